"""DQN and Ape-X against their papers in NumPy, from the raw stream to the loss, and the learner's target network."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from shoal.algorithms.apex_dqn import ApexDqn
from shoal.algorithms.dqn import Dqn
from shoal.core.algorithm import Algorithm
from shoal.core.settings import at
from shoal.core.tree import leaves, map_tree
from shoal.core.types import ActionSpec, NStep, Step
from shoal.nets.torsos import Architecture
from shoal.workers.follower import Follower
from shoal.workers.model import Model, first_priorities
from shoal.workers.packing import make, to_batch
from tests.algorithms.conftest import wander

SMALL = Architecture(hidden=(8,), activation="relu")
CPU = torch.device("cpu")


class Stream:
    """What three environments said at every instant, and where each observation was seen."""

    def __init__(self, spec: Any, instants: int = 40, size: int = 3, seed: int = 0) -> None:
        """Draw episodes that end by their own rules or are cut off."""
        random = np.random.default_rng(seed)

        def draw(array: Any) -> np.ndarray:
            if array.dtype == "uint8":
                return random.integers(0, 256, (instants, size, *array.shape), np.uint8)
            return random.normal(size=(instants, size, *array.shape)).astype(np.float32)

        ended = random.random((instants, size)) < 0.2
        ended[:3] = False
        terminated = ended & (random.random((instants, size)) < 0.5)
        self.first = np.concatenate([np.ones((1, size), bool), ended[:-1]])
        terminated &= ~self.first
        self.observation = map_tree(draw, spec.observation)
        self.reward = np.where(self.first, 0, 2 * random.normal(size=(instants, size))).astype(np.float32)
        self.discount = (~terminated).astype(np.float32)
        self.action = random.integers(0, spec.action.size, (instants, size))
        self.where = {self.shown(t, b, self.observation): (t, b) for t in range(instants) for b in range(size)}

    @staticmethod
    def shown(t: int, b: int, observation: Any) -> bytes:
        """One observation as bytes."""
        return next(leaves(observation))[t, b].tobytes()

    def pack(self, experience: Any) -> dict[str, Any]:
        """Every item that an actor would have sent."""
        packer, parts = make(experience, self.first.shape[1]), []
        for t in range(len(self.first)):
            seen = map_tree(lambda x, t=t: x[t], self.observation)
            items = packer.observe(Step(seen, self.reward[t], self.discount[t], self.first[t]))
            parts += [] if items is None else [map_tree(np.copy, items)]
            packer.choose(self.action[t], {}, version=0)
        items = {
            key: map_tree(lambda *each, key=key: np.concatenate(each, int(key != "version")), *rows)
            for key in parts[0]
            if (rows := [part[key] for part in parts])
        }
        count = len(items["version"])
        weight = np.linspace(0.1, 1, count, dtype=np.float32)
        return items | {"key": np.arange(count), "weight": weight}

    def batch(self, experience: Any) -> Any:
        """The same for a learner."""
        return to_batch(self.pack(experience), CPU)


def slow_huber(error: float) -> float:
    """Section 4 of doi:10.1038/nature14236 clips the error's slope to 1."""
    return error**2 / 2 if abs(error) <= 1 else abs(error) - 0.5


def slow_target(algorithm: Any, stream: Stream, ask: Any, t: int, b: int) -> list[float]:
    """Σ γ^k r + γ^n Q(s', argmax Q), by arXiv:1509.06461 and section 3 of arXiv:1803.00933, as quantiles."""
    total, steps, over = 0.0, 0, False
    while steps < algorithm.n and not stream.first[t + steps + 1, b] and not over:
        steps += 1
        total += algorithm.gamma ** (steps - 1) * stream.reward[t + steps, b]
        over = stream.discount[t + steps, b] == 0
        if t + steps + 1 == len(stream.first):
            break
    future = ask("target", t + steps, b)
    choosing = ask("online", t + steps, b) if algorithm.double else future
    best = max(range(len(future)), key=lambda action: sum(choosing[action]))
    power = 0.0 if over else algorithm.gamma**steps
    return [total + power * each for each in future[best]]


def slow_loss(algorithm: Any, stream: Stream, ask: Any, t: int, b: int) -> tuple[float, float]:
    """The loss and the priority of the transition that begins at an instant of an environment."""
    chosen = ask("online", t, b)[stream.action[t, b]]
    goals = slow_target(algorithm, stream, ask, t, b)
    count = len(chosen)
    if count == 1:
        return slow_huber(goals[0] - chosen[0]), abs(goals[0] - chosen[0])
    total = 0.0
    for i in range(count):  # eq. (10) of arXiv:1710.10044
        for goal in goals:
            error = goal - chosen[i]
            total += abs((i + 0.5) / count - (error < 0)) * slow_huber(error) / count
    return total, total


@pytest.fixture(autouse=True)
def seed() -> None:
    """Draw the same weights every time."""
    torch.manual_seed(0)


CASES = [
    Dqn(network=SMALL, gamma=0.9, double=False),
    Dqn(network=SMALL, gamma=0.9, n=3),
    Dqn(network=SMALL, gamma=0.9, n=2, quantiles=5, dueling=True, head=7),
    Dqn(network=SMALL, gamma=0.9, n=4, quantiles=3, double=False),
    ApexDqn(network=SMALL, gamma=0.8, n=3, head=7),
    ApexDqn(network=SMALL, gamma=0.8, n=1, head=0, dueling=False, double=False),
    ApexDqn(network=SMALL, gamma=0.8, n=3, head=7, quantiles=4),
]


@pytest.mark.parametrize("kind", ["discrete", "mapping"])
@pytest.mark.parametrize("algorithm", CASES)
def test_loss_is_the_papers(specs, algorithm, kind):
    stream = Stream(specs[kind])
    net = algorithm.build(specs[kind])
    target = wander(net)
    nets = {"online": net, "target": target}

    def ask(which: str, t: int, b: int) -> list[list[float]]:
        """Quantiles by action, of one observation alone."""
        seen = map_tree(lambda x: torch.tensor(x[None, None, t, b]), stream.observation)
        with torch.no_grad():
            return nets[which](seen, torch.zeros(1, 1, dtype=torch.bool))[0][0, 0].double().tolist()

    batch = stream.batch(algorithm.experience)
    loss = algorithm.loss(net, target, batch)
    kinds = set()
    for item in range(len(batch.key)):
        t, b = stream.where[stream.shown(0, item, map_tree(lambda x: x.numpy(), batch.observation))]
        each, priority = slow_loss(algorithm, stream, ask, t, b)
        assert loss.each[item].item() == pytest.approx(each, rel=1e-4, abs=1e-5)
        assert loss.priority[item].item() == pytest.approx(priority, rel=1e-4, abs=1e-5)
        ends = [u for u in range(t + 1, min(t + algorithm.n, 38) + 1) if stream.first[u + 1, b]]
        kinds.add(stream.discount[ends[0], b] if ends else None)
    assert kinds == {None, 0.0, 1.0}  # some went on, some ended by their rules, some were cut off
    assert loss.metrics["td_error"] > 0.1


@pytest.mark.parametrize("algorithm", CASES)
def test_only_the_chosen_value_learns(specs, algorithm):
    """The target stands still: no gradient reaches either network through it."""
    net = algorithm.build(specs["discrete"])
    target = wander(net)
    batch = Stream(specs["discrete"]).batch(algorithm.experience)
    algorithm.loss(net, target, batch).each.sum().backward()
    assert all(parameter.grad is None for parameter in target.parameters())
    found = [parameter.grad.clone() for parameter in net.parameters()]
    assert all(gradient.any() for gradient in found)
    net.zero_grad()
    still = copy.deepcopy(net)  # chooses the action, as the network does, but cannot learn
    with torch.no_grad():
        after = batch.observation[1:], batch.first[1:]
        judged, choosing = target(*after)[0][0], (still if algorithm.double else target)(*after)[0][0]
        best = choosing.mean(-1).argmax(-1)
        future = judged[torch.arange(len(best)), best]
        goal = batch.reward[0, :, None] + algorithm.gamma * batch.discount[0, :, None] * future
    chosen = net(batch.observation[:1], batch.first[:1])[0][0][torch.arange(len(best)), batch.action[0]]
    if algorithm.quantiles == 1:
        torch.nn.functional.smooth_l1_loss(chosen, goal, reduction="sum").backward()
    else:
        count = algorithm.quantiles
        for i in range(count):
            error = goal - chosen[:, i : i + 1]
            weight = ((i + 0.5) / count - (error < 0).float()).abs()
            size = torch.nn.functional.smooth_l1_loss(error, torch.zeros_like(error), reduction="none")
            (weight * size / count).sum().backward(retain_graph=True)
    for expected, gradient in zip(net.parameters(), found, strict=True):
        torch.testing.assert_close(gradient, expected.grad, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("algorithm", CASES)
def test_weights_are_left_to_the_learner_and_priorities_are_the_losss(specs, algorithm):
    stream = Stream(specs["discrete"])
    items = stream.pack(algorithm.experience)
    batch = to_batch(items, CPU)
    policy = Follower(algorithm, specs["discrete"], "cpu")
    loss = algorithm.loss(policy.net, policy.net, batch)
    other = algorithm.loss(policy.net, policy.net, batch._replace(weight=batch.weight * 100))
    assert torch.equal(loss.each, other.each)
    assert torch.equal(loss.priority, other.priority)
    assert not loss.priority.requires_grad
    assert loss.each.shape == loss.priority.shape == (len(batch.key),)
    assert not any(metric.dim() for metric in loss.metrics.values())
    new = {key: value for key, value in items.items() if key not in ("key", "weight")}
    np.testing.assert_array_equal(first_priorities(algorithm, policy.net, new, policy.device), loss.priority)


def choices(algorithm: Any, net: Any, spec: Any, rank: torch.Tensor | None, size: int) -> tuple[Any, Any]:
    """What is chosen and what is best."""
    step = Step(torch.randn(size, *spec.observation.shape), torch.zeros(size), torch.ones(size), torch.zeros(size) > 0)
    act = algorithm.act(net, step, algorithm.begin(net, size), rank)
    values = net.values(step)
    assert act.carry == {}
    assert [*act.record] == (["q"] if rank is None else [])
    assert rank is not None or torch.equal(act.record["q"], values)
    return act.action, values.argmax(-1)


def test_dqn_explores_less_and_less(specs):
    algorithm = Dqn(network=SMALL, epsilon={"start": 1.0, "end": 0.2}, evaluation_epsilon=0.0)
    net, size = algorithm.build(specs["discrete"]), 20_000
    for progress, epsilon in ((0.0, 1.0), (0.5, 0.6), (1.0, 0.2)):
        chosen, best = choices(at(algorithm, progress, 1), net, specs["discrete"], torch.zeros(size), size)
        assert (chosen == best).float().mean() == pytest.approx(1 - epsilon + epsilon / 3, abs=0.015)
    chosen, best = choices(algorithm, net, specs["discrete"], None, size)
    assert torch.equal(chosen, best)


def test_apex_explores_by_rank(specs):
    algorithm = ApexDqn(network=SMALL, epsilon=0.4, epsilon_spread=2.0)
    net, actors = algorithm.build(specs["discrete"]), 5
    rank = (torch.arange(actors) / (actors - 1)).repeat_interleave(20_000)
    chosen, best = choices(algorithm, net, specs["discrete"], rank, len(rank))
    shares = (chosen == best).view(actors, -1).float().mean(1)
    for i in range(actors):
        epsilon = 0.4 ** (1 + 2.0 * i / (actors - 1))
        assert shares[i] == pytest.approx(1 - epsilon + epsilon / 3, abs=0.015)


@pytest.mark.parametrize("make_algorithm", [Dqn, ApexDqn])
def test_evaluations_have_a_chance_of_their_own(specs, make_algorithm):
    algorithm = make_algorithm(network=SMALL, evaluation_epsilon=0.5)
    net = algorithm.build(specs["discrete"])
    chosen, best = choices(algorithm, net, specs["discrete"], None, 20_000)
    assert (chosen == best).float().mean() == pytest.approx(0.5 + 0.5 / 3, abs=0.015)


MOVING = Architecture(hidden=(8,), activation="relu", normalise_observation=True)


@pytest.mark.parametrize("algorithm", [Dqn(network=MOVING, target_every=3), ApexDqn(network=MOVING, target_every=3)])
@pytest.mark.parametrize("done", [0, 7])
def test_the_target_network_follows_after_every_so_many_updates(specs, algorithm, done):
    """Exactly then, in every weight and statistic; in between it stands still."""
    model = Model(algorithm, specs["discrete"], CPU)
    assert not any(parameter.requires_grad for parameter in model.target.parameters())
    copied = []
    for updates in range(done, done + 8):
        batch = Stream(specs["discrete"], seed=updates).batch(algorithm.experience)
        before = copy.deepcopy(model.target.state_dict())
        weights = copy.deepcopy(model.net.state_dict())
        priority, count, _ = model.update(algorithm, batch, updates)
        assert count == 1
        assert priority.shape == batch.key.shape
        now, target = model.net.state_dict(), model.target.state_dict()
        assert any(not torch.equal(now[key], weights[key]) for key in now)
        assert set(now) == set(target)
        follows = all(torch.equal(now[key], target[key]) for key in now)
        stands = all(torch.equal(before[key], target[key]) for key in now)
        assert follows != stands
        copied += [updates + 1] if follows else []
    assert copied == [number for number in range(done + 1, done + 9) if number % 3 == 0]


def test_the_learner_applies_importance_weights_once(specs):
    algorithm = Dqn(network=SMALL, clip_norm=None)
    model = Model(algorithm, specs["discrete"], CPU)
    batch = Stream(specs["discrete"]).batch(algorithm.experience)
    twin = copy.deepcopy(model.net)
    each = algorithm.loss(twin, copy.deepcopy(model.target), batch).each
    sum(weight * one for weight, one in zip(batch.weight, each, strict=True)).div(len(each)).backward()
    model.update(algorithm, batch, 0)
    for learned, expected in zip(model.net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(learned.grad, expected.grad)
    frozen = copy.deepcopy(model.net.state_dict())
    model = Model(algorithm, specs["discrete"], CPU)
    model.net.load_state_dict(frozen)
    model.update(algorithm, batch._replace(weight=torch.zeros_like(batch.weight)), 0)
    assert all(torch.equal(frozen[key], value) for key, value in model.net.state_dict().items())


WIDE = Architecture(hidden=(64,), activation="relu")


@pytest.mark.parametrize(
    "algorithm",
    [
        Dqn(network=WIDE, lr=1e-2),
        ApexDqn(network=WIDE, lr=3e-3, head=64),
        ApexDqn(network=WIDE, lr=1e-2, head=64, rule="adam"),
    ],
)
def test_updates_lower_the_loss_of_their_batch(specs, algorithm):
    model = Model(algorithm, specs["discrete"], CPU)
    batch = Stream(specs["discrete"]).batch(algorithm.experience)
    before = algorithm.loss(model.net, model.target, batch).each.mean()
    for updates in range(60):
        model.update(algorithm, batch, updates)
    assert algorithm.loss(model.net, model.target, batch).each.mean() < 0.6 * before


def test_nested_schedules_move_with_the_run():
    algorithm = Dqn(replay={"beta": {"start": 0.4, "end": 1.0}, "capacity": 7}, epsilon=0.1)
    for progress, beta in ((0.0, 0.4), (0.5, 0.7), (1.0, 1.0)):
        moved = at(algorithm, progress, 1)
        assert moved.replay.beta.now == pytest.approx(beta)
        assert moved.replay.capacity == 7
    assert algorithm.replay.beta.now == 0.4  # settings are frozen: what moved is another
    constant = Dqn(replay={"beta": 0.6}, epsilon=0.1)
    assert at(constant, 0.5, 1) is constant


def test_settings():
    assert isinstance(Dqn(), Algorithm)
    assert isinstance(ApexDqn(), Algorithm)
    assert Dqn().experience == NStep(1, 0.99)
    assert ApexDqn().experience == NStep(3, 0.99)
    assert Dqn(n=5, gamma=0.5).experience == NStep(5, 0.5)


def test_the_head_has_units_only_if_asked(specs):
    spec = specs["discrete"]
    assert spec.action == ActionSpec(3)
    assert Dqn(network=SMALL).build(spec).head.advantage.weight.shape == (3, 8)
    assert ApexDqn(network=SMALL, quantiles=2).build(spec).head.advantage[2].weight.shape == (6, 512)
