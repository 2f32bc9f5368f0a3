"""A node: a machine that hosts workers for a head elsewhere.

Its workers are processes of this machine; their calls are passed on to the head. A link may break and come back: calls
wait for it, and one that was on its way is asked again under its number, which the head knows if it has heard it
before. What a head orders is checked before anything is done about it.
"""

from __future__ import annotations

import importlib
import itertools
import logging
import secrets
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from shoal.core import recipe
from shoal.core.errors import Refused, ServiceLost, ShoalError, WorkerFailed
from shoal.core.rights import Rights
from shoal.engines.messages import LINE, TEXT, inspect_work, read_options, read_order
from shoal.engines.once import Once
from shoal.engines.options import Options
from shoal.engines.processes import Processes
from shoal.engines.supervisor import Supervisor
from shoal.transport.nursery import Nursery
from shoal.transport.session import Gate, Session, keep_meeting
from shoal.transport.trust import Terms, line

log = logging.getLogger("shoal")
REPORT = 0.5  # seconds between reports to the head
REASONS = 100  # for which heads did not want this node, that are logged
PATIENCE = 120.0  # seconds without the head after which its workers are ended
FRESH = 0.05  # seconds for which the newest weights here are taken for the newest there are


class Relay:
    """The newest weights on this node: fetched from the head once, whoever asks first."""

    def __init__(self) -> None:
        """Begin with none."""
        self._newest: Any = None
        self._looked = -FRESH
        self._turn = threading.Lock()

    def fetch(self, ask: Callable[[int], Any], newer_than: int) -> Any:
        """The weights, unless the caller holds them; those of a codec depend on that, and are its own."""
        with self._turn:
            if time.monotonic() - self._looked >= FRESH:
                found = ask(newer_than if self._newest is None else self._newest["version"])
                if found is not None and "message" in found:
                    return found
                self._newest, self._looked = found or self._newest, time.monotonic()
            newest = self._newest
        return None if newest is None or newest["version"] == newer_than else newest


class Forward:
    """Passes the calls of one worker's life on to the head, numbered so that one asked twice is answered once."""

    def __init__(self, node: Node, worker: str) -> None:
        """Begin a life."""
        self._node, self._channel, self._numbers = node, f"{worker}-{secrets.token_hex(8)}", itertools.count()

    def answer(self, rights: Rights | None, caller: str, service: str, method: str, args: Sequence[Any]) -> Any:
        """Pass a call on, if it is the worker's to make; weights may be at hand already."""
        if rights is not None:
            rights.check(service, method)
        if not self.lasting(service, method):
            return self._ask(service, method, args)
        relay = self._node.relays.setdefault(service, Relay())
        return relay.fetch(lambda version: self._ask(service, method, [version]), *args)

    def _ask(self, service: str, method: str, args: Sequence[Any]) -> Any:
        return self._node.ask("call", self._channel, next(self._numbers), service, method, [*args])

    def lasting(self, service: str, method: str) -> bool:
        """Whether weights are fetched, except under lockstep, where it matters who asks when."""
        return method == "fetch" and service in self._node.options.relays and not self._node.options.lockstep


class Node:
    """Holds the workers that a head wants here, whatever links come and go."""

    def __init__(self, slots: int, packages: tuple[str, ...] = ("shoal",), modules: tuple[str, ...] = ()) -> None:
        """Begin with nothing; only what the packages hold is ever made here."""
        self.slots, self.packages, self.modules = slots, packages, modules
        self.life = secrets.token_hex(8)  # tells it from another node of its name
        self.nursery: Nursery | None = Nursery(modules)  # loads the libraries before anyone asks
        self.session: Session | None = None
        self.run = ""  # whose workers these are
        self.options = Options()
        self.engine: Supervisor | None = None
        self.failures: dict[str, str] = {}
        self.turns = Once()
        self.relays: dict[str, Relay] = {}
        self._arrived = threading.Condition()
        self._change = threading.RLock()  # of the engine: by the head's wish, by deaths, by the end
        self._left = time.monotonic()  # when the last session ended
        self._closed = threading.Event()
        self._watching = threading.Thread(target=self._watch, name="watch", daemon=True)
        self._watching.start()

    def stay(self, session: Session) -> None:
        """Be there for whoever came over this link, until it ends."""
        while not session.closed.wait(REPORT):  # nobody else waits for this link, should it take nothing any more
            with suppress(ShoalError):
                if session is self.session:
                    self._report(session)
                else:  # no other head hears whose workers are here
                    session.tell("report", "", {}, {}, [], {}, False)
        with self._arrived:
            if self.session is session:
                self.session, self._left = None, time.monotonic()
                log.warning("the link to the head was lost: %s", session.lost)
        session.join()

    def ask(self, kind: str, *args: Any) -> Any:
        """Ask the head; while there is no link, wait for one."""
        limit = time.monotonic() + self.options.deadline
        while (left := limit - time.monotonic()) > 0 and not self._closed.is_set():
            with self._arrived:
                if self.session is None:
                    self._arrived.wait(left)
                session = self.session
            if session is not None:
                with suppress(ServiceLost):
                    return session.call(kind, *args, seconds=max(limit - time.monotonic(), 0.001))
        raise ServiceLost(f"no link to the head for {self.options.deadline:g} s")

    def answer(self, session: Session, kind: str, args: list[Any]) -> Any:
        """Do what the head says, if it makes sense."""
        args = read_order(kind, args)
        if kind == "describe":
            return {"slots": self.slots, "life": self.life, "busy": self._kept_for(), "clock": time.monotonic()}
        if kind == "refused":
            session.refused = line(args[0])
            return None
        if kind != "beat":
            self._check_head(session, args[0] if kind in ("hold", "release") else None)
        if kind == "hold":
            return self.hold(session, *args)
        if kind == "turn":
            return self.turn(*args)
        if kind == "service":
            return self._call(*args)
        if kind == "stacks":
            with self._change:
                return self.engine.standstill() if self.engine else ""
        if kind == "release":
            return self.release(*args)
        return None

    def hold(
        self,
        session: Session,
        run: str,
        options: Mapping[str, Any],
        check: list[Any] | tuple[Any, ...],
        services: list[str],
        workers: Mapping[str, Any],
        blocks: Mapping[str, Any],
    ) -> None:
        """Have exactly these workers, as [path, arguments, services that live with it, rights] by name."""
        inspect_work(workers, check, self.packages)
        if check and run != self.run:
            path, args, expected = check
            compare(recipe.find(path)(*(recipe.rebuild(arg, _no_service) for arg in args)), expected)
        heard = read_options(options, self.packages)
        with self._change:
            self._adopt(session, run)
            if run != self.run:
                self._end()
                self.run = run
                self.options = heard
            session.silence = self.options.silence
            if self.engine is None:
                nursery, self.nursery = self.nursery or Nursery(self.modules), None
                self.processes = Processes(self.options, nursery, lambda worker: Forward(self, worker))
                self.engine = Supervisor(self.options, self.processes)
            self._arrange(self.engine, workers, blocks)
        log.info("holds %s", ", ".join(workers) or "no workers")

    def _arrange(self, engine: Supervisor, workers: Mapping[str, Any], blocks: Mapping[str, Any]) -> None:
        """Drop what is not wanted any more, and start what is missing."""
        engine.placed = {name: made for name, (_, _, made, _) in workers.items() if made}
        self.processes.homes = {service: name for name, made in engine.placed.items() for service in made}
        for name in [name for name in engine.workers if name not in workers]:
            engine.drop(name)
        if not workers:
            self.relays.clear()
        for name in [name for name in self.processes.blocks if name not in blocks]:
            self.processes.blocks.pop(name).close()
        for name in [name for name in blocks if name not in self.processes.blocks]:
            engine.share(name, blocks[name])
        for name, (path, args, _, rights) in workers.items():
            self.failures.pop(name, None)
            if name not in engine.workers:
                engine.add(name, path, args, rights)

    def _kept_for(self) -> float:
        """Seconds for which this node still waits for a head that it has lost."""
        if not self.run or self.session is not None:
            return 0.0
        return max(PATIENCE - (time.monotonic() - self._left), REPORT)  # until its workers have been ended

    def _check_head(self, session: Session, run: str | None = None) -> None:
        """Refuse the orders of any head but the one that this node works for, which knows the name of its run."""
        with self._arrived:
            if session is self.session or self.run in ("", run):
                return
            away = (
                f", which is disconnected and may come back for {self._kept_for():.0f} s"
                if self.session is None
                else ""
            )
        raise Refused(f"this node works for another head{away}")

    def _adopt(self, session: Session, run: str) -> None:
        """Belong to the head at the other end of this session."""
        self._check_head(session, run)
        with self._arrived:
            before, self.session = self.session, session
            self._arrived.notify_all()
        if before is not None and before is not session:
            before.close("another link took its place")

    def turn(self, name: str, number: int) -> Any:
        """Let a worker take a turn under lockstep, and say whether it made progress and whether it has ended.

        One asked twice is taken once.
        """
        engine = self.engine
        if engine is None or name not in engine.workers or not self.options.lockstep:
            raise Refused(f"{name} takes no turns on this node")

        def turn() -> list[bool]:
            engine.turn(name)
            worker = engine.workers[name]
            return [bool(worker.turned), worker.ended]

        return self.turns.ask(name, "", number, turn)

    def _call(self, service: str, method: str, args: list[Any]) -> Any:
        """Call a service that lives here."""
        engine = self.engine
        if engine is None or service not in self.processes.homes or method.startswith("_"):
            raise ShoalError(f"there is no {service}.{method} on this node")
        return self.processes.call(service, method, args)

    def release(self, run: str) -> None:
        """End the workers of a run, which is over."""
        with self._change:
            if run == self.run:
                self._end()
                with self._arrived:
                    self.session = None
                log.info("the run is over")

    def _end(self) -> None:
        if self.engine is not None:
            self.engine.close()
            self.nursery = self.nursery or Nursery(self.modules)
        self.engine, self.run = None, ""
        self.failures.clear()
        self.turns.clear()
        self.relays.clear()

    def _watch(self) -> None:
        """See to the workers, and give up a head that stays away."""
        while not self._closed.wait(0.05 if self.engine is not None and not self.options.lockstep else REPORT):
            with self._change:
                self._tend()
                if self.session is None and self.engine is not None and time.monotonic() - self._left > PATIENCE:
                    log.warning("no link to the head for %g s: its workers are ended", PATIENCE)
                    self._end()

    def _tend(self) -> None:
        """Notice what became of the workers; under lockstep, their turns do."""
        if self.engine is None or self.options.lockstep:
            return
        try:
            self.engine.watch(0.02)
        except WorkerFailed as error:
            for name, worker in [*self.engine.workers.items()]:
                if worker.failure:
                    if self.session is not None:  # else it failed for want of the head, and is started again with it
                        self.failures[name] = str(error)
                    self.engine.drop(name)
        except ShoalError as error:  # the head asks for its workers again
            log.error("the workers are ended: %s", error)
            session = self.session
            self._end()
            if session is not None:
                session.close(str(error))

    def _report(self, session: Session) -> None:
        """Tell the head about the workers, which is a sign of life as well."""
        engine = self.engine
        workers = {} if engine is None else engine.report()
        lines = {} if engine is None else {name: worker.line[:LINE] for name, worker in [*engine.workers.items()]}
        ended = [] if engine is None else [name for name, worker in [*engine.workers.items()] if worker.ended]
        starting = engine is not None and engine.starting()
        failures = {name: text[-TEXT:] for name, text in [*self.failures.items()]}  # the end of it says what was raised
        session.tell("report", self.run, workers, lines, ended, failures, starting)
        if engine is not None and self.options.spans:
            for name, _, chunk in engine.spans():
                session.tell("spans", self.run, name, chunk)

    def close(self) -> None:
        """End everything."""
        self._closed.set()
        self._watching.join()
        with self._change:
            self._end()
            if self.nursery is not None:
                self.nursery.close()
        with self._arrived:
            self._arrived.notify_all()
        if (session := self.session) is not None:  # the thread that stays with it forgets it as it ends
            session.close("the node ends")
            session.join()


def _no_service(name: str) -> Any:
    raise Refused(f"{name} cannot be called before there are workers")


def _load(modules: tuple[str, ...]) -> None:
    """Import what comparing with a head will need."""
    for module in modules:
        with suppress(ImportError):
            importlib.import_module(module)


def compare(here: Mapping[str, str], there: Mapping[str, str]) -> None:
    """Refuse where what this machine would build is not what the head builds."""
    for name in {**there, **here}:
        if here.get(name) != there.get(name):
            raise Refused(f"{name} differs: {here.get(name)} on this node, {there.get(name)} at the head")


def _stay(node: Node, session: Session, logged: set[str]) -> None:
    """Be there for a head that came; what it does not want this node for is logged once."""
    node.stay(session)
    if session.refused and session.refused not in logged and len(logged) < REASONS:
        logged.add(session.refused)
        log.warning("the head at %s says: %s", session.link.peer, session.refused)


def listen(node: Node, address: str, terms: Terms) -> Gate:
    """Wait for a head to come."""
    logged: set[str] = set()
    return Gate(
        address,
        terms,
        lambda _: node.answer,
        lambda name, session: _stay(node, session, logged),
        lambda peer, reason: log.warning("refused %s: %s", peer, reason),
        certificates=True,
    )


def join(node: Node, address: str, terms: Terms, stopped: threading.Event) -> None:
    """Go to a head that listens, and again whenever the link is lost, until stopped."""
    refused = ""

    def stay(name: str, session: Session) -> None:
        nonlocal refused
        if not refused:
            log.info("joined %s at %s", name, address)
        node.stay(session)
        if refused := session.refused:
            raise Refused(f"{address}: the head says: {refused}")

    keep_meeting(address, terms, node.answer, stay, stopped)


def work(
    listen_at: str, join_at: str, terms: Terms, slots: int, packages: tuple[str, ...], modules: tuple[str, ...]
) -> None:
    """Be a node until the user or the system asks it to end."""
    recipe.allow(packages)
    node, stopped = Node(slots, packages, modules), threading.Event()
    threading.Thread(target=_load, args=(modules,), name="load", daemon=True).start()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    gate = None
    terms.warn()
    try:
        if listen_at:
            gate = listen(node, listen_at, terms)
            log.info("node %s listens at %s with %d slots", terms.name, gate.address, slots)
            stopped.wait()
        else:
            terms.check(join_at)
            joining = threading.Thread(target=join, args=(node, join_at, terms, stopped), daemon=True)
            joining.start()
            stopped.wait()
    finally:
        if gate is not None:
            gate.close()
        node.close()
