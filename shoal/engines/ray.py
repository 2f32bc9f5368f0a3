"""The engine of those who outgrow one machine: every worker is a Ray actor, services live in a worker's or the head's.

Actors do not call the program that started them, so the services of the head live in an actor beside it, on the same
machine. Each worker's actor is watched by one question that waits there for news. What died is started again by us and
not by Ray, so that seeds, reports and the time between are those of every engine.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from shoal.core.errors import ServiceLost, ShoalError, Stalled
from shoal.core.randomness import derive
from shoal.core.recipe import describe, path_of, services_in
from shoal.core.rights import rights_of, with_services
from shoal.core.types import Array, Work
from shoal.engines.driving import Activity, Bell, Patience, drive
from shoal.engines.hosting import CALLS, Hosted, host_class
from shoal.engines.memory import Block
from shoal.engines.options import Options, Room
from shoal.engines.processes import GRACE, HEAD, SILENT
from shoal.engines.rooming import check_room, connect, request
from shoal.engines.worker import Worker, plan_restart, recipe_of, seed_of
from shoal.transport.nursery import STARTING

LOOK = 0.05  # seconds between looks at the workers
MOURNING = 2.0  # seconds in which the death of a host is heard, after someone has lost a service
PATIENCE = 10.0  # seconds in which Ray should find room for a worker that is started again

log = logging.getLogger("shoal")


@dataclass
class Guest(Worker):
    """A worker as the head sees it, in its actor."""

    handle: Any = None  # of its Ray actor
    beat: Any = None  # the question that waits for news
    number: int = 0  # of news heard
    node: str = ""  # the machine
    bereft: bool = False  # whether it failed by the loss of a service
    cramped: bool = False  # whether it does without CPUs of its own


class Ray:
    """Workers are actors anywhere in a Ray cluster; a dead one is reported and, where allowed, started again."""

    def __init__(self, options: Options) -> None:
        """Connect to a cluster or start one, and begin with nothing running but the head's actor."""
        self.options, self.room = options, options.room or Room()
        self.patience = Patience(options.stall)
        self.ray, self.mine = connect(self.room.address)
        self.run_name = secrets.token_hex(4)
        self.workers: dict[str, Guest] = {}
        self.placed: dict[str, dict[str, Any]] = {}  # worker → services to make there
        self.homes: dict[str, str] = {}  # service → worker or head
        self.blocks: dict[str, Block] = {}
        self.restarts: dict[str, int] = {}
        self.group: Any = None  # the placement group of those that may live anywhere
        self.bundles: dict[str, int] = {}
        self._observers: list[threading.Thread] = []
        self._starting = threading.Lock()
        self._stopped = threading.Event()
        self._bell = Bell()
        self._failure: BaseException | None = None
        self.head = Guest(HEAD, "", [])
        try:
            context = self.ray.get_runtime_context()
            self.node, self.namespace = context.get_node_id(), context.namespace
            self.host_class = host_class(self.ray)
            self._launch(self.head)
        except BaseException:
            self.close()
            raise

    # What a program says.

    def serve(self, name: str, make: Callable[..., Any], *args: Any) -> Any:
        """Make a service in the head's actor, or have it made in that of the worker where it is placed."""
        self.homes[name] = home = self.options.homes.get(name, HEAD)
        recipe = recipe_of(make, args, derive(self.options.seed, name))
        if home == HEAD:
            self._map_blocks(self.head, recipe["args"])
            if problem := self._get(self.head.handle.serve.remote(name, recipe), STARTING):
                raise ShoalError(f"service {name} could not be made:\n{problem}")
        else:
            self.placed.setdefault(home, {})[name] = recipe
        return self.standin(name)

    def standin(self, name: str) -> Any:
        """A stand-in for a service, for the head."""
        return Hosted(name, lambda: self._host(self.homes[name]), Activity(HEAD), self.options.deadline)

    def share(self, name: str, tree: Mapping[str, Array]) -> Any:
        """Copy arrays into memory that is handed to every worker which names it, all of them on this machine."""
        self.blocks[name] = Block(name, tree)
        return self.blocks[name]

    def run(self, name: str, work: Callable[..., Work], *args: Any) -> None:
        """Take a worker, to start with all others as soon as any is needed; an observer in a thread of the head."""
        if name in self.options.observers:
            thread = threading.Thread(target=self._observe, args=(work(*args), Activity(name)), name=name, daemon=True)
            self._observers.append(thread)
            thread.start()
            return
        with self._starting:
            self.workers[name] = Guest(name, path_of(work), [describe(arg) for arg in args], rights_of(work, args))

    def _observe(self, work: Work, activity: Activity) -> None:
        try:
            drive(work, activity, self._bell, self._stopped.is_set)
        except BaseException as error:
            self._failure = error
        finally:
            with suppress(ShoalError):
                work.close()

    def watch(self, seconds: float) -> None:
        """Start what has not been started, take in what the workers say for a while, and see to those that died."""
        self._start_all()
        self._listen(seconds)
        self._tend()

    def wait(self, *names: str) -> None:
        """Watch over the workers until the named ones have ended."""
        self._start_all()
        self.patience.begin()
        while any(not self.workers[name].ended for name in names):
            if self.options.lockstep:
                for worker in [*self.workers.values()]:
                    self._turn(worker)
            self.watch(0.0 if self.options.lockstep else LOOK)
            now, moves = time.monotonic(), sum(w.activity.get("moves", 0) + w.ended for w in self.workers.values())
            begins = any(self._begins(worker, now) for worker in self.workers.values())
            self.patience.heed(self.report(), self._standstill)
            self.patience.look(moves, begins, self._standstill)

    def hurry(self) -> None:
        """Take that the run was asked to end, so that nothing stuck may delay it for long."""
        self.patience.hurry()

    def _begins(self, worker: Guest, now: float) -> bool:
        """Whether a worker is about to start or loads its libraries, within reason."""
        return bool(worker.again_at) or (not worker.ready and now - worker.started < STARTING)

    # Starting.

    def _start_all(self) -> None:
        """Find room for the workers that have none yet, and start them."""
        with self._starting:
            new = [worker for worker in self.workers.values() if not worker.started]
            if not new:
                return
            free = [worker.name for worker in new if not self._stays(worker)]
            wanted = {worker.name: request(self.room, worker.name) for worker in new}
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
            for worker in new:
                self._launch(worker)

    def _stays(self, worker: Guest) -> bool:
        """Whether a worker has to live on this machine: for its services' folder, or for shared memory."""
        return (worker.name in self.placed and not self.room.roam) or bool(self._named_blocks(worker))

    def _given(self, worker: Guest) -> list[Any]:
        """The descriptions of all arguments of a worker and of its services."""
        return [*worker.args, *(arg for recipe in self.placed.get(worker.name, {}).values() for arg in recipe["args"])]

    def _named_blocks(self, worker: Guest) -> set[str]:
        return {name for arg in self._given(worker) for name in services_in(arg) if name in self.blocks}

    def _ray_name(self, worker: str) -> str:
        return f"{self.run_name}/{worker}/{self.restarts.get(worker, 0)}"

    def _launch(self, worker: Guest) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

        where: Any = "SPREAD"
        if worker.name in self.bundles and not worker.cramped:
            where = PlacementGroupSchedulingStrategy(self.group, self.bundles[worker.name])
        elif worker is self.head or self._stays(worker):
            where = NodeAffinitySchedulingStrategy(self.node, soft=False)
        asked = {} if worker is self.head else request(self.room, worker.name)
        services = self.placed.get(worker.name, {})
        start = {
            "name": worker.name,
            "work": worker.work,
            "args": worker.args,
            "services": services,
            "rights": None if worker is self.head else with_services(worker.rights, services),
            "actors": {name: self._ray_name(home) for name, home in {**self.homes, **self.options.homes}.items()},
            "namespace": self.namespace,
            "seed": seed_of(self.options, worker.name, self.restarts.get(worker.name, 0)),
            "lockstep": self.options.lockstep,
            "deadline": self.options.deadline,
            "allow": None if self.options.allow is None else [*self.options.allow],
        }
        worker.handle = self.host_class.options(
            name=self._ray_name(worker.name),
            num_cpus=asked.pop("CPU", 0) * (not worker.cramped),
            num_gpus=asked.pop("GPU", 0),
            resources=asked,
            max_concurrency=CALLS,
            scheduling_strategy=where,
        ).remote(start)
        worker.heard = worker.started = time.monotonic()
        worker.again_at, worker.ready, worker.ended, worker.failure = 0.0, False, False, ""
        worker.line, worker.number, worker.bereft = f"{worker.name}: is starting", 0, False
        self._map_blocks(worker, self._given(worker))
        if worker is not self.head:
            worker.handle.begin.remote()
        self._watch(worker)

    def _map_blocks(self, worker: Guest, args: list[Any]) -> None:
        """Have an actor of this machine map the shared memory that these arguments name."""
        for name in {name for arg in args for name in services_in(arg) if name in self.blocks}:
            path, layout = f"/proc/{os.getpid()}/fd/{self.blocks[name].descriptor}", self.blocks[name].layout
            self._get(worker.handle.map_block.remote(name, path, layout), STARTING)

    def _watch(self, worker: Guest) -> None:
        worker.beat = worker.handle.beat.remote(worker.number)

    def _host(self, name: str) -> Any:
        """The actor that holds services, for the head."""
        if name == HEAD:
            return self.head.handle
        limit = time.monotonic() + self.options.deadline
        while name not in self.workers or self.workers[name].again_at:
            if time.monotonic() > limit:
                raise ServiceLost(f"there was no {name} for {self.options.deadline:g} s")
            time.sleep(LOOK)
        self._start_all()
        return self.workers[name].handle

    def _get(self, reference: Any, seconds: float) -> Any:
        """What an actor answers, or why it does not."""
        try:
            return self.ray.get(reference, timeout=seconds)
        except self.ray.exceptions.RayError as error:
            raise ServiceLost(_cause(error)) from None

    # Watching.

    def _listen(self, seconds: float) -> None:
        """Take in what the actors say."""
        watched = {worker.beat: worker for worker in [self.head, *self.workers.values()] if worker.beat is not None}
        ready, _ = self.ray.wait([*watched], timeout=seconds)
        if ready:
            ready, _ = self.ray.wait([*watched], num_returns=len(watched), timeout=0)
        for reference in ready:
            self._hear(watched[reference], reference)

    def _hear(self, worker: Guest, reference: Any) -> None:
        """Take in one answer of an actor, or its end."""
        beat = reference is worker.beat
        worker.beat = None if beat else worker.beat
        try:
            state = self.ray.get(reference, timeout=self.options.stall)
        except self.ray.exceptions.GetTimeoutError:
            raise Stalled(f"{worker.name} gave no answer\n{self._standstill()}") from None
        except self.ray.exceptions.RayError as error:
            worker.failure, worker.fatal = f"died: {_cause(error)}; {worker.line}", False
            return
        worker.heard = time.monotonic()
        worker.activity, worker.line, worker.ready = state["activity"], state["line"], state["ready"]
        worker.ended, worker.pid, worker.node = state["ended"], state["pid"], state["node"]
        worker.failure, worker.fatal, worker.number = state["failure"], state["fatal"], state["number"]
        worker.bereft = state["bereft"]
        if beat and not worker.failure:
            self._watch(worker)

    def _turn(self, worker: Guest) -> None:
        """Let one worker take its turn under lockstep."""
        if not worker.ended and not worker.again_at:
            asked = worker.handle.turn.remote()
            while not self.ray.wait([asked], timeout=LOOK)[0]:
                self._listen(0.0)
                self.patience.heed({worker.name: worker.activity}, self._standstill)
            self._hear(worker, asked)

    def _tend(self) -> None:
        """See to those that died or fell silent, and start them again when their time has come."""
        if self._failure:
            raise self._failure
        now = time.monotonic()
        for worker in [self.head, *self.workers.values()]:
            if worker.again_at and now >= worker.again_at:
                self._launch(worker)
            elif not (worker.pid or worker.again_at or worker.cramped) and now - worker.started > PATIENCE:
                self._squeeze_in(worker)
            silent = worker.pid and not worker.ended and now - worker.heard > self.options.silence
            if silent and not worker.failure and not worker.again_at:
                worker.failure = f"{SILENT} for {self.options.silence:g} s\n{worker.line}"
            early = worker.bereft and now - worker.heard < MOURNING
            if worker.failure and not (worker.again_at or early):
                self._failed(worker, now)

    def _squeeze_in(self, worker: Guest) -> None:
        """Let a worker that was started again share the CPUs of others, if its own went with a machine."""
        if not self.restarts.get(worker.name):
            return  # at first there was room for all, and a slow machine may take its time
        log.warning("%s found no room in %g s: it shares the CPUs of others", worker.name, PATIENCE)
        self._end(worker)
        worker.cramped = True
        self._launch(worker)

    def _failed(self, worker: Guest, now: float) -> None:
        self._end(worker)
        plan_restart(worker, self.options, _died(worker), now)
        self.restarts[worker.name] = self.restarts.get(worker.name, 0) + 1
        if worker.name in self.placed:  # everyone else has lost its services
            for other in self.workers.values():
                if other is not worker and not other.ended:
                    self._end(other)
                    self.restarts[other.name] = self.restarts.get(other.name, 0) + 1
                    other.again_at = worker.again_at

    def _end(self, worker: Guest) -> None:
        """End an actor by force."""
        if worker.handle is not None:
            with suppress(self.ray.exceptions.RayError, ValueError):
                self.ray.kill(worker.handle)
        worker.handle = worker.beat = None
        worker.pid = 0

    def _standstill(self) -> str:
        """Who stands where, with stacks, when nothing moves."""
        lines, parts = [], []
        for worker in self.workers.values():
            answer = ""
            if worker.handle is not None:
                with suppress(ServiceLost):
                    answer = self._get(worker.handle.stacks.remote(), 2.0)
            lines.append(worker.line if answer else f"{worker.name}: does not answer; before: {worker.line}")
            parts.append(answer)
        return "\n".join([*lines, *parts])

    def report(self) -> Mapping[str, Any]:
        """What each worker has done with its time, and how often it was started again; on several machines, where."""
        several = len({worker.node for worker in [*self.workers.values()] if worker.node}) > 1
        return {
            name: {
                **worker.activity,
                "restarts": self.restarts.get(name, 0),
                "pid": worker.pid,
                **({"node": worker.node, "away": not worker.pid} if several else {}),
            }
            for name, worker in [*self.workers.items()]
        }

    def close(self) -> None:
        """End every actor, first by asking, and Ray itself if it was started or joined here."""
        self._stopped.set()
        self._bell.ring()
        for thread in self._observers:
            thread.join(timeout=GRACE)
        guests = [worker for worker in self.workers.values() if worker.handle is not None]
        for worker in guests:
            worker.handle.stop.remote()
        asked = [worker.handle.finish.remote() for worker in guests if worker.pid]
        if asked:
            self.ray.wait(asked, num_returns=len(asked), timeout=GRACE)
        for worker in [*guests, self.head]:
            self._end(worker)
        self.workers.clear()
        if self.group is not None:
            with suppress(Exception):  # Ray may be gone already
                self.ray.util.remove_placement_group(self.group)
            self.group = None
        for block in self.blocks.values():
            block.close()
        self.blocks.clear()
        if self.mine:
            self.ray.shutdown()
            self.mine = False


def _died(worker: Guest) -> bool:
    return worker.failure.startswith(("died", SILENT))


def _cause(error: BaseException) -> str:
    """What Ray says of a loss, without its advice."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
