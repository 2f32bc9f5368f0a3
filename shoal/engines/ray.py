"""The engine of a Ray cluster: every worker is an actor; services live in a worker's actor or in one beside the head.

Actors do not call the program that started them, so the services of the head live in an actor on the same machine.
Each actor is watched by one question that waits there for news. What died is restarted by the supervisor and not by
Ray, so that seeds, reports and the time between are those of every engine. Ray pickles what it carries, but is given
wire values only: workers and services are named by import path.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import signal
import socket
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from shoal.core.caller import caller
from shoal.core.errors import (
    DeadlineExceeded,
    ServiceFailed,
    ServiceLost,
    SettingsError,
    ShoalError,
    Stalled,
)
from shoal.core.recipe import allow, services_in
from shoal.core.rights import Rights
from shoal.core.spans import later, without
from shoal.core.types import Array
from shoal.core.wire import sendable, shared_size
from shoal.engines.host import BEAT, Host, named_in, recipe_of, stacks
from shoal.engines.memory import Block, Layout, opened
from shoal.engines.options import Options, Room
from shoal.engines.standin import Call
from shoal.engines.supervisor import HEAD, STARTING, Launcher, Worker

THREADS = {"work": 1, "control": 2}  # of an actor, beside those that answer calls
GROUPS = {
    "work": ("begin", "turn", "finish"),
    "control": ("beat", "stacks", "stop", "relink", "clock"),
}  # which methods they run
CALLS = 8  # threads that answer calls, since a service may be busy while others are not
LOOK = 0.02  # seconds between looks for an actor that is not there yet
INLINE = 100 << 10  # bytes up to which Ray sends an answer along with its message
VALUE, RAISED, KEPT = 0, 1, 2  # what an answer is
CLOCK = 2.0  # seconds in which a machine may say what its clock shows, since nobody is heard meanwhile
AGAIN = 60.0  # seconds before a machine that did not is asked again
ROOM = 10.0  # seconds in which Ray should find room for a worker that is restarted
PLENTY = 1024  # CPUs of a Ray of our own: as on other engines, the machine's cores are shared by all who want them
TOKEN = "if it wants a token, set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH as on its machines"
log = logging.getLogger("shoal")


class Ray(Launcher):
    """A Ray actor for each worker, anywhere in a Ray cluster."""

    def __init__(self, options: Options) -> None:
        """Connect to a cluster or start one, and begin with the head's actor alone."""
        self.options, self.room = options, options.room or Room()
        self.ray, self.mine = connect(self.room.address)
        self.run_name = secrets.token_hex(4)
        self.blocks: dict[str, Block] = {}
        self.waiting: dict[str, tuple[Worker, dict[str, Any]]] = {}  # to be started together, so that all find room
        self.started: dict[str, tuple[Worker, dict[str, Any]]] = {}
        self.lives: dict[str, int] = {}
        self.handles: dict[str, Any] = {}
        self.asked: dict[Any, tuple[str, str]] = {}  # questions that wait for an answer: of whom, and what
        self.cramped: set[str] = set()  # workers that do without CPUs of their own
        self.nodes: dict[str, str] = {}
        self.ahead: dict[str, float] = {}  # by machine: seconds by which this one's clock is ahead
        self.asking: dict[str, float] = {}  # by machine: when its clock may be asked for again
        self.group: Any = None  # the placement group of those that may live anywhere
        self.bundles: dict[str, int] = {}
        self._starting = threading.RLock()
        try:
            context = self.ray.get_runtime_context()
            self.node, self.namespace = context.get_node_id(), context.namespace
            self.host_class = host_class(self.ray)
            start: dict[str, Any] = {"name": HEAD, "work": "", "args": [], "services": {}, "rights": None}
            start |= {"lockstep": False, "spans": 0}
            self._launch(HEAD, start | {"deadline": options.deadline, "allow": options.allow and [*options.allow]})
        except BaseException:
            self.close()
            raise

    def open(self, head: Host) -> None:
        """The head itself answers no calls."""

    def serve(self, name: str, make: Callable[..., Any], args: Sequence[Any], seed: int) -> bool:
        """Make a service in the head's actor."""
        recipe = recipe_of(make, args, seed)
        self._map_blocks(HEAD, {name for arg in recipe["args"] for name in services_in(arg)})
        if problem := self._get(self.handles[HEAD].serve.remote(name, recipe), STARTING):
            raise ShoalError(f"service {name} could not be made:\n{problem}")
        return True

    def share(self, name: str, tree: Mapping[str, Array]) -> Block:
        """Copy arrays into memory that is handed to every worker which names it, all of them on this machine."""
        self.blocks[name] = Block(name, tree)
        return self.blocks[name]

    # Starting and ending.

    def start(self, worker: Worker, start: Mapping[str, Any]) -> None:
        """Note a worker, to start with all others as soon as any is needed."""
        with self._starting:
            worker.seat, worker.pid = worker.name, 0
            self.lives[worker.name] = worker.lives
            self.waiting[worker.name] = worker, dict(start)

    def _start_all(self) -> None:
        """Find room for the workers that have none yet, and start them."""
        with self._starting:
            waiting, self.waiting = self.waiting, {}
            if first := {name: start for name, (worker, start) in waiting.items() if not worker.lives}:
                self._find_room(first)
            for name, (_, start) in waiting.items():
                self._launch(name, start)
                self.handles[name].begin.remote()
            self.started |= waiting

    def _find_room(self, starts: Mapping[str, Mapping[str, Any]]) -> None:
        free = [name for name, start in starts.items() if not self._stays(start)]
        wanted = {name: request(self.room, name) for name in starts}
        check_room(self.ray, wanted, len(free) if self.room.placement == "STRICT_SPREAD" else 0)
        if free and self.group is None:
            self.bundles = {name: index for index, name in enumerate(free)}
            self.group = self.ray.util.placement_group([wanted[name] for name in free], self.room.placement)
            if not self.group.wait(self.options.stall):
                raise Stalled(
                    f"Ray found no room for {', '.join(free)} in {self.options.stall:g} s, placed by "
                    f"{self.room.placement}: of {self.ray.cluster_resources()} there were free "
                    f"{self.ray.available_resources()}"
                )

    def _stays(self, start: Mapping[str, Any]) -> bool:
        """Whether a worker has to live on this machine: for its services' folder, or for shared memory."""
        return bool(start["services"] and not self.room.roam) or bool(named_in(start) & self.blocks.keys())

    def _ray_name(self, worker: str) -> str:
        return f"{self.run_name}/{worker}/{self.lives.get(worker, 0)}"

    def _launch(self, name: str, start: Mapping[str, Any]) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

        where: Any = "SPREAD"
        if name in self.bundles and name not in self.cramped:
            where = PlacementGroupSchedulingStrategy(self.group, self.bundles[name])
        elif name == HEAD or self._stays(start):
            where = NodeAffinitySchedulingStrategy(self.node, soft=False)
        asked = {} if name == HEAD else request(self.room, name)
        homes = {service: self.options.homes.get(service, HEAD) for service in start["rights"] or ()}
        names = {service: self._ray_name(home) for service, home in homes.items()}
        self.handles[name] = self.host_class.options(
            name=self._ray_name(name),
            num_cpus=asked.pop("CPU", 0) * (name not in self.cramped),
            num_gpus=asked.pop("GPU", 0),
            resources=asked,
            max_concurrency=CALLS,
            scheduling_strategy=where,
        ).remote({**start, "names": names, "namespace": self.namespace})
        self._map_blocks(name, named_in(start))
        self._ask(name, "beat", 0)
        if self.lives.get(name) and name in self.options.expendable:  # those who called its former life live on
            moved = [service for service, home in self.options.homes.items() if home == name]
            for other in self.handles.keys() - {name, HEAD}:
                self.handles[other].relink.remote(moved, self._ray_name(name))

    def _map_blocks(self, name: str, named: set[str]) -> None:
        """Have an actor of this machine map the shared memory that its arguments name."""
        for block in named & self.blocks.keys():
            path, layout = f"/proc/{os.getpid()}/fd/{self.blocks[block].descriptor}", self.blocks[block].layout
            self._get(self.handles[name].map_block.remote(block, path, layout), STARTING)

    def stop(self, worker: Worker) -> None:
        """Ask an actor to end its worker, and to close it."""
        if (handle := self.handles.get(worker.name)) is not None:
            handle.stop.remote()
            worker.seat = handle.finish.remote() if worker.pid else worker.name

    def end(self, worker: Worker, seconds: float) -> str:
        """End an actor, by force."""
        self.waiting.pop(worker.name, None)
        if worker.seat not in (None, worker.name):
            self.ray.wait([worker.seat], timeout=seconds)
        worker.seat, worker.pid = None, 0
        return self._kill(worker.name)

    def _kill(self, name: str) -> str:
        self.asked = {question: of for question, of in self.asked.items() if of[0] != name}
        if (handle := self.handles.pop(name, None)) is not None:
            with suppress(self.ray.exceptions.RayError, ValueError):
                self.ray.kill(handle)
        return "died"

    def close(self) -> None:
        """End the head's actor, and Ray itself if it was started or joined here."""
        for name in [*self.handles]:
            self._kill(name)
        for block in self.blocks.values():
            block.close()
        self.blocks.clear()
        if self.group is not None:
            with suppress(Exception):  # Ray may be gone already
                self.ray.util.remove_placement_group(self.group)
            self.group = None
        if self.mine:
            self.ray.shutdown()
            self.mine = False

    # Calls.

    def call(self, service: str, method: str, args: Sequence[Any]) -> Any:
        """Call a service in an actor, for the head."""
        home, limit = self.options.homes.get(service, HEAD), time.monotonic() + self.options.deadline
        self._start_all()
        while (handle := self.handles.get(home)) is None:
            if time.monotonic() > limit:
                raise ServiceLost(f"there was no {home} for {self.options.deadline:g} s")
            time.sleep(LOOK)
            self._start_all()
        return ask(handle, service, method, args, self.options.deadline)

    def _get(self, reference: Any, seconds: float) -> Any:
        """What an actor answers, or why it does not."""
        try:
            return self.ray.get(reference, timeout=seconds)
        except self.ray.exceptions.RayError as error:
            raise ServiceLost(_cause(error)) from None

    # Hearing.

    def _ask(self, name: str, question: str, *args: Any) -> None:
        self.asked[getattr(self.handles[name], question).remote(*args)] = name, question

    def poll(self, seconds: float) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Take in what the actors report."""
        self._start_all()
        ready, _ = self.ray.wait([*self.asked], timeout=seconds)
        if ready:
            ready, _ = self.ray.wait([*self.asked], num_returns=len(self.asked), timeout=0)
        for reference in ready:
            if reference in self.asked:
                name, question = self.asked.pop(reference)
                yield name, self._hear(name, question, reference)
        self._squeeze_in()

    def _hear(self, name: str, question: str, reference: Any) -> Mapping[str, Any]:
        """Take in one answer of an actor, or its end."""
        try:
            state: dict[str, Any] = self.ray.get(reference, timeout=self.options.stall)
        except self.ray.exceptions.GetTimeoutError:
            raise Stalled(f"{name} gave no answer") from None
        except self.ray.exceptions.RayError as error:
            if name == HEAD:
                raise ServiceLost(f"the head's actor died: {_cause(error)}") from None
            return {"died": True, "away": True, "failure": f"died: {_cause(error)}"}
        number, self.nodes[name] = state.pop("number"), state.pop("node")
        if (chunk := state.pop("spans", None)) is not None:
            ahead = self._ahead(name)
            state["spans"] = without(chunk) if ahead is None else later(chunk, ahead)
        several = len({*self.nodes.values()}) > 1
        if question == "beat" and not state["failure"]:
            self._ask(name, "beat", number)
        return {**state, "node": self.nodes[name] if several else "", "away": False}

    def _ahead(self, name: str) -> float | None:
        """Seconds by which this clock is ahead of an actor's, right to half the time of asking; None: unknown."""
        node, asked = self.nodes[name], time.monotonic()
        if node.endswith(self.node[:6]):
            return 0.0
        if node not in self.ahead and asked >= self.asking.get(node, asked):
            self.asking[node] = asked + AGAIN
            with suppress(ServiceLost):
                there = self._get(self.handles[name].clock.remote(), CLOCK)
                self.ahead[node] = (asked + time.monotonic()) / 2 - there
        return self.ahead.get(node)

    def _squeeze_in(self) -> None:
        """Let workers that were restarted share the CPUs of others, if their own went with a machine."""
        for name, (worker, start) in self.started.items():
            late = worker.lives and not worker.pid and time.monotonic() - worker.started > ROOM
            if late and name in self.handles and name not in self.cramped:
                log.warning("%s found no room in %g s: it shares the CPUs of others", name, ROOM)
                self._kill(name)
                self.cramped.add(name)
                self._launch(name, start)
                self.handles[name].begin.remote()

    def turn(self, worker: Worker) -> None:
        """Ask for a unit of work."""
        self._start_all()
        self._ask(worker.name, "turn")

    def stacks(self, worker: Worker) -> str:
        """Ask an actor where its threads are."""
        found = ""
        with suppress(ServiceLost, KeyError):
            found = self._get(self.handles[worker.name].stacks.remote(), 2.0)
        return found


class RayHost:
    """A host inside a Ray actor, steered by the head through calls in groups of threads."""

    def __init__(self, start: Mapping[str, Any]) -> None:
        """Take what to be; nothing is made yet, so that the head hears what goes wrong."""
        import ray

        self.start, self.host = start, Host(start["name"], connect=self._connect, spans=start["spans"])
        if start["rights"] is None:
            self.host.ready.set()
        else:
            # Checked by the caller and not where calls are answered: whoever takes part in a Ray cluster can run code
            # anywhere in it, so that this finds mistakes and no attackers.
            self.host.rights = Rights(start["name"], start["rights"], self.host.refused)
        self.names: dict[str, str] = dict(start["names"])  # of the actors in which services live
        self.found: dict[str, Any] = {}  # those actors
        self.thread: int | None = None  # the worker's
        self.news = threading.Condition()
        self.number = 0  # of news so far
        self._keeping = threading.Lock()
        self._kept: dict[str, tuple[Any, list[Any]]] = {}  # the last large answer of a method, and its reference
        self.node = f"{ray.util.get_node_ip_address()}/{ray.get_runtime_context().get_node_id()[:6]}"
        if start["allow"] is not None:
            allow(start["allow"])

    def begin(self) -> None:
        """Make the services, then the worker, and run it to its end unless it takes turns."""
        if self.thread is not None:
            return
        self.thread = threading.get_ident()
        with self._failures_kept():
            self.host.begin(self.start)
            self.tell()
            if not self.start["lockstep"]:
                self.host.drive()
                self.finish()

    def turn(self) -> dict[str, Any]:
        """Take one unit of work, and say how things stand."""
        self.begin()  # Ray keeps no order among the calls of a caller
        host, moved = self.host, False
        if host.work is not None and not (host.failure or host.stopped.is_set() or host.activity.ended):
            with self._failures_kept():
                moved = bool(host.advance())
        return {**self.state(), "turned": moved}

    @contextmanager
    def _failures_kept(self) -> Iterator[None]:
        """Turn what a worker raises, or its end, into news for the head."""
        try:
            yield
        except (Exception, ShoalError) as error:
            self.host.failed(error)
        if self.host.failure or self.host.activity.ended:
            self.tell()

    def finish(self) -> None:
        """Close the worker, which was asked to stop."""
        if self.host.work is not None:
            self.host.work.close()

    def serve(self, name: str, recipe: Mapping[str, Any]) -> str:
        """Make one more service; the answer is what went wrong."""
        try:
            self.host.make(name, recipe)
        except Exception:
            return traceback.format_exc()
        return ""

    def map_block(self, name: str, path: str, layout: Layout) -> None:
        """Map memory that another process of this machine holds open."""
        self.host.blocks[name] = opened(os.open(path, os.O_RDWR), layout)

    def beat(self, seen: int) -> dict[str, Any]:
        """Give a sign of life: at once when there are news, else after a while."""
        with self.news:
            if self.number == seen:
                self.news.wait(BEAT)
        return self.state()

    def state(self) -> dict[str, Any]:
        """How things stand."""
        return {**self.host.state(), "number": self.number, "pid": os.getpid(), "node": self.node}

    def tell(self) -> None:
        """Answer the head's waiting question now."""
        with self.news:
            self.number += 1
            self.news.notify_all()

    def clock(self) -> float:
        """What the clock of this machine shows."""
        return time.monotonic()

    def stacks(self) -> str:
        """Where every thread is."""
        return stacks({self.thread or 0: self.start["name"]})

    def stop(self) -> None:
        """Have the worker end after its unit of work."""
        self.host.stop()

    def call(self, request: tuple[str, str, list[Any], str]) -> tuple[int, Any]:
        """Answer a call to a service."""
        service, method, args, name = request
        try:
            value = self.host.answer(None, name, service, method, args)
            if value is True:  # something was stored, which the worker here may wait for
                self.host.bell.ring()
            if shared_size(value, 0) > INLINE and self.host.services[service].lasting(method):
                return KEPT, self._keep(f"{service}.{method}", value)
            return VALUE, sendable(value)
        except Exception:
            return RAISED, traceback.format_exc()

    def _keep(self, name: str, value: Any) -> list[Any]:
        """A reference to an answer that others may get as well: it is put into Ray's store once."""
        import ray

        with self._keeping:
            before = self._kept.get(name)
            if before is None or before[0] is not value:
                self._kept[name] = before = value, [ray.put(sendable(value))]
        return before[1]

    def _connect(self, service: str) -> Call:
        def call(method: str, args: Sequence[Any]) -> Any:
            deadline, name = self.start["deadline"], self.names[service]
            if name not in self.found:
                self.found[name] = look_up(name, self.start["namespace"], deadline)
            return ask(self.found[name], service, method, args, deadline)

        return call

    def relink(self, services: list[str], name: str) -> None:
        """Find services in another actor from now on."""
        self.names |= dict.fromkeys([service for service in services if service in self.names], name)


def host_class(ray: Any) -> Any:
    """The class of actors, with their groups of threads; Ray does not restart them, since the supervisor does."""
    for group, methods in GROUPS.items():
        for method in methods:
            ray.method(concurrency_group=group)(getattr(RayHost, method))
    return ray.remote(concurrency_groups=THREADS, max_restarts=0)(RayHost)


def ask(handle: Any, service: str, method: str, args: Sequence[Any], deadline: float) -> Any:
    """Call a service in an actor."""
    import ray

    try:
        kind, value = ray.get(handle.call.remote((service, method, sendable(args), caller())), timeout=deadline)
        if kind == KEPT:
            return ray.get(value[0], timeout=deadline)
    except ray.exceptions.GetTimeoutError:
        raise DeadlineExceeded(f"no answer in time, which is {deadline:g} s") from None
    except ray.exceptions.RayError as error:
        raise ServiceLost(_cause(error)) from None
    if kind == RAISED:
        raise ServiceFailed(value)
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


def library() -> Any:
    """Ray, if it is installed."""
    try:
        import ray
        import ray.exceptions
        import ray.util
    except ImportError:
        raise ShoalError("engine ray needs Ray: pip install 'shoal[ray]'") from None
    return ray


def connect(address: str) -> tuple[Any, bool]:
    """Connect to a Ray cluster, or start one; False: the program was connected already, and stays so."""
    if not address:
        os.environ.setdefault("RAY_AUTH_MODE", "token")  # even a Ray of our own listens to the network
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a run tells nobody
    ray = library()
    if ray.is_initialized():
        return ray, False
    if address.startswith("ray://"):
        raise SettingsError("ray.address: start the run on a machine of the cluster, and give the address HOST:PORT")
    settings: dict[str, Any] = {"logging_level": logging.ERROR, "namespace": f"shoal-{os.getpid()}"}
    if address:
        settings["address"] = address
        check_reachable(address)
    else:
        settings |= {"address": "local", "num_cpus": PLENTY, "include_dashboard": False}
        # Ray's own server would keep a note of every call, up to a hundred thousand of them.
        quiet = {"prestart_worker_first_driver": False, "task_events_report_interval_ms": 0}
        settings |= {"_node_ip_address": "127.0.0.1", "_system_config": quiet}
    try:
        with handlers_kept(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # advice on Ray's own settings
            ray.init(**settings)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        ray.shutdown()
        if address:
            raise ShoalError(f"the Ray cluster at {address} did not let us in: {error}\n{TOKEN}") from None
        raise ShoalError(f"Ray does not start on this machine: {error}") from None
    return ray, True


def check_reachable(address: str) -> None:
    """Say at once that nobody is there, which Ray finds out in minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        if address != "auto":
            raise SettingsError(f"ray.address: {address!r} is not HOST:PORT, nor auto")
        return
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except OSError as error:
        raise ShoalError(f"no Ray cluster at {address}: {error}") from None


@contextmanager
def handlers_kept() -> Any:
    """Keep the program's own answer to SIGTERM, which Ray would replace."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def role_of(worker: str) -> str:
    """A worker's name without its group and its number."""
    return re.sub(r"-\d+$", "", worker.rpartition("/")[2])


def request(room: Room, worker: str) -> dict[str, float]:
    """The resources that a worker asks for."""
    role = role_of(worker)
    asked = {"CPU": room.cpus.get(role, 1.0), "GPU": room.gpus.get(role, 0.0), **room.custom.get(role, {})}
    return {name: amount for name, amount in asked.items() if amount}


def check_room(ray: Any, wanted: Mapping[str, Mapping[str, float]], apart: int) -> None:
    """Refuse at once what the cluster could not give even if it were idle; `apart` workers need a machine each."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    problems = []
    for worker, asked in wanted.items():
        if not any(all(node.get(name, 0.0) >= amount for name, amount in asked.items()) for node in nodes):
            problems.append(f"no machine of it has {_listed(asked)} for {worker}")
    for name in sorted({name for asked in wanted.values() for name in asked}):
        need = sum(asked.get(name, 0.0) for asked in wanted.values())
        have = sum(node.get(name, 0.0) for node in nodes)
        if need > have:
            problems.append(f"{len(wanted)} workers ask for {need:g} {name} together, it has {have:g}")
    if apart > len(nodes):
        problems.append(f"STRICT_SPREAD wants a machine for each of {apart} workers, it has {len(nodes)}")
    if problems:
        raise ShoalError(
            f"the Ray cluster has too little: {'; '.join(problems)}. Lower ray.cpus, ray.gpus or ray.custom, "
            "take fewer workers, or add machines"
        )


def _listed(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items()) or "nothing"


def _cause(error: BaseException) -> str:
    """What Ray says of a loss, without its advice."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
