"""What each thread is inside of, so that whoever watches it can say what takes so long."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

FIRST = 10.0  # seconds after which something that takes long is worth a line


@dataclass
class Doing:
    """What one thread does at present, and since when."""

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
    """Lets something be said again only after twice as long as the time before."""

    def __init__(self) -> None:
        """Let it be said now."""
        self._again, self._gap = float("-inf"), FIRST

    def due(self) -> bool:
        """Whether it is time to say it; if so, it counts as said."""
        now = time.monotonic()
        if now < self._again:
            return False
        self._gap *= 2
        self._again = now + self._gap
        return True


_threads: dict[int, Doing] = {}  # by identifier; one that is used again takes over what is there


def here() -> Doing:
    """What this thread does, to be written by itself and read by others."""
    thread = threading.get_ident()
    if thread not in _threads:
        _threads[thread] = Doing()
    return _threads[thread]
