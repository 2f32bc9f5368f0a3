"""V-trace and GAE against sums written out as the papers write them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shoal.losses.returns import gae, vtrace


def tensors(*arrays):
    return [torch.tensor(array, dtype=torch.float32) for array in arrays]


def slow_vtrace(log_rho, discount, reward, value, mask, rho_bar, c_bar, lambda_):
    """Sum eq. (1) of arXiv:1802.01561 term by term, up to the end of each step's episode."""
    ratio = np.exp(log_rho)
    rho, c = np.minimum(rho_bar, ratio), lambda_ * np.minimum(c_bar, ratio)
    length, items = reward.shape
    vs = value.copy()
    for b in range(items):
        for s in range(length):
            for t in range(s, length):
                if mask[t, b] == 0:
                    break
                weight = np.prod(discount[s:t, b]) * np.prod(c[s:t, b])
                delta = rho[t, b] * (reward[t, b] + discount[t, b] * value[t + 1, b] - value[t, b])
                vs[s, b] += weight * delta
    advantage = mask * rho * (reward + discount * vs[1:] - value[:-1])
    return vs[:-1], advantage


def slow_gae(reward, discount, value, mask, lambda_):
    """Sum eq. (16) of arXiv:1506.02438 term by term, up to the end of each step's episode."""
    length, items = reward.shape
    advantage = np.zeros_like(reward)
    for b in range(items):
        for s in range(length):
            for t in range(s, length):
                if mask[t, b] == 0:
                    break
                delta = reward[t, b] + discount[t, b] * value[t + 1, b] - value[t, b]
                advantage[s, b] += np.prod(discount[s:t, b]) * lambda_ ** (t - s) * delta
    return advantage


@pytest.mark.parametrize(
    ("rho_bar", "c_bar", "lambda_"), [(1.0, 1.0, 1.0), (2.0, 0.8, 0.9), (0.5, 1.5, 0.0), (1e9, 1e9, 1.0)]
)
def test_vtrace_is_the_papers_sum(experience, rho_bar, c_bar, lambda_):
    vs, advantage = vtrace(*tensors(*experience), rho_bar, c_bar, lambda_)
    slow_vs, slow_advantage = slow_vtrace(*experience, rho_bar, c_bar, lambda_)
    np.testing.assert_allclose(vs, slow_vs, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(advantage, slow_advantage, rtol=1e-4, atol=1e-3)


def test_vtrace_leaves_masked_steps_alone(experience):
    vs, advantage = vtrace(*tensors(*experience))
    hidden = experience.mask == 0
    np.testing.assert_array_equal(vs.numpy()[hidden], experience.value[:-1][hidden].astype(np.float32))
    assert (advantage.numpy()[hidden] == 0).all()


def test_vtrace_on_policy_is_the_discounted_return():
    reward = torch.tensor([[1.0], [2.0], [4.0]])
    zero, one = torch.zeros(3, 1), torch.ones(3, 1)
    value = torch.tensor([[5.0], [6.0], [7.0], [8.0]])
    vs, advantage = vtrace(zero, 0.5 * one, reward, value, one)
    np.testing.assert_allclose(vs[:, 0], [1 + 1 + 1 + 1, 2 + 2 + 2, 4 + 4])
    np.testing.assert_allclose(advantage[:, 0], vs[:, 0] - value[:-1, 0])


def test_a_truncated_episode_bootstraps_from_its_own_last_observation():
    """Step 1 is the dummy one: neither its reward nor what follows reaches step 0."""
    discount = torch.tensor([[1.0], [1.0], [1.0]])
    value = torch.tensor([[0.0], [10.0], [500.0], [900.0]])
    reward = torch.tensor([[1.0], [300.0], [1.0]])
    mask = torch.tensor([[1.0], [0.0], [1.0]])
    vs, advantage = vtrace(torch.zeros(3, 1), discount, reward, value, mask)
    np.testing.assert_allclose(vs[:, 0], [11.0, 10.0, 901.0])
    np.testing.assert_allclose(advantage[:, 0], [11.0, 0.0, 401.0])
    np.testing.assert_allclose(gae(reward, discount, value, mask, 1.0)[:, 0], [11.0, 0.0, 401.0])


def test_the_gradients_ratio_may_have_its_own_bound(experience):
    arguments = tensors(*experience)
    vs, advantage = vtrace(*arguments, rho_bar_gradient=1.0)
    wide_vs, wide_advantage = vtrace(*arguments, rho_bar_gradient=1e9)
    torch.testing.assert_close(vs, wide_vs)
    torch.testing.assert_close(wide_advantage, advantage * arguments[0].exp().clamp(min=1.0))


@pytest.mark.parametrize("lambda_", [0.0, 0.5, 0.95, 1.0])
def test_gae_is_the_papers_sum(experience, lambda_):
    arguments = (experience.reward, experience.discount, experience.value, experience.mask)
    advantage = gae(*tensors(*arguments), lambda_)
    slow = slow_gae(*arguments, lambda_)
    np.testing.assert_allclose(advantage, slow, rtol=1e-4, atol=1e-3)


def test_no_gradient_flows_through_the_targets():
    one = torch.ones(2, 1)
    value = torch.ones(3, 1, requires_grad=True)
    vs, advantage = vtrace(one, one, one, value, one)
    assert not vs.requires_grad
    assert not advantage.requires_grad
    assert not gae(one, one, value, one).requires_grad
