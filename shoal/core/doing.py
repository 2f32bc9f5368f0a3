"""What each thread is doing, so that whoever watches it can say what takes so long."""

from __future__ import annotations

import threading
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import TracebackType

from shoal.core.spans import Spans

FIRST = 10.0  # seconds after which something slow is worth a line in the log


@dataclass
class Doing:
    """What one thread is doing, and since when."""

    what: str = ""  # empty: nothing that has a name
    where: str = ""
    since: float = field(default_factory=time.monotonic)
    parts: dict[str, Part] | None = None  # of the work of the worker that the thread runs; None: it runs none
    spans: Spans | None = None  # of that worker; None: nobody wants to know

    def begin(self, what: str, where: str) -> None:
        """Mark the start of something that may take long, such as a step of an environment."""
        self.what, self.where, self.since = what, where, time.monotonic()

    def end(self) -> None:
        """Mark its end."""
        self.what, self.since = "", time.monotonic()

    def __str__(self) -> str:
        """What it is, for people."""
        return f"{self.what} of {self.where}" if self.what else ""


class Seldom:
    """Counts a repeated event, and lets it be reported ever more rarely: each time after twice as long as before."""

    def __init__(self) -> None:
        """Let the first be reported at once."""
        self.count, self._again, self._gap = 0, float("-inf"), FIRST

    def due(self) -> bool:
        """Count the event, and say whether to report it."""
        self.count += 1
        now = time.monotonic()
        if now < self._again:
            return False
        self._gap *= 2
        self._again = now + self._gap
        return True


_threads: dict[int, Doing] = {}  # by identifier; a thread that reuses one takes over its entry


def here() -> Doing:
    """What this thread is doing, written by the thread itself and read by others."""
    thread = threading.get_ident()
    if thread not in _threads:
        _threads[thread] = Doing()
    return _threads[thread]


class Part:
    """A part of a worker's work: the seconds spent in it so far, also where it was left by an error."""

    __slots__ = ("_name", "_spans", "_start", "seconds")

    def __init__(self, name: str, spans: Spans | None) -> None:
        self.seconds, self._name, self._spans, self._start = 0.0, name, spans, 0.0

    def __enter__(self) -> None:
        self._start = time.monotonic()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        now = time.monotonic()
        self.seconds += now - self._start
        if self._spans is not None:
            self._spans.add(self._name, self._start, now)


NOBODY: AbstractContextManager[None] = nullcontext()


def span(name: str) -> AbstractContextManager[None]:
    """Count what this thread's worker does inside as a part of its work, and note it for a trace where one is wanted.

    A part is not inside another of the same name.
    """
    doing = here()
    if doing.parts is None:
        return NOBODY
    part = doing.parts.get(name)
    if part is None:
        part = doing.parts[name] = Part(name, doing.spans)
    return part
