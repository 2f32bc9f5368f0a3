"""The inside of a worker, wherever it lives: its services, its generator, and answers to calls."""

from __future__ import annotations

import inspect
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shoal.core.caller import call_as
from shoal.core.doing import here
from shoal.core.errors import Fatal, ServiceLost, ShoalError
from shoal.core.randomness import Randomness, seed_everything
from shoal.core.recipe import describe, find, path_of, rebuild, services_in
from shoal.core.rights import Named, Rights
from shoal.core.spans import Spans
from shoal.core.types import Work
from shoal.engines.standin import Activity, Call, Standin

BEAT = 0.5  # seconds between heartbeats
SHORTEST, LONGEST = 0.0002, 0.05  # seconds between two looks of a waiting worker
LATENESS = 1 / 8  # the share of its waiting time by which a worker may notice late that something arrived


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


class Served:
    """A service in this process, called by one thread at a time."""

    def __init__(self, service: Any) -> None:
        """Take a service."""
        self.service, self._turn = service, threading.Lock()

    def call(self, method: str, args: Sequence[Any]) -> Any:
        """Call one of its methods."""
        function = getattr(self.service, method)
        with self._turn:
            return function(*args)

    def lasting(self, method: str) -> bool:
        """Whether answers of a method never change once given."""
        return getattr(getattr(self.service, method), "immutable", False)


class Host:
    """One worker and the services that live with it; the head is a host without a worker."""

    def __init__(
        self,
        name: str,
        rights: Rights | None = None,
        connect: Callable[[str], Call] | None = None,
        services: dict[str, Served] | None = None,
        spans: int = 0,
    ) -> None:
        """Begin with nothing; `connect` reaches services elsewhere, `services` are those that others made here.

        Of what the worker does, this many spans are kept for a trace.
        """
        self.activity, self.rights, self.connect = Activity(name), rights, connect
        self.activity.spans = Spans(spans) if spans else None
        self.services: dict[str, Served] = {} if services is None else services
        self.blocks: dict[str, Mapping[str, Any]] = {}
        self.refused: dict[str, int] = {}  # by caller: calls that were not theirs to make
        self.bell = Bell()
        self.ready, self.stopped = threading.Event(), threading.Event()
        self.work: Work | None = None
        self.failure, self.fatal, self.lost = "", False, False
        self._computed = time.process_time()  # by this process before

    # Making what lives here.

    def standin(self, name: str) -> Any:
        """What the worker and the services here hold of a service or of a shared block."""
        if name in self.blocks:
            return self.blocks[name]
        check = None if self.rights is None else self.rights.check
        if name in self.services:
            return Standin(name, self.services[name].call, self.activity, check, near=True)
        if self.connect is None:
            raise ShoalError(f"there is no service {name!r}")
        return Standin(name, self.connect(name), self.activity, check)

    def serve(self, name: str, make: Callable[..., Any], args: Sequence[Any], seed: int) -> None:
        """Make a service, with randomness of its own."""
        with Randomness(seed).active():
            self.services[name] = Served(make(*args))

    def make(self, name: str, recipe: Mapping[str, Any]) -> None:
        """Make a service of its recipe."""
        args = [rebuild(arg, self.standin) for arg in recipe["args"]]
        self.serve(name, find_service(recipe["make"]), args, recipe["seed"])

    def begin(self, start: Mapping[str, Any]) -> None:
        """Make what a message from the supervisor describes: services, then the worker."""
        for name, recipe in start["services"].items():
            self.make(name, recipe)
        self.ready.set()
        function = find_worker(start["work"])
        args = [rebuild(arg, self.standin) for arg in start["args"]]
        seed_everything(start["seed"])
        self.work = function(*args)

    def member(self, name: str, work: Callable[..., Work], args: Sequence[Any], named: Named, spans: int) -> Host:
        """A worker in this process, beside the services here."""
        host = Host(name, Rights(name, named, self.refused), services=self.services, spans=spans)
        host.bell, host.stopped = self.bell, self.stopped
        host.work = work(*(given(arg, host.standin) for arg in args))
        return host

    # Running the worker.

    def advance(self) -> bool | None:
        """Take one unit of work; None: the worker has ended."""
        assert self.work is not None
        activity = self.activity
        activity.work = self.work
        call_as(activity.name)
        start, waited = time.monotonic(), sum(activity.waiting.values())
        activity.doing = doing = here()
        doing.end()  # of what came before, whatever it was
        doing.parts, doing.spans = activity.parts, activity.spans
        try:
            moved = next(self.work, None)
        finally:
            activity.doing = doing.parts = doing.spans = None
        activity.working += time.monotonic() - start - (sum(activity.waiting.values()) - waited)
        activity.moves += bool(moved)
        activity.ended = moved is None
        return moved

    def drive(self) -> None:
        """Advance the worker until it ends or is stopped; while it has to wait, it looks less and less often.

        A worker that waited long last time looks rarely from the start: every look may be a call to a busy process.
        """
        since: float | None = None  # when the present wait began
        noted, name = 0.0, ""  # up to when spans have it, and for what it is
        last = 0.0  # seconds that the last wait took
        while not self.stopped.is_set():
            looked = time.monotonic()
            moved = self.advance()
            now = time.monotonic()
            if since is not None and (moved is not False or now - noted > BEAT):
                self._note_wait(name, noted, looked)
                noted = looked
            if moved is None:
                return
            if moved:
                last, since = 0.0 if since is None else now - since, None
                continue
            if since is None:
                since = noted = now
            name = self.activity.last
            self.bell.wait(min(max(max(now - since, last) * LATENESS, SHORTEST), LONGEST))
            self.activity.wait(name, time.monotonic() - now)

    def _note_wait(self, name: str, start: float, end: float) -> None:
        """Add a wait to the spans; a long one in parts, so that one who is killed in it has shown most of it."""
        if self.activity.spans is not None:
            self.activity.spans.add(f"wait for {name}" if name else "wait", start, end)

    def stop(self) -> None:
        """Have the worker end after its unit of work."""
        self.stopped.set()
        self.bell.ring()

    def failed(self, error: BaseException) -> None:
        """Keep why the worker failed, for its supervisor."""
        self.lost, self.fatal = isinstance(error, ServiceLost), isinstance(error, Fatal)
        short = self.lost or self.fatal  # whose message says all that a user needs
        trace = "".join(traceback.format_exception(error))
        self.failure = f"failed: {error}" if short else f"failed:\n{trace}"

    def state(self) -> dict[str, Any]:
        """What is reported to the supervisor by a process with this worker only, and so its core-time with it."""
        more: dict[str, Any] = {"computing": round(time.process_time() - self._computed, 3)}
        if self.refused:
            more["refused"] = dict(self.refused)
        return {
            "report": {**self.activity.as_dict(), **more},
            "line": self.activity.describe(),
            "ready": self.work is not None,
            "ended": self.activity.ended,
            "failure": self.failure,
            "fatal": self.fatal,
            "lost": self.lost,
            **self.spans(),
        }

    def spans(self) -> dict[str, Any]:
        """What the worker did since the last call, for a trace, where one is wanted."""
        chunk = None if self.activity.spans is None else self.activity.spans.drain()
        return {} if chunk is None else {"spans": chunk}

    # Answering.

    def answer(self, rights: Rights | None, caller: str, service: str, method: str, args: Sequence[Any]) -> Any:
        """Answer a call from elsewhere; without rights it is the head's, which has all and may call for another."""
        call_as(caller if rights is None else rights.caller)
        if rights is not None:
            rights.check(service, method)
        if not self.ready.is_set():
            self.ready.wait()
        if service not in self.services:
            raise ShoalError(f"there is no service {service!r}")
        return self.services[service].call(method, args)

    def lasting(self, service: str, method: str) -> bool:
        """Whether answers of a method never change once given."""
        return self.services[service].lasting(method)


def recipe_of(make: Callable[..., Any], args: Sequence[Any], seed: int) -> dict[str, Any]:
    """How to make a service in another process."""
    return {"make": path_of(make), "args": [describe(arg) for arg in args], "seed": seed}


def named_in(start: Mapping[str, Any]) -> set[str]:
    """The services and shared blocks among the arguments of a worker and of the services that live with it."""
    args = [*start["args"], *(arg for recipe in start["services"].values() for arg in recipe["args"])]
    return {name for arg in args for name in services_in(arg)}


def given(value: Any, standin: Callable[[str], Any]) -> Any:
    """An argument as one host sees it: with its own stand-ins in place of the head's."""
    if isinstance(value, Standin):
        return standin(value._service)
    if isinstance(value, list | tuple):
        return [given(item, standin) for item in value]
    if isinstance(value, dict):
        return {key: given(item, standin) for key, item in value.items()}
    return value


def find_worker(path: str) -> Any:
    """Import a worker; another function is not called, since it may do anything."""
    if not inspect.isgeneratorfunction(function := find(path)):
        raise Fatal(f"{path} is no worker: one is a function that yields")
    return function


def find_service(path: str) -> Any:
    """Import the class of a service."""
    if not isinstance(made := find(path), type):
        raise Fatal(f"{path} is no service: one is made from a class")
    return made


def stacks(names: Mapping[int, str]) -> str:
    """The stacks of this process's threads, with the names given for their identifiers."""
    known = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        label = names.get(ident) or known.get(ident) or str(ident)
        parts.append(f"--- {label}\n" + "".join(traceback.format_stack(frame)))
    return "\n".join(parts)
