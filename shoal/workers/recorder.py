"""Recording: what was reported to the journal goes to the disk and to the display."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from shoal.core.doing import span
from shoal.core.means import Means
from shoal.core.tree import flat
from shoal.core.types import Work
from shoal.display import advice, console
from shoal.display.page.reading import Curves
from shoal.runs import directory, loggers
from shoal.runs.metrics import Metrics
from shoal.runs.trace import Trace

if TYPE_CHECKING:
    from shoal.experiment import Experiment
    from shoal.services.journal import Journal

log = logging.getLogger("shoal")
LOOK = 0.5  # seconds between looks for news
FLUSH = 5.0  # seconds between writes
WINDOW = 10.0  # seconds over which rates are taken
ADVICE = 15.0  # seconds between two looks at what could be better
ROWS = 1000  # a row covers at least this fraction of the time so far, so that long runs stay small


def record(
    experiment: Experiment,
    run: Path,
    steps: int,
    journal: Journal,
    report: Callable[[], Mapping[str, Any]],
    trace: Trace | None = None,
) -> Work:
    """Write the metrics of a run that continues after these steps, and show its progress; it only ever waits.

    Where a trace is wanted, it writes that too.
    """
    recorder = Recorder(experiment, run, steps, report)
    recorder.evaluations += journal.snapshot()["evaluations"]  # from before, if the run is resumed
    looked = 0.0
    try:
        while True:
            if time.monotonic() - looked >= min(experiment.log_every, LOOK):
                looked = time.monotonic()
                recorder.take(journal.drain())
                if trace is not None:
                    with span("trace"):
                        trace.take()
            yield False
    finally:
        try:
            if trace is not None:
                trace.close()
        finally:
            recorder.take(journal.drain(), last=True)
            recorder.close()


class Recorder:
    """Turns what the journal collected into rows, lines and a view for the display."""

    def __init__(self, experiment: Experiment, run: Path, steps: int, report: Callable[[], Mapping[str, Any]]) -> None:
        """Open the files and the display."""
        self.experiment, self.run, self.report = experiment, run, report
        settings = dict(flat(experiment.model_dump(mode="json")))
        self.metrics = Metrics(run, steps, loggers.start(experiment.loggers, run, settings, steps))
        self.display = console.display(experiment.log_every)
        self.title = f"{console.title(experiment)} · {run}"
        now = time.monotonic()
        self.marks = deque[tuple[float, int, int]]()  # when, steps, updates
        self.steps, self.started = steps, now
        self.row_at = self.flushed_at = self.shares_at = now
        self.status_at, self.advised_at = -math.inf, now
        self.newest: dict[str, float] = {}
        # Since the last row: the means of the metrics, and by arm the scores of its episodes.
        self.means = Means()
        self.arms: dict[int, list[float]] = {}
        self.evaluations: list[Mapping[str, Any]] = []
        self.workers: Mapping[str, Any] = {}
        self.trained: Mapping[str, Any] = {}  # what workers had done when training ended: some go on, and wait
        self.curves, self.advice = Curves(run), list[str]()
        self.problem: str | None = None
        self.trouble = ""  # why the metrics cannot be written
        self.saved: Any = None  # the newest checkpoint

    def take(self, news: Mapping[str, Any], last: bool = False) -> None:
        """Take what is new since the last time."""
        now = time.monotonic()
        if news["steps"] < self.steps:  # the learner went back to a checkpoint
            self.metrics.rewind(news["steps"])
            self.evaluations = [result for result in self.evaluations if result["steps"] <= news["steps"]]
            self.marks.clear()
            self.means = Means()
            self.arms.clear()
        moved, self.steps = news["steps"] != self.steps, news["steps"]
        if not self.marks:
            self.marks.append((now, news["steps"], news["updates"]))
        for problem in news["problems"]:
            log.warning(problem)
            self.problem = problem.splitlines()[0]
        for result in news["evaluations"]:
            log.info(console.evaluation_line(result))
            self.evaluations.append(result)
            self.metrics.add({"kind": "evaluation", "time": time.time(), **result})
        self.newest.update(news["metrics"])
        self.means.add(news["metrics"])
        for arm, score in news["choices"]:
            self.arms.setdefault(arm, []).append(score)
        rates = self._rates(now, news)
        if (moved or last) and self.means and (last or now - self.row_at >= (now - self.started) / ROWS):
            self.metrics.add(self._row(news, rates))
            self.row_at = now
            self.arms.clear()
        view = self._view(news, rates, now)
        self.display.show(view, last)
        if last or now - self.status_at >= self.experiment.log_every:
            spent = {"spent": {name: shares(worker) for name, worker in self.trained.items()}} if last else {}
            self._write_status({**view, **spent})
            self.status_at = now
        if now - self.advised_at >= ADVICE:
            self._advise()
            self.advised_at = time.monotonic()
        # With a checkpoint, so that a run that continues from there has no gap before it.
        if last or news["checkpoint"] != self.saved or now - self.flushed_at >= FLUSH:
            self._flush()
            self.flushed_at, self.saved = now, news["checkpoint"]

    def close(self) -> None:
        """Leave the terminal as it was, and let the loggers end."""
        self.display.close()
        self.metrics.close()
        self.curves.lines.close()

    def _rates(self, now: float, news: Mapping[str, Any]) -> dict[str, float]:
        """Steps and updates per second over the window."""
        self.marks.append((now, news["steps"], news["updates"]))
        while len(self.marks) > 2 and now - self.marks[0][0] > WINDOW:
            self.marks.popleft()
        before, steps, updates = self.marks[0]
        seconds = max(now - before, 1e-9)
        return {
            "steps_per_s": (news["steps"] - steps) / seconds,
            "updates_per_s": (news["updates"] - updates) / seconds,
        }

    def _row(self, news: Mapping[str, Any], rates: Mapping[str, float]) -> dict[str, Any]:
        counts = {key: news[key] for key in ("steps", "updates", "episodes", "faults", "return", "length")}
        times = {"time": time.time(), "seconds": round(news["seconds"], 3)}
        row = {"kind": "train", **times, **counts, **rates, "metrics": self.means.take()}
        scores = sorted(self.arms.items())
        arms = {str(arm): {"episodes": len(each), "score": fmean(each)} for arm, each in scores}
        return row | ({"arms": arms} if arms else {})

    def _view(self, news: Mapping[str, Any], rates: Mapping[str, float], now: float) -> dict[str, Any]:
        report = self.report()
        if not self.trained or (news["steps"] < self.experiment.steps and not news["stopped_by"]):
            self.trained = report
        workers = {name: shares(worker, self.workers.get(name)) for name, worker in report.items()}
        if now - self.shares_at >= FLUSH:  # shares are those of the last seconds
            self.workers, self.shares_at = report, now
        left = max(self.experiment.steps - news["steps"], 0)
        saved = news["checkpoint"]
        return {
            **{key: news[key] for key in ("steps", "updates", "episodes", "faults", "return", "length", "seconds")},
            **rates,
            "title": self.title,
            "total": self.experiment.steps,
            "left": left / rates["steps_per_s"] if rates["steps_per_s"] > 0 else None,
            "evaluations": self.evaluations,
            "target": self.experiment.evaluation.target,
            "metrics": self.newest,
            "workers": workers,
            "checkpoint": saved and {"steps": saved["steps"], "age": news["seconds"] - saved["seconds"]},
            "problem": self.problem,
            "advice": self.advice,
        }

    def _advise(self) -> None:
        """See what could be better about the run, by its folder."""
        try:
            self.curves.refresh()
            self.advice = [str(each) for each in advice.of(self.run, self.curves)]
        except Exception:  # training matters more
            log.debug("no advice on %s", self.run, exc_info=True)

    def _write_status(self, view: Mapping[str, Any]) -> None:
        """Write the view to the folder; evaluations are in the metrics already, and only grow."""
        status = {key: value for key, value in view.items() if key != "evaluations"}
        directory.write_status(self.run, {"time": time.time(), **status})

    def _flush(self) -> None:
        try:
            self.metrics.flush()
            if self.trouble:
                log.warning("metrics are written again")
            self.trouble = ""
        except OSError as error:
            if self.trouble != str(error):
                log.error("metrics cannot be written; they are kept in memory: %s", error)
            self.trouble = str(error)


def shares(now: Mapping[str, Any], before: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A worker's moves per second, and how it spends its time, in all or since a report, as shares of it.

    `working` and `waits` are parts of its time, `parts` those of its work that have names; `computing` is the time of
    all cores that its process used.
    """
    if before is None or now.get("seconds", 0) <= before.get("seconds", 0):  # the latter: it was started again
        before = {}
    total = max(now.get("seconds", 0) - before.get("seconds", 0), 1e-9)

    def share(name: str) -> float:
        return round(float(now.get(name, 0) - before.get(name, 0)) / float(total), 4)

    def divided(name: str) -> dict[str, float]:
        earlier = before.get(name, {})
        return {each: round((spent - earlier.get(each, 0)) / total, 4) for each, spent in now.get(name, {}).items()}

    taken = ("waits", "parts", "working", "computing", "busy", "doing")
    return {
        **{key: value for key, value in now.items() if key not in taken},
        "moves_per_s": round((now.get("moves", 0) - before.get("moves", 0)) / total, 2),
        "working": share("working"),
        **({"computing": share("computing")} if "computing" in now else {}),
        "waits": divided("waits"),
        "parts": divided("parts"),
    }
