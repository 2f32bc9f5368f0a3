"""The journal: what happened, and when to stop."""

from __future__ import annotations

import json
import math

import pytest

from shoal.services import journal as module
from shoal.services.journal import Journal


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands until it is set."""
    now = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
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
    assert snapshot["return"] == 3.0


def test_what_a_worker_beside_the_learner_measured_is_a_metric_unless_it_is_no_number():
    journal = Journal()
    journal.learned(640, 2, {"loss": 1.0})
    journal.measured({"inference_batch": 4.0})
    journal.measured({"inference_batch": math.nan})
    assert journal.snapshot()["metrics"] == {"loss": 1.0, "inference_batch": 4.0}
    assert journal.snapshot()["faults"] == 1
    assert "not finite numbers" in journal.drain()["problems"][0]


def test_the_return_is_that_of_the_last_hundred_episodes():
    journal = Journal()
    assert journal.snapshot()["return"] is None
    journal.acted([[1000.0, 1]] * 50, [])
    for _ in range(4):
        journal.acted([[1.0, 1]] * 25, [])
    assert journal.snapshot()["return"] == 1.0
    assert journal.snapshot()["episodes"] == 150


def test_faults_are_handed_out_once_and_the_oldest_give_way():
    journal = Journal()
    journal.acted([], ["one", "two"])
    assert journal.drain()["problems"] == ["one", "two"]
    assert journal.drain()["problems"] == []
    journal.acted([], [str(i) for i in range(30)])
    assert journal.drain()["problems"] == [str(i) for i in range(10, 30)]
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


def test_a_clock_that_is_set_changes_no_duration(clock, monkeypatch):
    wall = [5000.0]
    monkeypatch.setattr(module.time, "time", lambda: wall[0])
    journal = Journal()
    wall[0], clock[0] = 1.0, 1002.0
    journal.learned(10, 1, {})
    journal.evaluated({"steps": 10, "mean": 1.0})
    journal.saved(10, "")
    snapshot, state = journal.snapshot(), journal.state()
    found = [snapshot["seconds"], snapshot["first_update"], snapshot["evaluations"][0]["seconds"], state["seconds"]]
    assert found == [2.0] * 4
    assert journal.drain()["checkpoint"] == {"steps": 10, "seconds": 2.0}


def test_a_snapshot_is_plain_data_that_does_not_change_afterwards():
    journal = Journal(target=5)
    journal.learned(10, 1, {"loss": 1.0})
    snapshot = journal.snapshot()
    before = json.dumps(snapshot)
    journal.learned(20, 2, {"loss": 2.0})
    journal.evaluated({"steps": 20, "mean": 9.0})
    assert json.dumps(snapshot) == before


def test_what_is_drained_is_what_came_since_and_metrics_are_its_means():
    journal = Journal()
    journal.learned(10, 1, {"loss": 1.0})
    journal.learned(20, 2, {"loss": 3.0, "entropy": 0.5})
    journal.evaluated({"steps": 20, "mean": 1.0})
    news = journal.drain()
    assert news["metrics"] == {"loss": 2.0, "entropy": 0.5}
    assert [result["mean"] for result in news["evaluations"]] == [1.0]
    assert journal.drain()["metrics"] == {}
    assert journal.drain()["evaluations"] == []
    assert journal.snapshot()["metrics"] == {"loss": 3.0, "entropy": 0.5}
    assert len(journal.snapshot()["evaluations"]) == 1


def test_a_journal_goes_on_from_its_state(clock):
    journal = Journal()
    clock[0] = 1004.0
    journal.learned(10, 1, {"loss": 1.0})
    journal.acted([[2.0, 20]], ["broken"])
    journal.evaluated({"steps": 10, "mean": 1.0})
    state = json.loads(json.dumps(journal.state()))  # as a checkpoint keeps it
    clock[0] = 5000.0
    again = Journal(state=state)
    clock[0] = 5001.0
    old, new = journal.snapshot(), again.snapshot()
    assert new["seconds"] == 5.0
    assert {**old, "seconds": 0} == {**new, "seconds": 0}
    assert again.last_evaluated() == 10
    assert again.drain()["evaluations"] == []  # the recorder has them on disk


def test_a_learner_that_went_back_takes_later_scores_with_it():
    journal = Journal()
    for steps in (10, 20, 30):
        journal.evaluated({"steps": steps, "mean": 1.0})
    journal.drain()
    journal.went_back(20)
    assert journal.last_evaluated() == 20
    journal.evaluated({"steps": 30, "mean": 2.0})
    assert [result["mean"] for result in journal.drain()["evaluations"]] == [2.0]


def test_checkpoints_and_what_kept_them_from_the_disk_are_told(clock):
    journal = Journal()
    clock[0] = 1005.0
    journal.saved(100, "")
    journal.saved(200, "no space left")
    news = journal.drain()
    assert news["checkpoint"] == {"steps": 100, "seconds": 5.0}
    assert news["problems"] == ["no space left"]
