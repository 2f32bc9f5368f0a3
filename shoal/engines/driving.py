"""What every engine shares: driving a generator, knowing what it waits for, calling a service in the same process."""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.core.caller import call_as
from shoal.core.doing import FIRST, Doing, Seldom, here
from shoal.core.errors import Stalled
from shoal.core.rights import Rights, rights_of
from shoal.core.types import Work, immutable

log = logging.getLogger("shoal")
SHORTEST, LONGEST = 0.0002, 0.05  # seconds between two looks of a waiting worker
LATENESS = 1 / 8  # the share of its waiting time by which a worker may notice late that something came
HURRY = 1 / 10  # the share of `stall` that a worker may stay inside an environment once the run was asked to end


@dataclass
class Activity:
    """What one worker has been doing: seconds at work, seconds waiting and on whom, its present call."""

    name: str
    moves: int = 0
    began: float = field(default_factory=time.monotonic)
    working: float = 0.0
    waiting: dict[str, float] = field(default_factory=dict)
    calling: str = ""
    since: float = 0.0
    last: str = ""
    ended: bool = False
    work: Work | None = None  # to say where it stands
    doing: Doing | None = None  # None: between two units of work

    def call(self, name: str) -> None:
        """Mark the start of a call to a service in another process."""
        self.calling, self.since = name, time.monotonic()

    def answered(self) -> None:
        """Mark its end, and count its time as waiting."""
        self.last = name = self.calling
        self.calling = ""
        self.waiting[name] = self.waiting.get(name, 0.0) + time.monotonic() - self.since

    def wait(self, name: str, seconds: float) -> None:
        """Count seconds spent waiting for a service."""
        self.waiting[name] = self.waiting.get(name, 0.0) + seconds

    def describe(self) -> str:
        """One line on what the worker is doing."""
        if self.ended:
            return f"{self.name}: has ended after {self.moves} moves"
        if self.calling:
            state = f"waits for an answer from {self.calling} since {time.monotonic() - self.since:.1f} s"
        elif self.last:
            state = f"last asked {self.last}"
        else:
            state = "has called no service yet"
        if (doing := self.doing) is not None and doing.what:
            state += f", is in {doing} since {time.monotonic() - doing.since:.1f} s"
        return f"{self.name}: {self.moves} moves, {state}{self.place()}"

    def place(self) -> str:
        """The line of the worker at which it yielded or is busy."""
        frame = getattr(self.work, "gi_frame", None)
        return f", at {frame.f_code.co_filename}:{frame.f_lineno}" if frame else ""

    def as_dict(self) -> dict[str, Any]:
        """How its time was spent, in seconds, for reports; `busy` is how long nothing in its unit of work ended."""
        doing = self.doing
        inside = {} if doing is None else {"busy": round(time.monotonic() - doing.since, 3), "doing": str(doing)}
        return {
            **inside,
            "moves": self.moves,
            "seconds": round(time.monotonic() - self.began, 3),
            "working": round(self.working, 3),
            "waits": {name: round(seconds, 3) for name, seconds in self.waiting.copy().items()},
        }


class Patience:
    """Notices that no worker has moved for too long, or that one is stuck in what it does."""

    def __init__(self, seconds: float) -> None:
        """Begin now."""
        self.seconds = seconds
        self.begin()
        self._hurried: float | None = None
        self._said: dict[str, Seldom] = {}

    def begin(self) -> None:
        """Forget how long nobody has moved."""
        self._moves, self._since = -1, time.monotonic()

    def hurry(self) -> None:
        """Wait for nobody who is stuck in an environment: the run was asked to end."""
        self._hurried = self._hurried or time.monotonic()

    @property
    def hurried(self) -> bool:
        """Whether the run was asked to end."""
        return self._hurried is not None

    def look(self, moves: int, starting: bool, tell: Callable[[], str]) -> bool:
        """Whether there are more moves than before, or some will come; too long without raises, with what is told."""
        moved, now = moves != self._moves or starting, time.monotonic()
        if moved:
            self._moves, self._since = moves, now
        elif now - self._since > self.seconds:
            raise Stalled(f"no worker moved for {self.seconds:g} s\n{tell()}")
        return moved

    def heed(self, report: Mapping[str, Mapping[str, Any]], tell: Callable[[], str]) -> None:
        """Say which worker has been inside one thing for long; too long raises, with what is told."""
        for name, told in [*report.items()]:
            busy, doing = told.get("busy", 0.0), told.get("doing", "")
            if not isinstance(busy, float) or not math.isfinite(busy):  # what a node says may be anything
                continue
            inside = f"{name} has been inside {doing or 'one unit of work'} for {busy:.0f} s"
            asked = time.monotonic() - self._hurried if self._hurried is not None else 0.0
            if doing and min(busy, asked) > self.seconds * HURRY:
                raise Stalled(f"the run was asked to end, but {inside}\n{tell()}")
            if busy > self.seconds:
                raise Stalled(f"{inside}, {self.seconds:g} s allowed by limits.stall\n{tell()}")
            if doing and busy > FIRST and self._said.setdefault(name, Seldom()).due():
                log.warning("%s: %s takes long, %.0f s so far", name, doing, busy)


def moves_of(activities: Mapping[str, Activity], observers: frozenset[str]) -> int:
    """Units of work done; an observer moves by the clock, so it must not hide that the run stands still."""
    return sum(each.moves + each.ended for name, each in activities.items() if name not in observers)


class Bell:
    """Wakes the workers of a process when something in it changed."""

    def __init__(self) -> None:
        """Begin silent."""
        self._condition = threading.Condition()

    def ring(self) -> None:
        """Wake whoever waits."""
        with self._condition:
            self._condition.notify_all()

    def wait(self, seconds: float) -> None:
        """Wait for a ring, but no longer than this."""
        with self._condition:
            self._condition.wait(seconds)


class Local:
    """A stand-in for a service in the same process: plain calls, one at a time."""

    def __init__(self, name: str, service: Any, activity: Callable[[], Activity | None]) -> None:
        """Wrap a service; `activity` says who is calling."""
        self._service = name
        self._target = service
        self._lock = threading.Lock()
        self._activity = activity

    def __getattr__(self, method: str) -> Any:
        """Find a method of the service."""
        if method.startswith("_"):
            raise AttributeError(method)
        function = getattr(self._target, method)
        name = f"{self._service}.{method}"

        def call(*args: Any) -> Any:
            if caller := self._activity():
                caller.last = name
            with self._lock:
                return function(*args)

        if getattr(function, "immutable", False):
            immutable(call)
        self.__dict__[method] = call
        return call


class Granted:
    """A service in the same process as one worker sees it: what its recipe does not name is refused."""

    def __init__(self, standin: Local, rights: Rights) -> None:
        """Look at a stand-in that others use as well."""
        self._service, self._standin, self._rights = standin._service, standin, rights

    def __getattr__(self, method: str) -> Any:
        """Find a method of the service; this is asked once for each."""
        if method.startswith("_"):
            raise AttributeError(method)
        self._rights.check(self._service, method)
        self.__dict__[method] = found = getattr(self._standin, method)
        return found


def granted(name: str, work: Callable[..., Work], args: Sequence[Any]) -> list[Any]:
    """The arguments of a worker in this process, with its own view of every service among them."""
    rights = Rights(name, rights_of(work, args), {})

    def view(value: Any) -> Any:
        if isinstance(value, Local):
            return Granted(value, rights)
        if isinstance(value, list | tuple):
            return [view(item) for item in value]
        if isinstance(value, dict):
            return {key: view(item) for key, item in value.items()}
        return value

    return [view(arg) for arg in args]


def advance(work: Work, activity: Activity) -> bool | None:
    """Take one unit of work; None: the worker has ended."""
    activity.work = work
    call_as(activity.name)
    start, waited = time.perf_counter(), sum(activity.waiting.values())
    activity.doing = doing = here()
    doing.end()  # of what came before, whatever it was
    try:
        moved = next(work, None)
    finally:
        activity.doing = None
    spent = time.perf_counter() - start - (sum(activity.waiting.values()) - waited)
    activity.working += spent
    activity.moves += bool(moved)
    activity.ended = moved is None
    return moved


def drive(work: Work, activity: Activity, bell: Bell, stopped: Callable[[], bool]) -> None:
    """Advance a worker until it ends, pausing a little longer each time it has to wait."""
    waiting_since: float | None = None
    while not stopped():
        moved = advance(work, activity)
        if moved is None:
            return
        if moved:
            waiting_since = None
            continue
        now = time.perf_counter()
        waiting_since = waiting_since or now
        bell.wait(min(max((now - waiting_since) * LATENESS, SHORTEST), LONGEST))
        activity.wait(activity.last, time.perf_counter() - now)


def stacks(names: Mapping[int, str]) -> str:
    """The stacks of this process's threads, with the names given for their identifiers."""
    known = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        label = names.get(ident) or known.get(ident) or str(ident)
        parts.append(f"--- {label}\n" + "".join(traceback.format_stack(frame)))
    return "\n".join(parts)
