"""The engine of several machines: workers that may live elsewhere are spread over nodes that come and go.

The head keeps the services and the workers that belong to it as `processes` does. To each node it says which workers it
should hold, and says it again whenever a link comes back; the node sees to the rest. Nodes call the head's services
through their link, and a call that is asked twice, because the link broke in between, is answered once.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from shoal.core.caller import call_as
from shoal.core.errors import (
    DeadlineExceeded,
    Refused,
    ServiceFailed,
    ServiceLost,
    ShoalError,
    Stalled,
    WireError,
    WorkerFailed,
)
from shoal.core.randomness import derive
from shoal.core.recipe import describe, path_of, services_in
from shoal.core.rights import Named, Rights, rights_of, with_services
from shoal.core.types import Array, Work
from shoal.engines.driving import Patience
from shoal.engines.once import Once
from shoal.engines.options import Machines, Options
from shoal.engines.placement import HERE, place
from shoal.engines.processes import HEAD, Processes
from shoal.engines.station import About, Away, Shared, Station, read_about
from shoal.engines.worker import recipe_of
from shoal.transport.nursery import Nursery
from shoal.transport.session import Answer, Gate, Session, keep_meeting
from shoal.transport.trust import Terms

log = logging.getLogger("shoal")
BEAT = 1.0  # seconds between signs of life
SENSELESS = 20  # reports in a row that make no sense, after which a node is done without
UNWANTED = 1000  # names of nodes that are logged when they are refused
ASK = 1 / 4  # the share of `stall` after which a turn is asked for again, since each time takes a thread of the node
SHARED = ("seed", "lockstep", "restarts", "deadline", "stall", "silence")  # options that nodes are told


class Cluster:
    """Workers on several machines; no link that breaks ends the run."""

    def __init__(self, options: Options, nursery: Nursery | None = None) -> None:
        """Begin to look for nodes."""
        machines = options.machines or Machines()
        self.options, self.machines, self.network = options, machines, machines.network
        self.patience = Patience(options.stall)
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
        self.run_name = secrets.token_hex(16)  # a secret: by it a node knows this head again
        self.stations: dict[str, Station] = {}
        self.recipes: dict[str, tuple[str, list[Any], Named]] = {}
        self.rights: dict[str, Rights] = {}  # of the workers that nodes were told to hold
        self.places: dict[str, str] = {}  # worker → node
        self.placed: dict[str, dict[str, Any]] = {}  # worker that may roam → services to make there
        self.shared: dict[str, Shared] = {}
        self.order: list[str] = []
        self.turns = self.lives = 0
        self.failure: ShoalError | None = None
        self.answers = Once()
        self._unwanted: dict[str, str] = {}  # why nodes that came were refused, by name
        self._news = threading.Condition()
        self._closed = threading.Event()
        self._threads: list[threading.Thread] = []
        self.gate: Gate | None = None
        for address in self.machines.nodes:
            self._start(self._keep_in_touch, address)
        if self.network.listen:
            self.gate = Gate(
                self.network.listen, self.terms, self._answering, self._welcome, self._refused, certificates=False
            )
            log.info("nodes may join at %s", self.gate.address)

    @staticmethod
    def prepare(modules: tuple[str, ...]) -> Nursery:
        """Start loading modules for the workers, before anything else is known."""
        return Processes.prepare(modules)

    def _start(self, target: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=target, args=args, name="node", daemon=True)
        self._threads = [*(other for other in self._threads if other.is_alive()), thread]
        thread.start()

    def serve(self, name: str, make: Callable[..., Any], *args: Any) -> Any:
        """Make a service at the head, or have it made in the worker where it is placed, wherever that lives."""
        home = self.options.homes.get(name, HEAD)
        if home == HEAD or not self._roams(home):
            return self.here.serve(name, make, *args)
        self.placed.setdefault(home, {})[name] = recipe_of(make, args, derive(self.options.seed, name))
        away: Any = Away(self, name, home)
        self.here.local[name] = away  # those here call it through the head as well
        return away

    def share(self, name: str, tree: Mapping[str, Array]) -> Any:
        """Give every machine on which workers of the group `name/…` come to live memory that these share."""
        self.shared[name] = Shared(name, {key: np.array(value) for key, value in tree.items()})
        return self.shared[name]

    def _roams(self, worker: str) -> bool:
        """Whether a worker may live on a node."""
        return worker not in self.options.observers and (self.machines.remote is None or worker in self.machines.remote)

    def run(self, name: str, work: Callable[..., Work], *args: Any) -> None:
        """Start a worker here, or remember it for a node."""
        if name not in self.options.observers:
            self.order.append(name)
        if self._roams(name):
            with self._news:
                self.recipes[name] = path_of(work), [describe(arg) for arg in args], rights_of(work, args)
        else:
            self.here.run(name, work, *args)

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
            about = self._ask_about(name, session)
            with self._news:
                self._check_life(name, about["life"])
                station = self.stations.setdefault(name, Station(name))
                before, station.session, station.told = station.session, session, None
                station.life, station.slots = about["life"], about["slots"]
                self._news.notify_all()
        except ShoalError as error:
            with suppress(ShoalError):  # an answer says that it was heard
                session.call("refused", str(error), seconds=5.0)
            session.close(str(error))
            raise
        if before is not None:
            before.close("another link took its place")
        log.info("node %s with %d slots is here", name, station.slots)
        while not session.closed.wait(BEAT):  # nobody else waits for this link, should it take nothing any more
            with suppress(ServiceLost):
                session.tell("beat")
        with self._news:
            if station.session is session:
                station.session, station.left, station.starting = None, time.monotonic(), False
                if not self._closed.is_set():
                    log.warning("node %s is away: %s", name, session.lost)
        session.join()

    def _ask_about(self, name: str, session: Session) -> About:
        """What a node says of itself, as soon as it is free: until then it waits for a head that it has lost."""
        told = False
        while True:
            about = read_about(session.call("describe", seconds=self.options.deadline))
            known = self.stations.get(name)
            if not about["busy"] or (known is not None and known.life == about["life"]):
                return about
            if not told:
                log.warning("node %s is kept for another head, which is away, for %.0f s more", name, about["busy"])
            told = True
            if session.closed.wait(min(about["busy"], BEAT)) or self._closed.is_set():
                raise ServiceLost(f"the link was lost: {session.lost}")

    def _check_life(self, name: str, life: str) -> None:
        """Refuse a second node of a name, and a node that is here under another name already."""
        for station in self.stations.values():
            if station.session is None or station.session.closed.is_set():
                continue
            if station.name == name and station.life != life:
                raise Refused(f"another node is here under the name {name}: give this one another, with --name")
            if station.name != name and station.life == life:
                raise Refused(f"this node is here already, under the name {station.name}")

    def _answering(self, name: str) -> Answer:
        return lambda session, kind, args: self._answer(name, session, kind, args)

    def _answer(self, node: str, session: Session, kind: str, args: list[Any]) -> Any:
        """Answer a node that was taken in, over the link that it was taken in by."""
        station = self.stations.get(node)
        if station is None or station.session is not session:
            if kind == "report":  # a sign of life of one that comes or goes
                return None
            raise Refused(f"node {node} is not here by this link")
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
        raise ShoalError(f"the head does not know {kind!r}")

    def _answer_call(self, station: Station, args: list[Any]) -> Any:
        """Do what a worker on a node asks for, if it lives there and its recipe names that."""
        if [type(arg) for arg in args] != [str, int, str, str, list]:
            raise Refused("call: a channel, a number, a service, a method and arguments were expected")
        channel, number, service, method, given = args
        worker, _, life = channel.rpartition("-")
        told = station.told or []  # one that is moved may speak until its node has been told
        rights = self.rights.get(worker)
        if rights is None or (self.places.get(worker) != station.name and worker not in told):
            raise Refused(f"{worker:.200} does not live on node {station.name}, or does not any more")
        rights.check(service, method)
        call_as(worker)
        return self.answers.ask(worker, life, number, lambda: self._call(service, method, given))

    def reach(self, worker: str, kind: str, *args: Any) -> Any:
        """Call the node where a worker lives; while it has none, or its link is down, wait."""
        limit = time.monotonic() + self.options.deadline
        while (left := limit - time.monotonic()) > 0:
            self._arrange()
            station = self.stations.get(self.places.get(worker, HERE))
            if self.failure is not None:
                raise self.failure
            if station is None or station.session is None or worker not in (station.told or ()):
                with self._news:
                    self._news.wait(0.02)
                continue
            with suppress(ServiceLost):
                return station.session.call(kind, *args, seconds=left)
        raise ServiceLost(f"no link to {worker} for {self.options.deadline:g} s")

    def _call(self, service: str, method: str, args: list[Any]) -> Any:
        """Call a service; while its worker begins again, wait."""
        if service not in self.names():
            raise ShoalError(f"there is no service {service!r}")
        limit = time.monotonic() + self.options.deadline
        while True:
            try:
                return self.here.call(service, method, args)
            except ServiceLost:
                if time.monotonic() > limit or self._closed.wait(0.05):
                    raise

    def names(self) -> list[str]:
        """The services."""
        return [*self.here.local, *(name for names in self.here.placed.values() for name in names)]

    # Watching.

    def wait(self, *names: str) -> None:
        """Watch over all machines until the named workers have ended."""
        self.patience.begin()
        while not all(self._ended(name) for name in names):
            if self.options.lockstep:
                self._give_turns()
            else:
                self.here.watch(0.05)
            self._tend()
            self.patience.heed(self.report(), self._standstill)
            self.patience.look(self._moves(), self._starting(), self._standstill)

    def hurry(self) -> None:
        """Take that the run was asked to end, so that nothing stuck or missing may delay it for long."""
        self.patience.hurry()
        self.here.hurry()

    def _ended(self, name: str) -> bool:
        if name in self.recipes:
            return any(name in station.ended for station in self.stations.values())
        return self.here.workers[name].ended

    def _moves(self) -> int:
        told = sum(worker.get("moves", 0) for station in self.stations.values() for worker in station.report.values())
        return int(self.here.moves() + told)

    def _starting(self) -> bool:
        """Whether something is on its way: a worker that loads, or a node for those that have none."""
        unplaced = len(self.places) < len(self.recipes)
        return (
            self.here.starting()
            or unplaced
            or any(station.starting or station.telling for station in self.stations.values())
        )

    def _tend(self) -> None:
        """Look after the nodes, and after the workers that have no place."""
        if self.failure is not None:
            raise self.failure
        lives = sum(self.here.restarts.get(host, 0) for host in self.here.placed)
        if lives != self.lives:  # what everyone works with began again, so everyone does
            self.lives = lives
            for station in self.stations.values():
                station.renewed, station.told = False, None
        for station in [*self.stations.values()]:
            for name, text in station.failures.items():
                raise WorkerFailed(f"{name} on node {station.name}: {text}")
        self._arrange()
        for name in [name for name, where in self.places.items() if where == HERE and name not in self.here.workers]:
            if name in self.placed:
                raise ShoalError(f"{name} holds services and cannot live at the head: leave network.here at 0")
            for service in {found for arg in self.recipes[name][1] for found in services_in(arg)}:
                if service in self.shared and service not in self.here.blocks:
                    self.here.share(service, self.shared[service].tree)
            self.here.add(name, *self.recipes[name])

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
                self._tell(station)

    def _tell(self, station: Station) -> None:
        """Tell a node what to hold, where that has changed."""
        session, wanted = station.session, [name for name, node in self.places.items() if node == station.name]
        if session is not None and station.told != wanted and not station.telling:
            station.telling = True
            self._start(self._have_held, station, session, wanted)  # aside, since starting workers takes its time

    def _have_held(self, station: Station, session: Session, wanted: list[str]) -> None:
        sets = {key: [*getattr(self.options, key)] for key in ("restartable", "relays")}
        shared = {key: getattr(self.options, key) for key in SHARED} | sets
        check = [*self.machines.check] if self.machines.check else []
        recipes = {name: self._recipe(name) for name in wanted}
        named = {service for name in wanted for arg in self.recipes[name][1] for service in services_in(arg)}
        blocks = {name: block.tree for name, block in self.shared.items() if name in named}
        try:
            if not station.renewed:
                session.call("hold", self.run_name, shared, check, self.names(), {}, {}, seconds=self.options.deadline)
                station.renewed = True
                self._forget(wanted)  # whose lives are over
            told = [shared, check, self.names(), recipes, blocks]
            session.call("hold", self.run_name, *told, seconds=self.options.deadline)
            if station.session is session and station.renewed:
                station.told, station.starting = wanted, True  # until it reports
                self._forget(name for name in self.rights if self.places.get(name, HERE) == HERE)
        except ServiceFailed as error:  # do without a node that cannot do its part
            self._do_without(station, f"node {station.name} refuses its part: {error}")
        except WireError as error:  # it would be no smaller the next time
            self.failure = ShoalError(f"node {station.name} cannot be told its work: {error}")
        except (ServiceLost, DeadlineExceeded) as error:
            session.close(str(error))
        finally:
            station.telling = False

    def _do_without(self, station: Station, reason: str) -> None:
        """Give a node no more work; where there is no other, the run ends."""
        log.warning("%s", reason)
        station.slots, station.told = 0, []
        others = [other for other in self.stations.values() if other.slots]
        if not others and not self.network.listen and not self.network.here:
            self.failure = Refused(reason)

    def _forget(self, workers: Iterable[str]) -> None:
        """Drop the answers that were kept for workers of nodes, in case they had to ask again."""
        for name in [*workers]:
            self.answers.forget(name)

    def _recipe(self, name: str) -> list[Any]:
        """A worker as a node is told of it: path, arguments, services that live with it, and its rights."""
        path, args, named = self.recipes[name]
        made = self.placed.get(name, {})
        named = with_services(named, made)
        self.rights[name] = Rights(name, named, self.here.refused)
        return [path, args, made, named]

    def _give_turns(self) -> None:
        """Let every worker take one turn, in the order in which they were started, wherever they are."""
        self.turns += 1
        for name in self.order:
            if name not in self.recipes or self.places.get(name) == HERE:
                self.here.turn(name)
            elif not self._ended(name):
                self._turn(name)

    def _turn(self, name: str) -> None:
        """Ask for one turn, again whenever the link comes back."""
        limit = time.monotonic() + self.options.stall
        while time.monotonic() < limit:
            self._tend()
            station = self.stations.get(self.places.get(name, ""))
            session = station.session if station is not None else None
            if station is None or session is None or station.told is None:
                if self.patience.hurried:
                    return  # the others go on without it, and end
                if station is not None and (station.telling or station.starting):  # which may take its time
                    limit = time.monotonic() + self.options.stall
                with self._news:
                    self._news.wait(0.05)
                continue
            try:
                session.call("turn", name, self.turns, seconds=self.options.stall * ASK)
                return
            except DeadlineExceeded:  # ask again: it is taken once
                self.patience.heed(self.report(), self._standstill)
                limit = max(limit, session.heard + self.options.stall)
            except ServiceFailed as error:
                raise WorkerFailed(f"{name} on node {station.name}: {error}") from error
            except ServiceLost:
                continue
        raise Stalled(f"{name} had no turn for {self.options.stall:g} s\n{self._standstill()}")

    def _standstill(self) -> str:
        parts = [self.here.standstill()]
        for station in self.stations.values():
            state, stacks = "is away", "\n".join(station.lines.values())
            if (session := station.session) is not None:
                state = "is here"
                with suppress(ShoalError):
                    stacks = session.call("stacks", seconds=5.0)
            parts.append(f"node {station.name} {state}\n{stacks}")
        waiting = [name for name in self.recipes if name not in self.places]
        return "\n".join([*parts, *([f"no node yet for {', '.join(waiting)}"] if waiting else [])])

    def report(self) -> Mapping[str, Any]:
        """What each worker has done with its time, and where."""
        remote = {
            name: {**told, "node": station.name, "away": station.session is None, **self._told_refused(name)}
            for station in [*self.stations.values()]
            for name, told in [*station.report.items()]
            if self.places.get(name) == station.name
        }
        return {**self.here.report(), **remote}

    def _told_refused(self, worker: str) -> dict[str, int]:
        count = self.here.refused.get(worker, 0)
        return {"refused": count} if count else {}

    def close(self) -> None:
        """End everything, on every machine that can be reached."""
        self._closed.set()
        for station in [*self.stations.values()]:
            if (session := station.session) is not None:
                with suppress(ShoalError):
                    session.call("release", self.run_name, seconds=10.0)
                session.close("the run has ended")
                session.join()
        if self.gate is not None:
            self.gate.close()
        for thread in self._threads:
            thread.join(timeout=15)
        self.here.close()
