"""The journal: what happened, and when to stop."""

from __future__ import annotations

import json

import pytest

from shoal.services import journal as module
from shoal.services.journal import Journal


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands until it is set."""
    now = [1000.0]
    monkeypatch.setattr(module.time, "time", lambda: now[0])
    return now


def test_a_target_that_is_reached_stops_the_run():
    journal = Journal(target=10)
    journal.evaluated({"steps": 5, "mean": 9.9})
    assert not journal.learned(5, 1, {})
    assert journal.stopping() == ""
    journal.evaluated({"steps": 6, "mean": 10.0})
    assert journal.learned(6, 2, {})
    assert journal.stopping() == "target"
    journal.evaluated({"steps": 7, "mean": 0.0})
    assert journal.stopping() == "target"


def test_a_target_of_zero_is_a_target():
    journal = Journal(target=0)
    journal.evaluated({"steps": 1, "mean": -1.0})
    assert not journal.stopping()
    journal.evaluated({"steps": 2, "mean": 0.0})
    assert journal.stopping() == "target"


def test_without_a_target_no_score_stops_the_run():
    journal = Journal()
    journal.evaluated({"steps": 1, "mean": 1e9})
    assert not journal.learned(1, 1, {})


def test_the_first_reason_stays():
    journal = Journal(target=1)
    journal.stop("interrupted")
    journal.stop("steps")
    journal.evaluated({"steps": 1, "mean": 2.0})
    assert journal.stopping() == "interrupted"
    assert journal.snapshot()["stopped_by"] == "interrupted"


def test_counts():
    journal = Journal()
    journal.acted([[1.0, 10, {}], [3.0, 20, {"lines": 2}]], ["broken pipe"])
    journal.acted([[5.0, 30]], [])
    journal.learned(640, 2, {"loss": 1.0, "entropy": 0.5})
    journal.learned(1280, 4, {"loss": 0.25})
    snapshot = journal.snapshot()
    assert {key: snapshot[key] for key in ("steps", "updates", "episodes", "faults")} == {
        "steps": 1280,
        "updates": 4,
        "episodes": 3,
        "faults": 1,
    }
    assert snapshot["metrics"] == {"loss": 0.25, "entropy": 0.5}
    assert snapshot["recent_return"] == 3.0


def test_the_recent_return_is_that_of_the_last_hundred_episodes():
    journal = Journal()
    assert journal.snapshot()["recent_return"] is None
    journal.acted([[1000.0, 1]] * 50, [])
    for _ in range(4):
        journal.acted([[1.0, 1]] * 25, [])
    assert journal.snapshot()["recent_return"] == 1.0
    assert journal.snapshot()["episodes"] == 150


def test_faults_are_handed_out_once_and_the_oldest_give_way():
    journal = Journal()
    journal.acted([], ["one", "two"])
    assert journal.drain_faults() == ["one", "two"]
    assert journal.drain_faults() == []
    journal.acted([], [str(i) for i in range(30)])
    assert journal.drain_faults() == [str(i) for i in range(10, 30)]
    assert journal.snapshot()["faults"] == 32


def test_times_are_counted_from_the_beginning(clock):
    journal = Journal()
    clock[0] = 1003.0
    journal.learned(0, 0, {})
    assert journal.snapshot()["first_update"] is None
    clock[0] = 1005.0
    journal.learned(10, 1, {})
    clock[0] = 1006.0
    journal.learned(20, 2, {})
    journal.evaluated({"steps": 20, "mean": 1.5, "scores": [1.0, 2.0]})
    clock[0] = 1010.0
    snapshot = journal.snapshot()
    assert (snapshot["seconds"], snapshot["first_update"]) == (10.0, 5.0)
    assert snapshot["evaluations"] == [{"steps": 20, "mean": 1.5, "scores": [1.0, 2.0], "seconds": 6.0}]


def test_a_snapshot_is_plain_data_that_does_not_change_afterwards():
    journal = Journal(target=5)
    journal.learned(10, 1, {"loss": 1.0})
    snapshot = journal.snapshot()
    before = json.dumps(snapshot)
    journal.learned(20, 2, {"loss": 2.0})
    journal.evaluated({"steps": 20, "mean": 9.0})
    assert json.dumps(snapshot) == before
