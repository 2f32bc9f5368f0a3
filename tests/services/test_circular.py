"""The circular buffer: batches used in turn, each so many times, and bounded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from shoal.core.settings import Circling
from shoal.core.tree import leaves
from shoal.core.types import Store
from shoal.services.circular import Circular
from tests.services.test_queue import items, names


def ring(batches: int, times: int, capacity: int = 100, batch: int = 1) -> Circular:
    return Circular(Circling(batches=batches, times=times), capacity, batch)


def test_it_is_a_store():
    store: Store = ring(2, 2)
    assert store.get(1) is None
    assert {"filled", "capacity", "refused", "age_of_weights", "age_of_data"} <= {*store.status()}


def test_batches_are_used_in_turn_and_the_oldest_makes_room_first():
    store = ring(batches=2, times=3)
    for name in range(5):
        assert store.put(items(name))
    used = [names(store.get(1, version))[0] for version in range(15)]
    assert used == [0, 1, 0, 1, 0, 2, 1, 3, 2, 3, 2, 4, 3, 4, 4]
    assert store.get(1) is None


@pytest.mark.parametrize(("batches", "times"), [(1, 1), (1, 4), (3, 1), (3, 2), (4, 5)])
def test_every_batch_is_used_exactly_so_many_times_and_is_fresh_once(batches, times):
    store, uses, fresh = ring(batches, times, batch=2), {}, {}
    for name in range(0, 40, 2):
        store.put(items(name, name + 1))
        for _ in range(name % 3):  # faster and slower than the actors
            if (batch := store.get(2)) is not None:
                key = tuple(names(batch))
                uses[key] = uses.get(key, 0) + 1
                fresh[key] = fresh.get(key, 0) + batch["fresh"].sum()
    while (batch := store.get(2)) is not None:
        key = tuple(names(batch))
        uses[key], fresh[key] = uses.get(key, 0) + 1, fresh.get(key, 0) + batch["fresh"].sum()
    assert len(uses) == 20
    assert {*uses.values()} == {times}
    assert {*fresh.values()} == {2}


def test_a_slow_learner_holds_actors_back_and_nothing_is_lost():
    store = ring(batches=1, times=2, capacity=2)
    assert [store.put(items(name)) for name in range(3)] == [True, True, False]
    assert names(store.get(1)) == [0]
    assert store.put(items(2))  # one place in the queue is free again
    assert not store.put(items(3))
    assert names(store.get(1)) == [0]
    assert not store.put(items(3))  # until the next batch moves on
    assert [names(store.get(1))[0] for _ in range(4)] == [1, 1, 2, 2]
    assert store.status()["held"] == 0


def test_what_comes_back_is_what_went_in_each_time():
    store = ring(batches=1, times=3)
    store.put(items(7))
    whole = [store.get(1) for _ in range(3)]
    for batch in whole[1:]:
        plain = [{name: part for name, part in one.items() if name != "fresh"} for one in (whole[0], batch)]
        for one, two in zip(*(leaves(part) for part in plain), strict=True):
            np.testing.assert_array_equal(one, two)


def test_both_ages_grow_as_a_batch_is_used_again():
    store = ring(batches=1, times=2)
    store.put(items(1, version=0))
    store.get(1, version=3)
    store.put(items(2, version=2))
    store.get(1, version=4)
    assert (store.status()["age_of_weights"], store.status()["age_of_data"]) == (0, 4)
    store.get(1, version=5)
    assert (store.status()["age_of_weights"], store.status()["age_of_data"]) == (2, 1)


def test_a_checkpoint_keeps_what_is_held_and_forgets_what_waits():
    store, other = ring(batches=2, times=3), ring(batches=2, times=3)
    for name in range(3):
        store.put(items(name, version=name))
    for version in (1, 2, 3):
        store.get(1, version)
    other.restore(store.settle())
    for one in (store, other):
        one.put(items(9, version=3))
        seen = [(names(batch)[0], batch["key"][0], batch["fresh"][0], {**one.status()}) for batch in left(one)]
        if one is store:
            expected = seen
    assert seen == expected
    assert [name for name, *_ in seen] == [1, 0, 9, 1, 9, 9]
    other.restore({})  # of a run that saved none
    assert other.settle()["facts"].shape == (0, 4)


def left(store: Circular) -> Iterator[Any]:
    """All batches that a store still gives."""
    version = 4
    while (batch := store.get(1, version)) is not None:
        yield batch
        version += 1


def test_invalid_items_are_refused_and_named():
    store = ring(batches=1, times=1)
    bad = items(1)
    bad["reward"][:] = np.nan
    assert store.put({**bad, "reward": bad["reward"]})
    assert store.status()["refused"] == 1
    assert "reward" in store.refused()[0]
    assert store.get(1) is None
