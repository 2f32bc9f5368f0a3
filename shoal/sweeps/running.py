"""A sweep from beginning to end: trials as runs of their own, several at a time, stopped and continued in order."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from shoal.configs import read
from shoal.core.errors import SettingsError, ShoalError
from shoal.display.console import duration, number
from shoal.experiment import validate
from shoal.runs import directory, files, metrics
from shoal.runs.launching import Job, carry_out
from shoal.sweeps import results
from shoal.sweeps.plan import PLAN, Plan, check_same
from shoal.sweeps.study import Study, Trial, library, mend

log = logging.getLogger("shoal")
BASE = "base.yaml"  # the experiment of every trial
HOPELESS = 3  # trials that fail before any other ended: the next would fail too


@dataclass
class Running:
    """A trial whose runs have begun, or are about to."""

    number: int
    values: Mapping[str, Any]
    jobs: tuple[Job, ...]
    left: set[Job] = field(default_factory=set)
    problem: str = ""
    stopped: bool = False  # by the pruner
    concluded: bool = False


class Sweep:
    """Carries out a plan in its folder."""

    def __init__(self, plan: Plan, folder: Path, report: Callable[[int], None] = lambda ended: None) -> None:
        """Open the study; the caller holds the folder. `report` is called with the number of trials that ended."""
        mend(folder)
        self.plan, self.folder, self.report = plan, folder, report
        self.study = Study(plan, folder)
        self.owners: dict[Path, Running] = {}
        self.seen: dict[Path, int] = {}  # bytes of the metrics of a run that were looked at

    def run(self) -> None:
        """Try settings until there are as many trials as planned; where some ran before, they go on."""
        self.report(self._ended())
        with closing(carry_out(self._jobs(), self.plan.number_at_once, self._watch)) as finished:
            for job, complete in finished:
                trial = self.owners[job.folder]
                trial.left.discard(job)
                if not (complete or trial.stopped or trial.problem):
                    trial.problem = f"see {job.log}"
                self._conclude(trial)

    def _jobs(self) -> Iterator[Job]:
        """The runs in their order; each trial's settings are chosen when there is room for it."""
        for unfinished in self.study.unfinished():
            yield from self._begin(unfinished)
        while len(self.study.trials()) < self.plan.trials:
            yield from self._begin(self.study.ask())

    def _begin(self, number: int) -> Iterator[Job]:
        """The runs of one trial, unless it is stopped meanwhile."""
        values = self.study.values(number)
        trial = Running(number, values, self._runs(number, values), stopped=self.study.marked(number))
        trial.left.update(trial.jobs)
        self.owners |= {job.folder: trial for job in trial.jobs}
        try:
            validate(read(self.plan.base, values))
        except SettingsError as error:  # each of them was checked, but not all of them together
            trial.problem = str(error)
        for job in trial.jobs:
            if trial.stopped or trial.problem:
                trial.left.discard(job)
                self._conclude(trial)
            else:
                yield job

    def _runs(self, number: int, values: Mapping[str, Any]) -> tuple[Job, ...]:
        settings = tuple(f"{name}={json.dumps(value)}" for name, value in values.items())
        folders = results.folders(self.plan, self.folder, number)
        return tuple(
            Job(folder, str(self.folder / BASE), (*settings, f"seed={seed}"))
            for seed, folder in zip(self.plan.seeds, folders, strict=True)
        )

    def _watch(self, job: Job) -> bool:
        """Whether a run should be stopped: its trial failed in another run, or does not keep up."""
        trial = self.owners[job.folder]
        if self.plan.prune and not (trial.stopped or trial.problem) and self._news(job.folder):
            trial.stopped = self.study.report(trial.number, results.curve(self.plan, self.folder, trial.number))
            if trial.stopped:
                self.study.mark(trial.number)
        return trial.stopped or bool(trial.problem)

    def _news(self, run: Path) -> bool:
        """Whether a run has written metrics since this was last asked."""
        path = metrics.file_of(run)
        size = path.stat().st_size if path.exists() else 0
        new = size != self.seen.get(run, 0)
        self.seen[run] = size
        return new

    def _conclude(self, trial: Running) -> None:
        """End a trial once all its runs have."""
        if trial.left or trial.concluded:
            return
        trial.concluded = True
        score = None if trial.problem or trial.stopped else results.score(self.plan, self.folder, trial.number)
        if score is None and not (trial.problem or trial.stopped):
            trial.problem = f"no evaluation with a finite mean: see {trial.jobs[0].log}"
        if not trial.problem:
            self.study.report(trial.number, results.curve(self.plan, self.folder, trial.number))
        self.study.tell(trial.number, score, trial.problem)
        self._say(self.study.trials()[trial.number])
        self.report(self._ended())
        self._give_up(trial)

    def _say(self, trial: Trial) -> None:
        """A line for a trial that ended."""
        row = results.row(self.plan, self.folder, trial)
        outcome = trial.state if trial.score is None else f"score {number(trial.score)}"
        outcome += f": {trial.problem}" if trial.problem else ""
        best = results.best(self.plan, self.study.trials())
        so_far = f", best so far {number(best.score)} (trial {best.number})" if best and best.score is not None else ""
        values = "  ".join(f"{name}={results.short(value)}" for name, value in trial.values.items())
        log.info("trial %d: %s in %s%s  %s", trial.number, outcome, duration(row["seconds"]), so_far, values)

    def _give_up(self, trial: Running) -> None:
        """End a sweep whose trials fail from the first on."""
        ended = [known for known in self.study.trials() if known.state != "running"]
        if trial.problem and len(ended) == HOPELESS and all(known.state == "failed" for known in ended):
            raise ShoalError(f"the first {HOPELESS} trials all failed; the last: {trial.problem}")

    def _ended(self) -> int:
        return sum(trial.state != "running" for trial in self.study.trials())


def prepare(plan: Plan, folder: Path) -> None:
    """Write down a sweep's plan; one that differs from what the folder was begun with is refused."""
    check_same(plan, folder)
    files.write(folder / PLAN, plan.as_yaml())
    files.write(folder / BASE, yaml.safe_dump(plan.base, sort_keys=False))


def sweep(plan: Plan, folder: Path, report: Callable[[int], None] = lambda ended: None) -> None:
    """Begin a sweep, or continue it."""
    library()  # before a folder is made
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(f"cannot create the sweep's folder {folder}: {error.strerror}") from None
    with directory.locked(folder):
        prepare(plan, folder)
        Sweep(plan, folder, report).run()
