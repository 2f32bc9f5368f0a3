"""The metrics of a run over time: `metrics.jsonl`, written in chunks, which go to the loggers too.

A row of kind `train` has the counts, the rates and the means since the previous row; one of kind `evaluation` has the
score of the weights after that number of steps.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.runs import files
from shoal.runs.loggers import Logger

MOST = 10_000  # rows kept in memory while the disk cannot be written


class Metrics:
    """Collects rows, which reach the disk at `flush`."""

    def __init__(self, run: Path, steps: int, loggers: Sequence[Logger] = ()) -> None:
        """Continue at a number of steps; later rows are dropped, since those steps are taken again."""
        self.run, self.rows, self.loggers = run, list[Mapping[str, Any]](), loggers
        self._drop(steps)

    def rewind(self, steps: int) -> None:
        """Drop everything measured after a number of steps."""
        self._drop(steps)
        for logger in self.loggers:
            logger.rewind(steps)

    def _drop(self, steps: int) -> None:
        path = file_of(self.run)
        self.rows = [row for row in self.rows if row["steps"] <= steps]
        if path.exists():
            kept = "".join(json.dumps(row) + "\n" for row in read(self.run) if row["steps"] <= steps)
            files.write(path, kept)

    def add(self, row: Mapping[str, Any]) -> None:
        """Take a row."""
        self.rows.append(row)
        del self.rows[:-MOST]

    def flush(self) -> None:
        """Append what was added to the files; an OSError leaves it waiting."""
        if self.rows:
            files.append(file_of(self.run), "".join(json.dumps(row) + "\n" for row in self.rows).encode())
            for logger in self.loggers:
                logger.write(self.rows)
            self.rows = []

    def close(self) -> None:
        """Let every logger write what is left."""
        for logger in self.loggers:
            logger.close()


def file_of(run: Path) -> Path:
    """The file of a run's rows."""
    return run / "metrics.jsonl"


def evaluations(run: Path) -> dict[int, float]:
    """Steps → mean return of each evaluation of a run so far, in the order of the steps."""
    found = {row["steps"]: float(row["mean"]) for row in read(run, "evaluation")}
    return {steps: found[steps] for steps in sorted(found)}


def read(run: Path, kind: str = "") -> list[dict[str, Any]]:
    """The rows of a run, all or those of one kind; a last line that was cut off by a crash is left out."""
    try:
        lines = file_of(run).read_text().splitlines()
    except FileNotFoundError:
        return []
    rows = []
    for number, line in enumerate(lines):
        if kind and f'"kind": "{kind}"' not in line:  # cheaper than to read it
            continue
        try:
            rows.append(json.loads(line))
        except ValueError:
            if number < len(lines) - 1:
                raise
    return rows
