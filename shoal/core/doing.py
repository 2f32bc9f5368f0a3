"""What each thread is doing, so that whoever watches it can say what takes so long."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

FIRST = 10.0  # seconds after which something slow is worth a line in the log


@dataclass
class Doing:
    """What one thread is doing, and since when."""

    what: str = ""  # empty: nothing that has a name
    where: str = ""
    since: float = field(default_factory=time.monotonic)

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
