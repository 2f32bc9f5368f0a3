"""Distributions against sums, integrals and counts."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from shoal.core.errors import ShoalError
from shoal.core.types import ActionSpec, joint
from shoal.nets.heads import Categorical, Gaussian, Joint, make_head, outcomes
from shoal.nets.masks import split_mask

BOUNDED = ActionSpec(2, (-2.0, 0.0), (2.0, 10.0))


@pytest.fixture
def categorical() -> tuple[Categorical, torch.Tensor]:
    head = Categorical(3, ActionSpec(4))
    return head, torch.tensor([[2.0, 0.0, -1.0, 0.5], [0.0, 0.0, 0.0, 9.0]]).log_softmax(-1)


def gaussian_policy(mean, std) -> torch.Tensor:
    return torch.cat([torch.tensor(mean), torch.tensor(std).log()], -1)


def test_make_head_chooses_by_the_action_space():
    assert isinstance(make_head(3, ActionSpec(4), "clipped"), Categorical)
    assert not make_head(3, BOUNDED, "clipped").squashed
    assert make_head(3, BOUNDED, "squashed").squashed


def test_a_first_policy_is_nearly_uniform():
    features = torch.randn(8, 64)
    policy = Categorical(64, ActionSpec(4))(features)
    np.testing.assert_allclose(policy.detach().exp(), np.full((8, 4), 0.25), atol=0.05)
    mean, log_std = Gaussian(64, BOUNDED, squashed=False)(features).detach().chunk(2, -1)
    assert mean.abs().max() < 0.2
    assert (log_std == 0).all()


def test_categorical_formulas(categorical):
    head, policy = categorical
    probability = policy.double().exp().numpy()
    other = torch.randn(2, 4).log_softmax(-1)
    np.testing.assert_allclose(
        head.log_prob(policy, torch.tensor([2, 3])), np.log(probability[[0, 1], [2, 3]]), rtol=1e-5
    )
    np.testing.assert_allclose(head.entropy(policy), -(probability * np.log(probability)).sum(1), rtol=1e-5)
    np.testing.assert_allclose(
        head.kl(policy, other), (probability * (np.log(probability) - other.numpy())).sum(1), rtol=1e-4
    )
    assert head.mode(policy).tolist() == [0, 3]
    assert (head.kl(policy, policy) == 0).all()


def test_categorical_samples_have_the_policys_frequencies(categorical):
    head, policy = categorical
    torch.manual_seed(0)
    samples = head.sample(policy[0].expand(100_000, 4))
    assert head.action(samples) is samples
    frequency = np.bincount(samples.numpy(), minlength=4) / 100_000
    np.testing.assert_allclose(frequency, policy[0].exp(), atol=0.005)  # three standard errors


@pytest.mark.parametrize("squashed", [False, True])
def test_sampling_draws_on_torchs_global_generator(squashed):
    for head, policy in [
        (Categorical(3, ActionSpec(50)), torch.zeros(20, 50)),
        (Gaussian(3, BOUNDED, squashed), torch.zeros(20, 4)),
    ]:
        torch.manual_seed(1)
        one = head.sample(policy)
        other = head.sample(policy)
        torch.manual_seed(1)
        assert torch.equal(one, head.sample(policy))
        assert not torch.equal(one, other)


def test_clipped_actions_are_stretched_and_kept_within_bounds():
    head = Gaussian(3, BOUNDED, squashed=False)
    raw = torch.tensor([[0.5, -1.0], [-7.0, 7.0]])
    np.testing.assert_allclose(head.action(raw), [[1.0, 0.0], [-2.0, 10.0]])


def test_squashed_actions_are_stretched_and_kept_within_bounds():
    head = Gaussian(3, BOUNDED, squashed=True)
    raw = torch.tensor([[0.0, 0.3], [-70.0, 70.0]])
    np.testing.assert_allclose(head.action(raw), [[0.0, 5 + 5 * math.tanh(0.3)], [-2.0, 10.0]], rtol=1e-6)


def test_a_number_without_finite_bounds_is_not_stretched():
    spec = ActionSpec(3, (-math.inf, 0.0, -4.0), (math.inf, math.inf, 4.0))
    head = Gaussian(3, spec, squashed=False)
    np.testing.assert_allclose(head.action(torch.tensor([[9.0, -3.0, 0.5]])), [[9.0, 0.0, 2.0]])
    with pytest.raises(ShoalError, match=r"finite action bounds.*distribution clipped"):
        Gaussian(3, spec, squashed=True)


def test_gaussian_formulas():
    head = Gaussian(3, BOUNDED, squashed=False)
    mean, std, raw = np.array([0.3, -1.0]), np.array([0.5, 2.0]), np.array([1.0, 1.0])
    density = np.exp(-(((raw - mean) / std) ** 2) / 2) / (std * np.sqrt(2 * np.pi))
    policy = gaussian_policy([0.3, -1.0], [0.5, 2.0])
    np.testing.assert_allclose(head.log_prob(policy, torch.tensor(raw)), np.log(density).sum(), rtol=1e-5)
    np.testing.assert_allclose(head.entropy(policy), np.log(std * np.sqrt(2 * np.pi * np.e)).sum(), rtol=1e-5)
    np.testing.assert_allclose(head.mode(policy), mean, rtol=1e-6)


def test_gaussian_kl_is_its_integral():
    head = Gaussian(3, ActionSpec(1, (-1.0,), (1.0,)), squashed=False)
    policy, other = gaussian_policy([0.3], [0.5]), gaussian_policy([-0.5], [1.5])
    x = torch.linspace(-6, 6, 20_001, dtype=torch.float64).unsqueeze(1)
    log_p, log_q = (head.log_prob(each.double().expand(len(x), 2), x) for each in (policy, other))
    integral = torch.trapezoid(log_p.exp() * (log_p - log_q), x[:, 0])
    np.testing.assert_allclose(head.kl(policy, other), integral, rtol=1e-4)


@pytest.mark.parametrize(("mean", "std"), [(0.0, 1.0), (1.0, 0.3), (-2.0, 1.5)])
def test_squashed_density_is_the_change_of_variables(mean, std):
    """Probability of a small interval of raw over the length of the interval of actions it becomes."""
    head = Gaussian(3, ActionSpec(1, (-3.0,), (5.0,)), squashed=True).double()
    policy = gaussian_policy([mean], [std]).double()
    raw = mean + std * torch.linspace(-3, 3, 61, dtype=torch.float64).unsqueeze(1)
    width = 1e-5
    inside = torch.special.ndtr((raw + width - mean) / std) - torch.special.ndtr((raw - width - mean) / std)
    length = head.action(raw + width) - head.action(raw - width)
    numeric = (inside / length).log().squeeze(1)
    np.testing.assert_allclose(head.log_prob(policy.expand(61, 2), raw), numeric, atol=1e-4)


def test_squashed_density_is_finite_far_out():
    head = Gaussian(3, BOUNDED, squashed=True)
    assert head.log_prob(torch.zeros(4), torch.tensor([50.0, -50.0])).isfinite()


@pytest.mark.parametrize(("mean", "std"), [(0.0, 1.0), (1.0, 0.3), (-2.0, 2.0)])
def test_squashed_entropy_is_its_integral(mean, std):
    head = Gaussian(3, ActionSpec(1, (-3.0,), (5.0,)), squashed=True)
    policy = gaussian_policy([mean], [std])
    raw = torch.linspace(mean - 9 * std, mean + 9 * std, 20_001, dtype=torch.float64).unsqueeze(1)
    normal = torch.exp(-(((raw[:, 0] - mean) / std) ** 2) / 2) / (std * math.sqrt(2 * math.pi))
    surprise = -head.log_prob(policy.double().expand(len(raw), 2), raw)
    np.testing.assert_allclose(head.entropy(policy), torch.trapezoid(normal * surprise, raw[:, 0]), atol=5e-3)


def test_entropy_keeps_any_leading_axes():
    head = Gaussian(3, BOUNDED, squashed=True)
    policy = torch.randn(3, 5, 4)
    torch.testing.assert_close(head.entropy(policy)[1, 2], head.entropy(policy[1, 2]))


def test_gaussian_samples_have_the_policys_moments():
    head = Gaussian(3, BOUNDED, squashed=False)
    torch.manual_seed(0)
    samples = head.sample(gaussian_policy([0.3, -1.0], [0.5, 2.0]).expand(100_000, 4))
    np.testing.assert_allclose(samples.mean(0), [0.3, -1.0], atol=0.02)
    np.testing.assert_allclose(samples.std(0), [0.5, 2.0], rtol=0.02)


def test_bounds_are_not_weights():
    assert set(Gaussian(3, BOUNDED, squashed=True).state_dict()) == {
        "linear.weight",
        "linear.bias",
        "log_std",
    }


@pytest.mark.parametrize("hybrid", [False, True])
def test_a_joint_policy_is_the_product_of_its_parts(hybrid):
    torch.manual_seed(0)
    parts = (ActionSpec(3), BOUNDED, ActionSpec(2)) if hybrid else (ActionSpec(3), ActionSpec(4))
    head = make_head(5, joint(parts), "squashed")
    assert isinstance(head, Joint)
    policy, other = head(torch.randn(7, 5) * 50), head(torch.randn(7, 5) * 50)
    raw = head.sample(policy)
    assert raw.shape == (7, 4 if hybrid else 2)
    assert raw.dtype == (torch.float32 if hybrid else torch.int64)
    slices = [(0, 3, 0, 1), (3, 7, 1, 3), (7, 9, 3, 4)] if hybrid else [(0, 3, 0, 1), (3, 7, 1, 2)]
    total = {"log_prob": 0.0, "entropy": 0.0, "kl": 0.0}
    for own, spec, (a, b, c, d) in zip(head.heads, parts, slices, strict=True):
        drawn = raw[:, c] if spec.discrete else raw[:, c:d]
        total["log_prob"] += own.log_prob(policy[:, a:b], drawn)
        total["entropy"] += own.entropy(policy[:, a:b])
        total["kl"] += own.kl(policy[:, a:b], other[:, a:b])
        mode = head.mode(policy)
        assert torch.equal(mode[:, c] if spec.discrete else mode[:, c:d], own.mode(policy[:, a:b]))
        action = head.action(raw)
        taken = action[:, c] if spec.discrete else action[:, c:d]
        assert torch.equal(taken, own.action(drawn))
    torch.testing.assert_close(head.log_prob(policy, raw), total["log_prob"])
    torch.testing.assert_close(head.entropy(policy), total["entropy"])
    torch.testing.assert_close(head.kl(policy, other), total["kl"])


def test_what_is_masked_has_no_chance_and_leaves_the_rest_as_it_was():
    torch.manual_seed(0)
    head = Categorical(5, ActionSpec(4))
    features = torch.randn(6, 5) * 100
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 1, 0], [0, 0, 0, 1], [0, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 1]]).float()
    plain, policy = head(features), head(features, mask)
    assert torch.equal(policy[[0, 3]], plain[[0, 3]])  # all allowed, or none: after the end
    for row in (1, 2, 4, 5):
        allowed = mask[row].bool()
        assert (policy[row].exp()[~allowed] == 0).all()
        torch.testing.assert_close(policy[row][allowed], plain[row][allowed].log_softmax(-1))
    assert policy.isfinite().all()
    assert head.entropy(policy)[2] == 0
    assert head.kl(policy, plain).isfinite().all()
    drawn = torch.stack([head.sample(policy) for _ in range(500)])
    assert all((mask[row][drawn[:, row]] == 1).all() for row in (1, 2, 4, 5))
    policy[mask.any(1)].exp().sum().backward()
    assert head.linear.weight.grad.isfinite().all()


def test_a_joint_mask_covers_the_choices_only():
    head = make_head(5, joint([ActionSpec(3), BOUNDED, ActionSpec(2)]), "clipped")
    policy = head(torch.randn(1, 5), torch.tensor([[0.0, 1, 0, 1, 0]]))
    assert head.mode(policy)[0, [0, 3]].tolist() == [1, 0]
    assert policy[0, :3].exp().tolist() == [0, 1, 0]


def test_a_mask_is_parted_from_what_is_seen():
    seen = {"a": torch.ones(2), "action_mask": torch.zeros(3)}
    rest, mask = split_mask(seen)
    assert ([*rest], mask.shape) == (["a"], (3,))
    assert split_mask(seen["a"])[1] is None


def test_a_spread_may_depend_on_the_state():
    torch.manual_seed(0)
    head = make_head(5, BOUNDED, "clipped", state_std=True)
    _, log_std = head(torch.randn(50, 5) * 20).chunk(2, -1)
    assert log_std.std(0).min() > 0.01
    _, extreme = head(torch.randn(50, 5) * 1e6).chunk(2, -1)
    assert extreme.min() == -5
    assert extreme.max() == 2
    _, same = make_head(5, BOUNDED, "clipped")(torch.randn(50, 5)).chunk(2, -1)
    assert (same == 0).all()


def test_outcomes_average_to_the_kl_where_they_are_listed_and_where_they_are_drawn(categorical):
    head, policy = categorical
    other = torch.randn(2, 4).log_softmax(-1)
    chance, log_ratio = outcomes(head, policy, other)
    torch.testing.assert_close((chance * log_ratio).sum(0), head.kl(policy, other))
    torch.manual_seed(0)
    gaussian = Gaussian(3, BOUNDED, squashed=True)
    near, far = gaussian_policy([0.0, 0.1], [0.5, 0.6]), gaussian_policy([0.2, 0.0], [0.6, 0.5])
    chance, log_ratio = outcomes(gaussian, near.expand(500, 4), far.expand(500, 4))
    torch.testing.assert_close(chance.sum(0), torch.ones(500))
    torch.testing.assert_close((chance * log_ratio).sum(0).mean(), gaussian.kl(near, far), rtol=0.05, atol=0)
