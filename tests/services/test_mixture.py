"""A mixture: shares of each batch, one way in, keys that tell the part, farthest items overwritten, exact snapshots."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.errors import Fatal, SettingsError
from shoal.core.mixing import Part, problem_of, shares
from shoal.core.types import Store
from shoal.experiment import configure
from shoal.services.mixture import Mixture, Scores
from tests.services.test_replay import items, names

FRESH = {"kind": "queue", "fraction": 0.5}
IMPALA = {"environment": {"id": "CartPole-v1"}, "actors": 1, "envs": 2}


@pytest.fixture(autouse=True)
def seeded() -> None:
    np.random.seed(0)


def mixture(batch: int = 4, capacity: int = 8, **parts: Any) -> Mixture:
    every = {"fresh": FRESH, **parts}
    max_lag = every.pop("max_lag", None)
    return Mixture({name: Part(**part) for name, part in every.items()}, batch, capacity, max_lag)


def old(kind: str = "uniform", **more: Any) -> dict[str, Any]:
    return {"kind": kind, "fraction": 0.5, "capacity": 10, **more}


# --- shares


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=6), st.integers(1, 500))
def test_shares_are_whole_and_near_to_the_fractions(weights: list[int], size: int) -> None:
    parts = {f"p{n}": Part(kind="uniform", fraction=weight / sum(weights)) for n, weight in enumerate(weights)}
    counts = shares(parts, size)
    assert sum(counts.values()) == size
    for name, part in parts.items():
        assert abs(counts[name] - part.fraction * size) < 1 + 1e-6


def test_what_is_left_goes_to_the_largest_remainder() -> None:
    fractions = {"a": 0.37, "b": 0.36, "c": 0.27}  # of 10: 3.7, 3.6, 2.7
    parts = {name: Part(kind="uniform", fraction=share) for name, share in fractions.items()}
    assert shares(parts, 10) == {"a": 4, "b": 3, "c": 3}
    thirds = {name: Part(kind="uniform", fraction=0.3333333) for name in "abc"}
    assert shares(thirds, 10) == {"a": 4, "b": 3, "c": 3}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"old": {"kind": "uniform", "fraction": 0.4}}, r"0\.5 \(fresh\) \+ 0\.4 \(old\) add up to 0\.9, not to 1"),
        ({"old": {"kind": "queue", "fraction": 0.5}}, "exactly one part must be of kind queue.*fresh and old are"),
        ({"fresh": {"kind": "uniform", "fraction": 0.5}}, "exactly one part must be of kind queue.*none is"),
        (
            {"fresh": {"kind": "queue", "fraction": 0.99}, "old": {"kind": "uniform", "fraction": 0.01}},
            "mixture.old: gets no item",
        ),
        ({"Old": {"kind": "uniform", "fraction": 0.5}}, "'Old' is not a name"),
        ({"old": {"kind": "unifrom", "fraction": 0.5}}, "mixture.old.kind: .*did you mean 'uniform'"),
        ({"old": {"kind": "uniform", "fraction": float("nan")}}, "mixture.old.fraction"),
        ({"old": {"kind": "uniform", "fraction": 0.5, "distance": "kl"}}, "kind uniform has no distance; it has: cap"),
        ({"old": {"kind": "elite", "fraction": 0.5, "distanze": "kl"}}, "unknown setting; .*did you mean 'distance'"),
        ({"old": {"kind": "elite", "fraction": 0.5, "candidates": 0.5}}, "candidates 0.5: at least 1"),
        ({"old": {"kind": "elite", "fraction": 0.5, "minimum": 2000}}, "minimum 2000 is never reached"),
        ({"old": {"kind": "uniform", "fraction": 0.5, "capacity": 1}}, r"old\.capacity 1: the 2 items of one actor"),
        ({"fresh": {"kind": "queue", "fraction": 0.5, "capacity": 1}}, "do not fit .* 1 places of part fresh"),
    ],
)
def test_settings_that_mix_nothing_are_refused(changes: dict[str, Any], message: str) -> None:
    parts = {"fresh": FRESH, **({} if "Old" in changes else {"old": old()}), **changes}
    with pytest.raises(SettingsError, match=message):
        configure({**IMPALA, "algorithm": {"name": "impala", "batch": 4, "mixture": parts}})


def test_a_mixture_needs_a_learner() -> None:
    parts = {"fresh": FRESH, "old": old()}
    with pytest.raises(SettingsError, match="topology gradient_workers does not have"):
        configure({**IMPALA, "topology": "gradient_workers", "algorithm": {"name": "impala", "mixture": parts}})


def test_fractions_that_add_up_within_rounding_are_one() -> None:
    parts = {"fresh": Part(kind="queue", fraction=0.1)}
    parts |= {f"old{n}": Part(kind="uniform", fraction=0.1) for n in range(9)}
    assert sum(part.fraction for part in parts.values()) != 1
    assert problem_of(parts, 10) == ""


# --- in and out


def test_a_batch_has_its_shares_and_says_which_are_fresh() -> None:
    store: Store = mixture(old=old(minimum=2))
    store.put(items([1, 2, 3, 4], version=7))
    batch = store.get(4, version=7)
    assert batch is not None
    found = names(batch)
    assert found[:2].tolist() == [1, 2]
    assert {*found[2:]} <= {1, 2, 3, 4}
    assert np.asarray(batch["fresh"]).tolist() == [True, True, False, False]
    assert np.asarray(batch["version"]).tolist() == [7] * 4
    assert len({*np.asarray(batch["key"])[:2]} | {*np.asarray(batch["key"])[2:]}) > 2
    again = store.get(4)
    assert names(again)[:2].tolist() == [3, 4]
    assert store.get(4) is None  # a replay alone makes no batch


def test_until_a_replay_has_its_minimum_batches_are_smaller() -> None:
    store = mixture(old=old(minimum=5))
    store.put(items([1, 2, 3, 4]))
    assert len(names(store.get(4))) == 2
    store.put(items([5, 6]))
    assert len(names(store.get(4))) == 4


def test_a_full_queue_keeps_everything_out() -> None:
    store = mixture(capacity=4, old=old())
    assert store.put(items([1, 2, 3, 4]))
    assert not store.put(items([5]))
    assert store.status()["old_filled"] == 4
    assert store.status()["filled"] == store.status()["capacity"] == 4


@pytest.mark.parametrize(
    ("when_full", "waiting"),
    [("keep_latest", [3, 4, 5, 6, 7, 8]), ("keep_oldest", [1, 2, 3, 4, 5, 6]), ("alternate", [3, 4, 5, 6, 7, 8])],
)
def test_what_a_full_queue_drops_is_in_the_replay_all_the_same(when_full: str, waiting: list[int]) -> None:
    store = mixture(capacity=6, fresh={**FRESH, "when_full": when_full}, old=old(capacity=50))
    for first in (1, 3, 5, 7):
        assert store.put(items([first, first + 1]))
    if when_full == "alternate":  # the second time, the new ones are dropped
        assert store.put(items([9, 10]))
        assert store.status()["dropped"] == 4
    assert store.status()["old_filled"] == (10 if when_full == "alternate" else 8)
    assert names(store.queue.get(6)).tolist() == waiting


def test_bad_items_reach_no_part_and_drop_nothing() -> None:
    store = mixture(capacity=4, fresh={**FRESH, "when_full": "keep_latest"}, old=old())
    store.put(items([1, 2, 3, 4]))
    wrong = items([5, 6])
    wrong["reward"] = wrong["reward"] * np.nan
    assert store.put(wrong)
    assert store.status()["refused"] == 1
    assert "reward" in store.refused()[0]
    assert (store.status()["filled"], store.status()["old_filled"], store.status()["dropped"]) == (4, 4, 0)


def test_lag_is_bounded_by_what_a_batch_takes_from_the_queue() -> None:
    store = mixture(batch=4, capacity=8, max_lag=1, old=old())
    assert store.admit(0, 0, 2)  # the first batch: two items of four
    assert store.admit(1, 0, 2)  # the second
    assert not store.admit(2, 0, 2)  # the third would be two versions old


def test_priorities_reach_the_part_that_draws_by_them() -> None:
    store = mixture(batch=4, high=old("prioritized", alpha=1.0))
    store.put(items([1, 2]))
    drawn = store.get(4)
    keys = np.array([2 * 0 + 1, 2 * 1 + 1])  # of the second of two parts
    assert {*np.asarray(drawn["key"])[2:]} <= {*keys}
    store.update(keys, np.array([0.0, 1.0]))
    store.put(items([3, 4]))
    store.update(np.array([5, 7, 0, 2]), np.array([0.0, 0.0, 9.0, 9.0]))  # the last two are the queue's
    batch = store.get(4)
    assert names(batch)[2:].tolist() == [2, 2]


# --- candidates


def test_the_newest_item_comes_before_the_candidates_of_an_attentive_part() -> None:
    store = mixture(old=old("attentive", insertion="elite"), other=old("elite", fraction=1e-9, minimum=1))
    store.put(items([99]))
    for name in range(14):
        store.put(items([name]))
        drawn = store.draw({"fresh": 1, "old": 6, "other": 2}, 0)
        assert drawn is not None
        assert drawn["part"].tolist() == [0, *[1] * 7, *[2] * 2]
        assert names(drawn)[1] == name
        assert drawn["fresh"].tolist() == [True] + [False] * 9


def test_uses_are_counted_for_the_chosen_and_forgotten_with_the_item() -> None:
    scores = Scores(4, 2, 0)
    key = np.array([0, 1, 1])
    scores.note(key, np.array([1.0, 2.0, 2.0]), np.array([True, True, True]))
    scores.note(key, np.array([np.nan, 3.0, 3.0]), np.array([True, False, False]))
    assert scores.uses_of(np.array([0, 1, 2, 4])).tolist() == [1, 2, 0, 0]
    assert scores.score[:2].tolist() == [1.0, 3.0]
    scores.note(np.array([4]), np.array([5.0]), np.array([False]))  # a newer item in the slot of 0
    scores.note(np.array([0]), np.array([9.0]), np.array([True]))  # too late
    assert scores.score[0] == 5.0
    assert scores.uses_of(np.array([0, 4])).tolist() == [0, 0]


def test_elite_insertion_overwrites_the_farthest_of_some() -> None:
    store = mixture(capacity=50, old=old("elite", insertion="elite", contenders=10))
    store.put(items(range(10)))
    far = np.array([3, 1, 4, 15, 9, 2, 6, 5, 35, 8.0])
    key = np.arange(10) * 2 + 1
    store.choose(key, far, np.zeros(10, bool))
    store.put(items([100, 101]))
    kept = store.replays["old"].items(np.arange(10))["action"][0]
    assert kept.tolist() == [0, 1, 2, 100, 4, 5, 6, 7, 101, 9]  # all ten were compared, and 35 and 15 were farthest
    store.choose(key[[3, 8]], np.full(2, 99.0), np.zeros(2, bool))  # late news of items that are gone
    store.put(items([102]))
    assert store.replays["old"].items(np.array([4]))["action"][0] == 102  # 9 was farthest of those that are there
    new = store.replays["old"].keys
    assert len({*new}) == 10
    store.choose(new[[3]] * 2 + 1, np.array([1000.0]), np.zeros(1, bool))
    store.put(items([103]))
    assert store.replays["old"].items(np.array([3]))["action"][0] == 103


def test_elite_insertion_compares_only_some() -> None:
    store = mixture(capacity=100, old=old("elite", insertion="elite", contenders=1))
    for first in range(0, 60, 3):
        store.put(items(range(first, first + 3)))
    left = store.replays["old"].items(np.arange(10))["action"][0]
    assert len({*left}) == 10
    assert min(left) < 40  # the oldest would be 50
    assert store.replays["old"].filled == 10


@pytest.mark.parametrize("kind", ["uniform", "prioritized", "attentive", "elite"])
def test_a_snapshot_goes_on_with_the_same_draws(kind: str) -> None:
    more = {"insertion": "elite", "contenders": 3} if kind in ("attentive", "elite") else {}
    parts = {"fresh": FRESH, "old": old(kind, **more), "new": old("uniform", fraction=1e-9, capacity=30, minimum=1)}

    def make() -> Mixture:
        return Mixture({name: Part(**part) for name, part in parts.items()}, 4, 20, exact=True, seed=5)

    def go(store: Mixture, first: int) -> Any:
        np.random.seed(first)
        for name in range(first, first + 6):
            store.put(items([name, name + 1]))
            drawn = store.draw({"fresh": 1, "old": 3, "new": 1}, name)
            far = np.random.random(len(drawn["key"]))
            store.choose(drawn["key"], far, far < 0.5)
            store.update(drawn["key"], far)
        return [drawn["action"].tolist(), drawn["key"][1:].tolist(), drawn["uses"].tolist(), drawn["part"].tolist()]

    whole = make()
    go(whole, 0)
    saved = {name: np.copy(array) for name, array in whole.settle().items()}
    again = make()
    again.restore(saved)
    assert go(again, 50) == go(whole, 50)
    smaller = {**parts, "old": old(kind, **more, capacity=9)}
    with pytest.raises(Fatal, match="capacity of 10 items"):
        Mixture({name: Part(**part) for name, part in smaller.items()}, 4, 20).restore(saved)
