"""What happened so far: everyone reports to it, and it says when to stop."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import Any


class Journal:
    """Counts, newest metrics, recent episodes, evaluations and faults."""

    def __init__(self, target: float | None = None) -> None:
        """Stop the run when an evaluation reaches the target, if there is one."""
        self.target = target
        self.started = time.time()
        self.first_update: float | None = None
        self.counts = {"steps": 0, "updates": 0, "episodes": 0, "faults": 0}
        self.metrics: dict[str, float] = {}
        self.episodes: deque[tuple[float, int]] = deque(maxlen=100)
        self.evaluations: list[dict[str, Any]] = []
        self.faults: deque[str] = deque(maxlen=20)
        self.stopped_by = ""

    def learned(self, steps: int, updates: int, metrics: Mapping[str, float]) -> bool:
        """Take the learner's progress; True: end the run."""
        if updates and self.first_update is None:
            self.first_update = time.time()
        self.counts["steps"], self.counts["updates"] = steps, updates
        self.metrics.update(metrics)
        return bool(self.stopped_by)

    def acted(self, episodes: list[Any], faults: list[str]) -> None:
        """Take the episodes, as [score, length, …], that ended with an actor, and what broke there."""
        self.episodes.extend((score, length) for score, length, *_ in episodes)
        self.counts["episodes"] += len(episodes)
        self.counts["faults"] += len(faults)
        self.faults.extend(faults)

    def evaluated(self, result: Mapping[str, Any]) -> bool:
        """Take an evaluation: `steps` that produced the weights, `mean`, `scores` and metrics; True: no more wanted."""
        self.evaluations.append({**result, "seconds": time.time() - self.started})
        if self.target is not None and result["mean"] >= self.target:
            self.stop("target")
        return bool(self.stopped_by)

    def stop(self, reason: str) -> None:
        """Ask the learner to end the run; the first reason stays."""
        self.stopped_by = self.stopped_by or reason

    def stopping(self) -> str:
        """Why the run should end; empty: it should not."""
        return self.stopped_by

    def drain_faults(self) -> list[str]:
        """The fault reports since the last call."""
        faults = list(self.faults)
        self.faults.clear()
        return faults

    def snapshot(self) -> Mapping[str, Any]:
        """Everything, for display and summary."""
        scores = [score for score, _ in self.episodes]
        return {
            **self.counts,
            "seconds": time.time() - self.started,
            "first_update": self.first_update and self.first_update - self.started,
            "metrics": dict(self.metrics),
            "recent_return": sum(scores) / len(scores) if scores else None,
            "evaluations": list(self.evaluations),
            "stopped_by": self.stopped_by,
        }
