"""What the actor-critic algorithms have in common."""

from __future__ import annotations

import pytest

from shoal.algorithms.a3c import A3c
from shoal.algorithms.impact import Impact
from shoal.algorithms.impala import Impala
from shoal.algorithms.ppo import Ppo
from shoal.nets.actor_critic import ActorCriticArchitecture

SMALL = ActorCriticArchitecture(hidden=(8,))
NETWORKS = {
    "plain": SMALL,
    "lstm": ActorCriticArchitecture(hidden=(8,), lstm=6),
    "separate": ActorCriticArchitecture(hidden=(8,), separate=True),
}


@pytest.mark.parametrize("kind", ["discrete", "continuous"])
@pytest.mark.parametrize("network", [*NETWORKS])
@pytest.mark.parametrize("make", [A3c, Impact, Impala, Ppo])
def test_every_parameter_learns(specs, rollout, make, kind, network):
    algorithm = make(network=NETWORKS[network])
    net = algorithm.build(specs[kind])
    prepared = algorithm.prepare(net, rollout(algorithm, net, specs[kind]))
    loss = algorithm.loss(net, net, prepared)
    assert loss.each.shape == loss.priority.shape == prepared.weight.shape
    assert not any(metric.requires_grad or metric.dim() for metric in loss.metrics.values())
    loss.each.mean().backward()
    for name, parameter in net.named_parameters():
        assert parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("rule", ["rmsprop", "adam"])
@pytest.mark.parametrize("make", [A3c, Impala])
def test_an_update_lowers_the_loss_of_its_batch(specs, rollout, make, rule):
    algorithm = make(network=SMALL, rule=rule, lr=1e-3)
    net = algorithm.build(specs["discrete"])
    batch = rollout(algorithm, net, specs["discrete"])
    optimizer = algorithm.optimizer(net)
    before = algorithm.loss(net, net, batch).metrics["value_loss"]
    for _ in range(20):
        optimizer.zero_grad()
        algorithm.loss(net, net, batch).each.mean().backward()
        optimizer.step()
    assert algorithm.loss(net, net, batch).metrics["value_loss"] < before
