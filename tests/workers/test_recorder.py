"""The recorder: rows, lines and views from what the journal tells."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.display import console
from shoal.runs import directory, files, loggers, metrics
from shoal.runs.trace import Trace
from shoal.services.journal import Journal
from shoal.workers import recorder
from shoal.workers.recorder import Recorder, record, shares


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that stands until it is set."""
    now = [100.0]
    monkeypatch.setattr(recorder.time, "monotonic", lambda: now[0])
    return now


class Watcher:
    """A display that remembers what it was shown."""

    def __init__(self) -> None:
        self.views: list[Any] = []

    def show(self, view: Any, last: bool) -> None:
        self.views.append(view)

    def close(self) -> None:
        self.views.append("closed")


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watcher:
    watcher = Watcher()
    monkeypatch.setattr(console, "display", lambda interval: watcher)
    return watcher


EXPERIMENT = SimpleNamespace(
    algorithm_name="ppo",
    environment=SimpleNamespace(id="Catch"),
    engine="inline",
    steps=1000,
    log_every=1.0,
    evaluation=SimpleNamespace(target=None),
    loggers=(),
    model_dump=lambda mode: {},
)


def make(run: Path, steps: int = 0, report: Any = dict) -> Recorder:
    return Recorder(EXPERIMENT, run, steps, report)


def test_rates_are_those_of_the_last_seconds(tmp_path: Path, clock: list[float], watched: Watcher) -> None:
    journal, recorder = Journal(), make(tmp_path)
    for second in range(1, 31):
        clock[0] = 100.0 + second
        journal.learned(second * (10 if second <= 15 else 30), second, {"loss": 1.0})
        recorder.take(journal.drain())
    assert watched.views[4]["steps_per_s"] == pytest.approx(10)
    assert watched.views[-1]["steps_per_s"] == pytest.approx(30)
    assert watched.views[-1]["left"] == pytest.approx((1000 - 900) / 30)


def test_rows_hold_means_and_scores_and_long_runs_have_few(
    tmp_path: Path, clock: list[float], watched: Watcher
) -> None:
    journal, recorder = Journal(), make(tmp_path)
    for second in range(1, 20_001):
        clock[0] = 100.0 + second
        journal.learned(second, second, {"loss": float(second)})
        recorder.take(journal.drain())
    journal.evaluated({"steps": 20_000, "mean": 3.0, "scores": [3.0], "length": 1.0, "metrics": {}})
    recorder.take(journal.drain(), last=True)
    rows = metrics.read(tmp_path)
    assert rows[0]["metrics"] == {"loss": 1.0}
    assert [row["kind"] for row in rows[-2:]] == ["evaluation", "train"]
    assert 3000 < len(rows) < 5000  # of 20 000 looks: every one at first, one in twenty at the end
    # A row is the mean since the row before: of 20 looks or so, none is lost.
    before, after = rows[-4], rows[-3]
    assert after["steps"] - before["steps"] > 10
    assert after["metrics"]["loss"] == (before["steps"] + 1 + after["steps"]) / 2


def test_rows_tell_what_bandits_chose_and_what_came_of_it(tmp_path: Path, clock: list[float], watched: Watcher) -> None:
    journal, recorder = Journal(), make(tmp_path)
    for steps, pulls in ((1, [[3, 1.0], [0, 5.0]]), (1, [[3, 2.0]]), (2, [[0, 7.0]]), (3, [])):
        clock[0] += 10
        journal.learned(steps, steps, {"loss": 1.0})
        journal.acted([], [], pulls)
        recorder.take(journal.drain())
    rows = metrics.read(tmp_path)
    assert rows[0]["arms"] == {"0": {"episodes": 1, "score": 5.0}, "3": {"episodes": 1, "score": 1.0}}
    assert rows[1]["arms"] == {"0": {"episodes": 1, "score": 7.0}, "3": {"episodes": 1, "score": 2.0}}
    assert "arms" not in rows[2]
    assert ("bandit/score/03", 2.0) in loggers.scalars(rows[1])


def test_rows_reach_the_disk_with_a_checkpoint(tmp_path: Path, clock: list[float], watched: Watcher) -> None:
    journal, recorder = Journal(), make(tmp_path)
    clock[0] += 0.5
    journal.learned(10, 1, {"loss": 1.0})
    recorder.take(journal.drain())
    assert metrics.read(tmp_path) == []
    clock[0] += 0.5
    journal.learned(20, 2, {"loss": 1.0})
    journal.saved(20, "")
    recorder.take(journal.drain())
    assert [row["steps"] for row in metrics.read(tmp_path)] == [10, 20]
    assert watched.views[-1]["checkpoint"]["steps"] == 20


def test_trouble_with_the_disk_is_told_once_and_nothing_is_lost(
    tmp_path: Path, clock: list[float], watched: Watcher, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    journal, recorder = Journal(), make(tmp_path)

    def refuse(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(files, "append", refuse)
        for steps in (10, 20, 30):
            clock[0] += 10
            journal.learned(steps, steps, {"loss": 1.0})
            recorder.take(journal.drain())
    assert caplog.text.count("No space left") == 1
    with caplog.at_level(logging.INFO):
        recorder.take(journal.drain(), last=True)
    assert [row["steps"] for row in metrics.read(tmp_path)] == [10, 20, 30]
    assert "written again" in caplog.text


def test_a_learner_that_went_back_leaves_a_straight_record(
    tmp_path: Path, clock: list[float], watched: Watcher
) -> None:
    journal, recorder = Journal(), make(tmp_path)
    for steps in (100, 200, 150, 250):
        clock[0] += 10
        if steps == 150:
            journal.went_back(100)
            recorder.take(journal.drain())
            clock[0] += 10
        journal.learned(steps, steps, {"loss": 1.0})
        recorder.take(journal.drain())
    assert [row["steps"] for row in metrics.read(tmp_path)] == [100, 150, 250]
    assert min(view["steps_per_s"] for view in watched.views) >= 0


def test_a_trace_that_cannot_be_closed_costs_no_metrics(
    tmp_path: Path, clock: list[float], watched: Watcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    def source() -> Any:
        if broken:
            raise RuntimeError("no spans")
        return []

    broken, journal = list[bool](), Journal()
    work = record(EXPERIMENT, tmp_path, 0, journal, dict, Trace(tmp_path / "trace.json", source))  # type: ignore[arg-type]
    next(work)
    journal.learned(10, 1, {"loss": 1.0})
    broken.append(True)
    with pytest.raises(RuntimeError, match="no spans"):
        work.close()
    assert [row["steps"] for row in metrics.read(tmp_path)] == [10]
    assert watched.views[-1] == "closed"


def test_shares_are_of_the_time_since_the_report_before() -> None:
    before = {"moves": 5, "seconds": 10.0, "working": 2.0, "waits": {"store.put": 8.0}}
    now = {"moves": 9, "seconds": 20.0, "working": 11.0, "waits": {"store.put": 8.5, "parameters.fetch": 0.5}}
    assert shares(now, before)["working"] == 0.9
    assert shares(now, before)["waits"] == {"store.put": 0.05, "parameters.fetch": 0.05}
    assert shares(now)["working"] == 0.55
    assert shares(now, before)["moves_per_s"] == 0.4
    assert shares(now)["moves_per_s"] == 0.45
    assert shares({**now, "node": "one", "away": True})["node"] == "one"
    assert shares(before, now)["working"] == 0.2  # started again since: all that there is
    assert shares({})["working"] == 0.0


def test_shares_of_work_and_cores_are_of_the_same_time() -> None:
    before = {"seconds": 10.0, "computing": 4.0, "parts": {"step": 1.0}}
    now = {"seconds": 20.0, "computing": 14.0, "parts": {"step": 6.0, "infer": 2.0}}
    assert shares(now, before)["parts"] == {"step": 0.5, "infer": 0.2}
    assert shares(now, before)["computing"] == 1.0
    assert "computing" not in shares({"seconds": 10.0})  # nobody knows


def test_lines_come_at_their_interval(clock: list[float], caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    view = {"steps": 10, "total": 100, "steps_per_s": 5.0, "left": 90.0, "return": 1.5, "metrics": {"lag": 0.5, "x": 1}}
    with caplog.at_level(logging.INFO):
        lines = console.Lines(2.0)
        for _ in range(8):
            clock[0] += 0.5
            lines.show(view, False)
    assert len(caplog.records) == 2
    assert caplog.messages[0] == " 10 %  step 10  5 steps/s  1:30 min left  return 1.5  lag 0.5"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "0 s"), (59, "59 s"), (61, "1:01 min"), (3599, "59:59 min"), (7500, "2:05 h")]
)
def test_durations_are_told_as_people_do(seconds: float, text: str) -> None:
    assert console.duration(seconds) == text


def test_the_log_goes_to_a_file_and_handlers_go_away(tmp_path: Path) -> None:
    log = logging.getLogger("shoal")
    before = list(log.handlers), log.level
    with console.logging_to(tmp_path / "log.txt"):
        log.info("hello")
    log.info("unheard")
    assert "hello" in (tmp_path / "log.txt").read_text()
    assert "unheard" not in (tmp_path / "log.txt").read_text()
    assert (list(log.handlers), log.level) == before


def test_names_of_folders_are_plain_and_never_taken_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    one = directory.fresh("ALE/Pong-v5", "ppo")
    assert one.parent.name == "runs"
    assert one.name.startswith("ALE-Pong-v5_ppo_1")
    one.mkdir(parents=True)
    assert directory.fresh("ALE/Pong-v5", "ppo") != one


def test_how_a_run_stands_is_written_to_its_folder_at_the_pace_of_the_log(
    tmp_path: Path, clock: list[float], watched: Watcher
) -> None:
    journal, recorder, status = Journal(), make(tmp_path), tmp_path / directory.STATUS
    for now, steps, written in ((100.0, 10, 10), (100.5, 20, 10), (101.5, 30, 30)):
        clock[0] = now
        journal.learned(steps, 1, {"lag": 2.0})
        recorder.take(journal.drain())
        assert json.loads(status.read_text())["steps"] == written
    assert json.loads(status.read_text())["metrics"]["lag"] == 2.0


def test_what_workers_did_until_training_ended_is_kept(tmp_path: Path, clock: list[float], watched: Watcher) -> None:
    spent = {"learner": {"seconds": 0.0, "working": 0.0}}
    journal, recorder = Journal(), make(tmp_path, report=lambda: {"learner": dict(spent["learner"])})
    for now, steps in ((110.0, 500), (120.0, 1000), (300.0, 1000)):  # then the last evaluation
        clock[0], spent["learner"]["seconds"] = now, now - 100
        spent["learner"]["working"] = min(now, 120.0) - 100
        journal.learned(steps, 1, {"lag": 2.0})
        recorder.take(journal.drain(), last=now == 300.0)
    status = json.loads((tmp_path / directory.STATUS).read_text())
    assert status["spent"]["learner"]["working"] == 1.0
    assert status["workers"]["learner"]["working"] < 0.2


def test_advice_is_shown_after_a_while(tmp_path: Path, clock: list[float], watched: Watcher, monkeypatch: Any) -> None:
    monkeypatch.setattr(recorder.advice, "of", lambda run, curves: ["more actors"])
    journal, made = Journal(), make(tmp_path)
    for now in (100.0, 100.0 + recorder.ADVICE, 101.0 + recorder.ADVICE):
        clock[0] = now
        made.take(journal.drain())
    assert [view["advice"] for view in watched.views] == [[], [], ["more actors"]]
    made.close()


def test_advice_that_fails_harms_nobody(tmp_path: Path, clock: list[float], watched: Watcher, monkeypatch: Any) -> None:
    def fails(run: Path, curves: Any) -> list[Any]:
        raise ValueError("no")

    monkeypatch.setattr(recorder.advice, "of", fails)
    journal, made = Journal(), make(tmp_path)
    clock[0] += recorder.ADVICE
    made.take(journal.drain())
    made.close()
    assert watched.views[0]["advice"] == []
