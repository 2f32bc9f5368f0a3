"""Continuous control against the papers in NumPy, from the raw stream to the loss, and who learns when."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from shoal.algorithms.deterministic import ApexDpg, D4pg, FastTd3, Td3
from shoal.algorithms.sac import Sac
from shoal.core.settings import Schedule
from shoal.core.types import ActionSpec, ArraySpec, NStep, Spec, Step
from shoal.nets.continuous import ContinuousArchitecture
from shoal.workers.model import Following, Model, first_priorities
from shoal.workers.packing import fresh_batch, make
from tests.algorithms.conftest import wander

SMALL = ContinuousArchitecture(hidden=(8,), critic_hidden=(8,))
SPEC = Spec(ArraySpec((4,), "float32"), ActionSpec(2, (-2.0, 0.0), (2.0, 1.0)))
CPU = torch.device("cpu")
GAMMA = 0.9


@pytest.fixture(autouse=True)
def seed() -> None:
    """Draw the same weights every time."""
    torch.manual_seed(0)


class Stream:
    """What three environments said, and what was done, at every instant."""

    def __init__(self, n: int, instants: int = 40, size: int = 3) -> None:
        """Draw episodes that end by their own rules or are cut off, and pack them."""
        random = np.random.default_rng(0)
        ended = random.random((instants, size)) < 0.2
        ended[:3] = False
        self.first = np.concatenate([np.ones((1, size), bool), ended[:-1]])
        self.terminated = ended & (random.random((instants, size)) < 0.5) & ~self.first
        self.observation = random.normal(size=(instants, size, 4)).astype(np.float32)
        self.reward = np.where(self.first, 0, random.normal(size=(instants, size))).astype(np.float32)
        self.action = random.uniform((-2, 0), (2, 1), size=(instants, size, 2)).astype(np.float32)
        self.where = {self.observation[t, b].tobytes(): (t, b) for t in range(instants) for b in range(size)}
        packer, parts = make(NStep(n, GAMMA), size), []
        for t in range(instants):
            discount = (~self.terminated[t]).astype(np.float32)
            items = packer.observe(Step(self.observation[t], self.reward[t], discount, self.first[t]))
            parts += [] if items is None else [fresh_batch(items, CPU)]
            packer.choose(self.action[t], {}, version=0)
        self.batches = parts

    def transition(self, observation: Any, n: int) -> tuple[float, float, np.ndarray, np.ndarray]:
        """The n-step return from an observation, the factor of the bootstrap, the action, and where it leads."""
        t, b = self.where[observation.numpy().tobytes()]
        total, factor, action = 0.0, 1.0, self.action[t, b]
        for step in range(n):
            total += GAMMA**step * self.reward[t + step + 1, b]
            factor *= GAMMA * (not self.terminated[t + step + 1, b])
            last = t + step + 1
            if last + 1 < len(self.first) and self.first[last + 1, b]:  # the episode's last observation
                break
        return total, factor, action, self.observation[last, b]


def make_nets(algorithm: Any) -> tuple[Any, Any]:
    """A network and a target that differ, with outputs far from 0."""
    torch.manual_seed(1)
    net = wander(algorithm.build(SPEC))
    return net, wander(net)


def ask(net: Any, observation: np.ndarray, action: np.ndarray) -> np.ndarray:
    """What each critic says of one action of the environment, [critics, outputs]."""
    inside = (action - np.array([0.0, 0.5])) / np.array([2.0, 0.5])
    with torch.no_grad():
        inputs, chosen = torch.tensor(observation)[None], torch.tensor(inside, dtype=torch.float32)[None]
        return net.judge(inputs, chosen)[:, 0].double().numpy()


def policy_of(net: Any, observation: np.ndarray) -> np.ndarray:
    """The deterministic policy's action in the environment's units."""
    with torch.no_grad():
        return net.outside(net.policy(torch.tensor(observation)[None]))[0].numpy()


def every_item(stream: Stream) -> Any:
    """Each batch that was packed, each item in it."""
    for batch in stream.batches:
        for item in range(len(batch.weight)):
            yield batch, item


def slow_quantile_huber(quantiles: np.ndarray, goals: np.ndarray) -> float:
    """Section 4 of arXiv:1710.10044."""
    total = 0.0
    for index, quantile in enumerate(quantiles):
        fraction = (index + 0.5) / len(quantiles)
        for goal in goals:
            error = goal - quantile
            huber = error**2 / 2 if abs(error) <= 1 else abs(error) - 0.5
            total += abs(fraction - (error < 0)) * huber / len(goals)
    return total


def softmax(x: np.ndarray) -> np.ndarray:
    """Probabilities."""
    e = np.exp(x - x.max())
    return e / e.sum()


def slow_projection(support: np.ndarray, goals: np.ndarray, chance: np.ndarray) -> np.ndarray:
    """Algorithm 1 of arXiv:1707.06887."""
    wanted, width = np.zeros(len(support)), support[1] - support[0]
    for goal, share in zip(goals, chance, strict=True):
        place = min((np.clip(goal, support[0], support[-1]) - support[0]) / width, len(support) - 1)
        low, high = int(np.floor(place)), int(np.ceil(place))
        if low == high:
            wanted[low] += share
        else:
            wanted[low] += share * (high - place)
            wanted[high] += share * (place - low)
    return wanted


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("combine", ["min", "mean"])
@pytest.mark.parametrize("kind", ["values", "quantiles", "dropped", "atoms"])
def test_critics_learn_the_papers_targets_whatever_the_ending(n: int, combine: str, kind: str) -> None:
    more: dict[str, Any] = {
        "values": {},
        "quantiles": {"quantiles": 4},
        "dropped": {"quantiles": 4, "drop": 1},
        "atoms": {"atoms": 7, "support": (-2.0, 2.0)},
    }[kind]
    algorithm = Td3(n=n, gamma=GAMMA, combine=combine, smoothing=0.0, network=SMALL, **more)
    net, target = make_nets(algorithm)
    stream, seen, endings = Stream(n), 0, set()
    for batch, item in every_item(stream):
        with torch.no_grad():  # as on an actor: no term of the policy
            loss = algorithm.loss(net, target, batch)
        total, factor, action, then = stream.transition(batch.observation[0, item], n)
        now = batch.observation[0, item].numpy()
        future, outputs = ask(target, then, policy_of(target, then)), ask(net, now, action)
        if kind == "atoms":
            support = np.linspace(-2, 2, 7)
            chances = [softmax(one) for one in future]
            projected = np.array([slow_projection(support, total + factor * support, one) for one in chances])
            wanted = projected[(projected @ support).argmin()] if combine == "min" else projected.mean(0)
            each = sum(-(wanted * np.log(softmax(one))).sum() for one in outputs)
        else:
            if kind == "dropped":
                samples = np.sort(future.ravel())[: 2 * 4 - 2]
            elif combine == "min":
                samples = future[future.mean(1).argmin()]
            else:
                samples = future.mean(0) if kind == "values" else future.ravel()
            goals = total + factor * samples
            if kind == "values":
                each = sum((goals[0] - one[0]) ** 2 / 2 for one in outputs)
            else:
                each = sum(slow_quantile_huber(one, goals) for one in outputs)
        np.testing.assert_allclose(loss.each[item], each, rtol=2e-4, atol=1e-5)
        seen, endings = seen + 1, endings | {factor == 0, factor < GAMMA**n - 1e-9}
    assert seen > 80
    assert endings == {True, False}


def test_a_target_takes_the_whole_distribution_of_the_critic_with_the_smaller_mean() -> None:
    """arXiv:2505.22642, section 2: of both, after the projection, for actions of the policy that is learning."""
    algorithm = FastTd3(gamma=GAMMA, atoms=7, support=(-1.0, 1.0), smoothing=0.0, network=SMALL)
    net, target = make_nets(algorithm)
    stream, support, which = Stream(1), np.linspace(-1, 1, 7), {"moved": set(), "unmoved": set()}
    for batch, item in every_item(stream):
        with torch.no_grad():
            loss = algorithm.loss(net, target, batch)
        total, factor, action, then = stream.transition(batch.observation[0, item], 1)
        future = [softmax(one) for one in ask(target, then, policy_of(net, then))]
        projected = np.array([slow_projection(support, total + factor * support, one) for one in future])
        wanted = projected[chosen := int((projected @ support).argmin())]
        outputs = ask(net, batch.observation[0, item].numpy(), action)
        each = sum(-(wanted * np.log(softmax(one))).sum() for one in outputs)
        np.testing.assert_allclose(loss.each[item], each, rtol=2e-4, atol=1e-5)
        if factor:
            moved = chosen != int((np.array(future) @ support).argmin())
            which["moved" if moved else "unmoved"].add(chosen)
    assert which["unmoved"] == {0, 1}
    assert which["moved"]  # what lies beyond the support decides, now and then


@pytest.mark.parametrize("climb", ["first", "min"])
def test_the_policy_climbs_the_first_critic_or_the_lowest(climb: Any) -> None:
    algorithm = Td3(gamma=GAMMA, policy_every=1, climb=climb, network=SMALL)
    net, target = make_nets(algorithm)
    batch = Stream(1).batches[0]
    torch.manual_seed(0)
    with torch.no_grad():
        without = algorithm.loss(net, target, batch).each
    torch.manual_seed(0)
    loss = algorithm.loss(net, target, batch)
    for item, observation in enumerate(batch.observation[0].numpy()):
        values = ask(net, observation, policy_of(net, observation))[:, 0]
        value = values[0] if climb == "first" else values.min()
        np.testing.assert_allclose((without[item] - loss.each[item]).item(), value, rtol=1e-4, atol=1e-5)
    (loss.each - without).sum().backward()
    climbed = {name.partition(".")[0] for name, part in net.named_parameters() if part.grad is not None}
    assert climbed >= {"torso", "head"}


@pytest.mark.parametrize("algorithm", [Td3(network=SMALL), Sac(network=SMALL)], ids=["td3", "sac"])
def test_no_gradient_of_the_policy_reaches_the_critics(algorithm: Any) -> None:
    net, target = make_nets(algorithm)
    batch = Stream(1).batches[0]
    gradients = []
    for _ in range(2):
        torch.manual_seed(0)
        net.zero_grad()
        algorithm.loss(net, target, batch).each.sum().backward()
        gradients.append([part.grad.clone() for part in net.critics.parameters()])
        net.turn = False  # now without the policy
    for with_policy, without in zip(*gradients, strict=True):
        torch.testing.assert_close(with_policy, without)


def test_noise_on_targets_is_bounded_and_so_are_their_actions() -> None:
    algorithm = Td3(gamma=GAMMA, smoothing=100.0, smoothing_most=0.3, network=SMALL)
    net, target = make_nets(algorithm)
    asked = []
    judge = target.judge
    target.judge = lambda inputs, action: (asked.append(action), judge(inputs, action))[1]
    batch = Stream(1).batches[0]
    algorithm.loss(net, target, batch)
    wanted = target.policy(net.seen(batch)[1])
    moved = (asked[0] - wanted).abs()
    assert asked[0].abs().max() <= 1
    assert moved.max() <= 0.3 + 1e-6
    assert (moved > 0.29).any()


def test_the_soft_value_has_the_entropy_and_the_temperature_learns_its_goal() -> None:
    """arXiv:1812.05905, eq. 3, 5, 7 and 18."""
    algorithm = Sac(gamma=GAMMA, entropy=-0.5, temperature=0.3, network=SMALL)
    net, target = make_nets(algorithm)
    with torch.no_grad():
        net.log_temperature.fill_(np.log(0.3))
    stream = Stream(1)
    batch = stream.batches[0]
    torch.manual_seed(5)
    loss = algorithm.loss(net, target, batch)
    torch.manual_seed(5)
    with torch.no_grad():
        then_action, then_log = (part.double().numpy() for part in net.drawn(net.seen(batch)[1]))
        now_action, now_log = (part.double().numpy() for part in net.drawn(net.seen(batch)[0]))
    middle, reach = np.array([0.0, 0.5]), np.array([2.0, 0.5])
    for item in range(len(batch.weight)):
        total, factor, action, then = stream.transition(batch.observation[0, item], 1)
        now = batch.observation[0, item].numpy()
        soft = ask(target, then, middle + reach * then_action[item]).min() - 0.3 * then_log[item]
        each = sum((total + factor * soft - one[0]) ** 2 / 2 for one in ask(net, now, action))
        each += 0.3 * now_log[item] - ask(net, now, middle + reach * now_action[item]).min()
        each -= 0.3 * (now_log[item] + -0.5 * 2)
        np.testing.assert_allclose(loss.each[item].item(), each, rtol=1e-4, atol=1e-4)
    loss.each.mean().backward()
    # d/d log α of −α (log π + H̄): too little entropy raises the temperature.
    np.testing.assert_allclose(net.log_temperature.grad, -0.3 * (now_log - 1.0).mean(), rtol=1e-4)


def test_a_delayed_policy_learns_every_other_time_and_the_critics_every_time() -> None:
    algorithm = Td3(policy_every=2, network=SMALL, lr=1e-2)
    torch.manual_seed(0)
    model = Model(algorithm, SPEC, CPU)
    batch = Stream(1).batches[0]
    moved = []
    for update in range(4):
        before = copy.deepcopy(model.net.state_dict())
        model.update(algorithm, batch, update)
        after = model.net.state_dict()
        moved.append([not torch.equal(before[name], after[name]) for name in ("head.linear.weight", "values.weight")])
    assert moved == [[False, True], [True, True], [False, True], [True, True]]


def test_a_target_moves_by_tau() -> None:
    algorithm = Td3(tau=0.25, target_every=1, network=SMALL)
    net, target = make_nets(algorithm)
    before, goal = copy.deepcopy([*target.parameters()]), [*net.parameters()]
    net.updates += 3
    Following(net, target).move(algorithm.tau)
    for old, new, towards in zip(before, target.parameters(), goal, strict=True):
        torch.testing.assert_close(new, old + 0.25 * (towards - old))
    assert target.updates == 3
    Following(net, target).move(1.0)
    assert all(torch.equal(*pair) for pair in zip(target.parameters(), goal, strict=True))


def test_rates_of_policy_and_critics_differ() -> None:
    algorithm = Td3(network=SMALL, lr=Schedule(start=1e-2, shape="constant"), policy_rate=0.1)
    model = Model(algorithm, SPEC, CPU)
    model.update(algorithm, Stream(1).batches[0], 0)
    assert [group["lr"] for group in model.optimizer.param_groups] == [1e-2, pytest.approx(1e-3)]


def test_noise_falls_from_the_boldest_environment_to_the_most_careful() -> None:
    algorithm = ApexDpg(noise=0.4, noise_least=0.1, network=SMALL)
    net = algorithm.build(SPEC)
    net.updates += 1
    with torch.no_grad():
        for part in net.head.parameters():
            part.zero_()  # the policy is 0
    size = 4000
    step = Step(torch.zeros(3 * size, 4), torch.zeros(3 * size), torch.ones(3 * size), torch.zeros(3 * size).bool())
    rank = torch.tensor([0.0, 0.5, 1.0]).repeat_interleave(size)
    action = net.inside(algorithm.act(net, step, {}, rank).action.detach())
    spreads = action.view(3, size, 2).flatten(1).std(1)
    np.testing.assert_allclose(spreads, [0.4, 0.2, 0.1], rtol=0.1)
    assert torch.equal(net.inside(algorithm.act(net, step, {}, None).action), torch.zeros(3 * size, 2))


def test_noise_may_be_drawn_for_each_episode() -> None:
    algorithm = FastTd3(noise=0.4, noise_least=0.2, network=SMALL)
    net, size, rank = algorithm.build(SPEC), 500, torch.zeros(500)
    carry, spreads = algorithm.begin(net, size), []
    for first in (True, False, True):
        step = Step(torch.zeros(size, 4), torch.zeros(size), torch.ones(size), torch.full((size,), first))
        carry = algorithm.act(net, step, carry, rank).carry
        spreads.append(carry["spread"])
    assert torch.equal(spreads[0], spreads[1])
    assert not (spreads[1] == spreads[2]).any()
    for drawn in spreads:
        assert 0.2 <= drawn.min() < 0.21 < 0.39 < drawn.max() <= 0.4
        assert drawn.mean() == pytest.approx(0.3, abs=0.02)


@pytest.mark.parametrize("algorithm", [D4pg(network=SMALL), ApexDpg(network=SMALL)], ids=["atoms", "values"])
def test_an_actor_and_the_learner_agree_on_priorities(algorithm: Any) -> None:
    net, _ = make_nets(algorithm)
    stream = Stream(algorithm.n)
    batch = stream.batches[0]
    items = {key: value.numpy() if isinstance(value, torch.Tensor) else value for key, value in batch.arrays().items()}
    found = first_priorities(algorithm, net, {key: items[key] for key in items if key not in ("key", "weight")}, CPU)
    net.updates += 1
    loss = algorithm.loss(net, net, batch)
    np.testing.assert_allclose(found, loss.priority, rtol=1e-5)
    assert "policy_loss" in loss.metrics
    assert (loss.priority >= -1e-6).all()


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="atoms: a critic has either atoms or quantiles"):
        Td3(atoms=5, quantiles=4)
    with pytest.raises(ValueError, match="drop 4: a critic has only 4 quantiles"):
        Sac(quantiles=4, drop=4)
    with pytest.raises(ValueError, match=r"support \[1.0, 1.0\]: the lowest atom must lie below"):
        D4pg(support=(1.0, 1.0))
    with pytest.raises(ValueError, match=r"noise_least 0.5: at most noise 0.1"):
        Td3(noise_least=0.5)
