"""IMPALA's loss against its paper in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from shoal.algorithms.impala import Impala
from shoal.core.algorithm import Algorithm
from shoal.core.settings import Schedule, at
from shoal.core.types import Sequence
from shoal.nets.actor_critic import ActorCriticArchitecture
from shoal.workers.model import Model
from tests.algorithms.conftest import looked_at, vtrace_loss, vtrace_targets, wander

SMALL = ActorCriticArchitecture(hidden=(8,))
LSTM = ActorCriticArchitecture(hidden=(8,), lstm=6)


@pytest.mark.parametrize("kind", ["discrete", "continuous", "mapping"])
@pytest.mark.parametrize("network", [SMALL, LSTM])
def test_loss_is_the_papers(specs, rollout, kind, network):
    algorithm = Impala(network=network, gamma=0.9, rho_bar=1.2, c_bar=0.9, lambda_=0.95, entropy_cost=0.1)
    net = algorithm.build(specs[kind])
    batch = rollout(algorithm, net, specs[kind])
    net = wander(net)
    loss = algorithm.loss(net, net, batch)
    arrays = looked_at(net, batch)
    assert (batch.mask == 0).any()
    assert np.abs(arrays[0] - arrays[1]).max() > 0.1  # off policy
    for item in range(batch.action.shape[1]):
        each, priority = vtrace_loss(algorithm, *(array[:, item] for array in arrays))
        np.testing.assert_allclose(loss.each[item].item(), each, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(loss.priority[item], priority, rtol=1e-4)


@pytest.mark.parametrize("kind", ["discrete", "continuous", "mapping"])
@pytest.mark.parametrize("network", [SMALL, LSTM])
def test_the_policy_is_pushed_no_further_than_the_bound(specs, rollout, kind, network):
    """PPO's surrogate (arXiv:1707.06347, eq. 7) with V-trace's targets by the network before the batch."""
    algorithm = Impala(network=network, gamma=0.9, lambda_=0.95, entropy_cost=0.1, clip=0.2)
    net = algorithm.build(specs[kind])
    batch = rollout(algorithm, net, specs[kind])
    before = wander(net)
    prepared = algorithm.prepare(before, batch)
    after = wander(before)
    loss = algorithm.loss(after, after, prepared)
    log_before, log_mu, _, value, reward, discount, mask = looked_at(before, batch)
    log_after, _, entropy, value_after, *_ = looked_at(after, batch)
    expected, outside = np.zeros_like(mask), 0
    for item in range(mask.shape[1]):
        one = (array[:, item] for array in (np.exp(log_before - log_mu), value, reward, discount, mask))
        vs, _ = vtrace_targets(algorithm, *one)
        for t in range(len(mask)):
            advantage = reward[t, item] + 0.9 * discount[t, item] * vs[t + 1] - value[t, item]
            ratio = np.exp(log_after[t, item] - log_mu[t, item])
            bounded = min(max(ratio, 0.8), 1.2)
            outside += bounded != ratio
            expected[t, item] = (
                -min(ratio * advantage, bounded * advantage)
                + algorithm.value_cost * (vs[t] - value_after[t, item]) ** 2 / 2
                - 0.1 * entropy[t, item]
            )
    assert outside
    wanted = (expected * mask).mean(0) if network.lstm else expected[mask > 0]  # single steps, without memory
    np.testing.assert_allclose(loss.each.detach(), wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("distribution", ["clipped", "squashed"])
@pytest.mark.parametrize("kind", ["discrete", "continuous"])
@pytest.mark.parametrize("network", [SMALL, LSTM, ActorCriticArchitecture(hidden=(8,), separate=True)])
def test_fresh_experience_has_ratios_of_one(specs, rollout, kind, network, distribution):
    """What the learner computes over a sequence is what the actor computed step by step."""
    algorithm = Impala(network=network, distribution=distribution)
    net = algorithm.build(specs[kind])
    batch = rollout(algorithm, net, specs[kind])
    assert batch.first[1:-1].any()  # an episode begins inside
    policy, value, _ = net(batch.observation, batch.first, batch.record["core"][0] if network.lstm else None)
    torch.testing.assert_close(policy[:-1], batch.record["policy"], atol=1e-5, rtol=0)
    torch.testing.assert_close(value[:-1], batch.record["value"], atol=1e-5, rtol=0)
    metrics = algorithm.loss(net, net, batch).metrics
    assert abs(metrics["rho"] - 1) < 1e-5
    assert abs(metrics["kl"]) < 1e-5


def test_masked_steps_do_not_matter(specs, rollout):
    algorithm = Impala(network=SMALL)
    net = algorithm.build(specs["discrete"])
    batch = rollout(algorithm, net, specs["discrete"])
    hidden = batch.mask == 0
    other = batch._replace(reward=batch.reward.masked_fill(hidden, 1e3), action=batch.action.masked_fill(hidden, 2))
    assert torch.equal(algorithm.loss(net, net, batch).each, algorithm.loss(net, net, other).each)


def test_rewards_are_scaled_by_the_running_return(specs, rollout):
    algorithm = Impala(network=ActorCriticArchitecture(hidden=(8,), normalise_reward=True))
    net = algorithm.build(specs["discrete"])
    batch = rollout(algorithm, net, specs["discrete"])
    algorithm.prepare(net, batch)
    scale = net.return_moments.scale()
    assert not np.isclose(scale, 1, atol=0.05)
    plain = algorithm.model_copy(update={"network": SMALL})
    plain_net = plain.build(specs["discrete"])
    plain_net.load_state_dict(net.state_dict(), strict=False)
    by_hand = plain.loss(plain_net, plain_net, batch._replace(reward=batch.reward * scale))
    torch.testing.assert_close(algorithm.loss(net, net, batch).each, by_hand.each)


def replayed(batch):
    """Every other item as a replay would give it."""
    return batch._replace(fresh=torch.arange(batch.action.shape[1]) % 2 == 0)


def divergence(algorithm, net, batch):
    """Section 4.3 of arXiv:1909.11583, state by state: KL(π‖π̃) with π̃ ∝ min(ρ̄ μ, π)."""
    with torch.no_grad():
        pi, mu = net.unroll(batch)[0][:-1].exp().double().numpy(), batch.record["policy"].exp().double().numpy()
    each = np.zeros(pi.shape[:2])
    for place in np.ndindex(each.shape):
        implied = np.minimum(algorithm.rho_bar * mu[place], pi[place])
        each[place] = (pi[place] * np.log(pi[place] / (implied / implied.sum()))).sum()
    return each


@pytest.mark.parametrize("network", [SMALL, LSTM])
def test_a_step_outside_the_trust_region_teaches_nothing_and_ends_returns(specs, rollout, network):
    """Eq. (8) of arXiv:1909.11583: λ_t = 1[KL < b] before ρ and c; rejected steps have neither loss."""
    algorithm = Impala(network=network, gamma=0.9, lambda_=0.95, entropy_cost=0.1)
    net = algorithm.build(specs["discrete"])
    batch = replayed(rollout(algorithm, net, specs["discrete"]))
    net = wander(net)
    kl = divergence(algorithm, net, batch)
    algorithm = algorithm.model_copy(update={"trust_region": float(np.median(kl))})
    trusted = kl < algorithm.trust_region
    loss = algorithm.loss(net, net, batch)
    log_pi, log_mu, entropy, value, reward, discount, mask = looked_at(net, batch)
    valid = trusted * mask
    assert 0.2 < valid.sum() / mask.sum() < 0.8
    for item in range(mask.shape[1]):
        ratio = np.minimum(np.exp(log_pi - log_mu)[:, item], 1.0) * trusted[:, item]
        vs, total = value[:, item].copy(), 0.0
        for s in range(len(mask)):
            weight = 1.0
            for t in range(s, len(mask)):
                if not mask[t, item]:
                    break
                error = reward[t, item] + 0.9 * discount[t, item] * value[t + 1, item] - value[t, item]
                vs[s] += weight * ratio[t] * error
                weight *= 0.9 * discount[t, item] * 0.95 * ratio[t]
        for t in np.flatnonzero(valid[:, item]):
            advantage = ratio[t] * (reward[t, item] + 0.9 * discount[t, item] * vs[t + 1] - value[t, item])
            total += -log_pi[t, item] * advantage + algorithm.value_cost * (vs[t] - value[t, item]) ** 2 / 2
        if batch.fresh[item]:
            total -= 0.1 * (entropy * mask)[:, item].sum()
        np.testing.assert_allclose(loss.each[item].item(), total / len(mask), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(loss.metrics["trusted"], valid.sum() / mask.sum(), rtol=1e-5)
    prepared = algorithm.model_copy(update={"clip": 0.2}).prepare(net, batch).record["valid"]
    np.testing.assert_array_equal(prepared, valid if network.lstm else valid[mask > 0][None])


def test_all_steps_are_trusted_on_policy_whatever_the_actions(specs, rollout):
    for kind in ("discrete", "continuous"):
        algorithm = Impala(network=SMALL, trust_region=1e-3)
        net = algorithm.build(specs[kind])
        batch = rollout(algorithm, net, specs[kind])
        assert algorithm.loss(net, net, batch).metrics["trusted"] == 1
        moved = wander(net)
        assert algorithm.loss(moved, moved, batch).metrics["trusted"] < 1


@pytest.mark.parametrize("kind", ["discrete", "continuous"])
@pytest.mark.parametrize("clip", [None, 0.2])
def test_replayed_items_are_cloned_and_fresh_ones_are_not(specs, rollout, kind, clip):
    """Section 3 of arXiv:1811.11682: KL(μ‖π) and ‖V − V_μ‖² are added on replayed items only."""
    plain = Impala(network=LSTM, clip=clip)
    algorithm = plain.model_copy(update={"clone_policy": 0.01, "clone_value": 0.005})
    net = algorithm.build(specs[kind])
    batch = replayed(rollout(algorithm, net, specs[kind]))
    net = wander(net)
    prepared = algorithm.prepare(net, batch)
    added = (algorithm.loss(net, net, prepared).each - plain.loss(net, net, prepared).each).detach()
    with torch.no_grad():
        policy, value, _ = net.unroll(batch)
    kl = net.head.kl(batch.record["policy"], policy[:-1]).numpy()
    if kind == "discrete":
        mu = batch.record["policy"].exp().numpy()
        kl = (mu * (np.log(mu) - policy[:-1].numpy())).sum(-1)
    each = 0.01 * kl + 0.005 * (value[:-1] - batch.record["value"]).square().numpy()
    expected = (each * batch.mask.numpy()).mean(0) * ~batch.fresh.numpy()
    assert expected.max() > 1e-4
    np.testing.assert_allclose(added, expected, rtol=1e-3, atol=2e-6)
    whole = algorithm.loss(net, net, prepared._replace(fresh=None)).each
    torch.testing.assert_close(whole, plain.loss(net, net, prepared).each)


@pytest.mark.parametrize("minibatches", [1, 3])
def test_minibatches_know_which_items_are_replayed(specs, rollout, minibatches):
    """Nothing but cloning on replayed items, so a network that only sees fresh ones in its pieces would stand still."""
    algorithm = Impala(network=SMALL, clip=0.2, clone_policy=1.0, minibatches=minibatches, value_cost=0, entropy_cost=0)
    model = Model(algorithm, specs["discrete"], torch.device("cpu"))
    batch = rollout(algorithm, model.net, specs["discrete"])
    with torch.no_grad():
        model.net.head.linear.bias.add_(torch.tensor([1.0, 0.0, -1.0]))
    batch = batch._replace(fresh=torch.zeros(batch.action.shape[1], dtype=torch.bool))
    _, _, metrics = model.update(algorithm, batch, 0)
    assert metrics["policy_cloning"] > 0.01


def test_the_policys_ratio_may_have_a_bound_of_its_own(specs, rollout):
    net = Impala(network=SMALL).build(specs["discrete"])
    batch = rollout(Impala(network=SMALL), net, specs["discrete"])
    net, base = wander(net), Impala(network=SMALL, value_cost=0, entropy_cost=0)
    own = Impala(network=SMALL, value_cost=0, entropy_cost=0, rho_bar_policy=1.5)
    log_pi, log_mu, _, value, reward, discount, mask = looked_at(net, batch)
    for item in range(mask.shape[1]):
        ratio = np.exp(log_pi - log_mu)[:, item]
        vs, _ = vtrace_targets(base, ratio, *(x[:, item] for x in (value, reward, discount, mask)))
        advantage = np.minimum(ratio, 1.5) * (reward[:, item] + 0.99 * discount[:, item] * vs[1:] - value[:-1, item])
        expected = -(mask[:, item] * log_pi[:, item] * advantage).mean()
        np.testing.assert_allclose(own.loss(net, net, batch).each[item].item(), expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValidationError, match=r"rho_bar_policy: with clip.*leave out one of them"):
        Impala(clip=0.2, rho_bar_policy=2.0)


def test_settings():
    algorithm = Impala()
    assert isinstance(algorithm, Algorithm)
    assert algorithm.experience == Sequence(20)
    assert Impala(network=LSTM, unroll=5).experience == Sequence(5, initial=("core",))
    assert at(algorithm, 5, 10).lr.now == pytest.approx(3e-4)
    assert Impala(lr=Schedule(start=1.0)).lr.now == 1.0
