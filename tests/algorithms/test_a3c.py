"""A3C's loss against its paper in NumPy, on policy and off."""

from __future__ import annotations

import numpy as np
import pytest
from pydantic import ValidationError

from shoal.algorithms.a3c import A3c
from shoal.core.algorithm import Algorithm
from shoal.core.settings import Replaying, at
from shoal.core.types import Sequence
from shoal.nets.actor_critic import ActorCriticArchitecture
from tests.algorithms.conftest import looked_at, vtrace_loss, wander

SMALL = ActorCriticArchitecture(hidden=(8,))
LSTM = ActorCriticArchitecture(hidden=(8,), lstm=6)
KINDS = pytest.mark.parametrize("kind", ["discrete", "continuous", "mapping"])
NETWORKS = pytest.mark.parametrize("network", [SMALL, LSTM], ids=["plain", "lstm"])


def papers_loss(algorithm, log_pi, log_mu, entropy, value, reward, discount, mask):
    """Transcribe algorithm S3 of arXiv:1602.01783 for one item: R runs backwards and starts anew at an episode's end.

    `discount` is 0 at a terminal state, whose R is 0; the last observation of an episode cut off has its value.
    """
    total, size = 0.0, 0.0
    future = value[-1]
    for t in reversed(range(len(reward))):
        if not mask[t]:
            future = value[t]
            continue
        future = reward[t] + algorithm.gamma * discount[t] * future
        advantage = future - value[t]
        total -= log_pi[t] * advantage
        total += algorithm.value_cost * advantage**2 / 2
        total -= algorithm.entropy_cost.now * entropy[t]
        size += abs(advantage)
    return total / len(reward), size / len(reward)


@KINDS
@NETWORKS
def test_on_policy_the_loss_is_the_papers(specs, rollout, kind, network):
    algorithm = A3c(network=network, gamma=0.9, entropy_cost=0.1, value_cost=0.7)
    net = algorithm.build(specs[kind])
    batch = rollout(algorithm, net, specs[kind])
    assert (batch.mask == 0).any()  # episodes end inside,
    assert (batch.discount == 0).any()  # some by their own rules,
    ends = batch.first[1:] & (batch.discount.roll(1, 0) == 1)
    assert ends[1:].any()  # and some are cut off
    loss = algorithm.loss(net, net, batch)
    arrays = looked_at(net, batch)
    for item in range(batch.action.shape[1]):
        each, priority = papers_loss(algorithm, *(array[:, item] for array in arrays))
        np.testing.assert_allclose(loss.each[item].item(), each, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(loss.priority[item], priority, rtol=1e-4)
    assert loss.metrics["rho"] == pytest.approx(1.0, abs=1e-5)


@KINDS
@NETWORKS
def test_off_policy_the_loss_is_vtrace(specs, rollout, kind, network):
    algorithm = A3c(network=network, gamma=0.9, rho_bar=1.2, c_bar=0.9, entropy_cost=0.1)
    net = algorithm.build(specs[kind])
    batch = rollout(algorithm, net, specs[kind])
    net = wander(net)
    loss = algorithm.loss(net, net, batch)
    arrays = looked_at(net, batch)
    assert np.abs(arrays[0] - arrays[1]).max() > 0.1
    for item in range(batch.action.shape[1]):
        each, priority = vtrace_loss(algorithm, *(array[:, item] for array in arrays))
        np.testing.assert_allclose(loss.each[item].item(), each, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(loss.priority[item], priority, rtol=1e-4)


def test_settings():
    algorithm = A3c()
    assert isinstance(algorithm, Algorithm)
    assert algorithm.experience == Sequence(5)
    assert A3c(network=LSTM, unroll=7).experience == Sequence(7, initial=("core",))
    assert at(algorithm, 1, 1).lr.now == 0.0
    with pytest.raises(ValidationError, match="set replay_ratio instead"):
        A3c(replay=Replaying(samples_per_insert=2.0))
