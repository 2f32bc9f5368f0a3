"""Progress of a run: a live panel on a terminal, a bar in a notebook, else one line at a time."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

log = logging.getLogger("shoal")
FORMAT = logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S")
DATED = logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S")
SHOWN = ("policy_loss", "value_loss", "entropy", "lag")
LABELS = {
    "lr": "learning rate",
    "lag": "policy lag",
    "weights_mb": "weights sent (MB)",
    "received_mb": "received (MB)",
    "sent_mb": "sent (MB)",
}


class Display(Protocol):
    """Shows the state of a run."""

    def show(self, view: Mapping[str, Any], last: bool) -> None:
        """Show a new state."""
        ...

    def close(self) -> None:
        """Leave the terminal as it was."""
        ...


class Lines:
    """A plain line at every interval."""

    def __init__(self, interval: float) -> None:
        """Start the clock."""
        self.interval, self.shown = interval, time.monotonic()

    def show(self, view: Mapping[str, Any], last: bool) -> None:
        """Log a line if the interval is over."""
        if time.monotonic() - self.shown >= self.interval:
            self.shown = time.monotonic()
            log.info(progress_line(view))

    def close(self) -> None:
        """Do nothing: lines need no cleaning up."""


def display(interval: float) -> Display:
    """A panel where there is a terminal, a bar in a notebook, lines elsewhere."""
    if sys.stderr.isatty():
        from shoal.display.panel import Panel

        return Panel()
    from shoal.display import notebook

    if notebook.inside():
        return notebook.Bar()
    return Lines(interval)


class Terminal(logging.StreamHandler[Any]):
    """Writes to the current `sys.stderr`, which a panel may have replaced to stay below the lines."""

    @property
    def stream(self) -> Any:
        """The current standard error."""
        return sys.stderr

    @stream.setter
    def stream(self, value: Any) -> None:
        """Ignore any other."""


class Quiet(logging.FileHandler):
    """A log file that ignores a full disk: training matters more."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Ignore it."""


@contextmanager
def logging_to(file: Path) -> Iterator[None]:
    """Send the log to a file, and to the terminal unless something else handles it."""
    before = log.level
    handlers: list[logging.Handler] = [Terminal()] if not log.hasHandlers() else []
    with suppress(OSError):
        handlers.append(Quiet(file, delay=True, encoding="utf-8"))
    for handler in handlers:
        handler.setFormatter(FORMAT if isinstance(handler, Terminal) else DATED)
        log.addHandler(handler)
    log.setLevel(min(before, logging.INFO) or logging.INFO)
    try:
        yield
    finally:
        log.setLevel(before)
        for handler in handlers:
            log.removeHandler(handler)
            with suppress(OSError):
                handler.close()


@contextmanager
def progress(what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """A progress bar that is given the number done so far; nothing where there is no terminal."""
    if not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done)


def title(experiment: Any) -> str:
    """Algorithm, environment and engine, in a few words."""
    return f"{experiment.algorithm_name} on {experiment.environment.id} · {experiment.engine}"


def evaluation_line(result: Mapping[str, Any]) -> str:
    """One evaluation as a line."""
    extra = "".join(f"  {name} {value:.4g}" for name, value in result["metrics"].items())
    count = len(result["scores"])
    cut = f" ({result['cut']} cut off by evaluation.max_steps)" if result.get("cut") else ""
    mean = number(result["mean"])
    return f"evaluation at step {result['steps']:,}: mean return {mean} over {count} episodes{cut}{extra}"


def readable(name: str) -> str:
    """The name of a metric as people read it."""
    return LABELS.get(name, name.replace("_", " "))


def progress_line(view: Mapping[str, Any]) -> str:
    """The run's progress as a line."""
    parts = [f"{min(100 * view['steps'] / view['total'], 100):3.0f} %", f"step {view['steps']:,}"]
    parts += [f"{view['steps_per_s']:,.0f} steps/s"]
    if view["left"] is not None:
        parts.append(f"{duration(view['left'])} left")
    if view["return"] is not None:
        parts.append(f"return {number(view['return'])}")
    parts += [f"{name} {value:.3g}" for name, value in view["metrics"].items() if name in SHOWN]
    return "  ".join(parts)


def number(value: float) -> str:
    """A return, with the digits that matter."""
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """A time span to read: 45 s, 12:30 min, 3:05 h."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60) if seconds >= 3600 else int(seconds // 60)
    if seconds < 3600:
        return f"{minutes}:{int(seconds % 60):02d} min"
    return f"{minutes // 60}:{minutes % 60:02d} h"
