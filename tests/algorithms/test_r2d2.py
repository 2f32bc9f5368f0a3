"""R2D2 from the raw stream to the loss: what a memory saw while acting is what it sees while learning."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch

from shoal.algorithms.r2d2 import R2d2
from shoal.core.algorithm import Algorithm
from shoal.core.tree import leaves, map_tree, to_numpy, to_torch
from shoal.core.types import Sequence, Step
from shoal.nets.torsos import Architecture
from shoal.workers.follower import Follower
from shoal.workers.model import Model, first_priorities
from shoal.workers.packing import Sequences, to_batch
from tests.algorithms.conftest import wander

SMALL = Architecture(hidden=(8,), activation="relu", lstm=6)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def seed() -> None:
    """Draw the same weights every time."""
    torch.manual_seed(0)


def small(**changes: Any) -> R2d2:
    """Small enough to follow."""
    return R2d2(
        **{"network": SMALL, "gamma": 0.9, "n": 3, "unroll": 6, "burn_in": 0, "overlap": 2, "head": 7} | changes
    )


class Watch:
    """What a network said, call by call: values [T, B, A]."""

    def __init__(self, net: Any) -> None:
        """Watch from now on."""
        self.said: list[torch.Tensor] = []
        net.register_forward_hook(lambda _, __, answer: self.said.append(answer[0][..., 0].detach().clone()))


class Played:
    """Episodes that an algorithm acted in: everything said at every instant, and the sequences cut from it."""

    def __init__(self, algorithm: Any, net: Any, spec: Any, instants: int = 40, size: int = 3, seed: int = 0) -> None:
        """Act as an actor does; some episodes end by their own rules, some are cut off."""
        random = np.random.default_rng(seed)
        packer, carry = Sequences(algorithm.experience, size), algorithm.begin(net, size)
        first, parts = np.ones(size, bool), []
        self.steps: list[Step] = []
        self.actions: list[np.ndarray] = []
        for _ in range(instants):
            ended = ~first & (random.random(size) < 0.1)
            terminated = ended & (random.random(size) < 0.5)
            reward = np.where(first, 0, 2 * random.normal(size=size)).astype(np.float32)
            seen = map_tree(lambda array: draw(random, array, size), spec.observation)
            step = Step(seen, reward, (~terminated).astype(np.float32), first)
            items = packer.observe(step)
            parts += [] if items is None else [map_tree(np.copy, items)]
            with torch.inference_mode():
                act = algorithm.act(net, Step(*map(to_torch, step)), carry, torch.full((size,), 0.0))
            carry, action = act.carry, act.action.numpy()
            packer.choose(action, to_numpy(act.record), 0)
            self.steps.append(step)
            self.actions.append(action)
            first = ended
        self.items = {
            key: map_tree(lambda *each, key=key: np.concatenate(each, int(key != "version")), *rows)
            for key in parts[0]
            if (rows := [part[key] for part in parts])
        }
        count = len(self.items["version"])
        extra = {"key": np.arange(count), "weight": np.linspace(0.1, 1, count, dtype=np.float32)}
        self.batch = to_batch(map_tree(np.copy, self.items) | extra, CPU)
        shown = {
            next(leaves(step.observation))[b].tobytes(): (t, b)
            for t, step in enumerate(self.steps)
            for b in range(size)
        }
        self.places = [shown[next(leaves(self.items["observation"]))[0, item].tobytes()] for item in range(count)]

    def real(self, item: int) -> int:
        """The number of observations of an item that are not padding."""
        inside = self.batch.first[1:, item].tolist()
        return 1 + (inside.index(True) if True in inside else len(inside))


def draw(random: np.random.Generator, array: Any, size: int) -> np.ndarray:
    """Random observations."""
    if array.dtype == "uint8":
        return random.integers(0, 256, (size, *array.shape), np.uint8)
    return random.normal(size=(size, *array.shape)).astype(np.float32)


@pytest.mark.parametrize("kind", ["discrete", "mapping"])
@pytest.mark.parametrize(("unroll", "overlap"), [(6, 0), (6, 2), (5, 4), (12, 5)])
def test_the_loss_sees_what_acting_saw(specs, kind, unroll, overlap):
    """The state, the last action and the last reward of every step are in their places."""
    algorithm = small(unroll=unroll, overlap=overlap, epsilon=0.9)
    net = algorithm.build(specs[kind])
    watch = Watch(net)
    played = Played(algorithm, net, specs[kind], instants=80)
    acted = torch.cat(watch.said)  # [instants, B, A]
    watch.said.clear()
    algorithm.loss(net, copy.deepcopy(net), played.batch)
    values, *_ = watch.said
    assert len(values) == unroll + 1
    middle = padded = 0
    for item, (start, b) in enumerate(played.places):
        real = played.real(item)
        torch.testing.assert_close(values[:real, item], acted[start : start + real, b], atol=1e-5, rtol=1e-4)
        middle += not played.batch.first[0, item]
        padded += real < unroll + 1
    assert middle
    assert padded


def slow_h(x: float) -> float:
    """Openreview r1lyTjAqYX, section 2.3."""
    return math.copysign(math.sqrt(abs(x) + 1) - 1, x) + 1e-3 * x


def slow_h_inverse(y: float) -> float:
    """Proposition A.2 of arXiv:1805.11593."""
    inner = (math.sqrt(1 + 4e-3 * (abs(y) + 1 + 1e-3)) - 1) / 2e-3
    return math.copysign(inner**2 - 1, y)


def slow_values(net: Any, played: Played, item: int, actions: int) -> list[list[float]]:
    """Values at every real observation of an item, one step at a time from the stored state."""
    start, b = played.places[item]
    state, result = played.batch.record["core"][0, item : item + 1], []
    for t in range(start, start + played.real(item)):
        step = played.steps[t]
        extra = np.zeros(actions + 1, np.float32)
        if not step.first[b]:
            extra[played.actions[t - 1][b]] = 1
            extra[actions] = step.reward[b]
        seen = map_tree(lambda x, b=b: torch.tensor(x[None, b : b + 1]), step.observation)
        with torch.no_grad():
            value, state = net(seen, torch.tensor([[bool(step.first[b])]]), state, torch.tensor(extra)[None, None])
        result.append(value[0, 0, :, 0].double().tolist())
    return result


def slow_loss(algorithm: R2d2, played: Played, item: int, online: Any, target: Any) -> tuple[float, float]:
    """The loss and priority of one sequence, from the stream itself."""
    start, b = played.places[item]
    h, inverse = (slow_h, slow_h_inverse) if algorithm.rescale else (float, float)
    opens, last, errors = played.steps[start].first[b], len(online) - 1, []
    for t in range(last):
        total, reached, over = 0.0, t, False
        while reached < last and reached - t < algorithm.n and not over:
            total += algorithm.gamma ** (reached - t) * played.steps[start + reached + 1].reward[b]
            over = played.steps[start + reached + 1].discount[b] == 0
            reached += 1
        if not over:
            choosing = online if algorithm.double else target
            best = max(range(len(online[0])), key=lambda a, r=reached, q=choosing: q[r][a])
            total += algorithm.gamma ** (reached - t) * inverse(target[reached][best])
        if t >= algorithm.burn_in or opens:
            errors.append(h(total) - online[t][played.actions[start + t][b]])
    sizes = [abs(error) for error in errors]
    priority = algorithm.eta * max(sizes) + (1 - algorithm.eta) * sum(sizes) / len(sizes)
    length = algorithm.burn_in + algorithm.unroll
    return sum(error**2 / 2 for error in errors) / length, priority


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"burn_in": 3, "overlap": 3},
        {"burn_in": 2, "overlap": 5, "n": 1, "double": False},
        {"burn_in": 3, "overlap": 3, "rescale": False, "n": 20, "dueling": False},
        {"eta": 0.4, "unroll": 1, "overlap": 0},
    ],
)
@pytest.mark.parametrize("kind", ["discrete", "mapping"])
def test_loss_is_the_papers(specs, kind, changes):
    algorithm = small(**changes)
    actor = algorithm.build(specs[kind])
    played = Played(algorithm, actor, specs[kind])
    net, target = wander(actor), wander(actor)  # learning went on since
    loss = algorithm.loss(net, target, played.batch)
    assert loss.each.shape == loss.priority.shape == played.batch.key.shape
    for item in range(len(played.places)):
        online, judged = (slow_values(each, played, item, specs[kind].action.size) for each in (net, target))
        each, priority = slow_loss(algorithm, played, item, online, judged)
        assert loss.each[item].item() == pytest.approx(each, rel=2e-3, abs=1e-4)
        assert loss.priority[item].item() == pytest.approx(priority, rel=2e-3, abs=1e-4)
    assert {*played.batch.first[0].tolist()} == {True, False}


def disturb(batch: Any, row: torch.Tensor, step: torch.Tensor) -> Any:
    """Other observations in these rows [T+1, B], other rewards, discounts and actions at these steps [T, B]."""

    def fill(x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x[row] = torch.randint(0, 99, x[row].shape).to(x.dtype)
        return x

    return batch._replace(
        observation=map_tree(fill, batch.observation),
        reward=batch.reward.masked_fill(step, 1e3),
        discount=batch.discount.masked_fill(step, 0.7),
        action=batch.action.masked_fill(step, 2),
    )


@pytest.mark.parametrize("burn_in", [0, 3])
@pytest.mark.parametrize("kind", ["discrete", "mapping"])
def test_padding_and_the_dummy_do_not_matter(specs, kind, burn_in):
    algorithm = small(burn_in=burn_in, overlap=3)
    net = algorithm.build(specs[kind])
    target = wander(net)
    batch = Played(algorithm, net, specs[kind]).batch
    padding = torch.cat([torch.zeros_like(batch.first[:1]), batch.first[1:]])
    assert padding.any()
    other = disturb(batch, padding, batch.mask == 0)
    assert not torch.equal(other.reward, batch.reward)
    one, two = algorithm.loss(net, target, batch), algorithm.loss(net, target, other)
    assert torch.equal(one.each, two.each)
    assert torch.equal(one.priority, two.priority)
    assert all(torch.equal(one.metrics[key], two.metrics[key]) for key in one.metrics)
    gradients = [torch.autograd.grad(loss.each.sum(), [*net.parameters()]) for loss in (one, two)]
    for left, right in zip(*gradients, strict=True):
        torch.testing.assert_close(left, right)


def test_the_dummy_between_episodes_does_not_matter(specs, rollout):
    """Sequences that go on into the next episode, as a user's own packing may cut them."""
    algorithm = small(burn_in=2)
    net = algorithm.build(specs["discrete"])
    with torch.no_grad():
        batch = rollout(algorithm, net, specs["discrete"])
    assert (batch.mask[:-1] == 0).any()
    other = disturb(batch, torch.zeros_like(batch.first), batch.mask == 0)
    one, two = algorithm.loss(net, net, batch), algorithm.loss(net, net, other)
    assert torch.equal(one.each, two.each)
    assert torch.equal(one.priority, two.priority)


def test_gradients_reach_the_burn_in_of_an_opening_only(specs):
    algorithm = small(burn_in=3, overlap=3)
    net = algorithm.build(specs["discrete"])
    played = Played(algorithm, net, specs["discrete"])
    observation = played.batch.observation.clone().requires_grad_()
    loss = algorithm.loss(net, wander(net), played.batch._replace(observation=observation))
    loss.each.sum().backward()
    reached = (observation.grad != 0).any(-1)
    opened = kept = 0
    for item in range(len(played.places)):
        last = played.real(item) - 1  # the last observation is bootstrapped from, not learned from
        opens = bool(played.batch.first[0, item])
        assert reached[:3, item].tolist() == [opens and t < last for t in range(3)]
        assert reached[3:, item].tolist() == [t < last for t in range(3, len(observation))]
        opened, kept = opened + opens, kept + (not opens)
    assert opened
    assert kept


@pytest.mark.parametrize("burn_in", [0, 3])
def test_the_stored_state_is_begun_with(specs, burn_in):
    algorithm = small(burn_in=burn_in, overlap=3)
    net = algorithm.build(specs["discrete"])
    batch = Played(algorithm, net, specs["discrete"]).batch
    core = batch.record["core"]
    assert core.shape == (1, len(batch.key), 12)
    other = batch._replace(record=batch.record | {"core": torch.randn_like(core)})
    changed = algorithm.loss(net, net, other).each != algorithm.loss(net, net, batch).each
    assert torch.equal(changed, ~batch.first[0])


def test_what_acting_records_is_from_before_the_step(specs):
    algorithm = small(epsilon=1e-9)
    net = algorithm.build(specs["discrete"])
    carry = algorithm.begin(net, 2)
    extra = torch.tensor([[0.0, 0, 0, 0], [0, 0, 0, 0]])
    for reward, first in (([0.0, 0.0], [True, True]), ([3.0, 4.0], [False, False]), ([5.0, 0.0], [False, True])):
        step = Step(torch.randn(2, 4), torch.tensor(reward), torch.ones(2), torch.tensor(first))
        if not first[0]:
            extra = torch.nn.functional.one_hot(carry["action"], 3).float()
            extra = torch.cat([extra, step.reward[:, None]], 1) * (~step.first)[:, None]
        with torch.inference_mode():
            act = algorithm.act(net, step, carry, torch.zeros(2))
        assert torch.equal(act.record["core"], carry["core"])
        assert torch.equal(act.record["previous"], extra)
        assert torch.equal(act.carry["action"], act.action)
        carry = act.carry


def test_exploration_follows_the_rank_and_evaluation_does_not_explore(specs):
    algorithm = small(epsilon=0.4, epsilon_spread=2.0)
    net, size = algorithm.build(specs["discrete"]), 60_000
    step = Step(torch.randn(size, 4), torch.zeros(size), torch.ones(size), torch.ones(size, dtype=torch.bool))
    watch = Watch(net)
    rank = torch.tensor([0.0, 0.5, 1.0]).repeat_interleave(size // 3)
    with torch.inference_mode():
        explored, greedy = (algorithm.act(net, step, algorithm.begin(net, size), each).action for each in (rank, None))
        careless = small(evaluation_epsilon=0.5).act(net, step, algorithm.begin(net, size), None).action
    best = watch.said[0][0].argmax(-1)
    assert torch.equal(greedy, best)
    shares = (explored == best).view(3, -1).float().mean(1)
    for share, epsilon in zip(shares, (0.4, 0.4**2, 0.4**3), strict=True):
        assert share == pytest.approx(1 - epsilon + epsilon / 3, abs=0.015)
    assert (careless == best).float().mean() == pytest.approx(0.5 + 0.5 / 3, abs=0.015)


@pytest.mark.parametrize("burn_in", [0, 3])
def test_the_learner_weighs_the_target_stands_still_and_priorities_are_the_losss(specs, burn_in):
    algorithm = small(burn_in=burn_in, overlap=3)
    policy = Follower(algorithm, specs["discrete"], "cpu")
    played = Played(algorithm, policy.net, specs["discrete"])
    loss = algorithm.loss(policy.net, policy.net, played.batch)
    heavy = played.batch._replace(weight=100 * played.batch.weight)
    assert torch.equal(loss.each, algorithm.loss(policy.net, policy.net, heavy).each)
    first = first_priorities(algorithm, policy.net, played.items, policy.device)
    np.testing.assert_allclose(first, loss.priority, rtol=1e-5)
    assert not loss.priority.requires_grad
    net, target = algorithm.build(specs["discrete"]), algorithm.build(specs["discrete"])
    algorithm.loss(net, target, played.batch).each.sum().backward()
    assert all(parameter.grad is None for parameter in target.parameters())
    for name, parameter in net.named_parameters():
        assert parameter.grad.any(), name


def test_updates_lower_the_loss_of_their_batch(specs):
    algorithm = small(burn_in=3, overlap=3, lr=1e-2)
    model = Model(algorithm, specs["discrete"], CPU)
    batch = Played(algorithm, model.net, specs["discrete"]).batch
    before = algorithm.loss(model.net, model.target, batch).each.mean()
    for updates in range(40):
        model.update(algorithm, batch, updates)
    assert algorithm.loss(model.net, model.target, batch).each.mean() < 0.6 * before


def test_settings():
    algorithm = R2d2()
    assert isinstance(algorithm, Algorithm)
    assert algorithm.experience == Sequence(120, 80, across=False, initial=("core", "previous"))
