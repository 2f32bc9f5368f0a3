"""Replay: draws as the priorities say, keys that survive, frames kept once, a limiter that holds, exact snapshots."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.caller import call_as
from shoal.core.errors import Fatal
from shoal.core.settings import Replaying
from shoal.core.types import Store
from shoal.services.frames import Frames, Full
from shoal.services.replay import Replay
from shoal.services.sum_tree import SumTree


@pytest.fixture(autouse=True)
def seeded() -> None:
    np.random.seed(0)


def items(names: Any, length: int = 1, version: int = 0) -> dict[str, Any]:
    """Items in which every number tells the item's name; items lie along axis 1."""
    names = np.asarray(names, np.int64)
    vector = np.broadcast_to(names[None, :, None], (length + 1, len(names), 2))
    return {
        "observation": {"vector": vector.astype(np.float32)},
        "first": np.zeros((length + 1, len(names)), bool),
        "action": np.broadcast_to(names, (length, len(names))),
        "reward": np.broadcast_to(names, (length, len(names))).astype(np.float32),
        "discount": np.ones((length, len(names)), np.float32),
        "record": {},
        "version": np.full(len(names), version),
    }


def replay(capacity: int = 10, batch: int = 4, **more: Any) -> Replay:
    return Replay(Replaying(**{"capacity": capacity, "minimum": 1, "alpha": 1.0, **more}), batch)


def names(batch: Any) -> Any:
    """Which items a batch holds, after a check that it holds them whole."""
    found = batch["action"][0]
    assert (batch["observation"]["vector"] == found[None, :, None]).all()
    assert (batch["reward"] == found).all()
    assert batch["first"].shape[1] == len(batch["key"]) == len(batch["weight"])
    return found


# --- sums


@settings(max_examples=50)
@given(st.integers(1, 2000), st.data())
def test_sums_agree_with_a_plain_array(capacity: int, data: Any) -> None:
    sums, plain = SumTree(capacity), np.zeros(capacity)
    for _ in range(5):
        index = np.array(data.draw(st.lists(st.integers(0, capacity - 1), min_size=1, max_size=20)))
        value = np.array(data.draw(st.lists(st.floats(0, 100), min_size=len(index), max_size=len(index))))
        sums.set(index, value)
        for where, number in zip(index, value, strict=True):
            plain[where] = number
    assert np.array_equal(sums.get(np.arange(capacity)), plain)
    assert sums.total() == pytest.approx(plain.sum())
    if plain.sum() > 0:
        assert (plain[sums.draw(50)] > 0).all()


@pytest.mark.parametrize("capacity", [3, 16, 17, 300, 5000])
def test_draws_follow_the_exact_distribution(capacity: int) -> None:
    sums = SumTree(capacity)
    chance = np.random.random_sample(capacity) ** 3
    chance[:: max(capacity // 3, 2)] = 0.0
    sums.set(np.arange(capacity), chance)
    size, times = 64, 2000
    counts = np.bincount(np.concatenate([sums.draw(size) for _ in range(times)]), minlength=capacity)
    assert not counts[chance == 0].any()
    expected = chance / chance.sum() * size * times
    likely = expected >= 5
    squares = ((counts - expected) ** 2)[likely] / expected[likely]
    # χ² has mean n and variance 2n; stratified draws vary less than independent ones.
    assert squares.sum() < likely.sum() + 4 * np.sqrt(2 * likely.sum())


def test_draws_are_stratified() -> None:
    sums = SumTree(100)
    sums.set(np.arange(100), np.ones(100))
    for _ in range(20):
        assert np.array_equal(sums.draw(100), np.arange(100))  # one from each hundredth


# --- draws


def test_it_is_a_store() -> None:
    store: Store = replay()
    counts = {"filled": 0, "capacity": 10, "inserted": 0, "drawn": 0, "steps": 0, "refused": 0}
    assert store.status() == {**counts, "age_of_weights": 0.0, "age_of_data": 0.0}


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_items_are_drawn_in_proportion_to_their_priority_to_the_alpha(alpha: float) -> None:
    store = replay(64, alpha=alpha)
    priority = np.arange(1.0, 33.0)
    store.put(items(range(32)), priority)
    drawn = np.concatenate([names(store.get(16)) for _ in range(4000)])
    chance = priority**alpha / (priority**alpha).sum()
    expected = chance * len(drawn)
    squares = (np.bincount(drawn, minlength=32) - expected) ** 2 / expected
    assert squares.sum() < 32 + 4 * np.sqrt(64)


def test_weights_make_up_for_priorities_and_are_at_most_one() -> None:
    store = replay(8)
    priority = np.array([1.0, 2.0, 4.0, 8.0])
    store.put(items(range(4)), priority)
    for beta in (0.0, 0.4, 1.0):
        batch = store.get(64, beta=beta)
        assert batch is not None
        wanted = (4 * priority / priority.sum()) ** -beta
        weights = wanted[names(batch)]
        assert batch["weight"] == pytest.approx(weights / weights.max(), rel=1e-4)
        assert batch["weight"].max() == 1.0
        assert batch["weight"].dtype == np.float32


def test_without_priorities_weights_are_one() -> None:
    store = replay(8, alpha=0.0)
    store.put(items(range(4)))
    assert (store.get(16)["weight"] == 1.0).all()  # type: ignore[index]


def test_items_that_nobody_judged_have_the_highest_priority_so_far() -> None:
    store = replay(8)
    store.put(items([0, 1]), np.array([1.0, 5.0]))
    store.update(np.array([1]), np.array([9.0]))
    store.put(items([2]))
    assert store.sums.get(np.array([2]))[0] == pytest.approx(9.0, rel=1e-4)


# --- the ring


def test_the_newest_stay() -> None:
    store = replay(5)
    for start in range(0, 12, 3):
        store.put(items(range(start, start + 3)))
    assert set(np.concatenate([names(store.get(8)) for _ in range(50)])) == {7, 8, 9, 10, 11}
    assert store.status()["filled"] == 5
    with pytest.raises(ValueError, match="6 items at once do not fit a replay of 5"):
        store.put(items(range(6)))


def test_a_stale_key_is_ignored_and_never_misapplied() -> None:
    store = replay(4)
    store.put(items(range(4)), np.ones(4))
    old = store.get(4)
    store.put(items(range(4, 7)), np.ones(3))  # over items 0, 1, 2
    before = store.sums.get(np.arange(4)).copy()
    assert old is not None
    store.update(old["key"], np.full(4, 100.0))
    changed = store.sums.get(np.arange(4)) != before
    assert changed.tolist() == [False, False, False, True]  # item 3 alone is still there
    store.update(np.array([-1, 10**12]), np.array([5.0, 5.0]))


@settings(max_examples=30)
@given(st.lists(st.integers(1, 7), min_size=1, max_size=30), st.integers(7, 12))
def test_any_row_of_puts_agrees_with_a_plain_list(puts: list[int], capacity: int) -> None:
    store, plain, name = replay(capacity), [], 0
    for count in puts:
        store.put(items(range(name, name + count)), np.ones(count))
        plain = (plain + list(range(name, name + count)))[-capacity:]
        name += count
        batch = store.get(64)
        assert set(names(batch)) <= set(plain)
        assert batch is not None
        assert np.array_equal(batch["key"], names(batch))  # keys count the items
    assert len(store.keys[store.keys >= 0]) == store.filled == len(plain)


def test_items_of_another_shape_are_an_error() -> None:
    store = replay()
    store.put(items([0], length=2))
    with pytest.raises(ValueError, match="but earlier ones had"):
        store.put(items([0], length=3))


def test_steps_are_counted_once_though_sequences_overlap() -> None:
    settings = Replaying(capacity=10, minimum=1)
    store = Replay(settings, 2, overlap=2)
    sequence = items([0], length=5)
    sequence["first"][0] = True  # opens an episode: all five are new
    store.put(sequence)
    store.put(items([1], length=5))  # goes on: three are new
    last = items([2], length=5)
    last["first"][4:] = True  # ends after three, two of them seen before
    store.put(last)
    assert store.status()["steps"] == 5 + 3 + 1


# --- the limiter


@pytest.mark.parametrize("ratio", [0.5, 2.0, 8.0])
@pytest.mark.parametrize("eager", ["actors", "learner", "both"])
def test_the_ratio_of_draws_to_items_is_held(ratio: float, eager: str) -> None:
    batch, tolerance, minimum = 8, 2.0, 20
    store = replay(1000, batch, samples_per_insert=ratio, tolerance=tolerance, minimum=minimum)
    dice = np.random.default_rng(0)
    name = refused = 0
    for _ in range(3000):
        acts = {"actors": 0.9, "learner": 0.1, "both": 0.5}[eager]
        if dice.random() < acts:
            taken = store.put(items(range(name, name + 3)))
            name += 3 * taken
            refused += not taken
        else:
            refused += store.get(batch) is None
        if store.inserted >= minimum:
            ahead = ratio * (store.inserted - minimum) - store.drawn
            assert -tolerance * batch <= ahead <= tolerance * batch + 3 * ratio
    assert refused
    assert store.drawn > 0


def test_nothing_is_drawn_before_the_minimum() -> None:
    store = replay(100, minimum=10)
    store.put(items(range(9)))
    assert store.get(4) is None
    store.put(items([9]))
    assert store.get(4) is not None


@pytest.mark.parametrize("ratio", [0.1, 1.0, 30.0])
def test_actors_and_learner_never_wait_for_each_other(ratio: float) -> None:
    store = replay(1000, 16, samples_per_insert=ratio, tolerance=0.5, minimum=5)
    for name in range(2000):
        moved = store.put(items([name]))
        moved |= store.get(16) is not None
        assert moved


# --- frames


def stacks(count: int, stack: int = 4, side: int = 40, seed: int = 0) -> Any:
    """Observations [2, n, stack, side, side] of n steps in a stream of new frames, as n-step items are."""
    frames = np.random.default_rng(seed).integers(0, 256, (count + stack, side, side), np.uint8)
    views = np.stack([frames[t : t + stack] for t in range(count + 1)])
    return np.stack([views[:-1], views[1:]])


def pictures(observation: Any) -> dict[str, Any]:
    return {**items(range(observation.shape[1])), "observation": observation}


@pytest.mark.parametrize("compress", [False, True])
def test_every_frame_is_kept_once_and_comes_back_whole(compress: bool) -> None:
    store = Replay(Replaying(capacity=64, minimum=1, compress=compress), 4, stack=4)
    seen = stacks(50)
    for start in range(0, 50, 10):
        store.put(pictures(seen[:, start : start + 10]))
    pool = store.frames["observation"]
    assert pool.capacity - pool.left == 54
    batch = store.get(64)
    assert batch is not None
    assert np.array_equal(batch["observation"], seen[:, batch["key"]])
    naive = seen[:, :1].nbytes
    if not compress:
        assert store.nbytes() / store.capacity < naive / 4


def test_frames_of_overwritten_items_make_room() -> None:
    store = Replay(Replaying(capacity=20, minimum=1), 4, stack=4)
    for round_ in range(30):
        seen = stacks(7, seed=round_)
        store.put(pictures(seen))
    pool = store.frames["observation"]
    used = np.unique(store.memory["observation"][store.keys >= 0])
    assert pool.capacity - pool.left == len(used)
    assert (pool.uses[used] > 0).all()
    assert len(pool.known) == len(used)


def test_a_full_pool_lets_the_oldest_items_go() -> None:
    store = Replay(Replaying(capacity=40, minimum=1), 4, stack=4)
    for round_ in range(40):  # no two observations share a frame: eight per item, where one was planned
        seen = np.random.default_rng(round_).integers(0, 256, (2, 1, 4, 40, 40), np.uint8)
        store.put(pictures(seen))
    assert 1 <= store.filled < 10
    assert np.array_equal(store.get(4)["observation"][:, :1].shape, (2, 1, 4, 40, 40))  # type: ignore[index]
    last = [slot for slot in range(40) if store.keys[slot] == 39]
    assert np.array_equal(store._read("observation", np.array(last)), seen)


def test_different_frames_with_the_same_hash_stay_different(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Frames, "_hash", lambda self, frames: np.zeros(len(frames), np.uint64))
    pool = Frames(10, 16)
    frames = np.arange(64, dtype=np.uint8).reshape(4, 16)
    places = [pool.add(frames[:2]), pool.add(frames[2:]), pool.add(frames[:1])]
    assert np.array_equal(pool.get(places[0]), frames[:2])
    assert np.array_equal(pool.get(places[1]), frames[2:])
    assert np.array_equal(pool.get(places[2]), frames[:1])
    for some in places:
        pool.drop(some)
    assert pool.left == 10
    with pytest.raises(Full):
        pool.add(np.arange(11 * 16, dtype=np.uint8).reshape(11, 16))


# --- snapshots


@pytest.mark.parametrize("count", [5, 20, 33])
@pytest.mark.parametrize("kind", ["numbers", "frames", "compressed"])
def test_a_restored_replay_goes_on_with_the_same_bits(count: int, kind: str) -> None:
    chosen = Replaying(capacity=16, minimum=1, compress=kind == "compressed")

    def put(store: Replay, name: int) -> None:
        seen = pictures(stacks(1, seed=name)) if kind != "numbers" else items([name])
        store.put(seen, np.array([1.0 + name % 5]))

    one, other = (Replay(chosen, 4, stack=4) for _ in range(2))
    for name in range(count):
        put(one, name)
    one.get(4)
    other.restore({key: array.copy() for key, array in one.settle().items()})
    for store in (one, other):
        np.random.seed(1)
        for name in range(100, 110):
            put(store, name)
        store.drawn_batch = store.get(16, beta=0.5)  # type: ignore[attr-defined]
    a, b = one.drawn_batch, other.drawn_batch  # type: ignore[attr-defined]
    for name in ("key", "weight", "version", "reward"):
        assert np.array_equal(a[name], b[name])
    if kind != "numbers":
        assert np.array_equal(a["observation"], b["observation"])
    assert one.status() == other.status()


@pytest.mark.parametrize("kind", ["numbers", "frames", "compressed"])
def test_items_that_arrive_while_a_replay_is_written_spoil_nothing(kind: str) -> None:
    """Actors go on while a large replay is written: what they overwrite is missing, and all the rest is right."""
    chosen, stream = Replaying(capacity=16, minimum=1, alpha=0, compress=kind == "compressed"), stacks(33)

    def put(store: Replay, names: range) -> None:
        for name in names:
            seen = {} if kind == "numbers" else {"observation": stream[:, name : name + 1]}
            store.put({**items([name]), **seen})

    for moment in range(20):  # of the first new item, in arrays that were written before
        store, copy = (Replay(chosen, 4, stack=4) for _ in range(2))
        put(store, range(25))
        written = {}
        for number, (name, array) in enumerate(store.settle().items()):
            if number >= moment:
                put(store, range(25 + number - moment, 26 + number - moment) if number < moment + 3 else range(0))
            written[name] = array.copy()
        copy.restore(written)
        assert copy.filled == min(13 + max(moment + 3 - len(written), 0), 16), moment
        put(copy, range(25, 33))  # which needs frames and places for them
        batch = copy.get(200)
        assert batch is not None
        assert {*batch["key"].tolist()} == {*range(33 - copy.filled, 33)}
        assert np.array_equal(batch["action"][0], batch["key"])
        assert np.array_equal(batch["reward"][0], batch["key"])
        if kind != "numbers":
            assert np.array_equal(batch["observation"], stream[:, batch["key"]])


def test_an_empty_one_has_nothing_to_keep_and_another_size_is_refused() -> None:
    store = replay()
    assert store.settle() == {}
    store.restore({})
    store.put(items([1]))
    with pytest.raises(Fatal, match=r"capacity of 10 items; replay\.capacity is 11"):
        replay(11).restore(store.settle())


@pytest.mark.parametrize("wrong", [[1.0, np.nan], [np.inf, 1.0], [1e30, 1.0], [1.0]])
def test_priorities_that_make_no_sense_are_refused_counted_and_their_sender_named(wrong: list[float]) -> None:
    store = replay()
    store.put(items([1, 2, 3]), np.ones(3))
    call_as("actor-3")
    assert store.put(items([4, 5]), np.array(wrong))
    store.update(np.array([0, 1]), np.array(wrong))
    assert store.status()["refused"] == 2
    assert store.refused()[0].startswith("refused experience of actor-3: ")
    assert store.status()["filled"] == 3
    drawn = {int(name) for _ in range(50) for name in names(store.get(4))}
    assert drawn == {1, 2, 3}  # all of them, and not key 0 only


def test_ages_of_weights_and_of_data_are_told_apart_and_survive_a_snapshot() -> None:
    store = replay()
    store.get(1, version=4)
    store.put(items([1], version=1))
    again = replay()
    again.restore({key: np.array(value) for key, value in store.settle().items()})
    for one in (store, again):
        one.get(1, version=10)
        assert (one.status()["age_of_weights"], one.status()["age_of_data"]) == (3.0, 6.0)


# --- statistics


def test_an_item_is_fresh_the_first_time_it_is_drawn() -> None:
    store = replay(capacity=6, batch=6)
    store.put(items(range(4)))
    drawn: dict[int, int] = {}
    for number in range(60):
        if number == 30:
            store.put(items([4, 5, 6]))  # the last takes the place of an old one
            copy = replay(capacity=6, batch=6)
            copy.restore(store.settle())
            store = copy
        batch = store.get(6)
        assert batch is not None
        for name, fresh in zip(names(batch).tolist(), batch["fresh"].tolist(), strict=True):
            drawn[name] = drawn.get(name, 0) + fresh
            assert drawn[name] == 1, name
    assert {*drawn} == {*range(7)}
