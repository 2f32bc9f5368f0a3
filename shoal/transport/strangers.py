"""Those who have not shown who they are: how many may be here at once, and what is said of those who are refused."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

PLACES = 64  # strangers at once
GOING = 1.0  # seconds in which one who is put out has to be gone
PUT_OUT = "it took too long while others waited: only so many may be here who are not known yet"
CROWDED = "too many are here already who are not known yet"
THREADLESS = "this machine starts no more threads"
FULLY, WINDOW = 10, 10.0  # refusals that are told one by one in so many seconds; the others are counted


class Place:
    """What one stranger takes up until he is known or gone."""

    def __init__(self, room: Room, host: str, put_out: Callable[[], None]) -> None:
        """Be taken by somebody from a host, whom `put_out` makes go."""
        self.room, self.host, self.put_out = room, host, put_out
        self.wanted = False  # by somebody else

    def leave(self) -> None:
        """Give it back; also more than once."""
        self.room.leave(self)


class Room:
    """Places for strangers: where all are taken, whoever has been there longest makes way for the next.

    He is chosen among those from the host with most of them, so that nobody keeps out the others by coming often.
    """

    def __init__(self) -> None:
        """Begin empty."""
        self._places: dict[Place, None] = {}  # in the order in which they were taken
        self._change = threading.Condition()

    def enter(self, host: str, put_out: Callable[[], None]) -> Place | None:
        """A place, or None where nobody makes way in time."""
        with self._change:
            if len(self._places) >= PLACES:
                staying = [place for place in self._places if not place.wanted]  # the others are about to go
                crowd = Counter(place.host for place in staying).most_common(1)
                for oldest in [place for place in staying if place.host == crowd[0][0]][:1]:
                    oldest.wanted = True
                    oldest.put_out()
                if not self._change.wait_for(lambda: len(self._places) < PLACES, GOING):
                    return None
            place = Place(self, host, put_out)
            self._places[place] = None
            return place

    def leave(self, place: Place) -> None:
        """Take a place back."""
        with self._change:
            self._places.pop(place, None)
            self._change.notify_all()


class Refusals:
    """Tells of those who were refused: the first in full, and how many more there were, so that nobody fills a log."""

    def __init__(self, tell: Callable[[str, str], None]) -> None:
        """Tell who was refused, and why."""
        self._tell = tell
        self._turn = threading.RLock()
        self._since, self._told, self._more, self._last = -WINDOW, 0, 0, ""
        self._timer: threading.Timer | None = None

    def __call__(self, peer: str, reason: str) -> None:
        """Tell of one, or count him."""
        with self._turn:
            now = time.monotonic()
            if now - self._since >= WINDOW:
                self.flush()
                self._since, self._told = now, 0
            if self._told < FULLY:
                self._told += 1
                self._tell(peer, reason)
                return
            self._more, self._last = self._more + 1, f"{peer}, {reason}"
            if self._timer is None:
                timer = threading.Timer(self._since + WINDOW - now, self.flush)
                timer.daemon, timer.name = True, "refusals"
                with suppress(RuntimeError):  # without a thread for it, the next refusal tells
                    timer.start()
                    self._timer = timer

    def flush(self) -> None:
        """Say now how many more there were."""
        with self._turn:
            if self._timer is not None:
                self._timer.cancel()
            more, self._more, self._timer = self._more, 0, None
            if more:
                self._tell(f"{more} more in the last {WINDOW:g} s", f"the last of them {self._last}")
