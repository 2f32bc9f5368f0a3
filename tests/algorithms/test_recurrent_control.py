"""Continuous control with a memory, from the raw stream to the loss: sequences, burn-in, and who teaches the memory."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from shoal.algorithms.deterministic import Td3
from shoal.algorithms.sac import Sac
from shoal.core.types import NStep, Sequence
from shoal.nets.continuous import ContinuousArchitecture
from shoal.nets.transitions import Sequences
from shoal.workers.model import Model, first_priorities
from tests.algorithms.conftest import CONTINUOUS, SPECS, wander
from tests.algorithms.test_r2d2 import Played

SPEC = SPECS["continuous"]
NETWORK = ContinuousArchitecture(hidden=(8,), critic_hidden=(8,), lstm=6)
CPU = torch.device("cpu")
GAMMA = 0.9


@pytest.fixture(autouse=True)
def seed() -> None:
    """Draw the same weights every time."""
    torch.manual_seed(0)


def small(make: Any, unroll: int = 6, burn_in: int = 3, overlap: int = 3, **changes: Any) -> Any:
    """Small enough to follow, and without noise in its targets."""
    quiet = {"smoothing": 0.0} if make is Td3 else {}
    sequences = Sequences(unroll=unroll, burn_in=burn_in, overlap=overlap, eta=0.7)
    return make(**{"network": NETWORK, "gamma": GAMMA, "policy_every": 1, "sequences": sequences} | quiet | changes)


def step_by_step(net: Any, played: Played, item: int) -> list[torch.Tensor]:
    """What policy and critics see [1, inputs] at every real observation of an item, from the stored state on."""
    start, b = played.places[item]
    state, found = played.batch.record["core"][0, item : item + 1], []
    for t in range(start, start + played.real(item)):
        step, extra = played.steps[t], torch.zeros(1, 1, 3)
        if not step.first[b]:
            extra[0, 0, :2] = torch.tensor((played.actions[t - 1][b] - [0.0, 0.5]) / [2.0, 0.5])
            extra[0, 0, 2] = float(step.reward[b])
        with torch.no_grad():
            seen, state = net(
                torch.tensor(step.observation[None, b : b + 1]), torch.tensor([[step.first[b]]]), state, extra
            )
        found.append(seen[0])
    return found


@pytest.mark.parametrize("make", [Sac, Td3])
def test_the_loss_sees_what_acting_saw(make: Any) -> None:
    algorithm = small(make, burn_in=0, overlap=2)
    assert algorithm.experience == Sequence(6, 2, across=False, initial=("core", "previous"))
    assert small(make, network=ContinuousArchitecture()).experience == NStep(1, GAMMA)
    assert algorithm.sees_reward
    net, said = algorithm.build(SPEC), []
    net.updates += 1
    net.register_forward_hook(lambda _, __, answer: said.append(answer[0].detach().clone()))
    played = Played(algorithm, net, SPEC, instants=80)
    acted = torch.cat(said)  # [instants, B, inputs]
    said.clear()
    algorithm.loss(net, copy.deepcopy(net), played.batch)
    middle = padded = 0
    for item, (start, b) in enumerate(played.places):
        real = played.real(item)
        torch.testing.assert_close(said[0][:real, item], acted[start : start + real, b], atol=1e-5, rtol=1e-4)
        middle, padded = middle + (not played.batch.first[0, item]), padded + (real < 7)
    assert middle
    assert padded


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("burn_in", [0, 3])
@pytest.mark.parametrize("make", [Sac, Td3])
def test_loss_and_priority_are_those_of_the_steps_one_by_one(make: Any, burn_in: int, n: int) -> None:
    algorithm = small(make, burn_in=burn_in, n=n)
    played = Played(algorithm, wander(algorithm.build(SPEC)), SPEC)
    net, target = wander(algorithm.build(SPEC)), wander(algorithm.build(SPEC))
    items, length = len(played.places), burn_in + 6
    online, judged = ([step_by_step(each, played, item) for item in range(items)] for each in (net, target))
    rows = []  # time before items, as the loss has them
    for t in range(length):
        for item, (start, b) in enumerate(played.places):
            last = len(online[item]) - 1
            if t >= last or not (t >= burn_in or played.steps[start].first[b]):
                continue
            reached, total, factor = t, 0.0, 1.0
            while reached < last and reached - t < n and factor:
                step = played.steps[start + reached + 1]
                total += factor * step.reward[b]
                factor *= GAMMA * step.discount[b]
                reached += 1
            action = net.inside(torch.tensor(played.actions[start + t][b])[None])
            rows.append((item, online[item][t], online[item][reached], judged[item][reached], action, total, factor))
    now, then, seen = (torch.cat([row[part] for row in rows]) for part in (1, 2, 3))
    with torch.no_grad():
        torch.manual_seed(5)
        if make is Sac:
            (next_action, next_log), (new_action, log) = net.drawn(then), net.drawn(now)
            soft = target.judge(seen, next_action)[..., 0].amin(0) - net.log_temperature.exp() * next_log
        else:
            soft, new_action = target.judge(seen, target.policy(seen))[..., 0].amin(0), net.policy(now)
        goal = torch.tensor([row[5] for row in rows]) + torch.tensor([float(row[6]) for row in rows]) * soft
        errors = goal - net.judge(now, torch.cat([row[4] for row in rows]))[..., 0]
        value = net.judge(now, new_action)[..., 0]
        each = 0.5 * errors.square().sum(0) - (value.amin(0) if make is Sac else value[0])
        if make is Sac:
            temperature = net.log_temperature.exp()
            each += temperature * log - temperature * (log + algorithm.entropy * 2)
    torch.manual_seed(5)
    loss = algorithm.loss(net, target, played.batch)
    for item in range(items):
        mine = [index for index, row in enumerate(rows) if row[0] == item]
        sizes = errors.abs().mean(0)[mine]
        priority = 0.7 * sizes.max() + 0.3 * sizes.mean() if len(mine) else 0.0
        np.testing.assert_allclose(loss.each[item].item(), each[mine].sum() / length, rtol=2e-3, atol=1e-4)
        np.testing.assert_allclose(loss.priority[item].item(), priority, rtol=2e-3, atol=1e-4)
    assert {*played.batch.first[0].tolist()} == {True, False}
    with torch.no_grad():
        torch.manual_seed(5)
        expected = algorithm.loss(net, net, played.batch).priority
        torch.manual_seed(5)
    np.testing.assert_allclose(first_priorities(algorithm, net, played.items, CPU), expected, rtol=1e-5)


@pytest.mark.parametrize("make", [Sac, Td3])
def test_padding_does_not_matter(make: Any) -> None:
    algorithm = small(make)
    net = wander(algorithm.build(SPEC))
    batch = Played(algorithm, net, SPEC).batch
    padding = torch.cat([torch.zeros_like(batch.first[:1]), batch.first[1:]])
    assert padding.any()
    other = batch._replace(
        observation=batch.observation.masked_fill(padding.unsqueeze(-1), 7.0),
        action=batch.action.masked_fill(batch.mask.unsqueeze(-1) == 0, 0.3),
        reward=batch.reward.masked_fill(batch.mask == 0, 1e3),
        discount=batch.discount.masked_fill(batch.mask == 0, 0.7),
    )
    losses = []
    for each in (batch, other):
        torch.manual_seed(0)
        losses.append(algorithm.loss(net, net, each))
    assert torch.equal(losses[0].each, losses[1].each)
    assert torch.equal(losses[0].priority, losses[1].priority)
    assert losses[0].metrics == losses[1].metrics


@pytest.mark.parametrize("make", [Sac, Td3])
def test_critics_teach_the_memory_and_the_policy_does_not(make: Any) -> None:
    gradients = []
    algorithm = small(make)
    net = wander(algorithm.build(SPEC))
    batch = Played(algorithm, net, SPEC).batch
    for turn in (True, False):  # with a term of the policy, and without
        torch.manual_seed(0)
        net.zero_grad()
        net.turn = turn
        loss = algorithm.loss(net, net, batch)
        assert ("policy_loss" in loss.metrics) is turn
        loss.each.sum().backward()
        gradients.append([part.grad.clone() for part in net.memory.parameters()])
    assert all(part.abs().sum() > 0 for part in gradients[0])
    for with_policy, without in zip(*gradients, strict=True):
        torch.testing.assert_close(with_policy, without)
    model = Model(algorithm, SPEC, CPU)
    names = {id(part): name for name, part in model.net.named_parameters()}
    assert "memory" in {names[id(part)].partition(".")[0] for part in model.optimizer.param_groups[0]["params"]}


def test_actions_are_seen_as_the_environment_took_them() -> None:
    algorithm = small(Td3, noise=5.0)
    net = algorithm.build(SPEC)
    net.updates += 1
    played = Played(algorithm, net, SPEC)
    low, high = np.array(CONTINUOUS.low), np.array(CONTINUOUS.high)
    assert any((action == low).any() or (action == high).any() for action in played.actions)
    assert played.batch.record["previous"][..., :2].abs().max() <= 1
