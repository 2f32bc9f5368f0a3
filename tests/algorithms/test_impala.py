"""IMPALA's loss against its paper in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shoal.algorithms.impala import Impala
from shoal.core.algorithm import Algorithm
from shoal.core.settings import Schedule, at
from shoal.core.types import Sequence
from shoal.nets.actor_critic import ActorCriticArchitecture
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


def test_settings():
    algorithm = Impala()
    assert isinstance(algorithm, Algorithm)
    assert algorithm.experience == Sequence(20)
    assert Impala(network=LSTM, unroll=5).experience == Sequence(5, initial=("core",))
    assert at(algorithm, 5, 10).lr.now == pytest.approx(3e-4)
    assert Impala(lr=Schedule(start=1.0)).lr.now == 1.0
