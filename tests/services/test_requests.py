"""Requests of actors without a network: answered once and in order, checked, and batched by their rate."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shoal.core.caller import call_as
from shoal.services import requests
from shoal.services.requests import LONGEST, Requests

SHAPES = {"observation": [[2], "float32"]}
SIZE = 3


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    now = SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(requests, "time", SimpleNamespace(monotonic=lambda: now.seconds))
    call_as("actor-0")
    yield now
    call_as("")


@pytest.fixture
def mailbox(clock: Any) -> Requests:
    made = Requests(SHAPES, 2)
    for stream in ("a", "b"):
        assert made.open(stream, SIZE, 0, np.zeros(SIZE, np.float32)) == ""
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
    mailbox.open("a", SIZE, 0, np.zeros(SIZE, np.float32))
    mailbox.ask("a", 1, "act", step())
    mailbox.give("a", taken["a"], {"action": "old"})
    assert mailbox.answer("a", 1) is None
    assert mailbox.status()["reopened"] == 1


def test_a_request_that_did_not_arrive_is_not_waited_for(mailbox: Requests) -> None:
    assert mailbox.answer("a", 7) == {"unknown": True}
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


def test_there_are_no_more_streams_than_were_announced(mailbox: Requests) -> None:
    assert "there are 2 already" in mailbox.open("c", SIZE, 0, np.zeros(SIZE, np.float32))
    assert "ranks" in mailbox.open("a", SIZE, 0, np.full(SIZE, np.nan, np.float32))
    assert mailbox.status()["streams"] == 2
