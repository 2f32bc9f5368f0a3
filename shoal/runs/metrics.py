"""The metrics of a run over time: `metrics.jsonl` and TensorBoard events, written in chunks.

A row of kind `train` has the counts, the rates and the means since the previous row; one of kind `evaluation` has the
score of the weights after that number of steps.
"""

from __future__ import annotations

import io
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shoal.runs import files

MOST = 10_000  # rows kept in memory while the disk cannot be written


class Metrics:
    """Collects rows, which reach the disk at `flush`."""

    def __init__(self, run: Path, steps: int) -> None:
        """Continue at a number of steps; later rows are dropped, since those steps are taken again."""
        self.run, self.rows = run, list[Mapping[str, Any]]()
        self.events: Path | None = None
        self.rewind(steps)

    def rewind(self, steps: int) -> None:
        """Drop everything measured after a number of steps."""
        path = file_of(self.run)
        self.rows = [row for row in self.rows if row["steps"] <= steps]
        if path.exists():
            kept = "".join(json.dumps(row) + "\n" for row in read(self.run) if row["steps"] <= steps)
            files.write(path, kept)
            self._flush_events([], forget=steps + 1)  # at once: a crash before the first row must not undo it

    def add(self, row: Mapping[str, Any]) -> None:
        """Take a row."""
        self.rows.append(row)
        del self.rows[:-MOST]

    def flush(self) -> None:
        """Append what was added to the files; an OSError leaves it waiting."""
        if self.rows:
            files.append(file_of(self.run), "".join(json.dumps(row) + "\n" for row in self.rows).encode())
            rows, self.rows = self.rows, []
            self._flush_events(rows)

    def _flush_events(self, rows: list[Mapping[str, Any]], forget: int | None = None) -> None:
        """Append events for TensorBoard, after a request to drop those from step `forget` on."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        chunk = io.BytesIO()
        writer = RecordWriter(chunk)
        if self.events is None:
            name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
            self.events = self.run / "tensorboard" / name
            writer.write(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())
        if forget is not None:
            again = SessionLog(status=SessionLog.START)
            writer.write(Event(wall_time=time.time(), step=forget, session_log=again).SerializeToString())
        for row in rows:
            values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars(row)]
            event = Event(wall_time=row["time"], step=row["steps"], summary=Summary(value=values))
            writer.write(event.SerializeToString())
        files.append(self.events, chunk.getvalue())


def scalars(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers of a row under TensorBoard's names."""
    if row["kind"] == "evaluation":
        yield "evaluation/return", row["mean"]
        yield "evaluation/length", row["length"]
        yield from ((f"evaluation/{name}", value) for name, value in row["metrics"].items())
        return
    yield from ((f"speed/{name}", row[name]) for name in ("steps_per_s", "updates_per_s"))
    yield from ((f"train/{name}", row[name]) for name in ("return", "length") if row[name] is not None)
    yield from ((f"learner/{name}", value) for name, value in row["metrics"].items())
    for arm, figures in row.get("arms", {}).items():
        yield from ((f"bandit/{name}/{arm:0>2}", value) for name, value in figures.items())


def file_of(run: Path) -> Path:
    """The file of a run's rows."""
    return run / "metrics.jsonl"


def read(run: Path) -> list[dict[str, Any]]:
    """The rows of a run; a last line that was cut off by a crash is left out."""
    try:
        lines = file_of(run).read_text().splitlines()
    except FileNotFoundError:
        return []
    rows = []
    for number, line in enumerate(lines):
        try:
            rows.append(json.loads(line))
        except ValueError:
            if number < len(lines) - 1:
                raise
    return rows
