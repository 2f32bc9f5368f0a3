"""Requests of actors without a network: answered once and in order, checked, and batched by their rate."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shoal.core.caller import call_as
from shoal.services import requests
from shoal.services.inspection import ROW
from shoal.services.requests import LONGEST, Requests

SIZE = 3
RANK = np.zeros(SIZE, np.float32)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    now = SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(requests, "time", SimpleNamespace(monotonic=lambda: now.seconds))
    call_as("actor-0")
    yield now
    call_as("")


@pytest.fixture
def mailbox(clock: Any) -> Requests:
    made = Requests([[2], "float32"], SIZE, {"a": "actor-0", "b": "actor-0", "c": "actor-1"}, [4])
    for stream in ("a", "b"):
        assert made.open(stream, SIZE, 0, RANK) == ""
    return made


def step(value: float = 0.0) -> dict[str, Any]:
    return {
        "observation": np.full((SIZE, 2), value, np.float32),
        "reward": np.zeros(SIZE, np.float32),
        "discount": np.ones(SIZE, np.float32),
        "first": np.zeros(SIZE, bool),
    }


def test_each_request_has_its_own_answer_whoever_is_served_first(mailbox: Requests) -> None:
    assert mailbox.ask("b", 1, "act", step(2.0)) is True
    assert mailbox.ask("a", 1, "act", step(1.0)) is True
    taken = mailbox.take()
    assert taken is not None
    assert [*taken] == ["b", "a"]
    assert mailbox.take() is None
    mailbox.give("a", taken["a"], {"action": 1})
    assert mailbox.answer("b", 1) is None
    assert mailbox.answer("a", 1) == {"action": 1, "number": 1}
    mailbox.give("b", taken["b"], {"action": 2})
    assert mailbox.answer("b", 1) == {"action": 2, "number": 1}
    assert mailbox.ask("a", 2, "act", step()) is True
    assert mailbox.answer("a", 2) is None  # that of the request before is not given again
    assert mailbox.status()["requests"] == 2


def test_a_batch_waits_for_others_by_the_rate_at_which_they_come(mailbox: Requests, clock: Any) -> None:
    for number in range(200):  # two streams, 1 ms apart
        for stream in ("a", "b"):
            clock.seconds += 0.001
            mailbox.ask(stream, number, "act", step())
        assert mailbox.take() is not None
    clock.seconds += 0.001
    mailbox.ask("a", 200, "act", step())
    assert mailbox.take() is None
    clock.seconds += 0.0015
    assert mailbox.take() is None
    clock.seconds += 0.001
    taken = mailbox.take()
    assert taken is not None
    assert [*taken] == ["a"]
    clock.seconds += 100.0  # slow ones do not make others wait for long
    for number in range(201, 400):
        clock.seconds += 1.0
        mailbox.ask("a", number, "act", step())
        clock.seconds += 1.01 * LONGEST
        assert mailbox.take() is not None


def test_a_stream_that_begins_again_gets_no_answer_of_its_earlier_life(mailbox: Requests) -> None:
    mailbox.ask("a", 1, "act", step())
    mailbox.ask("b", 1, "act", step())
    taken = mailbox.take()
    assert taken is not None
    mailbox.open("a", SIZE, 0, RANK)
    mailbox.ask("a", 1, "act", step())
    mailbox.give("a", taken["a"], {"action": "old"})
    assert mailbox.answer("a", 1) is None
    assert mailbox.status()["reopened"] == 1


def test_a_request_that_did_not_arrive_is_not_waited_for(mailbox: Requests) -> None:
    assert mailbox.answer("a", 7) == {"unknown": True}
    call_as("actor-1")
    assert mailbox.ask("c", 1, "act", step()) == {"unknown": True}


def test_what_was_asked_is_copied(mailbox: Requests) -> None:
    asked = step(1.0)
    mailbox.ask("a", 1, "act", asked)
    mailbox.ask("b", 1, "act", step())
    asked["observation"][:] = 5.0
    taken = mailbox.take()
    assert taken is not None
    assert (taken["a"]["tree"]["observation"] == 1.0).all()


@pytest.mark.parametrize(
    ("changes", "what", "number", "words"),
    [
        (
            {"observation": np.zeros((SIZE, 3), np.float32)},
            "act",
            1,
            r"observation is \(3, 3\) of float32, not \(3, 2\)",
        ),
        ({"observation": np.zeros((SIZE, 2), np.int64)}, "act", 1, "observation is .* of int64"),
        ({"observation": np.full((SIZE, 2), np.nan, np.float32)}, "act", 1, "observation"),
        ({"reward": np.full(SIZE, np.inf, np.float32)}, "act", 1, "reward"),
        ({"reward": np.zeros(SIZE + 1, np.float32)}, "act", 1, r"reward is \(4,\)"),
        ({"reward": np.zeros(SIZE)}, "act", 1, r"reward is \(3,\) of float64, not \(3,\) of float32"),
        ({"discount": np.ones(SIZE)}, "act", 1, "discount is .* of float64"),
        ({"observation": 1.0}, "act", 1, "observation is no array"),
        ({"observation": {"x": np.zeros((SIZE, 2), np.float32)}}, "act", 1, "observation is no array"),
        ({"first": np.zeros(SIZE, np.float32)}, "act", 1, "first is .* of float32"),
        ({"more": np.zeros(SIZE)}, "act", 1, "more"),
        ({}, "sing", 1, "'sing' is neither act nor score"),
        ({}, "act", -1, "number -1"),
        ({}, "act", "1", "number '1'"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(
    mailbox: Requests, changes: dict[str, Any], what: str, number: Any, words: str
) -> None:
    said = mailbox.ask("a", number, what, {**step(), **changes})
    assert isinstance(said, dict)
    assert "refused a request of actor-0" in said["refused"]
    assert re.search(words, said["refused"])
    assert mailbox.status()["refused"] == 1
    assert len(mailbox.refused()) == 1
    assert not mailbox.waiting


@pytest.mark.parametrize(
    ("size", "seed", "rank", "pulls", "words"),
    [
        (3.0, 0, RANK, [], "3.0 environments, not 3"),
        (True, 0, RANK, [], "True environments"),
        (1 << 20, 0, RANK, [], "1048576 environments"),
        (SIZE, "0", RANK, [], "seed '0'"),
        (SIZE, -1, RANK, [], "seed -1"),
        (SIZE, 0, RANK.astype(np.float64), [], "rank is .* of float64"),
        (SIZE, 0, [0.0] * SIZE, [], "rank is no array"),
        (SIZE, 0, RANK + np.nan, [], "ranks"),
        (SIZE, 0, RANK + 2, [], "ranks"),
        (SIZE, 0, RANK, [[0, float("nan")]], "pulls"),
        (SIZE, 0, RANK, [[0, "1"]], "pulls"),
    ],
)
def test_a_stream_that_makes_no_sense_is_refused(
    mailbox: Requests, size: Any, seed: Any, rank: Any, pulls: Any, words: str
) -> None:
    assert re.search(f"refused a stream of actor-0: {words}", mailbox.open("a", size, seed, rank, pulls))
    assert mailbox.status()["refused"] == 1
    assert mailbox.status()["reopened"] == 0


def test_a_stream_is_its_actor_s_alone(mailbox: Requests) -> None:
    mailbox.ask("a", 1, "act", step())
    mailbox.ask("b", 1, "act", step())
    call_as("actor-1")
    refused = "of actor-1: stream 'a' is not its own"
    assert refused in mailbox.open("a", SIZE, 0, RANK)
    for said in (mailbox.ask("a", 2, "act", step()), mailbox.answer("a", 1)):
        assert isinstance(said, dict)
        assert refused in said["refused"]
    assert "is not its own" in mailbox.open("d", SIZE, 0, RANK)
    assert mailbox.status()["reopened"] == 0
    taken = mailbox.take()
    assert mailbox.open("c", SIZE, 0, RANK) == ""
    call_as("actor-0")
    assert taken is not None
    mailbox.give("a", taken["a"], {"action": 1})
    assert mailbox.answer("a", 1) == {"action": 1, "number": 1}


def items() -> dict[str, Any]:
    return {
        "observation": np.zeros((2, 1, 2), np.float32),
        "action": np.zeros((1, 1), np.int64),
        "record": {},
        "version": np.zeros(1, np.int64),
    }


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({}, "not a record and version"),
        ({**items(), "version": 0}, "versions are not a list"),
        ({**items(), "action": np.full((1, 1), 4)}, "an action lies outside 0 to 3"),
        ({**items(), "observation": np.full((2, 1, 2), np.nan, np.float32)}, "holds nan"),
    ],
)
def test_items_that_make_no_sense_are_refused(mailbox: Requests, tree: Any, words: str) -> None:
    assert mailbox.ask("a", 1, "score", items()) is True
    said = mailbox.ask("a", 2, "score", tree)
    assert isinstance(said, dict)
    assert re.search(f"refused a request of actor-0: .*{words}", said["refused"])


def test_what_cannot_be_answered_is_refused_later_and_stops_nobody_else(mailbox: Requests) -> None:
    for _ in range(2 * ROW):
        mailbox.ask("a", 1, "score", items())
        mailbox.ask("b", 1, "score", items())
        taken = mailbox.take()
        assert taken is not None
        call_as("inference-0")
        for stream in taken:
            mailbox.give(stream, taken[stream], {"problem": "no such thing"})
        call_as("actor-0")
    assert mailbox.answer("a", 1) == {"refused": "refused a request of actor-0: no such thing", "number": 1}
    assert mailbox.status()["refused"] == 4 * ROW
