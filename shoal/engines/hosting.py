"""The inside of a Ray actor: it answers calls to its services while its worker runs.

Ray carries arguments and answers; it pickles them, with arrays apart, which the other side reads in place. What we give
it are wire values only, so nothing of a user's is pickled: workers and services are named by import path.
"""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np

from shoal.core.caller import call_as, caller
from shoal.core.errors import DeadlineExceeded, Fatal, ServiceFailed, ServiceLost, ShoalError, WireError
from shoal.core.randomness import Randomness, seed_everything
from shoal.core.recipe import allow, find, rebuild
from shoal.core.rights import Rights
from shoal.core.types import Work
from shoal.core.wire import TYPES, shared_size
from shoal.engines.driving import Activity, Bell, Local, advance, drive, stacks
from shoal.engines.memory import Layout, opened

THREADS = {"work": 1, "control": 2}  # of an actor, beside those that answer calls
GROUPS = {"work": ("begin", "turn", "finish"), "control": ("beat", "stacks", "stop")}  # which methods they run
CALLS = 8  # threads that answer calls, since a service may be busy while others are not
BEAT = 0.5  # seconds between signs of life
LOOK = 0.02  # seconds between looks for an actor that is not there yet
INLINE = 100 << 10  # bytes up to which Ray sends an answer along with its message
VALUE, RAISED, KEPT = 0, 1, 2  # what an answer is


def plain(value: Any) -> Any:
    """The value as every wire would carry it: lists, mappings, arrays, numbers and text; anything else is refused."""
    kind = type(value)
    if kind in (str, int, float, bool) or value is None:
        return value
    if isinstance(value, np.ndarray):
        if value.dtype.str not in TYPES:
            raise WireError(f"cannot send an array of type {value.dtype}; allowed: {', '.join(TYPES)}")
        return value
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, np.generic):
        return value.item()
    raise WireError(f"cannot send a {kind.__name__}: only arrays, numbers, text, lists and mappings")


class Hosted:
    """A stand-in for a service in an actor."""

    def __init__(
        self,
        name: str,
        handle: Callable[[], Any],
        activity: Activity,
        deadline: float,
        rights: Rights | None = None,
    ) -> None:
        """Ask for the actor at every call, since a handle that outlives its connection keeps a socket open.

        Rights are checked here and not where calls are answered: whoever takes part in a Ray cluster can run code
        anywhere in it, so that this finds mistakes and no attackers. The head has all.
        """
        self._service, self._handle, self._activity, self._deadline = name, handle, activity, deadline
        self._rights = rights

    def __getattr__(self, method: str) -> Any:
        """Find a method of the service."""
        if method.startswith("_"):
            raise AttributeError(method)
        if self._rights is not None:
            self._rights.check(self._service, method)
        name = f"{self._service}.{method}"

        def call(*args: Any) -> Any:
            self._activity.call(name)
            try:
                return self._ask(name, method, args)
            finally:
                self._activity.answered()

        self.__dict__[method] = call
        return call

    def _ask(self, name: str, method: str, args: Any) -> Any:
        import ray

        try:
            asked = self._handle().call.remote((self._service, method, plain(args), caller()))
            kind, value = ray.get(asked, timeout=self._deadline)
            if kind == KEPT:
                return ray.get(value[0], timeout=self._deadline)
        except ray.exceptions.GetTimeoutError:
            raise DeadlineExceeded(f"{name}: no answer in time, which is {self._deadline:g} s") from None
        except (ray.exceptions.RayError, ServiceLost) as error:
            raise ServiceLost(f"{name}: {str(error).splitlines()[0]}") from None
        if kind == RAISED:
            raise ServiceFailed(f"{name} raised:\n{value}")
        return value


def look_up(name: str, namespace: str, seconds: float) -> Any:
    """Find an actor by its name, waiting for one that is about to start."""
    import ray

    limit = time.monotonic() + seconds
    while True:
        try:
            return ray.get_actor(name, namespace)
        except ValueError:
            if time.monotonic() > limit:
                raise ServiceLost(f"there was no actor {name} for {seconds:g} s") from None
            time.sleep(LOOK)


class Host:
    """One worker and its services, or services alone, steered by the head through calls in groups of threads."""

    def __init__(self, start: Mapping[str, Any]) -> None:
        """Take what to be; nothing is made yet, so that the head hears what goes wrong."""
        import ray

        self.start = start
        self.activity = Activity(start["name"])
        self.blocks: dict[str, Any] = {}
        self.services: dict[str, Local] = {}
        self.refused: dict[str, int] = {}  # calls of the worker that its recipe does not name
        self.rights = None if start["rights"] is None else Rights(start["name"], start["rights"], self.refused)
        self.bell = Bell()
        self.ready = threading.Event()
        self.stopped = threading.Event()
        self.work: Work | None = None
        self.worker: int | None = None  # the worker's thread
        self.failure, self.fatal, self.bereft = "", False, False
        self.news = threading.Condition()
        self.number = 0  # of news so far
        self._keeping = threading.Lock()
        self._kept: dict[str, tuple[Any, list[Any]]] = {}  # the last large answer of a method, and its reference
        context = ray.get_runtime_context()
        self.node = f"{ray.util.get_node_ip_address()}/{context.get_node_id()[:6]}"
        if start["allow"] is not None:
            allow(start["allow"])

    # What the head asks.

    def begin(self) -> None:
        """Make the services, then the worker, and run it to its end unless it takes turns."""
        if self.worker is not None:
            return
        self.worker = threading.get_ident()
        with Telling(self):
            for name, recipe in self.start["services"].items():
                self._make(name, recipe)
            self.ready.set()
            function = find(self.start["work"])
            args = [rebuild(arg, self.find_service) for arg in self.start["args"]]
            seed_everything(self.start["seed"])
            self.work = function(*args)
            self.tell()
            if not self.start["lockstep"]:
                drive(self.work, self.activity, self.bell, self.stopped.is_set)
                self.work.close()

    def turn(self) -> dict[str, Any]:
        """Take one unit of work, and say how things stand."""
        self.begin()  # Ray keeps no order among the calls of a caller
        if self.work is not None and not (self.failure or self.stopped.is_set() or self.activity.ended):
            with Telling(self):
                advance(self.work, self.activity)
        return self.state()

    def finish(self) -> None:
        """Close the worker, which has been told to stop."""
        if self.work is not None:
            self.work.close()

    def serve(self, name: str, recipe: Mapping[str, Any]) -> str:
        """Make one more service; the answer is what went wrong."""
        try:
            self._make(name, recipe)
        except Exception:
            return traceback.format_exc()
        self.ready.set()
        return ""

    def _make(self, name: str, recipe: Mapping[str, Any]) -> None:
        args = [rebuild(arg, self.find_service) for arg in recipe["args"]]
        with Randomness(recipe["seed"]).active():
            self.services[name] = Local(name, find(recipe["make"])(*args), self.caller)

    def map_block(self, name: str, path: str, layout: Layout) -> None:
        """Map memory that another process of this machine holds open."""
        self.blocks[name] = opened(os.open(path, os.O_RDWR), layout)

    def beat(self, seen: int) -> dict[str, Any]:
        """Give a sign of life: at once when there are news, else after a while."""
        with self.news:
            if self.number == seen:
                self.news.wait(BEAT)
        return self.state()

    def state(self) -> dict[str, Any]:
        """How things stand."""
        return {
            "number": self.number,
            "activity": {
                **self.activity.as_dict(),
                **({"refused": sum(self.refused.values())} if self.refused else {}),
            },
            "line": self.activity.describe(),
            "ready": self.work is not None,
            "ended": self.activity.ended,
            "failure": self.failure,
            "fatal": self.fatal,
            "bereft": self.bereft,
            "pid": os.getpid(),
            "node": self.node,
        }

    def stacks(self) -> str:
        """Where every thread stands."""
        return stacks({self.worker or 0: self.activity.name})

    def stop(self) -> None:
        """Have the worker end after its unit of work."""
        self.stopped.set()
        self.bell.ring()

    # What others ask.

    def call(self, request: tuple[str, str, list[Any], str]) -> tuple[int, Any]:
        """Answer a call to a service."""
        name, method, args, told = request
        call_as(told)
        self.ready.wait()
        try:
            function = getattr(self.services[name], method)
            value = function(*args)
            if value is True:  # something was taken in, which the worker here may wait for
                self.bell.ring()
            if getattr(function, "immutable", False) and shared_size(value, 0) > INLINE:
                return KEPT, self._keep(f"{name}.{method}", value)
            return VALUE, plain(value)
        except Exception:
            return RAISED, traceback.format_exc()

    def _keep(self, name: str, value: Any) -> list[Any]:
        """A reference to an answer that others may get as well: it is put into Ray's store once."""
        import ray

        with self._keeping:
            before = self._kept.get(name)
            if before is None or before[0] is not value:
                self._kept[name] = before = value, [ray.put(plain(value))]
        return before[1]

    # What the worker and the services here ask.

    def find_service(self, name: str) -> Any:
        """The arrays of a shared block, or the stand-in of a service, here or elsewhere."""
        if name in self.blocks:
            return self.blocks[name]
        if name in self.services:
            return self.services[name]
        name_there, deadline = self.start["actors"][name], self.start["deadline"]
        found = cache(lambda: look_up(name_there, self.start["namespace"], deadline))
        return Hosted(name, found, self.activity, deadline, self.rights)

    def caller(self) -> Activity | None:
        """The worker, where it is the one that calls a service here."""
        return self.activity if threading.get_ident() == self.worker else None

    def tell(self) -> None:
        """Answer the head's waiting question now."""
        with self.news:
            self.number += 1
            self.news.notify_all()


def host_class(ray: Any) -> Any:
    """The host as an actor whose threads are told apart; Ray does not start it again, since the head does."""
    for group, methods in GROUPS.items():
        for method in methods:
            ray.method(concurrency_group=group)(getattr(Host, method))
    return ray.remote(concurrency_groups=THREADS, max_restarts=0)(Host)


class Telling:
    """Turns what a worker raises, or its end, into news for the head."""

    def __init__(self, host: Host) -> None:
        """Tell of one host."""
        self.host = host

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        """Take down what was raised."""
        host = self.host
        if isinstance(error, ServiceLost):
            host.failure, host.bereft = f"failed: {error}", True
        elif isinstance(error, Fatal):  # its message says all that a user needs
            host.failure, host.fatal = f"failed: {error}", True
        elif error is not None:
            host.failure = "failed:\n" + traceback.format_exc()
        if error is not None or host.activity.ended:
            host.tell()
        return isinstance(error, Exception | ShoalError)
