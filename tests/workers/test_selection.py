"""Selection among candidates: distances and strategies against a slow reference, and the right items in a batch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from shoal.algorithms.impala import Impala
from shoal.core.mixing import Part
from shoal.core.types import Batch
from shoal.experiment import configure
from shoal.nets.actor_critic import ActorCriticArchitecture
from shoal.services.mixture import Mixture
from shoal.workers.progress import Progress
from shoal.workers.selection import Selection, chosen, distances
from tests.algorithms.conftest import SPECS, play, wander
from tests.services.test_replay import items, names

FRESH = {"kind": "queue", "fraction": 0.5}


def part(distance: str = "ln_norm", kind: str = "elite", **more: Any) -> Part:
    return Part(kind=kind, fraction=0.5, distance=distance, **more)


def softmax(row: list[float]) -> list[float]:
    powers = [math.exp(x) for x in row]
    return [x / sum(powers) for x in powers]


def slow_distance(kind: str, p: float, new: Any, old: Any, mask: Any) -> float:
    """One item's distance, [T, F] from [T, F], as the seed's text has it but for the mean over valid steps."""
    steps = [t for t in range(len(new)) if mask[t]]
    if kind == "ln_norm":
        return (sum(abs(a - b) ** p for t in steps for a, b in zip(new[t], old[t], strict=True)) / len(steps)) ** (
            1 / p
        )
    if kind == "cosine":
        dot = sum(a * b for t in steps for a, b in zip(new[t], old[t], strict=True))
        lengths = [math.sqrt(sum(a * a for t in steps for a in x[t])) for x in (new, old)]
        return 1 - dot / (lengths[0] * lengths[1])
    total = 0.0
    for t in steps:
        total += sum(a * math.log(a / b) for a, b in zip(softmax(new[t]), softmax(old[t]), strict=True))
    return total / len(steps)


@pytest.mark.parametrize(
    ("kind", "p"), [("ln_norm", 1.0), ("ln_norm", 2.0), ("ln_norm", 3.0), ("cosine", 2.0), ("kl", 2.0)]
)
def test_distances_are_those_of_a_slow_reference(kind: str, p: float) -> None:
    torch.manual_seed(0)
    new, old = torch.randn(5, 7, 3), torch.randn(5, 7, 3)
    mask = (torch.rand(5, 7) < 0.8).float()
    mask[0] = 1
    found = distances(part(kind, norm=p), new, old, mask)
    for item in range(7):
        slow = slow_distance(kind, p, *(x[:, item].tolist() for x in (new, old, mask)))
        assert found[item].item() == pytest.approx(slow, rel=1e-4, abs=1e-6)
    last = new[-1:, :1]  # one state against every step
    found = distances(part(kind, "attentive", norm=p), new, last, mask)
    slow = slow_distance(kind, p, new[:, 3].tolist(), [last[0, 0].tolist()] * 5, mask[:, 3].tolist())
    assert found[3].item() == pytest.approx(slow, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("kind", ["ln_norm", "cosine", "kl"])
def test_like_things_are_near(kind: str) -> None:
    old = torch.tensor([[[1.0, 2.0, 3.0]]])
    others = [[1.0, 2.0, 3.0], [1.1, 2.0, 3.0], [2.0, 2.0, 2.0], [3.0, 0.0, -3.0]]  # ever less alike
    near = [distances(part(kind), torch.tensor([[other]]), old, torch.ones(1, 1)).item() for other in others]
    assert near == sorted(near)
    assert near[0] == pytest.approx(0.0, abs=1e-6)
    assert near[1] > 0 < near[2] < near[3]


def slow_choice(distance: Any, uses: Any, key: Any, size: int, strategy: int) -> list[int]:
    """The same in loops; an item that was drawn again waits behind all others."""
    seen: list[int] = []
    ranked = []
    for place in range(len(key)):
        ranked.append((key[place] in seen, place))
        seen.append(key[place])
    order = [place for _, place in sorted(ranked, key=lambda pair: (pair[0], distance[pair[1]]))]
    again = {place: late for late, place in ranked}
    if strategy == 1:
        return order[:size]
    if strategy == 3:
        result: list[int] = []
        for late in (False, True):
            for count in sorted({*uses}):
                result += [place for place in order if uses[place] == count and again[place] == late]
        return result[:size]
    result, begin = [], 0
    for group in range(size):
        length = len(order) // size + (group < len(order) % size)
        bucket = order[begin : begin + length]
        begin += length
        result.append(bucket[0] if strategy == 2 else min(bucket, key=lambda place: uses[place]))
    return result


@pytest.mark.parametrize("strategy", [1, 2, 3, 4])
def test_choices_are_those_of_a_slow_reference(strategy: int) -> None:
    dice = np.random.default_rng(strategy)
    for _ in range(50):
        size = int(dice.integers(1, 6))
        count = size * int(dice.integers(1, 5)) + int(dice.integers(0, 3))
        key = dice.integers(0, count * 2, count)
        distance, uses = dice.random(2 * count)[key], dice.integers(0, 4, 2 * count)[key]
        found = chosen(distance, uses, key, size, strategy)
        assert found.tolist() == slow_choice(distance.tolist(), uses.tolist(), key.tolist(), size, strategy)
        assert len({*found.tolist()}) == size


def test_strategies_on_a_hand_made_case() -> None:
    distance, uses, key = np.array([0.4, 0.1, 0.2, 0.3]), np.array([0, 3, 1, 0]), np.arange(4)
    assert chosen(distance, uses, key, 2, 1).tolist() == [1, 2]
    assert chosen(distance, uses, key, 2, 2).tolist() == [1, 3]
    assert chosen(distance, uses, key, 2, 3).tolist() == [3, 0]
    assert chosen(distance, uses, key, 2, 4).tolist() == [2, 3]


# --- features


@pytest.mark.parametrize("network", [{"hidden": (8,)}, {"hidden": (8,), "lstm": 6, "previous": True}])
def test_recorded_features_are_what_the_same_network_sees_again(network: dict[str, Any]) -> None:
    mixture = {"fresh": Part(**FRESH), "old": part()}
    algorithm = Impala(network=ActorCriticArchitecture(**network), mixture=mixture)
    net = algorithm.build(SPECS["discrete"])
    batch = play(algorithm, net, SPECS["discrete"])
    with torch.no_grad():
        seen = algorithm.features(net, batch)
        other = algorithm.features(wander(net), batch)
    assert seen.shape[0] == len(batch.first)
    torch.testing.assert_close(seen[:-1], batch.record["features"])
    near = distances(part(), seen[:-1], batch.record["features"], batch.mask)
    far = distances(part(), other[:-1], batch.record["features"], batch.mask)
    assert near.max() < 1e-3 < far.min()


@pytest.mark.parametrize("kind", ["uniform", "attentive", "elite"])
def test_features_are_recorded_only_where_they_are_needed(kind: str) -> None:
    mixture = {"fresh": Part(**FRESH), "old": Part(kind=kind, fraction=0.5)}
    algorithm = Impala(network=ActorCriticArchitecture(hidden=(8,)), mixture=mixture)
    net = algorithm.build(SPECS["discrete"])
    assert ("features" in play(algorithm, net, SPECS["discrete"]).record) == (kind == "elite")


# --- a batch

NET, CPU = torch.nn.Identity(), torch.device("cpu")


class Looking:
    """An algorithm whose features are what it is told for each item's name, and 0 at the first step."""

    def __init__(self, seen: dict[int, float]) -> None:
        self.seen = seen

    def features(self, net: Any, batch: Any) -> torch.Tensor:
        names = batch.observation["vector"][..., 0]
        rows = [[[self.seen[int(name)]] for name in row] for row in names.tolist()]
        return torch.tensor(rows) * (torch.arange(len(rows)) > 0).view(-1, 1, 1)


def select(kind: str, seen: dict[int, float], steps: int = 0, **more: Any) -> tuple[Any, Selection, Mixture]:
    """A batch of two fresh items and two old ones of ten, all of which are candidates."""
    parts = {"fresh": FRESH, "old": {"kind": kind, "fraction": 0.5, "capacity": 10, "candidates": 50, **more}}
    experiment = configure({"environment": {"id": "CartPole-v1"}, "actors": 1, "envs": 2, "steps": 100,
                            "algorithm": {"name": "impala", "batch": 4, "mixture": parts}})  # fmt: skip
    assert experiment.mixture is not None
    store = Mixture(experiment.mixture, 4, 20)
    np.random.seed(0)
    given = items(range(10), length=3)
    given["record"] = {"features": np.zeros((3, 10, 1), np.float32)}
    store.put(given)
    selection = Selection(experiment, experiment.mixture)
    selection.algorithm = Looking(seen)  # type: ignore[assignment]
    return selection.draw(store, NET, CPU, Progress(steps=steps, version=3)), selection, store


STEPS = math.sqrt(2 / 3)  # the root of the mean square over three steps, of which the first is 0
SEEN = {0: 5.0, 1: 4.0, 2: 3.0, 3: 2.0, 4: 0.5, 5: 0.0, 6: -0.2, 7: 6.0, 8: 7.0, 9: 9.0}


def test_elite_takes_the_nearest_to_what_was_seen_by_the_actor() -> None:
    batch, selection, store = select("elite", SEEN)
    assert names(batch).tolist() == [0, 1, 5, 6]
    assert batch["fresh"].tolist() == [True, True, False, False]
    assert {*batch} <= {*Batch._fields}
    assert batch["record"] == {}  # nobody else needs features
    assert store.scores["old"].uses.tolist() == [0, 0, 0, 0, 0, 1, 1, 0, 0, 0]
    assert store.scores["old"].score[:3].tolist() == pytest.approx([STEPS * 5, STEPS * 4, STEPS * 3])
    assert selection.metrics["old_distance_chosen"] == pytest.approx(STEPS * 0.1)


def test_attentive_takes_the_nearest_to_the_newest_item() -> None:
    batch, _, _ = select("attentive", SEEN)
    assert names(batch)[2:].tolist() == [9, 8]


def test_strategies_count_what_was_chosen_before() -> None:
    batch, selection, store = select("elite", SEEN, strategy=3)
    again = selection.draw(store, NET, CPU, Progress(version=4))
    assert names(batch)[2:].tolist() == [5, 6]
    assert names(again)[2:].tolist() == [4, 3]


@pytest.mark.parametrize(("steps", "count"), [(0, 12), (20, 10), (50, 7), (99, 0), (100, 0), (1000, 0)])
def test_candidates_become_fewer_over_the_run(steps: int, count: int) -> None:
    _, selection, _ = select("elite", SEEN, steps, candidates={"start": 6, "end": 1})
    assert selection.metrics.get("old_candidates", 0) == count  # 0: all that are drawn are taken


def test_elite_insertion_wants_distances_to_the_end() -> None:
    batch, _, store = select("elite", SEEN, 100, candidates={"start": 6, "end": 1}, insertion="elite")
    old = names(batch)[2:]
    assert store.scores["old"].score[old].tolist() == pytest.approx([STEPS * abs(SEEN[name]) for name in old])
