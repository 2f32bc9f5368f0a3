"""The engine of one machine: every worker has a process; services live in a worker's process or in the head.

The head starts each process with one control pipe and gives it a pipe to every process that holds services. All
pipes are nameless, so when the head goes, however it goes, every child reads the end of its control pipe and ends.
"""

from __future__ import annotations

import os
import selectors
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from shoal.core.errors import ServiceLost, ShoalError, Stalled, WireError
from shoal.core.randomness import derive
from shoal.core.recipe import describe, path_of, services_in
from shoal.core.rights import Named, Rights, rights_of, with_services
from shoal.core.types import Array, Work
from shoal.engines.child import Remote, answer_calls
from shoal.engines.driving import Activity, Bell, Local, Patience, drive
from shoal.engines.memory import Block
from shoal.engines.options import Options
from shoal.engines.worker import Worker, plan_restart, recipe_of, seed_of
from shoal.transport.nursery import STARTING, Nursery
from shoal.transport.pipe import MessageCache, Pipe

HEAD = "head"
CHILD = "shoal.engines.child"  # what a worker's process runs
SILENT = "gave no sign of life"
GRACE = 3.0  # seconds a process has to end by itself


class Processes:
    """Workers are processes; a dead one is heard, reported and, where allowed, started again."""

    def __init__(
        self,
        options: Options,
        nursery: Nursery | None = None,
        services: Callable[[str], Mapping[str, Any]] | None = None,
    ) -> None:
        """Begin with nothing running, but for a nursery; `services` are those of the head as one caller sees them."""
        self.options = options
        self.patience = Patience(options.stall)
        self.services = services or (lambda caller: self.local)
        self._nursery = nursery or Nursery()
        self.workers: dict[str, Worker] = {}
        self.placed: dict[str, dict[str, Any]] = {}  # worker → services to make there
        self.local: dict[str, Local] = {}
        self.blocks: dict[str, Block] = {}
        self.restarts: dict[str, int] = {}
        self.refused: dict[str, int] = {}  # calls to services here that were not the caller's to make
        self._early: dict[str, list[Any]] = {}  # links for a process that is not there yet: socket, caller, its rights
        self._observers: dict[str, tuple[threading.Thread, Activity]] = {}
        self._threads: list[threading.Thread] = []
        self._pipes: list[Pipe] = []  # the head's own, for calls into workers
        self._spare: dict[str, list[Any]] = {}  # stand-ins by service that no call is using
        self._selector = selectors.DefaultSelector()
        self._stopped = threading.Event()
        self._bell, self._shelf = Bell(), MessageCache()
        self._ready = threading.Event()
        self._ready.set()
        self._failure: BaseException | None = None

    @staticmethod
    def prepare(modules: tuple[str, ...]) -> Nursery:
        """Start loading modules for the workers, before anything else is known."""
        return Nursery(modules)

    def serve(self, name: str, make: Callable[..., Any], *args: Any) -> Any:
        """Make a service in the head, or have it made in the worker where it is placed."""
        home = self.options.homes.get(name, HEAD)
        if home == HEAD:
            self.local[name] = Local(name, make(*args), lambda: None)
            return self.local[name]
        self.placed.setdefault(home, {})[name] = recipe_of(make, args, derive(self.options.seed, name))
        return self.standin(name)

    def standin(self, name: str) -> Any:
        """A new stand-in for a service, for one thread of the head."""
        if name in self.local:
            return self.local[name]
        mine: list[Pipe] = []

        def connect() -> Pipe:
            for before in mine:  # which failed
                before.close()
                self._pipes.remove(before)
            mine[:] = [self._call_into(self.options.homes[name])]
            return mine[0]

        return Remote(name, connect, Activity(HEAD))

    def call(self, name: str, method: str, args: list[Any]) -> Any:
        """Call a service from any thread; there are as many stand-ins, and pipes, as calls at a time."""
        spare = self._spare.setdefault(name, [])
        try:
            standin = spare.pop()
        except IndexError:
            standin = self.standin(name)
        try:
            return getattr(standin, method)(*args)
        finally:
            spare.append(standin)

    def share(self, name: str, tree: Mapping[str, Array]) -> Any:
        """Copy arrays into memory that is handed to every worker which names it in its arguments."""
        self.blocks[name] = Block(name, tree)
        return self.blocks[name]

    def run(self, name: str, work: Callable[..., Work], *args: Any) -> None:
        """Start a worker in a process of its own; an observer in a thread of the head."""
        if name in self.options.observers:
            activity = Activity(name)
            thread = threading.Thread(target=self._observe, args=(work(*args), activity), name=name, daemon=True)
            self._observers[name] = thread, activity
            thread.start()
            return
        self.add(name, path_of(work), [describe(arg) for arg in args], rights_of(work, args))

    def add(self, name: str, work: str, args: list[Any], rights: Named) -> None:
        """Start a worker that is described by the path of its function, recipes of its arguments, and its rights."""
        self.workers[name] = Worker(name, work, args, rights)
        self._launch(self.workers[name])

    def _observe(self, work: Work, activity: Activity) -> None:
        try:
            drive(work, activity, self._bell, self._stopped.is_set)
        except BaseException as error:
            self._failure = error
        finally:
            work.close()

    def _launch(self, worker: Worker) -> None:
        worker.control, end = Pipe.pair()
        try:
            worker.pid = self._nursery.start(worker.name, CHILD, end)
        except ServiceLost:
            self._nursery.close()
            self._nursery = Nursery(self._nursery.modules)
            worker.pid = self._nursery.start(worker.name, CHILD, end)
        end.close()
        worker.heard = worker.started = time.monotonic()
        worker.again_at, worker.ready, worker.ended, worker.failure = 0.0, False, False, ""
        worker.line = f"{worker.name}: is starting"
        homes = {name: self.options.homes.get(name, HEAD) for name in [*self.local, *self.options.homes]}
        hosts = sorted(set(homes.values()) - {worker.name})
        ends = [self._connect(host, worker.name) for host in hosts]
        services = self.placed.get(worker.name, {})
        given = [*worker.args, *(arg for recipe in services.values() for arg in recipe["args"])]
        wanted = {name for arg in given for name in services_in(arg)}
        blocks = [block for name, block in self.blocks.items() if name in wanted]
        start = {
            "name": worker.name,
            "work": worker.work,
            "args": worker.args,
            "services": services,
            "blocks": {block._service: block.layout for block in blocks},
            "homes": homes,
            "hosts": hosts,
            "seed": seed_of(self.options, worker.name, self.restarts.get(worker.name, 0)),
            "lockstep": self.options.lockstep,
            "deadline": self.options.deadline,
            "allow": None if self.options.allow is None else [*self.options.allow],
        }
        descriptors = [*(end.fileno() for end in ends), *(block.descriptor for block in blocks)]
        worker.control.send(start, tuple(descriptors))
        for end in ends:
            end.close()
        for link in self._early.pop(worker.name, []):
            self._hand_over(worker, *link)
        self._selector.register(worker.control.socket, selectors.EVENT_READ, worker)

    def _connect(self, host: str, caller: str) -> Any:
        """Return a socket whose other end is answered by the host, as far as the caller has the right to."""
        pipe, end = Pipe.pair()
        named = None if caller == HEAD else with_services(self.workers[caller].rights, self.placed.get(caller, {}))
        if host == HEAD:
            rights = None if named is None else Rights(caller, named, self.refused)
            thread = threading.Thread(
                target=answer_calls,
                args=(pipe, self.services(caller), self._ready, self._bell, self._shelf, rights),
                name="calls",
                daemon=True,
            )
            self._threads = [*(other for other in self._threads if other.is_alive()), thread]
            thread.start()
            return end
        other = pipe.socket
        if host in self.workers and self.workers[host].control is not None:
            self._hand_over(self.workers[host], other, caller, named)
        else:
            self._early.setdefault(host, []).append((other, caller, named))
        return end

    def _hand_over(self, worker: Worker, end: Any, caller: str, named: Named | None) -> None:
        assert worker.control is not None
        with suppress(ServiceLost):  # its death is noticed where deaths are noticed
            worker.control.send(["link", caller, named], (end.fileno(),))
        end.close()

    def _call_into(self, host: str) -> Pipe:
        pipe = Pipe(self._connect(host, HEAD))
        pipe.set_deadline(self.options.deadline)
        self._pipes.append(pipe)
        return pipe

    def wait(self, *names: str) -> None:
        """Watch over the workers until the named ones have ended."""
        self.patience.begin()
        while any(not self.workers[name].ended for name in names):
            if self.options.lockstep:
                for name in [*self.workers]:
                    self.turn(name)
            else:
                self.watch(0.05)
            self.patience.heed(self.report(), self.standstill)
            self.patience.look(self.moves(), self.starting(), self.standstill)

    def hurry(self) -> None:
        """Take that the run was asked to end, so that nothing stuck may delay it for long."""
        self.patience.hurry()

    def watch(self, seconds: float) -> None:
        """Take in what the workers say for a while, and see to those that died."""
        self._listen(seconds)
        self._tend()

    def _tend(self) -> None:
        if self._failure:
            raise self._failure
        now = time.monotonic()
        for worker in self.workers.values():
            self._check(worker, now)

    def moves(self) -> int:
        """Units of work done so far, by all workers together."""
        return sum(worker.activity.get("moves", 0) + worker.ended for worker in self.workers.values())

    def starting(self) -> bool:
        """Whether any worker is about to start."""
        now = time.monotonic()
        return any(self._starting(worker, now) for worker in [*self.workers.values()])

    def _starting(self, worker: Worker, now: float) -> bool:
        """Whether a worker is about to start or loads its libraries, within reason."""
        return bool(worker.again_at) or (not worker.ready and now - worker.started < STARTING)

    def turn(self, name: str) -> None:
        """Let one worker take its turn under lockstep."""
        worker = self.workers[name]
        if not worker.ended and worker.control is not None:
            self._ask(worker, "next", self.options.stall)
        self._tend()

    def _ask(self, worker: Worker, question: str, seconds: float) -> Any:
        """Send a question down the control pipe and wait for its answer, or for the worker's end."""
        assert worker.control is not None
        worker.answer, limit = None, time.monotonic() + seconds
        try:
            worker.control.send([question])
        except ServiceLost:
            return None
        while worker.answer is None and not worker.ended and not worker.failure:
            if question == "next":  # as long as it gives signs of life, what these say counts
                self.patience.heed({worker.name: worker.activity}, self.standstill)
                limit = max(limit, worker.heard + seconds)
            if time.monotonic() > limit:
                if question == "next":
                    raise Stalled(f"{worker.name} gave no sign of life for {seconds:g} s\n{self.standstill()}")
                return None
            self._listen(0.05)
        return worker.answer

    def _listen(self, seconds: float) -> None:
        """Take in what the workers say."""
        for key, _ in self._selector.select(seconds):
            worker: Worker = key.data
            assert worker.control is not None
            self._hear(worker, worker.control)
            while worker.control.pending and not worker.failure:
                self._hear(worker, worker.control)

    def _hear(self, worker: Worker, control: Pipe) -> None:
        """Take in one message of a worker, or its end."""
        try:
            (kind, *rest), _ = control.receive()
        except (ServiceLost, WireError):
            self._selector.unregister(control.socket)
            worker.failure = worker.failure or "died"
            return
        worker.heard = time.monotonic()
        if kind == "beat":
            worker.activity, worker.line = rest
        elif kind == "failed":
            worker.failure, worker.fatal = rest
        elif kind == "ready":
            worker.ready = True
        elif kind == "ended":
            worker.ended = True
        else:
            worker.answer = rest

    def _check(self, worker: Worker, now: float) -> None:
        """Notice that a worker died or fell silent, and start it again when its time has come."""
        if worker.again_at:
            if now >= worker.again_at:
                self._launch(worker)
            return
        if not worker.failure and not worker.ended and now - worker.heard > self.options.silence:
            worker.failure = f"{SILENT} for {self.options.silence:g} s\n{worker.line}"
        if worker.failure:
            self._failed(worker, now)

    def _failed(self, worker: Worker, now: float) -> None:
        code = self._end_process(worker, 1.0)
        died = worker.failure == "died" or worker.failure.startswith(SILENT)
        if worker.failure == "died":
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            worker.failure = f"{how}; {worker.line}"
        plan_restart(worker, self.options, died, now)
        self.restarts[worker.name] = self.restarts.get(worker.name, 0) + 1
        if worker.name in self.placed:
            self._renew(worker)

    def _renew(self, host: Worker) -> None:
        """Start everyone else again as well: their pipes to the services of the host are cut."""
        for worker in self.workers.values():
            if worker is not host and not worker.ended:
                self._end_process(worker, 0.1)
                self.restarts[worker.name] = self.restarts.get(worker.name, 0) + 1
                worker.again_at = host.again_at

    def standstill(self) -> str:
        """Who stands where, with stacks, when nothing moves."""
        lines: list[str] = []
        parts: list[str] = []
        for worker in self.workers.values():
            answer = None if worker.ended else self._ask(worker, "stacks", 2.0)
            lines.append(worker.line if answer else f"{worker.name}: does not answer; before: {worker.line}")
            parts += answer or []
        return "\n".join([*lines, *parts])

    def report(self) -> Mapping[str, Any]:
        """What each worker has done with its time, how often it was started again, and its calls that were refused."""
        workers = [*self.workers.values()]  # which a node asks for while it starts more
        refused = sum((Counter(worker.activity.get("refused", {})) for worker in workers), Counter(self.refused))
        return {
            worker.name: {
                **{key: value for key, value in worker.activity.items() if key != "refused"},
                "restarts": self.restarts.get(worker.name, 0),
                "pid": worker.pid,
                **({"refused": refused[worker.name]} if worker.name in refused else {}),
            }
            for worker in workers
        }

    def _end_process(self, worker: Worker, grace: float) -> int:
        """Reap a process, by force if it does not end by itself, and everything it started."""
        code = self._nursery.wait(worker.pid, grace)
        if code is None:
            with suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGKILL)
            code = self._nursery.wait(worker.pid, GRACE)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(worker.pid, signal.SIGKILL)
        if worker.control is not None:
            if worker.control.socket.fileno() in self._selector.get_map():
                self._selector.unregister(worker.control.socket)
            worker.control.close()
            worker.control = None
        return -signal.SIGKILL if code is None else code

    def drop(self, name: str) -> None:
        """End one worker and forget it."""
        worker = self.workers.pop(name)
        if worker.control is not None:
            with suppress(ShoalError):
                worker.control.send(["stop"])
            self._end_process(worker, GRACE)

    def close(self) -> None:
        """End every process and thread, first by asking."""
        self._stopped.set()
        self._bell.ring()
        for worker in self.workers.values():
            if worker.control is not None:
                try:
                    worker.control.set_deadline(GRACE)
                    worker.control.send(["stop"])
                except ShoalError:
                    pass
        limit = time.monotonic() + GRACE
        for worker in self.workers.values():
            if worker.control is not None:
                self._end_process(worker, max(limit - time.monotonic(), 0.01))
        self.workers.clear()
        for end in [*self._pipes, *(link[0] for links in self._early.values() for link in links)]:
            end.close()
        for thread in [*self._threads, *(thread for thread, _ in self._observers.values())]:
            thread.join(timeout=GRACE)
        for block in self.blocks.values():
            block.close()
        self.blocks.clear()
        self._selector.close()
        self._nursery.close()
