"""NGU from the raw stream to the loss: arms, novelty, both values, and the rewards of the bandit."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch

from shoal.algorithms.ngu import PARTS, Ngu
from shoal.core.bandit import Bandit
from shoal.core.tree import map_tree, to_numpy, to_torch
from shoal.core.types import Sequence, Step
from shoal.nets.torsos import Architecture
from shoal.workers.follower import Follower
from shoal.workers.model import Model, first_priorities, optimizer_step
from shoal.workers.packing import Sequences, to_batch

CPU = torch.device("cpu")
ACTIONS = 3
NETWORK = {"network": Architecture(hidden=(8,), activation="relu", lstm=6), "embedding": 5, "head": 7}
ARMS = {"arms": 4, "beta": 0.7, "gamma": 0.95, "gamma_last": 0.8, "bandit_epsilon": 0.0}
CUT = {"lambda_": 0.9, "unroll": 6, "burn_in": 0, "overlap": 2}


@pytest.fixture(autouse=True)
def seed() -> None:
    """Draw the same weights every time."""
    torch.manual_seed(0)


def small(**changes: Any) -> Ngu:
    """Small enough to follow."""
    return Ngu(**NETWORK | ARMS | CUT | changes)


def build(algorithm: Ngu, spec: Any) -> Any:
    """Networks that have seen errors of distillation before."""
    net = algorithm.build(spec)
    net.novelty.error_mean.fill_(0.15)
    net.novelty.error_square.fill_(0.15**2 + 0.1**2)
    return net


def wander(net: Any) -> Any:
    """Networks whose values are others."""
    other = copy.deepcopy(net)
    with torch.no_grad():
        for parameter in (*other.extrinsic.parameters(), *other.intrinsic.parameters()):
            parameter.add_(0.3 * torch.randn_like(parameter))
    return other


def watch(net: Any) -> dict[str, list[torch.Tensor]]:
    """What both networks of values say from now on, call by call: [T, B, A]."""
    said: dict[str, list[torch.Tensor]] = {part: [] for part in PARTS}
    for part, heard in said.items():
        hook = lambda _, __, answer, heard=heard: heard.append(answer[0][..., 0].detach().clone())  # noqa: E731
        getattr(net, part).register_forward_hook(hook)
    return said


class Played:
    """Episodes that an algorithm acted in: everything said at every instant, and the sequences cut from it."""

    def __init__(self, algorithm: Ngu, net: Any, instants: int = 60, size: int = 3, ending: float = 0.1) -> None:
        """Act as an actor does, among four places that are visited again and again."""
        random = np.random.default_rng(0)
        packer, self.carry = Sequences(algorithm.experience, size), algorithm.begin(net, size)
        centres, first, parts = random.normal(size=(4, 4)), np.ones(size, bool), []
        self.steps, self.actions, self.records = [], [], []
        for _ in range(instants):
            ended = ~first & (random.random(size) < ending)
            alive = ~(ended & (random.random(size) < 0.5))
            reward = np.where(first, 0, random.integers(-9, 10, size))
            seen = centres[random.integers(4, size=size)] + 0.05 * random.normal(size=(size, 4))
            step = Step(*(array.astype(np.float32) for array in (seen, reward, alive)), first)
            if (items := packer.observe(step)) is not None:
                parts.append(map_tree(np.copy, items))
            with torch.inference_mode():
                act = algorithm.act(net, Step(*map(to_torch, step)), self.carry, torch.zeros(size))
            self.steps.append(step)
            self.actions.append(act.action.numpy())
            self.records.append(to_numpy(act.record))
            packer.choose(self.actions[-1], self.records[-1], 0)
            self.carry, first = act.carry, ended
        self.items = {
            key: map_tree(lambda *each, key=key: np.concatenate(each, int(key != "version")), *rows)
            for key in parts[0]
            if (rows := [part[key] for part in parts])
        }
        count = len(self.items["version"])
        extra = {"key": np.arange(count), "weight": np.linspace(0.1, 1, count, dtype=np.float32)}
        self.batch = to_batch(map_tree(np.copy, self.items) | extra, CPU)
        shown = {step.observation[b].tobytes(): (t, b) for t, step in enumerate(self.steps) for b in range(size)}
        self.places = [shown[self.items["observation"][0, item].tobytes()] for item in range(count)]

    def real(self, item: int) -> int:
        """The number of observations of an item that are not padding."""
        inside = self.batch.first[1:, item].tolist()
        return 1 + (inside.index(True) if True in inside else len(inside))


@pytest.mark.parametrize(("window", "bonus"), [(160, 1.0), (5, 1.0), (3, 0.0), (9, 20.0)])
def test_the_bandit_is_told_what_each_arm_earned(specs, window, bonus):
    """Every environment has a bandit; an episode's return is all it earned, with its last reward."""
    algorithm = small(window=window, bonus=bonus)
    played = Played(algorithm, build(algorithm, specs["discrete"]), instants=150, ending=0.3)
    pulls: list[tuple[int, float]] = []
    for b in range(3):
        past, arm, score, bandit = [], 0, 0.0, Bandit(4, window, 0.0, bonus)
        for t, step in enumerate(played.steps):
            if step.first[b]:
                if t:
                    past.append((arm, score))
                    bandit.reward(arm, score)
                arm, score = bandit.choose(), 0.0
            else:
                score += float(step.reward[b])
            assert played.records[t]["arm"][b] == arm
        assert [*played.carry["bandits"][b].history] == past[-window:]
        pulls += past
        assert len(past) > 15
        assert [arm for arm, _ in past[:4]] == [0, 1, 2, 3]
    assert sorted(map(tuple, algorithm.choices(played.carry))) == sorted(pulls)  # for the log
    assert algorithm.choices(played.carry) == []


def slow_episodic(distances: list[float], average: float) -> float:
    """Algorithm 1 of arXiv:2002.06038, after its update of the moving average."""
    similarity = math.sqrt(sum(1e-4 / (max(each / average - 0.008, 0.0) + 1e-4) for each in distances)) + 1e-3
    return 0.0 if similarity > 8 else 1 / similarity


@pytest.mark.parametrize("memory", [1, 12, 20, 1000])
def test_novelty_is_the_papers(specs, memory):
    algorithm = small(memory=memory)
    net, longest = build(algorithm, specs["discrete"]), 0
    played = Played(algorithm, net, instants=90, ending=0.03)
    for b in range(3):
        remembered, total, count = [], 0.0, 0  # the average goes over all neighbours so far, in all episodes
        for t, step in enumerate(played.steps):
            seen = torch.tensor(step.observation[b : b + 1])
            with torch.no_grad():
                point = net.novelty.embedding(seen)[0].double().numpy()
                error = (net.novelty.predictor(seen) - net.novelty.random(seen)).double().square().mean().item()
            if step.first[b]:
                remembered = []
            distances = sorted(float(((point - other) ** 2).sum()) for other in remembered[-memory:])[:10]
            total, count = total + sum(distances), count + len(distances)
            lasting = min(max(1 + (error - 0.15) / 0.1, 1.0), 5.0)
            expected = slow_episodic(distances, total / count) * lasting if distances else 0.0
            assert played.records[t]["novelty"][b] == pytest.approx(expected, rel=2e-3)
            remembered.append(point)
            longest = max(longest, len(remembered))
    assert longest > 33  # the memory grew more than once


@pytest.mark.parametrize(("unroll", "overlap"), [(6, 0), (6, 2), (5, 4), (12, 5)])
def test_the_loss_sees_what_acting_saw(specs, unroll, overlap):
    """States, last action, last reward, novelty and arm of every step are in their places."""
    algorithm = small(unroll=unroll, overlap=overlap, epsilon=0.9)
    net = build(algorithm, specs["discrete"])
    said = watch(net)
    played = Played(algorithm, net, instants=80)
    acted = {part: torch.cat(said[part]) for part in PARTS}
    algorithm.loss(net, algorithm.build(specs["discrete"]), played.batch)
    middle = padded = 0
    for item, (start, b) in enumerate(played.places):
        real = min(played.real(item), unroll)  # after the last step the novelty is not known
        for part in PARTS:
            before, now = acted[part][start : start + real, b], said[part][-1][:real, item]
            torch.testing.assert_close(now, before, atol=1e-5, rtol=1e-4)
        middle += not played.batch.first[0, item]
        padded += real < unroll
    assert min(middle, padded) > 0
    assert {*played.batch.record["arm"][0].tolist()} >= {0, 1, 2}


def slow_h(x: float) -> float:
    """Openreview r1lyTjAqYX, section 2.3."""
    return math.copysign(math.sqrt(abs(x) + 1) - 1, x) + 1e-3 * x


def slow_h_inverse(y: float) -> float:
    """Proposition A.2 of arXiv:1805.11593."""
    inner = (math.sqrt(1 + 4e-3 * (abs(y) + 1 + 1e-3)) - 1) / 2e-3
    return math.copysign(inner**2 - 1, y)


def slow_beta(algorithm: Ngu, arm: int) -> float:
    """Appendix A of arXiv:2002.06038."""
    if arm in (0, algorithm.arms - 1):
        return algorithm.beta if arm else 0.0
    return algorithm.beta / (1 + math.exp(-10 * (2 * arm - (algorithm.arms - 2)) / (algorithm.arms - 2)))


def slow_gamma(algorithm: Ngu, arm: int) -> float:
    """Appendix A of arXiv:2002.06038."""
    last = algorithm.arms - 1
    mixed = (last - arm) * math.log(1 - algorithm.gamma) + arm * math.log(1 - algorithm.gamma_last)
    return 1 - math.exp(mixed / last)


def slow_best(extrinsic: list[float], intrinsic: list[float], beta: float) -> int:
    """The action with the largest h(h⁻¹(Qe) + β h⁻¹(Qi)) (arXiv:2003.13350, section 3.1)."""
    both = zip(extrinsic, intrinsic, strict=True)
    mixed = [slow_h(slow_h_inverse(one) + beta * slow_h_inverse(two)) for one, two in both]
    return mixed.index(max(mixed))


def test_acting_takes_the_best_of_the_mixed_values(specs):
    torch.manual_seed(2)  # with which the two values do not agree on one action throughout
    algorithm = small(epsilon=1e-9, beta=5.0)
    net = wander(build(algorithm, specs["discrete"]))
    said = watch(net)
    played, mattered = Played(algorithm, net, instants=100, ending=0.3), 0
    for t in range(100):
        for b in range(3):
            extrinsic, intrinsic = (said[part][t][0, b].double().tolist() for part in PARTS)
            best = slow_best(extrinsic, intrinsic, slow_beta(algorithm, played.records[t]["arm"][b]))
            assert played.actions[t][b] == best
            mattered += best != extrinsic.index(max(extrinsic))
    assert mattered > 10


def test_an_evaluation_plays_the_arm_that_exploits_and_ranks_explore(specs):
    algorithm, size = small(epsilon=0.5, epsilon_spread=60.0), 10_000
    net = wander(build(algorithm, specs["discrete"]))
    said, carry = watch(net), algorithm.begin(net, size)
    for first in (True, False, True):
        step = Step(torch.randn(size, 4), torch.randn(size), torch.ones(size), torch.full((size,), first))
        with torch.inference_mode():
            act = algorithm.act(net, step, carry, None)
        assert not act.record["arm"].any()
        assert torch.equal(act.action, said["extrinsic"][-1][0].argmax(-1))
        carry = act.carry
    assert all(bandit.pulls == 0 for bandit in carry["bandits"])
    with torch.inference_mode():
        act = algorithm.act(net, step, carry, torch.arange(size) % 2)  # the first arm, which exploits as well
    right = (act.action == said["extrinsic"][-1][0].argmax(-1)).view(-1, 2).float().mean(0)
    assert right.tolist() == [pytest.approx(0.5 + 0.5 / 3, abs=0.03), 1.0]


def slow_values(net: Any, played: Played, item: int, part: str, arms: int) -> list[list[float]]:
    """Values at every real observation of an item, one step at a time from the stored state."""
    start, b = played.places[item]
    state, result = played.batch.record[f"core_{part}"][0, item : item + 1], []
    for t in range(start, start + played.real(item)):
        step, extra = played.steps[t], np.zeros(ACTIONS + 2 + arms, np.float32)
        if not step.first[b]:
            extra[played.actions[t - 1][b]] = 1
            extra[ACTIONS] = step.reward[b]
        if t - start < len(played.batch.action):  # after the last step it is not known
            novelty = float(played.records[t]["novelty"][b])
            extra[ACTIONS + 1] = np.sqrt(novelty + 1) - 1 + 1e-3 * novelty  # on the scale of h
        extra[ACTIONS + 2 + played.records[start]["arm"][b]] = 1
        seen, first = torch.tensor(step.observation[None, b : b + 1]), torch.tensor([[bool(step.first[b])]])
        with torch.no_grad():
            value, state = getattr(net, part)(seen, first, state, torch.tensor(extra)[None, None])
        result.append(value[0, 0, :, 0].double().tolist())
    return result


def slow_errors(algorithm: Ngu, played: Played, item: int, net: Any, target: Any, part: str) -> dict[int, float]:
    """Errors of one of the values by step, where one is learned from; what is not known is not summed."""
    start, b = played.places[item]
    arm = int(played.records[start]["arm"][b])
    gamma, beta = slow_gamma(algorithm, arm), slow_beta(algorithm, arm)
    online = {each: slow_values(net, played, item, each, algorithm.arms) for each in PARTS}
    judged = slow_values(target, played, item, part, algorithm.arms)
    best = [slow_best(*pair, beta) for pair in zip(online["extrinsic"], online["intrinsic"], strict=True)]
    last = len(judged) - 1
    if last == len(played.batch.action):
        last -= 1  # how new the last observation is, is not known
    taken = [int(played.actions[start + t][b]) for t in range(last)]
    errors = {}
    for t in range(last):
        goal, weight = slow_h_inverse(judged[t][taken[t]]), 1.0
        for k in range(t, last):  # Retrace as a sum over the steps that follow
            then = played.steps[start + k + 1]
            earned = then.reward[b] if part == "extrinsic" else played.records[start + k + 1]["novelty"][b]
            over = then.discount[b] == 0 and part == "extrinsic"  # novelty goes on in the next episode
            future = 0.0 if over else slow_h_inverse(judged[k + 1][best[k + 1]])
            goal += weight * (float(earned) + gamma * future - slow_h_inverse(judged[k][taken[k]]))
            if k + 1 < last:
                weight *= gamma * algorithm.lambda_ * (taken[k + 1] == best[k + 1])
        if t >= algorithm.burn_in or played.steps[start].first[b]:
            errors[t] = slow_h(goal) - online[part][t][taken[t]]
    return errors


def check_loss(algorithm: Ngu, spec: Any, ends: bool | None) -> int:
    """Compare items with the paper, all or those whose episode ends inside or not, and return their number."""
    actor = build(algorithm, spec)
    played = Played(algorithm, actor)
    net, target = wander(actor), wander(actor)  # learning went on since
    loss = algorithm.loss(net, target, played.batch)
    values = loss.each.detach() - sum(net.novelty.loss(played.batch)).detach()  # what is left is of the values
    length, checked = len(played.batch.action), 0
    for item, (start, b) in enumerate(played.places):
        if ends is not None and ends == (played.real(item) == length + 1):
            continue
        extrinsic, intrinsic = (slow_errors(algorithm, played, item, net, target, part) for part in PARTS)
        each = sum(error**2 / 2 for error in [*extrinsic.values(), *intrinsic.values()]) / length
        beta = slow_beta(algorithm, int(played.records[start]["arm"][b]))
        sizes = [abs(error) + beta * abs(intrinsic.get(t, 0.0)) for t, error in extrinsic.items()]
        priority = algorithm.eta * max(sizes) + (1 - algorithm.eta) * sum(sizes) / len(sizes)
        assert values[item].item() == pytest.approx(each, rel=2e-3, abs=1e-4)
        assert loss.priority[item].item() == pytest.approx(priority, rel=2e-3, abs=1e-4)
        checked += 1
    return checked


BURN_IN = {"burn_in": 3, "overlap": 3}


@pytest.mark.parametrize("changes", [{}, BURN_IN, {"arms": 2, "eta": 0.3, "dueling": False}])
def test_loss_is_the_papers_for_one_step(specs, changes):
    assert check_loss(small(lambda_=0.0, **changes), specs["discrete"], ends=None) > 10


@pytest.mark.parametrize("changes", [{}, BURN_IN, BURN_IN | {"lambda_": 1.0}])
def test_loss_is_the_papers_where_the_episode_ends(specs, changes):
    assert check_loss(small(**changes), specs["discrete"], ends=True) > 3


@pytest.mark.parametrize("changes", [{}, BURN_IN])
def test_loss_is_the_papers_where_the_episode_goes_on(specs, changes):
    """How new the last observation is, is not known: returns stop before it, and do not take it for old."""
    assert check_loss(small(**changes), specs["discrete"], ends=False) > 5


@pytest.mark.parametrize("burn_in", [0, 3])
def test_padding_and_the_dummy_do_not_matter(specs, burn_in):
    algorithm = small(burn_in=burn_in, overlap=3)
    net = build(algorithm, specs["discrete"])
    target = wander(net)
    batch = Played(algorithm, net).batch
    padding, dummy = batch.first & (torch.arange(len(batch.first)) > 0)[:, None], batch.mask == 0
    assert padding.any()
    novelty = batch.record["novelty"].masked_fill(padding[:-1], 1e3)  # that of a last observation counts
    other = batch._replace(
        observation=batch.observation.masked_fill(padding[..., None], 50.0),
        reward=batch.reward.masked_fill(dummy, 1e3),
        discount=batch.discount.masked_fill(dummy, 0.7),
        action=batch.action.masked_fill(dummy, 2),
        record=batch.record | {"novelty": novelty},
    )
    one, two = algorithm.loss(net, target, batch), algorithm.loss(net, target, other)
    torch.testing.assert_close(one.each, two.each)
    torch.testing.assert_close(one.priority, two.priority)
    learned = [parameter for parameter in net.parameters() if parameter.requires_grad]
    for left, right in zip(*(torch.autograd.grad(loss.each.sum(), learned) for loss in (one, two)), strict=True):
        torch.testing.assert_close(left, right)


def test_gradients_reach_the_burn_in_of_an_opening_only(specs):
    algorithm = small(**BURN_IN)
    net = build(algorithm, specs["discrete"])
    played = Played(algorithm, net)
    novelty = played.batch.record["novelty"].clone().requires_grad_()
    batch = played.batch._replace(record=played.batch.record | {"novelty": novelty})
    algorithm.loss(net, wander(net), batch).each.sum().backward()
    for item in range(len(played.places)):
        last, opens = played.real(item) - 1, bool(batch.first[0, item])
        last = min(last, len(novelty) - 1)  # the last step of a full sequence is not learned from
        expected = [t < last and (t >= 3 or opens) for t in range(len(novelty))]
        assert (novelty.grad[:, item] != 0).tolist() == expected
    assert {*batch.first[0].tolist()} == {True, False}


def test_the_learner_weighs_the_target_stands_still_and_priorities_are_the_losss(specs):
    algorithm = small(**BURN_IN)
    policy = Follower(algorithm, specs["discrete"], "cpu")
    played = Played(algorithm, policy.net)
    loss = algorithm.loss(policy.net, policy.net, played.batch)
    heavy = played.batch._replace(weight=100 * played.batch.weight)
    assert torch.equal(loss.each, algorithm.loss(policy.net, policy.net, heavy).each)
    first = first_priorities(algorithm, policy.net, played.items, policy.device)
    np.testing.assert_allclose(first, loss.priority, rtol=1e-5)
    net, target = build(algorithm, specs["discrete"]), build(algorithm, specs["discrete"])
    algorithm.loss(net, target, played.batch).each.sum().backward()
    assert all(parameter.grad is None for parameter in [*target.parameters(), *net.novelty.random.parameters()])
    learned = {id(each) for group in algorithm.optimizer(net).param_groups for each in group["params"]}
    for name, parameter in net.named_parameters():
        learns = not name.startswith("novelty.random")
        assert (id(parameter) in learned) == learns == bool(parameter.grad is not None and parameter.grad.any()), name


def test_updates_lower_every_loss_of_their_batch(specs):
    algorithm = small(**BURN_IN, lr=1e-2)
    model = Model(algorithm, specs["discrete"], CPU)
    batch = Played(algorithm, model.net).batch
    before = algorithm.loss(model.net, model.target, batch).metrics
    for updates in range(25):
        model.update(algorithm, batch, updates)
    after = algorithm.loss(model.net, model.target, batch).metrics
    for name in ("extrinsic_loss", "intrinsic_loss", "inverse_loss", "distillation_loss"):
        assert after[name] < before[name]


def test_settings():
    initial = ("core_extrinsic", "core_intrinsic", "previous", "arm")
    assert Ngu().experience == Sequence(120, 80, across=False, initial=initial)


def test_the_norm_of_one_value_does_not_bound_the_other(specs):
    algorithm = small(clip_norm=1e-3)
    model = Model(algorithm, specs["discrete"], CPU)
    batch = Played(algorithm, model.net).batch
    model.optimizer.step = lambda: None  # the gradients are looked at, not used
    optimizer_step(algorithm, model.net, model.target, model.optimizer, batch)
    for name in (*PARTS, "novelty"):
        gradients = [part.grad for part in getattr(model.net, name).parameters() if part.grad is not None]
        torch.testing.assert_close(torch.nn.utils.get_total_norm(gradients), torch.tensor(1e-3), rtol=1e-3, atol=0)
