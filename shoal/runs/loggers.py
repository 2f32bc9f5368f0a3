"""Where else the metrics of a run go: TensorBoard, Weights & Biases, MLflow, or a logger of one's own.

Each logger has a thread of its own, so that one that fails, or never answers, costs its own entries and nothing else.
"""

from __future__ import annotations

import importlib.util
import io
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from shoal.core.errors import SettingsError, nearest
from shoal.core.recipe import find
from shoal.runs import files

log = logging.getLogger("shoal")
LOGGERS = {
    "tensorboard": "shoal.runs.loggers:TensorBoard",
    "wandb": "shoal.runs.loggers:WeightsAndBiases",
    "mlflow": "shoal.runs.loggers:MlFlow",
}
WAITING = 1_000  # chunks of rows that may wait for a logger; later ones are dropped
PATIENCE = 20.0  # seconds that a run waits at its end for what loggers still have to write
PROJECT = "shoal"
Row = Mapping[str, Any]


class Logger(Protocol):
    """What Shoal asks of a logger; it is made with the folder of a run, its settings, and the steps it continues at."""

    def write(self, rows: Sequence[Row]) -> None:
        """Take rows, as they are in metrics.jsonl."""
        ...

    def rewind(self, steps: int) -> None:
        """Everything after these steps was undone, and is done again."""
        ...

    def close(self) -> None:
        """Write what is left."""
        ...


def scalars(row: Row) -> Iterator[tuple[str, float]]:
    """The numbers of a row, under the names that loggers show."""
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


def installed(name: str) -> bool:
    """Whether the package of a logger is there."""
    return importlib.util.find_spec(name) is not None


def check(names: Sequence[str]) -> None:
    """Refuse loggers that do not exist, or whose package is not installed."""
    for name in names:
        if name not in LOGGERS and ":" not in name:
            raise SettingsError(
                f"loggers: unknown logger {name!r}: {', '.join(LOGGERS)}, or your own as package.module:Class"
                f"{nearest(name, LOGGERS)}"
            )
        if name in LOGGERS and not installed(name):
            raise SettingsError(f"loggers: {name} is not installed: pip install 'shoal[{name}]'")


def start(names: Sequence[str] | None, run: Path, settings: Mapping[str, Any], steps: int) -> list[Background]:
    """Start the loggers of a run; None: TensorBoard's where it is installed."""
    if names is None:
        names = ["tensorboard"] if installed("tensorboard") else []
    return [Background(name, partial(_make, LOGGERS.get(name, name), run, settings, steps)) for name in names]


def _make(path: str, run: Path, settings: Mapping[str, Any], steps: int) -> Logger:
    return find(path)(run, settings, steps)  # type: ignore[no-any-return]


class Background:
    """A logger in a thread of its own; what it raises is logged once, and what it cannot keep up with is dropped."""

    def __init__(self, name: str, make: Callable[[], Logger]) -> None:
        """Make the logger, in its thread: some take seconds."""
        self.name, self.make, self.problem = name, make, ""
        self.waiting = queue.Queue[tuple[str, Any]](WAITING)
        self.dropped = 0
        self.thread = threading.Thread(target=self._run, name=f"logger {name}", daemon=True)
        self.thread.start()

    def write(self, rows: Sequence[Row]) -> None:
        """Let it take rows."""
        self._ask("write", [*rows])

    def rewind(self, steps: int) -> None:
        """Let it forget what came after these steps."""
        self._ask("rewind", steps)

    def close(self) -> None:
        """Let it write what is left, for as long as a run can wait for that."""
        self._ask("close", None)
        self.thread.join(PATIENCE)
        if self.thread.is_alive():
            log.warning("logger %s did not end within %g s; the run does not wait for it", self.name, PATIENCE)
        if self.dropped:
            log.warning("logger %s was too slow: %d chunks of rows were dropped", self.name, self.dropped)

    def _ask(self, what: str, value: Any) -> None:
        try:
            self.waiting.put_nowait((what, value))
        except queue.Full:
            self.dropped += 1

    def _run(self) -> None:
        logger: Logger | None = None
        what = "begin"
        value: Any = None
        while True:
            try:
                logger = logger or self.make()
                if what == "write":
                    logger.write(value)
                elif what == "rewind":
                    logger.rewind(value)
                elif what == "close":
                    logger.close()
            except Exception as error:
                if self.problem != (problem := f"{type(error).__name__}: {error}"):
                    log.error("logger %s failed, and the run continues without what it missed: %s", self.name, problem)
                self.problem = problem
            if what == "close":
                return
            what, value = self.waiting.get()


class TensorBoard:
    """Events for TensorBoard, in the run's folder `tensorboard`."""

    def __init__(self, run: Path, settings: Mapping[str, Any], steps: int) -> None:
        """Begin a file of events; TensorBoard drops what earlier ones say of later steps."""
        from tensorboard.compat.proto.event_pb2 import Event

        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        self.path = run / "tensorboard" / name
        resumed = self.path.parent.exists()
        self._append([Event(wall_time=time.time(), file_version="brain.Event:2")])
        if resumed:
            self.rewind(steps)

    def write(self, rows: Sequence[Row]) -> None:
        """Append an event for each row."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [[Summary.Value(tag=tag, simple_value=value) for tag, value in scalars(row)] for row in rows]
        self._append(
            [
                Event(wall_time=row["time"], step=row["steps"], summary=Summary(value=each))
                for row, each in zip(rows, values, strict=True)
            ]
        )

    def rewind(self, steps: int) -> None:
        """Append a request to drop what came after these steps."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        again = SessionLog(status=SessionLog.START)
        self._append([Event(wall_time=time.time(), step=steps + 1, session_log=again)])

    def close(self) -> None:
        """Everything is written."""

    def _append(self, events: Sequence[Any]) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        chunk = io.BytesIO()
        writer = RecordWriter(chunk)
        for event in events:
            writer.write(event.SerializeToString())
        files.append(self.path, chunk.getvalue())


class WeightsAndBiases:
    """A run of Weights & Biases, offline unless WANDB_MODE says otherwise: `wandb sync` uploads it."""

    def __init__(self, run: Path, settings: Mapping[str, Any], steps: int) -> None:
        """Begin a run, in `wandb` beside the run's folder; one that is resumed becomes one more of the same group."""
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # offline, nothing calls home
        import wandb

        mode: Any = os.environ.get("WANDB_MODE", "offline")  # it checks the word itself
        self.run = wandb.init(
            mode=mode,
            dir=run.parent,  # not in the run's folder: its files link to others outside
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            group=run.name,
            name=run.name if not steps else f"{run.name} from step {steps:,}",
            config=dict(settings),
            settings=wandb.Settings(silent=True, console="off"),
        )
        self.run.define_metric("*", step_metric="steps")

    def write(self, rows: Sequence[Row]) -> None:
        """Log each row, over the steps of the environment."""
        for row in rows:
            self.run.log({**dict(scalars(row)), "steps": row["steps"]})

    def rewind(self, steps: int) -> None:
        """A history cannot be shortened: the same steps come again."""

    def close(self) -> None:
        """End the run, and the process that wrote it."""
        import wandb

        self.run.finish()
        wandb.teardown()


class MlFlow:
    """A run of MLflow, in `mlflow.db` beside the run's folder unless MLFLOW_TRACKING_URI says otherwise."""

    def __init__(self, run: Path, settings: Mapping[str, Any], steps: int) -> None:
        """Begin a run, or continue the one of a run that is resumed."""
        from mlflow.tracking import MlflowClient

        address = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{(run.parent / 'mlflow.db').resolve()}"
        self.client = MlflowClient(tracking_uri=address)
        known = self.client.get_experiment_by_name(PROJECT)
        experiment = known.experiment_id if known else self.client.create_experiment(PROJECT)
        before = self.client.search_runs([experiment], f"attributes.run_name = '{run.name}'", max_results=1)
        if before and steps:
            self.id = before[0].info.run_id
            return
        self.id = self.client.create_run(experiment, run_name=run.name).info.run_id
        for name, value in settings.items():
            self.client.log_param(self.id, name, value)

    def write(self, rows: Sequence[Row]) -> None:
        """Log the numbers of all rows at once."""
        from mlflow.entities import Metric

        numbers = [
            Metric(name, value, int(1000 * row["time"]), row["steps"]) for row in rows for name, value in scalars(row)
        ]
        for begin in range(0, len(numbers), 1000):  # more are refused
            self.client.log_batch(self.id, numbers[begin : begin + 1000])

    def rewind(self, steps: int) -> None:
        """A history cannot be shortened: the same steps come again."""

    def close(self) -> None:
        """End the run."""
        self.client.set_terminated(self.id)
