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
from tests.algorithms.conftest import looked_at, vtrace_loss, wander

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


def test_the_policy_is_held_back_where_it_has_moved(specs, rollout):
    algorithm = Impala(network=SMALL)
    net = algorithm.build(specs["discrete"])
    batch = rollout(algorithm, net, specs["discrete"])
    net = wander(net)
    held = (
        algorithm.model_copy(update={"kl_cost": 0.7}).loss(net, net, batch).each - algorithm.loss(net, net, batch).each
    )
    acted = batch.record["policy"].double().numpy()
    now = net.unroll(batch)[0][:-1].detach().double().numpy()
    kl = (np.exp(acted) * (acted - now)).sum(-1) * batch.mask.numpy()
    np.testing.assert_allclose(held.detach(), 0.7 * kl.mean(0), rtol=1e-4, atol=1e-6)
    assert held.requires_grad


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
