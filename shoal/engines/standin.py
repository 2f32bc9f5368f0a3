"""What a worker holds instead of a service, and the record of what it does with its time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from shoal.core.doing import Doing, Part
from shoal.core.errors import DeadlineExceeded, ServiceFailed, ServiceLost
from shoal.core.spans import BRIEF, Spans
from shoal.core.types import Work

Call: TypeAlias = Callable[[str, Sequence[Any]], Any]  # a method and its arguments → the answer


@dataclass
class Activity:
    """What one worker has been doing: seconds at work, seconds waiting and on whom, its present call."""

    name: str
    moves: int = 0
    began: float = field(default_factory=time.monotonic)
    working: float = 0.0
    waiting: dict[str, float] = field(default_factory=dict)
    parts: dict[str, Part] = field(default_factory=dict)  # of its work, by name
    calling: str = ""
    since: float = 0.0
    last: str = ""
    ended: bool = False
    work: Work | None = None  # to say at which line it is
    doing: Doing | None = None  # None: between two units of work
    spans: Spans | None = None  # what it did when; None: nobody wants to know

    def call(self, name: str) -> None:
        """Mark the start of a call to a service in another process."""
        self.calling, self.since = name, time.monotonic()

    def answered(self) -> None:
        """Mark its end, and count its time as waiting."""
        self.last = name = self.calling
        self.calling, now = "", time.monotonic()
        self.waiting[name] = self.waiting.get(name, 0.0) + now - self.since
        if self.spans is not None:
            self.spans.add(name, self.since, now)

    def wait(self, name: str, seconds: float) -> None:
        """Count seconds spent waiting for a service."""
        self.waiting[name] = self.waiting.get(name, 0.0) + seconds

    def describe(self) -> str:
        """One line on what the worker is doing."""
        if self.ended:
            return f"{self.name}: has ended after {self.moves} moves"
        if self.calling:
            state = f"has waited {time.monotonic() - self.since:.1f} s for an answer from {self.calling}"
        elif self.last:
            state = f"last called {self.last}"
        else:
            state = "has called no service yet"
        if (doing := self.doing) is not None and doing.what:
            state += f", has been in {doing} for {time.monotonic() - doing.since:.1f} s"
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
            "parts": {name: round(part.seconds, 3) for name, part in self.parts.copy().items()},
        }


class Standin:
    """Looks like a service; `call` is all it knows of where that lives."""

    def __init__(
        self,
        name: str,
        call: Call,
        activity: Activity,
        check: Callable[[str, str], None] | None = None,
        near: bool = False,
    ) -> None:
        """Stand in for a service, `near` in the same process; `check` refuses methods that are not for this worker."""
        self._service, self._call, self._activity, self._check, self._near = name, call, activity, check, near

    def __getattr__(self, method: str) -> Callable[..., Any]:
        """Bind a method of the service, which happens once for each."""
        if method.startswith("_"):
            raise AttributeError(method)
        if self._check is not None:
            self._check(self._service, method)
        name, call, activity = f"{self._service}.{method}", self._call, self._activity

        def near(*args: Any) -> Any:
            activity.last = name
            return call(method, args)

        def near_traced(*args: Any) -> Any:
            assert activity.spans is not None
            activity.last, start = name, time.monotonic()
            try:
                return call(method, args)
            finally:
                if (end := time.monotonic()) - start > BRIEF:
                    activity.spans.add(name, start, end)

        def far(*args: Any) -> Any:
            activity.call(name)
            try:
                return call(method, args)
            except (DeadlineExceeded, ServiceLost) as error:
                raise type(error)(f"{name}: {error}") from None
            except ServiceFailed as error:
                raise ServiceFailed(f"{name} raised:\n{error}") from None
            finally:
                activity.answered()

        inside = near if activity.spans is None else near_traced
        self.__dict__[method] = bound = inside if self._near else far
        return bound
