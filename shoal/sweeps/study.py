"""Optuna's part of a sweep: which settings come next, which trial is stopped early, and what is remembered of them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.core.errors import ShoalError
from shoal.core.randomness import derive
from shoal.sweeps.plan import Choice, Plan

JOURNAL = "journal.log"  # what Optuna remembers
NAME = "sweep"
STARTUP = 10  # trials whose settings are drawn at random; Optuna's own choice for TPE
FEWEST = 5  # trials that have to end before any is stopped early; Optuna's own choice for its median rule


@dataclass(frozen=True)
class Trial:
    """What is known of a trial."""

    number: int
    state: str  # complete, pruned, failed or running
    values: Mapping[str, Any]
    score: float | None
    problem: str


def library() -> Any:
    """Optuna, or an error that names the extra."""
    try:
        import optuna
    except ImportError as error:
        raise ShoalError("sweeps need optuna: pip install 'shoal[sweep]'") from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


class Alone:
    """The lock of a journal that a sweep has for itself; Optuna's own would stay locked after a crash."""

    def acquire(self) -> bool:
        """Do nothing: the sweep holds its folder."""
        return True

    def release(self) -> None:
        """Do nothing."""


class Study:
    """The trials of a sweep, in a journal in its folder."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        """Open the journal, or begin one; the caller holds the folder, or only reads."""
        self.plan, self.optuna = plan, library()
        storages = self.optuna.storages
        backend = storages.journal.JournalFileBackend(str(folder / JOURNAL), lock_obj=Alone())
        storage, pruner = storages.JournalStorage(backend), self._pruner()
        try:
            self.study = self.optuna.load_study(study_name=NAME, storage=storage, pruner=pruner)
        except KeyError:  # there is none yet
            self.study = self.optuna.create_study(
                study_name=NAME, storage=storage, pruner=pruner, direction=plan.direction
            )
        self.asked: dict[int, Any] = {}  # number → Optuna's trial, of those that run

    def _pruner(self) -> Any:
        pruners, plan = self.optuna.pruners, self.plan
        length = max(plan.experiment.steps // plan.experiment.evaluation_interval, 1)
        first = int(plan.prune_from * length)
        if plan.prune == "median":
            return pruners.MedianPruner(FEWEST, first)
        if plan.prune == "quartile":
            return pruners.PercentilePruner(25.0, FEWEST, first)
        if plan.prune == "halving":
            return pruners.SuccessiveHalvingPruner(min_resource=max(first, 1), reduction_factor=3)
        return pruners.NopPruner()

    def unfinished(self) -> list[int]:
        """The trials that ran when the sweep was last stopped."""
        running = self.optuna.trial.TrialState.RUNNING
        for trial in self.study.get_trials(deepcopy=False, states=(running,)):
            self._seed(trial.number)
            self.asked.setdefault(trial.number, self.optuna.trial.Trial(self.study, trial._trial_id))
        return sorted(self.asked)

    def ask(self) -> int:
        """Begin another trial."""
        self._seed(len(self.study.get_trials(deepcopy=False)))
        trial = self.study.ask()
        self.asked[trial.number] = trial
        return int(trial.number)

    def _seed(self, number: int) -> None:
        """Draw for each trial by a seed of its own: a sweep that was stopped draws the same as one that went on."""
        self.study.sampler = self.optuna.samplers.TPESampler(
            n_startup_trials=STARTUP, constant_liar=True, seed=derive(self.plan.seed, "trial", number)
        )

    def values(self, number: int) -> dict[str, Any]:
        """The settings of a trial that runs; those that it has already stay."""
        trial, found = self.asked[number], dict[str, Any]()
        for name, dimension in self.plan.space.items():
            if isinstance(dimension, Choice):
                found[name] = json.loads(trial.suggest_categorical(name, [json.dumps(v) for v in dimension.values]))
            elif dimension.whole:
                step = 1 if dimension.step is None else dimension.step
                found[name] = trial.suggest_int(name, dimension.low, dimension.high, step=step, log=dimension.log)
            else:
                found[name] = trial.suggest_float(
                    name, dimension.low, dimension.high, step=dimension.step, log=dimension.log
                )
        return found

    def report(self, number: int, curve: Mapping[int, float]) -> bool:
        """Note the evaluations of a trial that are new; True: it should be stopped."""
        trial = self.asked[number]
        known = self.study.get_trials(deepcopy=False)[number].intermediate_values
        stop = False
        for point in sorted({*curve} - {*known}):
            trial.report(curve[point], point)
            stop = stop or trial.should_prune()
        return stop

    def mark(self, number: int) -> None:
        """Remember that a trial is being stopped early, before its runs are."""
        self.asked[number].set_user_attr("stopped", True)

    def marked(self, number: int) -> bool:
        """Whether a trial was being stopped early."""
        return bool(self.asked[number].user_attrs.get("stopped"))

    def tell(self, number: int, score: float | None, problem: str = "") -> None:
        """End a trial: with a score, as stopped early, or as failed."""
        states, trial = self.optuna.trial.TrialState, self.asked[number]
        if problem:
            trial.set_user_attr("problem", problem)
            self.study.tell(trial, state=states.FAIL)
        elif self.marked(number):
            self.study.tell(trial, state=states.PRUNED)
        else:
            self.study.tell(trial, score)
        del self.asked[number]

    def trials(self) -> list[Trial]:
        """All trials so far."""
        names = {"COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed", "RUNNING": "running"}
        return [
            Trial(
                trial.number,
                names.get(trial.state.name, "running"),
                {
                    name: json.loads(value) if isinstance(self.plan.space[name], Choice) else value
                    for name, value in trial.params.items()
                },
                trial.value if trial.state.name == "COMPLETE" else None,
                str(trial.user_attrs.get("problem", "")),
            )
            for trial in self.study.get_trials(deepcopy=False)
        ]


def mend(folder: Path) -> None:
    """Cut off the journal's last line where a crash left it unfinished: what follows it could not be read."""
    path = folder / JOURNAL
    if path.exists():
        content = path.read_bytes()
        if (whole := content.rfind(b"\n") + 1) < len(content):
            os.truncate(path, whole)
