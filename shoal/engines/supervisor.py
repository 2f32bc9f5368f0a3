"""The head's view of a run: starts workers, restarts those that die, gives turns, notices when nothing moves.

An engine is a launcher: it says how a worker is started, heard and ended, and how services elsewhere are called.
Everything else is here, once for all of them.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeAlias

from shoal.core.doing import FIRST, Seldom
from shoal.core.errors import ShoalError, Stalled, WorkerFailed
from shoal.core.randomness import derive
from shoal.core.recipe import describe, path_of
from shoal.core.rights import Named, rights_of, with_services
from shoal.core.spans import Chunk, keep
from shoal.core.types import Array, Work
from shoal.engines.host import Host, given, recipe_of
from shoal.engines.options import Options
from shoal.engines.standin import Activity, Standin

log = logging.getLogger("shoal")
Reports: TypeAlias = Mapping[str, Mapping[str, Any]]  # what each worker says of itself
HEAD = "head"
LOOK = 0.05  # seconds between looks at the workers
HEALTH = 60.0  # seconds of life after which earlier restarts no longer count
STARTING = 120.0  # seconds in which libraries may load
GRACE = 3.0  # seconds in which a worker has to end when asked
MOURNING = 2.0  # seconds in which the death of a host is reported, after a caller has lost its services
HURRY = 1 / 10  # the share of `stall` that a worker may stay inside an environment once the run was asked to end


@dataclass
class Worker:
    """A worker as the head sees it."""

    name: str
    work: Any  # the function, or its path where it lives in another process
    args: Sequence[Any]  # likewise, or their descriptions
    rights: Named = field(default_factory=dict)
    seat: Any = None  # what its launcher knows it by
    host: Host | None = None  # where it lives in this process
    report: dict[str, Any] = field(default_factory=dict)
    line: str = "has not started"
    heard: float = 0.0
    started: float = 0.0
    restarts: int = 0  # without a minute of health in between
    lives: int = 0  # that are over
    again_at: float = 0.0
    ready: bool = False
    ended: bool = False
    turned: bool | None = None  # whether its turn made progress; None: it still takes it
    failure: str = ""
    fatal: bool = False  # starting it again would only repeat the failure
    lost: bool = False  # it failed because it lost a service
    died: bool = False  # it did not get to say why
    pid: int = 0
    node: str = ""  # the machine, where there are several
    away: bool = False  # whether that machine is disconnected
    elsewhere: bool = False  # whether that machine watches over it
    spans: deque[Chunk] = field(default_factory=deque)  # that nobody has taken yet

    def begin(self, now: float) -> None:
        """Forget the life before."""
        self.heard = self.started = now
        self.again_at, self.line, self.turned = 0.0, f"{self.name}: is starting", None
        self.ready = self.ended = self.fatal = self.lost = self.died = False
        self.failure = ""

    def hear(self, changes: Mapping[str, Any]) -> None:
        """Take in what its launcher reports."""
        self.heard = time.monotonic()
        for key, value in changes.items():
            if key == "spans":
                keep(self.spans, value)
            else:
                setattr(self, key, value)

    def reported(self) -> dict[str, Any]:
        """What it has done with its time."""
        return self.report if self.host is None else self.host.activity.as_dict()

    def moves(self) -> int:
        """Units of work so far; its end is one as well."""
        moves = self.report.get("moves", 0) if self.host is None else self.host.activity.moves
        return int(moves) + self.ended

    def starting(self) -> bool:
        """Whether it is about to start or loads its libraries, within reason."""
        loading = not (self.ready or self.host) and time.monotonic() - self.started < STARTING
        return bool(self.again_at) or loading

    def describe(self) -> str:
        """One line on what it is doing."""
        return self.line if self.host is None else self.host.activity.describe()


class Launcher(Protocol):
    """What an engine supplies: how workers are started, heard and ended, and how services elsewhere are called."""

    shared: bool = False  # whether workers live in the head's process, and are given objects and not descriptions
    in_turns: bool = False  # whether workers always take turns

    def open(self, head: Host) -> None:
        """Take the head, whose services workers may call."""
        ...

    def start(self, worker: Worker, start: Mapping[str, Any]) -> None:
        """Start a worker, which must be able to call what `start["rights"]` names."""
        ...

    def poll(self, seconds: float) -> Iterable[tuple[str, Mapping[str, Any]]]:
        """Wait for reports of workers, and yield which fields of which `Worker` change; `died`: it has gone."""
        ...

    def turn(self, worker: Worker) -> bool | None:
        """Give a worker its turn; whether it made progress, or None: `poll` will say so as `turned`."""
        ...

    def call(self, service: str, method: str, args: Sequence[Any]) -> Any:
        """Call a service that does not live in the head, from any thread."""
        ...

    def stop(self, worker: Worker) -> None:
        """Ask a worker to end after its unit of work."""
        ...

    def end(self, worker: Worker, seconds: float) -> str:
        """End a worker, by force if it has not ended in time, and say how it ended."""
        ...

    def stacks(self, worker: Worker) -> str:
        """Where the threads of a worker are; empty: it does not answer."""
        return ""

    def serve(self, name: str, make: Callable[..., Any], args: Sequence[Any], seed: int) -> bool:
        """Make a service of the head elsewhere; False: it should live in the head itself."""
        return False

    def share(self, name: str, tree: Mapping[str, Array]) -> Any:
        """Copy arrays into memory that workers of one machine share, and return what stands for it."""
        raise ShoalError("this engine has no shared memory")

    def guard(self, check: Callable[[], None]) -> AbstractContextManager[Any]:
        """Call `check` now and then while workers run in the head's own thread; it raises when one is stuck."""
        return nullcontext()

    def hurry(self) -> None:
        """Note that the run was asked to end."""
        return

    def release(self) -> None:
        """End workers on other machines, while the services that they call are still there."""
        return

    def close(self) -> None:
        """End everything that is left."""
        ...


class Supervisor:
    """Workers by name and state, whatever they run in."""

    def __init__(self, options: Options, launcher: Launcher) -> None:
        """Begin with nothing running."""
        self.options, self.launcher = options, launcher
        self.lockstep = options.lockstep or launcher.in_turns
        self.patience = Patience(options.stall)
        self.head = Host(HEAD)
        self.head.ready.set()
        self.workers: dict[str, Worker] = {}
        self.placed: dict[str, dict[str, Any]] = {}  # worker → services to make there
        self._observers: list[threading.Thread] = []
        self._observing: dict[str, Host] = {}
        self._turned = 0  # turns that made progress
        self._failure: BaseException | None = None
        launcher.open(self.head)

    # What a program asks for.

    def serve(self, name: str, make: Callable[..., Any], *args: Any) -> Any:
        """Make a service in the head, or have it made in the worker where it is placed."""
        home, seed = self.options.homes.get(name, HEAD), derive(self.options.seed, name)
        if home != HEAD and not self.launcher.shared:
            self.placed.setdefault(home, {})[name] = recipe_of(make, args, seed)
        elif not self.launcher.serve(name, make, args, seed):
            self.head.serve(name, make, [given(arg, self.head.standin) for arg in args], seed)
        return self.standin(name)

    def standin(self, name: str) -> Any:
        """What the head holds of a service; any of its threads may call it."""
        if name in self.head.services:
            return Standin(name, self.head.services[name].call, Activity(HEAD), near=True)
        return Standin(name, partial(self.launcher.call, name), Activity(HEAD))

    def share(self, name: str, tree: Mapping[str, Array]) -> Any:
        """Copy arrays into memory that all workers of a machine share, and return what stands for it."""
        return self.launcher.share(name, tree)

    @property
    def shares(self) -> bool:
        """Whether there is memory that workers of a machine share."""
        return type(self.launcher).share is not Launcher.share

    def run(self, name: str, work: Callable[..., Work], *args: Any) -> None:
        """Start a worker; an observer lives in a thread of the head where workers live elsewhere."""
        rights = rights_of(work, args)
        if self.launcher.shared:
            self._add(Worker(name, work, args, rights))
        elif name in self.options.observers:
            self._observe(name, work, args)
        else:
            self.add(name, path_of(work), [describe(arg) for arg in args], rights)

    def add(self, name: str, work: str, args: Sequence[Any], rights: Named) -> None:
        """Start a worker that is described by the path of its function, recipes of its arguments, and its rights."""
        self._add(Worker(name, work, args, rights))

    def _add(self, worker: Worker) -> None:
        self.workers[worker.name] = worker
        self._launch(worker)

    def _observe(self, name: str, work: Callable[..., Work], args: Sequence[Any]) -> None:
        self._observing[name] = host = Host(name, spans=self.options.spans)
        host.work, host.bell, host.stopped = work(*args), self.head.bell, self.head.stopped

        def observe() -> None:
            assert host.work is not None
            try:
                host.drive()
            except BaseException as error:
                self._failure = error
            finally:
                with suppress(ShoalError):
                    host.work.close()

        thread = threading.Thread(target=observe, name=name, daemon=True)
        self._observers.append(thread)
        thread.start()

    def wait(self, *names: str) -> None:
        """Watch over the workers until the named ones have ended; raise what any worker raised."""
        self.patience.begin()
        with self.launcher.guard(self._check_busy):
            while any(not self.workers[name].ended for name in names):
                if self.lockstep:
                    self._give_turns(names)
                else:
                    self.watch(LOOK)
                if not self.launcher.in_turns:  # whose guard does this
                    self._check_busy()
                moves = self._turned if self.lockstep else self.moves()
                waits = not self.patience.look(moves, self.starting(), self._reports, self.standstill)
                if waits and self.launcher.in_turns:
                    time.sleep(0.0005)

    def hurry(self) -> None:
        """Note that the run was asked to end, so that nothing stuck may delay it for long."""
        self.patience.hurry()
        self.launcher.hurry()

    def report(self) -> Mapping[str, Any]:
        """What each worker has done with its time, how often it was restarted, and its calls that were refused."""
        workers = [*self.workers.values()]  # which others may change meanwhile
        refused = Counter(self.head.refused)
        for worker in workers:
            if worker.host is None:
                refused.update(worker.report.get("refused", {}))
        return {
            worker.name: {
                **({} if worker.host else {"restarts": worker.lives, "pid": worker.pid}),
                **{key: value for key, value in worker.reported().items() if key != "refused"},
                **({"refused": refused[worker.name]} if refused[worker.name] else {}),
                **({"node": worker.node, "away": worker.away} if worker.node else {}),
            }
            for worker in workers
        }

    def spans(self) -> Iterator[tuple[str, str, Chunk]]:
        """What workers did since the last call, for a trace: the worker, its machine where there are several, spans."""
        workers = [*self.workers.values()]
        hosts = {worker.name: worker.host for worker in workers if worker.host is not None} | self._observing
        for name, host in hosts.items():
            if (chunk := host.spans().get("spans")) is not None:
                yield name, "", chunk
        for worker in workers:
            while worker.spans:
                yield worker.name, worker.node, worker.spans.popleft()

    def close(self) -> None:
        """End every worker, first by asking, and whatever the engine has started."""
        self.head.stop()
        self.launcher.release()  # first: a worker elsewhere may be waiting for an answer from one that lives here
        running = [worker for worker in self.workers.values() if worker.seat is not None]
        for worker in running:
            self.launcher.stop(worker)
        limit = time.monotonic() + GRACE
        for worker in running:
            self.launcher.end(worker, max(limit - time.monotonic(), 0.01))
        self.workers.clear()
        for thread in self._observers:
            thread.join(timeout=GRACE)
        self.launcher.close()

    # Starting.

    def _launch(self, worker: Worker) -> None:
        services = self.placed.get(worker.name, {})
        worker.begin(time.monotonic())
        seed = derive(self.options.seed, worker.name, *([worker.lives] if worker.lives else []))
        self.launcher.start(
            worker,
            {
                "name": worker.name,
                "work": worker.work,
                "args": worker.args,
                "services": services,
                "rights": with_services(worker.rights, services),
                "seed": seed,  # another for each life, so that none repeats what the one before did
                "lockstep": self.lockstep,
                "spans": self.options.spans,
                "deadline": self.options.deadline,
                "allow": None if self.options.allow is None else [*self.options.allow],
            },
        )

    def starting(self) -> bool:
        """Whether any worker is about to start or loads its libraries, within reason."""
        return any(worker.starting() for worker in [*self.workers.values()])

    # Watching.

    def watch(self, seconds: float) -> None:
        """Take in what the workers report for a while, and see to those that died."""
        self.listen(seconds)
        self._tend()

    def listen(self, seconds: float) -> None:
        """Take in what the workers report."""
        for name, changes in self.launcher.poll(seconds):
            if name in self.workers:
                self.workers[name].hear(changes)

    def moves(self) -> int:
        """Units of work so far; an observer moves by the clock, so it must not hide that the run stands still."""
        observers = self.options.observers
        return sum(worker.moves() for name, worker in [*self.workers.items()] if name not in observers)

    def _check_busy(self) -> None:
        self.patience.heed(self._reports(), self.standstill)

    def _reports(self) -> Reports:
        return {worker.name: worker.reported() for worker in [*self.workers.values()]}

    def _give_turns(self, names: Sequence[str]) -> None:
        """Let every worker take one turn, in the order in which they were started."""
        for worker in [*self.workers.values()]:
            try:
                self.turn(worker.name)
            except Stalled as verdict:
                if worker.name in names or not self.patience.hurried:
                    raise
                log.warning("%s\nthe run ends without it", verdict)
                worker.ended = True

    def turn(self, name: str) -> None:
        """Let one worker take its turn under lockstep."""
        worker = self.workers[name]
        if not (worker.ended or worker.again_at):
            worker.turned = self.launcher.turn(worker)
            limit = time.monotonic() + self.options.stall if worker.turned is None else 0.0
            while worker.turned is None and not (worker.ended or worker.failure or worker.died):
                # As long as it gives signs of life, what these say counts.
                self.patience.heed({name: worker.reported()}, self.standstill)
                if time.monotonic() > max(limit, worker.heard + self.options.stall) and not worker.starting():
                    raise Stalled(f"{name} gave no sign of life for {self.options.stall:g} s\n{self.standstill()}")
                self.listen(LOOK)
            if name not in self.options.observers:
                self._turned += bool(worker.turned) + worker.ended
        if not self.launcher.in_turns:
            self._tend()

    def _tend(self) -> None:
        """See to the workers that died or fell silent, and start them again when their time has come."""
        if self._failure:
            raise self._failure
        now = time.monotonic()
        for worker in [*self.workers.values()]:
            if worker.again_at:
                if now >= worker.again_at:
                    self._launch(worker)
                continue
            silent = not (worker.ended or worker.host or worker.elsewhere) and now - worker.heard > self.options.silence
            if silent and not worker.failure:
                worker.failure = f"gave no sign of life for {self.options.silence:g} s\n{worker.line}"
                worker.died = True
            mourning = worker.lost and now - worker.heard < MOURNING  # the host's death is the better reason
            if worker.died or (worker.failure and not mourning):
                self._failed(worker, now)

    def _failed(self, worker: Worker, now: float) -> None:
        how = self.launcher.end(worker, 1.0)
        worker.failure = worker.failure or f"{how}; {worker.line}"
        self._plan_restart(worker, now)
        worker.lives += 1
        if worker.name in self.placed and worker.name not in self.options.expendable:
            for other in self.workers.values():  # everyone else has lost its services
                if other is not worker and not other.ended and other.name not in self.options.expendable:
                    if not other.again_at:
                        self.launcher.end(other, 0.1)
                    other.lives, other.again_at = other.lives + 1, worker.again_at

    def _plan_restart(self, worker: Worker, now: float) -> None:
        """Set the time of a failed worker's next start, later each time, or raise what it failed of."""
        options = self.options
        if now - worker.started > HEALTH:
            worker.restarts = 0
        allowed = worker.name in options.restartable or (worker.died and worker.name in options.revivable)
        if not allowed or worker.fatal or worker.restarts >= options.restarts:
            raise WorkerFailed(f"{worker.name} {worker.failure}")
        worker.restarts += 1
        delay = min(0.25 * 2**worker.restarts, 30.0)
        worker.again_at = now + delay
        log.warning("%s %s\nrestarting it in %.1f s (%d of %d)", worker.name, worker.failure, delay,
                    worker.restarts, options.restarts)  # fmt: skip

    def standstill(self) -> str:
        """Who is where, with stacks, when nothing moves."""
        lines, parts = [], []
        for worker in [*self.workers.values()]:
            found = "" if worker.ended else self.launcher.stacks(worker)
            answers = found or worker.host is not None
            lines.append(worker.describe() if answers else f"{worker.name}: does not answer; before: {worker.line}")
            parts.append(found)
        return "\n".join([*lines, *dict.fromkeys(filter(None, parts))])

    def drop(self, name: str) -> None:
        """End one worker and forget it."""
        worker = self.workers.pop(name)
        if worker.seat is not None:
            self.launcher.stop(worker)
            self.launcher.end(worker, GRACE)


class Patience:
    """Notices that no worker has made progress for too long, or that one is stuck in what it does."""

    def __init__(self, seconds: float) -> None:
        """Begin now."""
        self.seconds = seconds
        self.begin()
        self._hurried: float | None = None
        self._said: dict[str, Seldom] = {}

    def begin(self) -> None:
        """Forget how long nobody has made progress."""
        self._moves, self._since = -1, time.monotonic()

    def hurry(self) -> None:
        """Wait for nobody who is stuck in an environment: the run was asked to end."""
        self._hurried = self._hurried or time.monotonic()

    @property
    def hurried(self) -> bool:
        """Whether the run was asked to end."""
        return self._hurried is not None

    def look(self, moves: int, starting: bool, reports: Callable[[], Reports], describe: Callable[[], str]) -> bool:
        """Whether there is progress, or some will come; too long without raises, with who is where.

        If all wait for one that is stuck, its own time is up at about the same moment: it is named in any case.
        """
        moved, now = moves != self._moves or starting, time.monotonic()
        if moved:
            self._moves, self._since = moves, now
        elif now - self._since > self.seconds:
            stuck = [words for _, words, doing, busy in _inside(reports()) if doing and busy > self.seconds / 2]
            raise Stalled("\n".join([f"no worker made progress for {self.seconds:g} s", *stuck, describe()]))
        return moved

    def heed(self, reports: Reports, describe: Callable[[], str]) -> None:
        """Say which worker has been inside one thing for long; too long raises, with who is where."""
        for name, words, doing, busy in _inside(reports):
            asked = time.monotonic() - self._hurried if self._hurried is not None else 0.0
            if doing and min(busy, asked) > self.seconds * HURRY:
                raise Stalled(f"the run was asked to end, but {words}\n{describe()}")
            if busy > self.seconds:
                raise Stalled(f"{words}, {self.seconds:g} s allowed by limits.stall\n{describe()}")
            if doing and busy > FIRST and self._said.setdefault(name, Seldom()).due():
                log.warning("%s: %s takes long, %.0f s so far", name, doing, busy)


def _inside(reports: Reports) -> Iterator[tuple[str, str, str, float]]:
    """Each worker, what it has been inside of, in words and by name if it has one, and for how many seconds."""
    for name, report in [*reports.items()]:
        busy, doing = report.get("busy", 0.0), report.get("doing", "")
        if isinstance(busy, float) and math.isfinite(busy):  # what a node reports may be anything
            yield name, f"{name} has been inside {doing or 'one unit of work'} for {busy:.0f} s", doing, busy
