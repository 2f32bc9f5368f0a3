"""Admission before authentication: how many strangers may be connected at once, and what the log says of them."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

from shoal.transport import Report

PLACES = 64  # strangers at once
LEAVING = 1.0  # seconds within which one who has to leave must be gone
LIMIT = 64 << 10  # bytes that a stranger may send
DISPLACED = "it took too long to identify itself while others were waiting"
CROWDED = "too many connections have not identified themselves yet"
THREADLESS = "this machine cannot start more threads"
IN_FULL, WINDOW = 10, 10.0  # refusals that are logged one by one within a number of seconds; the others are counted


class Place:
    """What one stranger occupies until it is known or gone."""

    def __init__(self, lobby: Lobby, host: str, disconnect: Callable[[], None]) -> None:
        """Belong to a connection from a host, which `disconnect` ends."""
        self.lobby, self.host, self.disconnect = lobby, host, disconnect
        self.displaced = False

    def leave(self) -> None:
        """Give it back; may be called more than once."""
        self.lobby.leave(self)


class Lobby:
    """Places for strangers; when all are taken, the one that has been there longest makes way for the next.

    It is chosen among those from the host with most of them, so that nobody keeps others out by connecting often.
    """

    def __init__(self) -> None:
        """Begin empty."""
        self._places: dict[Place, None] = {}  # in the order in which they were taken
        self._change = threading.Condition()

    def enter(self, host: str, disconnect: Callable[[], None]) -> Place | None:
        """A place, or None where nobody makes way in time."""
        with self._change:
            if len(self._places) >= PLACES:
                staying = [place for place in self._places if not place.displaced]
                most = Counter(place.host for place in staying).most_common(1)
                for oldest in [place for place in staying if place.host == most[0][0]][:1]:
                    oldest.displaced = True
                    oldest.disconnect()
                if not self._change.wait_for(lambda: len(self._places) < PLACES, LEAVING):
                    return None
            place = Place(self, host, disconnect)
            self._places[place] = None
            return place

    def leave(self, place: Place) -> None:
        """Take a place back."""
        with self._change:
            self._places.pop(place, None)
            self._change.notify_all()


class RefusalLog:
    """Reports refused connections: the first in full, then how many more there were, so that nobody fills a log."""

    def __init__(self, report: Report) -> None:
        """Report who was refused, and why."""
        self._report = report
        self._turn = threading.RLock()
        self._since, self._reported, self._more, self._last = -WINDOW, 0, 0, ""
        self._timer: threading.Timer | None = None

    def __call__(self, peer: str, reason: str) -> None:
        """Report one refusal, or count it."""
        with self._turn:
            now = time.monotonic()
            if now - self._since >= WINDOW:
                self.flush()
                self._since, self._reported = now, 0
            if self._reported < IN_FULL:
                self._reported += 1
                self._report(peer, reason)
                return
            self._more, self._last = self._more + 1, f"{peer}, {reason}"
            if self._timer is None:
                timer = threading.Timer(self._since + WINDOW - now, self.flush)
                timer.daemon, timer.name = True, "refusals"
                with suppress(RuntimeError):  # without a thread for it, the next refusal reports
                    timer.start()
                    self._timer = timer

    def flush(self) -> None:
        """Report now how many more there were."""
        with self._turn:
            if self._timer is not None:
                self._timer.cancel()
            more, self._more, self._timer = self._more, 0, None
            if more:
                self._report(f"{more} more in the last {WINDOW:g} s", f"the last one {self._last}")
