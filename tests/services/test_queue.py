"""The queue: bounded, first in first out, each item once."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.tree import leaves, map_tree
from shoal.core.types import Store
from shoal.services.queue import Queue


def items(*names: int, version: int = 0, length: int = 3):
    """Items in which every number tells the item's name; items lie along axis 1."""
    names = np.array(names, np.int64)
    vector = np.broadcast_to(names[None, :, None], (length + 1, len(names), 2))
    return {
        "observation": {"vector": vector.astype(np.float32)},
        "first": np.zeros((length + 1, len(names)), bool),
        "reward": np.broadcast_to(names, (length, len(names))).astype(np.float32),
        "record": {"core": names[None]},
        "version": np.full(len(names), version),
    }


def names(batch) -> list[int] | None:
    """Which items a batch holds, after a check that it holds them whole."""
    if batch is None:
        return None
    told = batch["record"]["core"][0]
    assert (batch["observation"]["vector"] == told[None, :, None]).all()
    assert (batch["reward"] == told).all()
    assert not batch["first"].any()
    return told.tolist()


def test_first_in_first_out_across_puts():
    queue = Queue(6)
    assert queue.put(items(1, 2, 3))
    assert queue.put(items(4, 5, 6))
    assert names(queue.get(2)) == [1, 2]
    assert queue.put(items(7, 8))
    assert names(queue.get(6)) == [3, 4, 5, 6, 7, 8]
    assert queue.get(1) is None


def test_a_batch_has_the_shapes_and_types_of_the_items_and_what_a_learner_needs():
    queue = Queue(4)
    queue.put(items(1, 2, version=5))
    queue.put(items(3, 4, version=6))
    batch = queue.get(3)
    assert map_tree(lambda x: (x.dtype.name, x.shape), batch) == {
        "observation": {"vector": ("float32", (4, 3, 2))},
        "first": ("bool", (4, 3)),
        "reward": ("float32", (3, 3)),
        "record": {"core": ("int64", (1, 3))},
        "version": ("int64", (3,)),
        "key": ("int64", (3,)),
        "weight": ("float32", (3,)),
    }
    assert batch["version"].tolist() == [5, 5, 6]
    assert batch["weight"].tolist() == [1, 1, 1]


def test_keys_are_never_given_twice():
    queue = Queue(2)
    seen = []
    for name in range(6):
        queue.put(items(name))
        seen += queue.get(1)["key"].tolist()
    assert len(set(seen)) == 6


def test_not_enough_yet():
    queue = Queue(4)
    assert queue.get(1) is None
    queue.put(items(1, 2))
    assert queue.get(3) is None
    assert queue.status() == {"filled": 2, "capacity": 4, "dropped": 0}
    assert names(queue.get(2)) == [1, 2]


def test_all_or_none_when_full():
    queue = Queue(4)
    assert queue.put(items(1, 2, 3))
    assert not queue.put(items(4, 5))
    assert queue.status()["filled"] == 3
    assert queue.put(items(6))
    assert not queue.put(items(7))
    assert names(queue.get(4)) == [1, 2, 3, 6]
    assert queue.put(items(8, 9, 10, 11))


def test_more_at_once_than_it_can_ever_hold_is_an_error():
    with pytest.raises(ValueError, match="5 items at once do not fit a queue of 4"):
        Queue(4).put(items(1, 2, 3, 4, 5))


def test_no_items_are_no_trouble():
    queue = Queue(2)
    assert queue.put(items())
    assert queue.put(items(1))
    assert queue.put(items())
    assert names(queue.get(1)) == [1]


@pytest.mark.parametrize(
    "wrong",
    [
        items(3, length=2),
        {**items(3), "reward": np.zeros((1, 1), np.float32)},  # one row would spread over all
        {**items(3), "reward": np.zeros((3, 2), np.float32)},
        {key: value for key, value in items(3).items() if key != "reward"},
        {**items(3), "observation": np.zeros((4, 1))},
    ],
    ids=["length", "one row", "width", "missing", "structure"],
)
def test_items_of_another_shape_are_an_error_and_take_no_place(wrong):
    queue = Queue(4)
    queue.put(items(1, 2))
    for _ in range(5):
        with pytest.raises((ValueError, KeyError, IndexError)):
            queue.put(wrong)
    assert queue.status()["filled"] == 2
    assert queue.put(items(4, 5))
    assert names(queue.get(4)) == [1, 2, 4, 5]


def test_stale_items_are_dropped_and_counted():
    queue = Queue(6)
    queue.put(items(1, 2, version=1))
    queue.put(items(3, 4, version=2))
    queue.put(items(5, version=1))
    queue.put(items(6, version=3))
    assert queue.get(4, oldest=2) is None
    assert queue.status() == {"filled": 3, "capacity": 6, "dropped": 3}
    assert queue.put(items(7, 8, 9, version=3))
    batch = queue.get(5, oldest=2)
    assert names(batch) == [3, 4, 6, 7, 8]
    assert batch["version"].tolist() == [2, 2, 3, 3, 3]
    assert queue.status()["dropped"] == 3


def test_a_queue_full_of_stale_items_makes_room():
    queue = Queue(2)
    queue.put(items(1, 2, version=0))
    assert queue.get(2, oldest=1) is None
    assert queue.put(items(3, 4, version=1))
    assert names(queue.get(2, oldest=1)) == [3, 4]


def test_items_are_copied_on_the_way_in_and_out():
    queue = Queue(2)
    given_items = items(1, 2)
    queue.put(given_items)
    for leaf in leaves(given_items):
        leaf.fill(0)
    batch = queue.get(2)
    assert names(batch) == [1, 2]
    queue.put(items(3, 4))
    assert names(batch) == [1, 2]
    for leaf in leaves(batch):
        assert leaf.flags.owndata
        leaf.fill(0)
    assert names(queue.get(2)) == [3, 4]


def test_memory_is_allocated_once():
    queue = Queue(4)
    queue.put(items(1))
    before = [id(leaf) for leaf in leaves(queue.memory)]
    for name in range(20):
        queue.get(1)
        queue.put(items(name, version=name))
    assert [id(leaf) for leaf in leaves(queue.memory)] == before


def test_it_is_a_store_that_ignores_priorities():
    queue: Store = Queue(2)
    queue.put(items(1, 2), np.array([1.0, 2.0]))
    queue.update(np.array([0, 5]), np.array([1.0, 2.0]))
    assert names(queue.get(2)) == [1, 2]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_run_of_calls_agrees_with_a_plain_list(data):
    capacity = data.draw(st.integers(1, 6))
    queue, model, dropped, version = Queue(capacity), deque(), 0, 0
    for name in range(0, 300, 10):
        version += data.draw(st.integers(0, 1))
        if data.draw(st.booleans()):
            new = [name + i for i in range(data.draw(st.integers(1, capacity)))]
            fits = len(model) + len(new) <= capacity
            assert queue.put(items(*new, version=version)) == fits
            model.extend((each, version) for each in new if fits)
        else:
            size, oldest = data.draw(st.integers(1, capacity)), version - data.draw(st.integers(0, 2))
            enough = len(model) >= size
            if enough:
                fresh = deque(pair for pair in model if pair[1] >= oldest)
                dropped += len(model) - len(fresh)
                model, enough = fresh, len(fresh) >= size
            expected = [model.popleft()[0] for _ in range(size)] if enough else None
            assert names(queue.get(size, oldest)) == expected
        assert queue.status() == {"filled": len(model), "capacity": capacity, "dropped": dropped}


def test_a_cleared_queue_is_as_at_the_beginning():
    queue, fresh = Queue(5), Queue(5)
    queue.put(items(1, 2, 3))
    queue.get(2)
    assert queue.settle() == {}
    assert queue.status()["filled"] == 0
    for one in (queue, fresh):
        assert one.put(items(4, 5, 6, 7, 8))
    assert list(queue.filled) == list(fresh.filled)
    assert names(queue.get(5)) == names(fresh.get(5)) == [4, 5, 6, 7, 8]
