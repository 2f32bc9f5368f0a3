"""Runs that only pretend to learn, at once and by a formula."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable
from typing import Any

from shoal.configs import parse_overrides
from shoal.experiment import load
from shoal.runs import metrics
from shoal.writing import as_yaml


class Killed(BaseException):
    """Stands for `kill -9`."""


class Pretended:
    """A program as `carry_out` sees it, whose evaluations are those of a function of settings and steps."""

    stdin = None
    killed_after = 10**9  # evaluations of all runs
    log: list[tuple[str, str]]  # (train, resume, stopped) and the run

    def __init__(self, job: Any, objective: Callable[[dict[str, Any], int], float | None]) -> None:
        self.job, self.objective, self.told = job, objective, False
        begun = (job.folder / "config.yaml").exists()
        self.log.append(("resume" if begun else "train", job.folder.name))
        self.settings = parse_overrides(list(job.settings))
        if not begun:
            job.folder.mkdir(parents=True)
            (job.folder / "config.yaml").write_text(as_yaml(load(job.config, self.settings)))

    def wait(self, timeout: float | None = None) -> int:
        done = len(metrics.evaluations(self.job.folder))
        if done < 5 and not self.told:
            Pretended.killed_after -= 1
            if Pretended.killed_after < 0:
                raise Killed
            value = self.objective(self.settings, 100 * (done + 1))
            if value is None:
                return 1
            row = {"kind": "evaluation", "steps": 100 * (done + 1), "mean": value, "time": done}
            with metrics.file_of(self.job.folder).open("a") as file:
                file.write(json.dumps(row) + "\n")
            raise subprocess.TimeoutExpired("shoal", timeout or 0)
        why = "interrupted" if self.told else "steps"
        summary = {"stopped_by": why, "steps": 100 * done, "seconds": float(done), "solved": None}
        (self.job.folder / "summary.json").write_text(json.dumps(summary))
        return 0

    def send_signal(self, number: int) -> None:
        assert number == signal.SIGINT
        self.log.append(("stopped", self.job.folder.name))
        self.told = True
