"""The engine of several machines: workers that may live elsewhere are spread over nodes that come and go.

The head's services and the workers that belong to it live as on `processes`. To each node the head says which workers
it should hold, and says it again whenever a link comes back; the node sees to the rest. Nodes call the head's services
through their link, and a call that is asked twice, because the link broke in between, is answered once.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shoal.core.caller import call_as
from shoal.core.errors import DeadlineExceeded, Refused, ServiceFailed, ServiceLost, ShoalError, WireError, WorkerFailed
from shoal.core.recipe import services_in
from shoal.core.rights import Rights
from shoal.core.spans import Chunk, keep, later
from shoal.core.types import Array
from shoal.engines.host import Host, Served
from shoal.engines.messages import LIMITS, About, read_about, read_report, read_spans
from shoal.engines.once import Once
from shoal.engines.options import Machines, Options
from shoal.engines.placement import HERE, place
from shoal.engines.processes import Processes
from shoal.engines.supervisor import Launcher, Worker
from shoal.transport.nursery import Nursery
from shoal.transport.session import Answer, Gate, Session, keep_meeting
from shoal.transport.trust import Terms

log = logging.getLogger("shoal")
BEAT = 1.0  # seconds between signs of life
SENSELESS = 20  # reports in a row that make no sense, after which a node is done without
UNWANTED = 1000  # names of nodes that are logged when they are refused
ASK = 1 / 4  # the share of `stall` after which a turn is asked for again, since each time takes a thread of the node


class Cluster(Launcher):
    """Workers on several machines; a broken link does not end the run."""

    def __init__(self, options: Options, nursery: Nursery | None = None) -> None:
        """Take where nodes are to be found."""
        machines = options.machines or Machines()
        self.options, self.machines, self.network = options, machines, machines.network
        network = self.network
        self.terms = Terms(
            "head", network.trust, insecure=network.insecure, link=network.link, world=network.world, role="head"
        )
        addresses = [*machines.nodes, *filter(None, [self.network.listen])]
        if not addresses:
            raise ShoalError(
                "the cluster has no machines: name them in nodes, or set network.listen for those that join"
            )
        for address in addresses:
            self.terms.check(address)
        self.terms.warn()
        self.here = Processes(options, nursery)
        self.roaming = {service: home for service, home in options.homes.items() if self._roams(home)}
        self.here.homes = {service: home for service, home in options.homes.items() if service not in self.roaming}
        self.run_name = secrets.token_hex(16)  # a secret: by it a node knows this head again
        self.stations: dict[str, Station] = {}
        self.recipes: dict[str, tuple[Worker, Mapping[str, Any]]] = {}  # of the workers that may live on nodes
        self.wanted: set[str] = set()  # those of them that should run
        self.rights: dict[str, Rights] = {}  # of the workers that nodes were ordered to hold
        self.places: dict[str, str] = {}  # worker → node
        self.blocks: dict[str, Shared] = {}
        self.turns = 0
        self.failure: ShoalError | None = None
        self.answers = Once()
        self._asking = ""  # the worker on a node whose turn it is
        self._hurried = False
        self._unwanted: dict[str, str] = {}  # why nodes that came were refused, by name
        self._news = threading.Condition()
        self._closed = threading.Event()
        self._threads: list[threading.Thread] = []
        self.gate: Gate | None = None

    @staticmethod
    def prepare(modules: tuple[str, ...]) -> Nursery:
        """Start loading modules for the workers, before anything else is known."""
        return Processes.prepare(modules)

    def open(self, head: Host) -> None:
        """Take the head, whose services workers may call, and begin to look for nodes."""
        self.head = head
        self.here.open(head)
        for service, home in self.roaming.items():
            head.services[service] = Elsewhere(self, service, home)
        for address in self.machines.nodes:
            self._start(self._keep_in_touch, address)
        if self.network.listen:
            self.gate = Gate(
                self.network.listen, self.terms, self._answering, self._welcome, self._refused, certificates=False
            )
            log.info("nodes may join at %s", self.gate.address)

    def _start(self, target: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=target, args=args, name="node", daemon=True)
        self._threads = [*(other for other in self._threads if other.is_alive()), thread]
        thread.start()

    def share(self, name: str, tree: Mapping[str, Array]) -> Shared:
        """Give every machine on which workers of the group `name/…` come to live memory that these share."""
        self.blocks[name] = Shared(name, {key: np.array(value) for key, value in tree.items()})
        return self.blocks[name]

    def _roams(self, worker: str) -> bool:
        """Whether a worker may live on a node."""
        return worker not in self.options.observers and (self.machines.remote is None or worker in self.machines.remote)

    # Starting and ending.

    def start(self, worker: Worker, start: Mapping[str, Any]) -> None:
        """Start a worker here, or give it to a node."""
        if not self._roams(worker.name):
            self.here.start(worker, start)
            return
        with self._news:
            worker.seat, worker.elsewhere = worker.name, True
            self.recipes[worker.name] = worker, start
            self.wanted.add(worker.name)

    def _is_here(self, worker: Worker) -> bool:
        return worker.name in self.here.controls

    def stop(self, worker: Worker) -> None:
        """Ask a process here to end; nodes are released as a whole."""
        if self._is_here(worker):
            self.here.stop(worker)

    def end(self, worker: Worker, seconds: float) -> str:
        """End a process here, or have its node begin it anew."""
        with self._news:
            self.wanted.discard(worker.name)
        if self._is_here(worker):
            return self.here.end(worker, seconds)
        worker.seat = None
        if (station := self.stations.get(self.places.get(worker.name, HERE))) is not None:
            station.renewed, station.ordered = False, None
        return "was ended"

    def stacks(self, worker: Worker) -> str:
        """Ask a process here, or the node, which answers for all its workers."""
        if self._is_here(worker):
            return self.here.stacks(worker)
        station = self.stations.get(self.places.get(worker.name, HERE))
        if station is None:
            return f"{worker.name}: there is no node for it yet"
        if station.session is None:
            return f"node {station.name} is disconnected"
        found = ""
        with suppress(ShoalError):
            found = f"node {station.name}\n{station.session.call('stacks', seconds=5.0)}"
        return found

    def hurry(self) -> None:
        """Wait no more for machines that are missing."""
        self._hurried = True

    def release(self) -> None:
        """End the workers on every node that can be reached."""
        self._closed.set()
        for station in [*self.stations.values()]:
            if (session := station.session) is not None:
                with suppress(ShoalError):
                    session.call("release", self.run_name, seconds=10.0)
                session.close("the run has ended")
                session.join()

    def close(self) -> None:
        """Let no node in any more, and end what is left here."""
        if self.gate is not None:
            self.gate.close()
        for thread in self._threads:
            thread.join(timeout=15)
        self.here.close()

    # Links.

    def _keep_in_touch(self, address: str) -> None:
        """Connect to a node that listens, and again whenever the link is lost."""
        answer = self._answering(address)
        keep_meeting(address, self.terms, answer, lambda _, session: self._joined(address, session), self._closed)

    def _refused(self, peer: str, reason: str) -> None:
        log.warning("refused %s: %s", peer, reason)

    def _welcome(self, name: str, session: Session) -> None:
        """Take a node in that joined; why it is not wanted is logged once, since it will try again."""
        try:
            self._joined(name, session)
        except ShoalError as error:
            if self._unwanted.get(name) != str(error) and len(self._unwanted) < UNWANTED:
                self._unwanted[name] = str(error)
                self._refused(f"{name} at {session.link.peer}", str(error))

    def _joined(self, name: str, session: Session) -> None:
        """Take a node in, and stay with it until its link ends."""
        session.silence = self.options.silence
        try:
            about, ahead = self._ask_about(name, session)
            with self._news:
                self._check_life(name, about["life"])
                station = self.stations.setdefault(name, Station(name))
                before, station.session, station.ordered = station.session, session, None
                if station.life != about["life"]:  # else spans of one worker could overlap
                    station.ahead = ahead
                station.life, station.slots = about["life"], about["slots"]
                self._news.notify_all()
        except ShoalError as error:
            with suppress(ShoalError):  # an answer says that it was heard
                session.call("refused", str(error), seconds=5.0)
            session.close(str(error))
            raise
        if before is not None:
            before.close("another link took its place")
        log.info("node %s connected with %d slots", name, station.slots)
        while not session.closed.wait(BEAT):  # nobody else waits for this link, should it take nothing any more
            with suppress(ServiceLost):
                session.tell("beat")
        with self._news:
            if station.session is session:
                station.session, station.left, station.starting = None, time.monotonic(), False
                if not self._closed.is_set():
                    log.warning("node %s disconnected: %s", name, session.lost)
        session.join()

    def _ask_about(self, name: str, session: Session) -> tuple[About, float]:
        """What a node says of itself, as soon as it is free: until then it waits for a head that it has lost.

        The number is by how many seconds the clock here is ahead of the node's, right to half the time of the question.
        """
        logged = False
        while True:
            asked = time.monotonic()
            about = read_about(session.call("describe", seconds=self.options.deadline))
            ahead = (asked + time.monotonic()) / 2 - about["clock"]
            known = self.stations.get(name)
            if not about["busy"] or (known is not None and known.life == about["life"]):
                return about, ahead
            if not logged:
                log.warning(
                    "node %s is kept for another head, which is disconnected, for %.0f s more", name, about["busy"]
                )
            logged = True
            if session.closed.wait(min(about["busy"], BEAT)) or self._closed.is_set():
                raise ServiceLost(f"the link was lost: {session.lost}")

    def _check_life(self, name: str, life: str) -> None:
        """Refuse a second node of a name, and a node that is already connected under another name."""
        for station in self.stations.values():
            if station.session is None or station.session.closed.is_set():
                continue
            if station.name == name and station.life != life:
                raise Refused(f"another node is connected under the name {name}: choose another with --name")
            if station.name != name and station.life == life:
                raise Refused(f"this node is already connected, under the name {station.name}")

    def _answering(self, name: str) -> Answer:
        return lambda session, kind, args: self._answer(name, session, kind, args)

    def _answer(self, node: str, session: Session, kind: str, args: list[Any]) -> Any:
        """Answer a node that was taken in, over the link that it was taken in by."""
        station = self.stations.get(node)
        if station is None or station.session is not session:
            if kind in ("report", "spans"):  # a sign of life of one that comes or goes
                return None
            raise Refused(f"node {node} is not connected by this link")
        if kind == "call":
            return self._answer_call(station, args)
        if kind == "report":
            try:
                station.hear(args, self.run_name, self.recipes, self.places)
            except Refused as error:
                if station.row == SENSELESS:  # nobody knows what its workers do, or whether they have ended
                    self._do_without(station, f"node {node} sends reports that make no sense: {error}")
                raise
            self._forget(name for name in station.ended if self.places.get(name) == node)
            return None
        if kind == "spans":
            station.take_spans(args, self.run_name, self.recipes if self.options.spans else {}, self.places)
            return None
        raise ShoalError(f"the head does not know {kind!r}")

    def _answer_call(self, station: Station, args: list[Any]) -> Any:
        """Do what a worker on a node asks for, if it lives there and its recipe names that."""
        if [type(arg) for arg in args] != [str, int, str, str, list]:
            raise Refused("call: a channel, a number, a service, a method and arguments were expected")
        channel, number, service, method, given = args
        worker, _, life = channel.rpartition("-")
        ordered = station.ordered or []  # one that is moved may call until its node has been ordered to end it
        rights = self.rights.get(worker)
        if rights is None or (self.places.get(worker) != station.name and worker not in ordered):
            raise Refused(f"{worker:.200} does not live on node {station.name}, or does not any more")
        rights.check(service, method)
        call_as(worker)
        return self.answers.ask(worker, life, number, lambda: self.call(service, method, given))

    def reach(self, worker: str, kind: str, *args: Any) -> Any:
        """Call the node where a worker lives; while it has none, or its link is down, wait."""
        limit = time.monotonic() + self.options.deadline
        while (left := limit - time.monotonic()) > 0:
            self._arrange()
            station = self.stations.get(self.places.get(worker, HERE))
            if self.failure is not None:
                raise self.failure
            if station is None or station.session is None or worker not in (station.ordered or ()):
                with self._news:
                    self._news.wait(0.02)
                continue
            with suppress(ServiceLost):
                return station.session.call(kind, *args, seconds=left)
        raise ServiceLost(f"no link to {worker} for {self.options.deadline:g} s")

    def call(self, service: str, method: str, args: Sequence[Any]) -> Any:
        """Call a service; while its worker begins again, wait."""
        if service in self.head.services:
            return self.head.services[service].call(method, args)
        limit = time.monotonic() + self.options.deadline
        while True:
            try:
                return self.here.call(service, method, args)
            except ServiceLost:
                if time.monotonic() > limit or self._closed.wait(0.05):
                    raise

    # Watching.

    def poll(self, seconds: float) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Take in what processes here and nodes report, and see that every worker has a place."""
        yield from self.here.poll(seconds)
        if self.failure is not None:
            raise self.failure
        self._arrange()
        self._fill_here()
        for station in [*self.stations.values()]:
            yield from self._news_of(station)
        for name in [name for name in self.recipes if name not in self.places]:
            worker = self.recipes[name][0]
            worker.started, worker.ready = time.monotonic(), False  # it waits for a node, which may take its time
        if (name := self._asking) and (moved := self._ask_turn(self.recipes[name][0])) is not None:
            yield name, {"turned": moved}

    def _news_of(self, station: Station) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """What a node has reported of the workers that live there."""
        busy = station.starting or station.ordering
        fresh, station.fresh = station.fresh, False
        for name in [name for name, node in self.places.items() if node == station.name and name in self.wanted]:
            worker, away = self.recipes[name][0], station.session is None
            if busy:
                worker.started = time.monotonic()
            if name in station.failures:
                raise WorkerFailed(f"{name} on node {station.name}: {station.failures[name]}")
            worker.node, worker.away, worker.ready = station.name, away, not busy
            for chunk in station.spans.pop(name, []):
                keep(worker.spans, chunk)
            if not fresh:  # it was not heard of
                continue
            changes: dict[str, Any] = {"ended": worker.ended or name in station.ended}
            if (report := station.report.get(name)) is not None:
                refused = {"refused": {name: report["refused"]}} if "refused" in report else {}
                changes |= {"report": {**report, **refused}, "line": station.lines.get(name, "")}
            yield name, changes

    def _fill_here(self) -> None:
        """Start the workers that have their place at the head."""
        for name in [name for name, where in self.places.items() if where == HERE and name in self.wanted]:
            worker, start = self.recipes[name]
            if name in self.here.controls:
                continue
            if start["services"]:
                raise ShoalError(f"{name} holds services and cannot live at the head: leave network.here at 0")
            for service in {found for arg in start["args"] for found in services_in(arg)}:
                if service in self.blocks and service not in self.here.blocks:
                    self.here.share(service, self.blocks[service].tree)
            worker.elsewhere = False
            self.here.start(worker, start)

    def turn(self, worker: Worker) -> bool | None:
        """Ask for a unit of work, here or on a node."""
        self._arrange()
        self._fill_here()
        if self._is_here(worker):
            return self.here.turn(worker)
        self.turns, self._asking = self.turns + 1, worker.name
        return self._ask_turn(worker)

    def _ask_turn(self, worker: Worker) -> bool | None:
        """Ask a node once more for the turn that is due, which it takes once; None: ask again."""
        station = self.stations.get(self.places.get(worker.name, HERE))
        session = station.session if station is not None else None
        if station is None or session is None or station.ordered is None:
            if not self._hurried:
                with self._news:
                    self._news.wait(0.05)
                return None
            self._asking = ""  # the others go on without it, and end
            return False
        try:
            answer = session.call("turn", worker.name, self.turns, seconds=self.options.stall * ASK)
        except ServiceFailed as error:
            raise WorkerFailed(f"{worker.name} on node {station.name}: {error}") from error
        except (ServiceLost, DeadlineExceeded):
            worker.heard = max(worker.heard, session.heard)
            return None
        if not isinstance(answer, list) or [type(part) for part in answer] != [bool, bool]:
            raise Refused(f"node {station.name} answers a turn of {worker.name} with what makes no sense")
        self._asking, worker.ended = "", answer[1]
        return bool(answer[0])

    def _arrange(self) -> None:
        """Give every worker a place, and tell the nodes whose part has changed."""
        now = time.monotonic()
        with self._news:
            present = {
                name: station.slots
                for name, station in self.stations.items()
                if station.session is not None or now - station.left < self.network.away
            }
            away = frozenset(name for name in present if self.stations[name].session is None)
            self.places = place([*self.recipes], self.places, present, self.network.here, away)
            for station in self.stations.values():
                self._order(station)

    def _order(self, station: Station) -> None:
        """Order a node to hold its workers, where these have changed."""
        mine = [name for name, node in self.places.items() if node == station.name]
        session, wanted = station.session, [name for name in mine if name in self.wanted]
        if session is not None and station.ordered != wanted and not station.ordering:
            station.ordering = True
            self._start(self._have_held, station, session, wanted)  # aside, since starting workers takes its time

    def _have_held(self, station: Station, session: Session, wanted: list[str]) -> None:
        sets = {key: [*getattr(self.options, key)] for key in ("restartable", "relays")}
        shared = {key: getattr(self.options, key) for key in ("seed", "lockstep", "spans", *LIMITS)} | sets
        check = [*self.machines.check] if self.machines.check else []
        recipes = {name: self._recipe(name) for name in wanted}
        named = {service for name in wanted for arg in self.recipes[name][1]["args"] for service in services_in(arg)}
        blocks = {name: block.tree for name, block in self.blocks.items() if name in named}
        names = [*{**self.head.services, **self.options.homes}]
        try:
            if not station.renewed:
                session.call("hold", self.run_name, shared, check, names, {}, {}, seconds=self.options.deadline)
                station.renewed = True
                self._forget(wanted)  # whose lives are over
            content = [shared, check, names, recipes, blocks]
            session.call("hold", self.run_name, *content, seconds=self.options.deadline)
            if station.session is session and station.renewed:
                station.ordered, station.starting = wanted, True  # until it reports
                self._forget(name for name in self.rights if self.places.get(name, HERE) == HERE)
        except ServiceFailed as error:  # do without a node that cannot do its part
            self._do_without(station, f"node {station.name} refuses its part: {error}")
        except WireError as error:  # it would be no smaller the next time
            self.failure = ShoalError(f"node {station.name} cannot be sent its work: {error}")
        except (ServiceLost, DeadlineExceeded) as error:
            session.close(str(error))
        finally:
            station.ordering = False

    def _do_without(self, station: Station, reason: str) -> None:
        """Give a node no more work; where there is no other, the run ends."""
        log.warning("%s", reason)
        station.slots, station.ordered = 0, []
        others = [other for other in self.stations.values() if other.slots]
        if not others and not self.network.listen and not self.network.here:
            self.failure = Refused(reason)

    def _forget(self, workers: Iterable[str]) -> None:
        """Drop the answers that were kept for workers of nodes, in case they had to ask again."""
        for name in [*workers]:
            self.answers.forget(name)

    def _recipe(self, name: str) -> list[Any]:
        """A worker as a node is ordered to hold it: path, arguments, services that live with it, and its rights."""
        start = self.recipes[name][1]
        self.rights[name] = Rights(name, start["rights"], self.head.refused)
        return [start["work"], start["args"], start["services"], start["rights"]]


@dataclass
class Station:
    """A node as the head sees it."""

    name: str
    life: str = ""
    ahead: float = 0.0  # seconds by which the clock here is ahead of its
    slots: int = 0
    session: Session | None = None
    left: float = 0.0  # when its link was lost
    ordered: list[str] | None = None  # the workers it was last ordered to hold; None: it has to be ordered again
    report: dict[str, Any] = field(default_factory=dict)
    lines: dict[str, str] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)
    failures: dict[str, str] = field(default_factory=dict)
    starting: bool = False
    renewed: bool = True  # whether its workers have begun since the services they call did
    ordering: bool = False  # whether a thread is ordering it what to hold
    fresh: bool = False  # whether a report has come that nobody has looked at
    refused: int = 0  # reports that made no sense
    row: int = 0  # how many of them came one after the other
    spans: dict[str, list[Chunk]] = field(default_factory=dict)  # by worker: those that nobody has taken yet

    def hear(self, args: list[Any], run: str, workers: Collection[str], places: Mapping[str, str]) -> None:
        """Take a report about workers of a run, or refuse it, which is logged ever more rarely."""
        try:
            received = read_report(args)
            if received.run != run:  # of a run before this one
                return
            if strangers := received.names() - {*workers}:
                raise Refused(f"{min(strangers)} is no worker of this run")
        except Refused as error:
            self.row += 1
            self._complain(error)
            raise
        self.row, self.fresh = 0, True
        mine = {*(self.ordered or ()), *(name for name, node in places.items() if node == self.name)}
        self.report, self.lines, self.starting = dict(received.workers), received.lines, received.starting
        self.failures = {name: text for name, text in received.failures.items() if name in mine}
        self.ended = mine & {*received.ended}  # of others it cannot know

    def take_spans(self, args: list[Any], run: str, traced: Collection[str], places: Mapping[str, str]) -> None:
        """Take what a worker that lives there did, by the clock here, or refuse it."""
        try:
            named, name, chunk = read_spans(args)
            if named != run:  # of a run before this one
                return
            if name not in traced:
                raise Refused(f"spans of {name}, of which none are wanted")
            if places.get(name) == self.name:  # else it has moved
                keep(self.spans.setdefault(name, []), later(chunk, self.ahead))
        except Refused as error:
            self._complain(error)
            raise

    def _complain(self, error: Refused) -> None:
        """Count and log what makes no sense, ever more rarely."""
        self.refused += 1
        if self.refused.bit_count() == 1:  # the first, the second, the fourth, …
            log.warning("refused a report of node %s, number %d of them: %s", self.name, self.refused, error)


class Elsewhere(Served):
    """A service that lives on a node: those at the head call it through the head."""

    def __init__(self, cluster: Cluster, service: str, home: str) -> None:
        """Find it where its worker is at the time of the call."""
        self._cluster, self._service, self._home = cluster, service, home

    def call(self, method: str, args: Sequence[Any]) -> Any:
        """Call it over the link to its node."""
        return self._cluster.reach(self._home, "service", self._service, method, [*args])

    def lasting(self, method: str) -> bool:
        """Nothing is known of its answers here."""
        return False


@dataclass(frozen=True)
class Shared:
    """A stand-in for memory that workers of one machine share, with what it holds at first."""

    _service: str
    tree: Mapping[str, Array]
