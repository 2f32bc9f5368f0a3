"""What happened so far: everyone reports to it, and it says when to stop."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.core.caller import caller
from shoal.core.means import Means

FAULTS = 20  # reports that wait for the recorder
PULLS = 1_000  # of bandits that are remembered
LONGEST = 20_000  # characters of one


class Journal:
    """Counts, metrics, recent episodes, evaluations and faults."""

    def __init__(
        self, target: float | None = None, state: Mapping[str, Any] | None = None, stages: Sequence[float] = ()
    ) -> None:
        """Stop the run when an evaluation reaches the target, if there is one; continue from a saved state.

        `stages` are the scores that end the stages of a curriculum, all but the last of which end.
        """
        state = state or {}
        self.target, self.stages = target, stages
        self.started: float = time.monotonic() - state.get("seconds", 0.0)
        self.first_update: float | None = state.get("first_update")  # seconds after the start
        self.counts = {"steps": 0, "updates": 0, "episodes": 0, "faults": 0, **state.get("counts", {})}
        self.metrics: dict[str, float] = dict(state.get("metrics", {}))  # the newest
        self.means = Means()  # of the metrics since the recorder last asked
        self.episodes = deque[tuple[float, int]](map(tuple, state.get("episodes", ())), maxlen=100)
        self.evaluations: list[dict[str, Any]] = list(state.get("evaluations", ()))
        self.recorded = len(self.evaluations)  # how many the recorder has
        self.faults: deque[str] = deque(maxlen=FAULTS)
        self.choices: deque[list[float]] = deque(maxlen=10_000)  # since the recorder last asked
        self.recent = deque[list[float]](state.get("pulls", ()), maxlen=PULLS)  # the newest choices
        self.checkpoint: dict[str, float] | None = None
        self.stopped_by = ""

    def learned(self, steps: int, updates: int, metrics: Mapping[str, float]) -> bool:
        """Note the learner's progress; True: end the run."""
        if updates and self.first_update is None:
            self.first_update = self._seconds()
        self.counts["steps"], self.counts["updates"] = steps, updates
        self.metrics.update(metrics)
        self.means.add(metrics)
        return bool(self.stopped_by)

    def measured(self, metrics: Mapping[str, float]) -> None:
        """Note what a worker other than the learner measured."""
        if not all(map(_number, metrics.values())):
            self.faults.append(f"{caller() or 'someone'} reported metrics that are not finite numbers: left out")
            self.counts["faults"] += 1
            return
        self.metrics.update(metrics)
        self.means.add(metrics)

    def went_back(self, steps: int) -> None:
        """Note that the learner continues from an earlier step, and forget what was scored after it."""
        self.counts["steps"] = steps
        self.evaluations = [result for result in self.evaluations if result["steps"] <= steps]
        self.recorded = min(self.recorded, len(self.evaluations))

    def saved(self, steps: int, problem: str) -> None:
        """Note that a checkpoint was saved, or why not."""
        if problem:
            self.report(problem)
        else:
            self.checkpoint = {"steps": steps, "seconds": self._seconds()}

    def acted(self, episodes: list[Any], faults: list[str], choices: Sequence[list[float]] = ()) -> None:
        """Note an actor's episodes as [score, length, …], its faults, and its bandits' pulls as [arm, score]."""
        played = [(score, length) for score, length, *_ in episodes if _number(score) and _number(length, 0)]
        pulled = [[arm, score] for arm, score in choices if _number(arm, 0) and _number(score)]
        if len(played) < len(episodes) or len(pulled) < len(choices):
            self.faults.append(
                f"{caller() or 'someone'} reported episodes or choices that are not finite numbers: left out"
            )
            self.counts["faults"] += 1
        self.episodes.extend(played)
        self.counts["episodes"] += len(played)
        self.counts["faults"] += len(faults)
        self.faults.extend(str(fault)[:LONGEST] for fault in faults[-FAULTS:])
        self.choices.extend(pulled)
        self.recent.extend(pulled)

    def pulls(self) -> list[list[float]]:
        """The newest pulls of bandits, each as [arm, score]: what a new bandit can know."""
        return [*self.recent]

    def report(self, problem: str) -> None:
        """Note something that the user should know."""
        self.faults.append(problem)

    def evaluated(self, result: Mapping[str, Any]) -> bool:
        """Note an evaluation: `steps` behind the weights, `mean`, `scores` and metrics; True: no more are wanted."""
        self.evaluations.append({**result, "seconds": self._seconds()})
        if self.target is not None and result["mean"] >= self.target and result.get("stage", 0) == len(self.stages):
            self.stop("target")
        return bool(self.stopped_by)

    def stage(self) -> int:
        """The stage of the curriculum, from the evaluations so far: so whoever goes back to earlier ones goes back."""
        stage = 0
        for result in self.evaluations:
            if stage < len(self.stages) and result.get("stage") == stage and result["mean"] >= self.stages[stage]:
                stage += 1
        return stage

    def last_evaluated(self) -> int:
        """The steps behind the weights that were scored last."""
        return self.evaluations[-1]["steps"] if self.evaluations else 0

    def stop(self, reason: str) -> None:
        """Ask the learner to end the run; the first reason stays."""
        self.stopped_by = self.stopped_by or reason

    def stopping(self) -> str:
        """Why the run should end; empty: it should not."""
        return self.stopped_by

    def drain(self) -> Mapping[str, Any]:
        """A snapshot with the evaluations, problems and means of the metrics since the last call."""
        news = {
            **self.snapshot(),
            "metrics": self.means.take(),
            "evaluations": self.evaluations[self.recorded :],
            "problems": list(self.faults),
            "choices": list(self.choices),
            "checkpoint": self.checkpoint,
        }
        self.recorded = len(self.evaluations)
        self.faults.clear()
        self.choices.clear()
        return news

    def snapshot(self) -> Mapping[str, Any]:
        """Everything, for the summary."""
        return {
            **self.counts,
            "seconds": self._seconds(),
            "first_update": self.first_update,
            "metrics": dict(self.metrics),
            "return": _mean([score for score, _ in self.episodes]),
            "length": _mean([length for _, length in self.episodes]),
            "evaluations": list(self.evaluations),
            "stopped_by": self.stopped_by,
        }

    def _seconds(self) -> float:
        """Seconds since the beginning, by a monotonic clock."""
        return time.monotonic() - self.started

    def state(self) -> Mapping[str, Any]:
        """What a resumed run continues from."""
        return {
            "seconds": self._seconds(),
            "first_update": self.first_update,
            "counts": dict(self.counts),
            "metrics": dict(self.metrics),
            "episodes": [list(episode) for episode in self.episodes],
            "evaluations": list(self.evaluations),
            "pulls": [*self.recent],
        }


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _number(value: Any, least: float = -math.inf) -> bool:
    """Whether a value is a finite number, and not below the least."""
    return type(value) in (int, float) and math.isfinite(value) and value >= least
