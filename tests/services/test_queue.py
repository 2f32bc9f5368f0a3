"""The queue: bounded, first in first out, each item once."""

from __future__ import annotations

import random
import re
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.caller import call_as
from shoal.core.errors import ShoalError
from shoal.core.tree import leaves, map_tree
from shoal.core.types import Store
from shoal.services.inspection import action_problem
from shoal.services.queue import LATE, Queue


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
    found = batch["record"]["core"][0]
    assert (batch["observation"]["vector"] == found[None, :, None]).all()
    assert (batch["reward"] == found).all()
    assert not batch["first"].any()
    return found.tolist()


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
    assert (queue.status()["filled"], queue.status()["capacity"]) == (2, 4)
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


def test_the_oldest_policy_comes_first_and_nothing_is_dropped():
    queue = Queue(8)
    queue.put(items(1, 2, version=1))
    queue.put(items(3, 4, version=2))
    queue.put(items(5, version=1))  # of a slow actor
    batch = queue.get(4, version=9)
    assert names(batch) == [1, 2, 5, 3]
    assert batch["version"].tolist() == [1, 1, 1, 2]
    queue.put(items(6, version=1))
    assert names(queue.get(2, version=10)) == [6, 4]


def test_ages_of_weights_and_of_data_are_told_apart():
    queue = Queue(4)
    assert queue.get(1, version=5) is None
    queue.put(items(1, version=3))  # acted on by weights two versions behind
    queue.put(items(2, version=5))
    assert queue.get(3, version=5) is None
    batch = queue.get(2, version=9)
    assert (9 - batch["version"]).tolist() == [6, 4]  # the lag is their sum
    status = queue.status()
    assert (status["age_of_weights"], status["age_of_data"]) == (1.0, 4.0)


class TestAdmission:
    """Who may begin: so that nothing is older than allowed when it is learned from, and nobody is left out."""

    def test_where_any_age_will_do_everyone_may(self):
        queue = Queue(4, 2)
        assert all(queue.admit(actor, 0, 2) for actor in range(100))

    def test_without_lag_each_version_gets_one_batch(self):
        queue = Queue(8, batch=4, max_lag=0)
        assert queue.get(4, version=0) is None
        assert queue.admit(0, 0, 2)
        assert queue.admit(1, 0, 2)
        assert not queue.admit(2, 0, 2)  # its items would be for the next version
        for actor in (0, 1):
            assert queue.put(items(actor, actor + 10, version=0), None, actor)
            assert not queue.admit(actor, 0, 2)
        assert queue.get(4, version=0) is not None
        assert not queue.admit(0, 0, 2)  # weights that are being changed
        assert queue.admit(2, 1, 2)

    def test_an_actor_that_brings_less_is_let_in_again(self):
        """Sequences that stop with their episodes come one by one."""
        queue = Queue(8, batch=4, max_lag=0)
        queue.get(4, version=0)
        for name in range(4):
            assert queue.admit(0, 0, 4)
            assert queue.put(items(name, version=0), None, 0)
        assert not queue.admit(0, 0, 4)
        assert names(queue.get(4, version=0)) == [0, 1, 2, 3]

    def test_an_actor_that_died_is_not_waited_for_in_its_next_life(self):
        queue = Queue(4, batch=2, max_lag=0)
        queue.get(2, version=0)
        assert queue.admit(0, 0, 2)
        assert queue.admit(0, 0, 2)  # it begins again

    def test_what_was_announced_long_ago_is_not_waited_for(self, monkeypatch):
        queue, exact = Queue(4, 2, 0), Queue(4, 2, 0, exact=True)
        now = time.monotonic()
        for one in (queue, exact):
            assert one.admit(0, 0, 2)
            assert not one.admit(1, 0, 2)
        monkeypatch.setattr(time, "monotonic", lambda: now + LATE + 1)
        assert queue.admit(1, 0, 2)
        assert not exact.admit(1, 0, 2)  # in lockstep no clock decides

    @pytest.mark.parametrize("seed", range(100))
    def test_whoever_is_slow_nothing_is_older_than_allowed_and_the_run_goes_on(self, seed):
        dice = random.Random(seed)
        envs, actors, lag = dice.randint(1, 4), dice.randint(1, 4), dice.randint(0, 3)
        batch = envs * dice.randint(1, actors)
        queue, version, learned = Queue(2 * batch + envs * actors, batch, lag), 0, 0
        working: dict[int, int] = {}  # actor → version it acts by
        held = dict.fromkeys(range(actors), 0)
        for _ in range(200):
            moves = [("learn", 0)] if len(queue.filled) >= batch else []
            moves += [("put", actor) for actor in working]
            moves += [("begin", actor) for actor in range(actors) if actor not in working]
            what, actor = dice.choice(moves)
            if what == "learn":
                if (got := queue.get(batch, version)) is None:
                    assert working  # it waits for one of them
                    continue
                assert (version - got["version"]).max() <= lag
                version, learned = version + 1, learned + 1
            elif what == "put":
                assert queue.put(items(*range(envs), version=working.pop(actor)), None, actor)
            else:
                queue.get(10**6, version)  # the learner looks
                if queue.admit(actor, held[actor], envs):
                    working[actor] = held[actor]
                else:
                    held[actor] = version
                    if not working and len(queue.filled) < batch:
                        assert queue.admit(actor, version, envs)  # else all would wait for each other
                        working[actor] = version
        assert learned > 3


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"reward": np.full((3, 1), np.nan, np.float32)}, "reward holds nan"),
        ({"observation": {"vector": np.full((4, 1, 2), np.inf, np.float32)}}, "observation.vector holds inf"),
        ({"record": {"core": np.full((1, 1), np.nan)}}, "record.core holds nan"),
        ({"version": np.array([-1])}, "version -1 is negative"),
        ({"version": np.array([0.5])}, "versions are not a list of integers"),
        ({"action": np.full((3, 1), 7)}, "an action lies outside 0 to 3"),
        ({"action": np.full((3, 1), 0.5)}, "actions are of type float64, not integers below 4"),
    ],
)
def test_experience_that_makes_no_sense_is_refused_counted_and_its_sender_named(wrong, reason, monkeypatch):
    queue = Queue(4, choices=[4])
    assert queue.put(items(1))
    call_as("actor-7")
    for _ in range(12):
        assert queue.put({**items(2), **wrong})  # it continues; this is not worth another try
    assert queue.status()["refused"] == 12
    (first,) = queue.refused()
    assert first.startswith("refused experience of actor-7: ")
    assert reason in first
    now = time.monotonic()
    for seconds, counts in ((19, []), (21, [14]), (60, []), (62, [16])):  # again after 20 s, then after 40 s
        monkeypatch.setattr(time, "monotonic", lambda seconds=seconds: now + seconds)
        queue.put({**items(2), **wrong})
        lines = queue.refused()
        assert [line.rpartition("(")[2] for line in lines] == [f"{count} refused so far)" for count in counts]
    assert queue.put(items(3))
    assert names(queue.get(2)) == [1, 3]


def test_where_nothing_good_comes_it_is_an_error():
    """Else everyone would wait for ever for a batch that cannot come."""
    queue = Queue(4)
    bad = {**items(1), "reward": np.full((3, 1), np.nan, np.float32)}
    assert all(queue.put(bad) for _ in range(99))
    with pytest.raises(ShoalError, match="with nothing valid in between"):
        queue.put(bad)


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
    queue, model, version = Queue(capacity), [], 0
    for name in range(0, 300, 10):
        version += data.draw(st.integers(0, 1))
        if data.draw(st.booleans()):
            acted = max(version - data.draw(st.integers(0, 2)), 0)
            new = [name + i for i in range(data.draw(st.integers(1, capacity)))]
            fits = len(model) + len(new) <= capacity
            assert queue.put(items(*new, version=acted)) == fits
            model.extend((acted, each) for each in new if fits)
        else:
            size = data.draw(st.integers(1, capacity))
            expected = None
            if len(model) >= size:
                model.sort(key=lambda pair: pair[0])
                expected, model = [each for _, each in model[:size]], model[size:]
            assert names(queue.get(size, version)) == expected
        assert queue.status()["filled"] == len(model)


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


@pytest.mark.parametrize(
    ("action", "problem"),
    [
        ([[[0, 3]], [[2, 0]]], ""),
        ([[[0, 4]]], "an action lies outside 0 to 3"),
        ([[[3, 0]]], "an action lies outside 0 to 2"),
        ([[[-1, 0]]], "an action lies outside 0 to 2"),
        ([[[0.0, 1.0]]], "actions are of type float64, not integers below 4"),
        ([[[0, 1, 2]]], r"actions of shape \(1, 1, 3\) do not have 2 numbers each"),
    ],
)
def test_joint_actions_are_checked_number_by_number(action: Any, problem: str) -> None:
    found = action_problem(np.array(action), [3, 4])
    assert re.fullmatch(problem, found)


def test_of_hybrid_actions_only_the_choices_are_checked() -> None:
    assert action_problem(np.array([[[-7.5, 2.0, 0.1]]]), [0, 3, 0]) == ""
    assert action_problem(np.array([[[0.0, 2.5, 0.0]]]), [0, 3, 0]) == "an action lies outside 0 to 2"
    assert action_problem(np.array([[[0.0, 3.0, 0.0]]]), [0, 3, 0]) == "an action lies outside 0 to 2"
