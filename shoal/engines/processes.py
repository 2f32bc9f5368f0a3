"""The engine of one machine: every worker has a process; services live in a worker's process or in the head.

The head starts each process with one control pipe, and gives it a pipe to every process whose services it calls. All
pipes are nameless, so when the head goes, however it goes, every child reads the end of its control pipe and exits.
"""

from __future__ import annotations

import faulthandler
import os
import queue
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from shoal.core.caller import caller
from shoal.core.errors import DeadlineExceeded, Refused, ServiceFailed, ServiceLost, ShoalError, WireError
from shoal.core.recipe import allow
from shoal.core.rights import Rights
from shoal.core.types import Array
from shoal.core.wire import shared_size
from shoal.engines.host import BEAT, Bell, Host, named_in, stacks
from shoal.engines.memory import Block, opened
from shoal.engines.options import Options
from shoal.engines.standin import Call
from shoal.engines.supervisor import GRACE, HEAD, Launcher, Worker
from shoal.transport.nursery import Nursery, leave_termination_to_the_head
from shoal.transport.pipe import LARGE, MessageCache, Pipe

CHILD = "shoal.engines.processes"  # whose `main` a worker's process runs
ORPHANED = 5.0  # seconds to end in order after the head has gone
ASKED = 2.0  # seconds in which a process should say where its threads are


class Answers(Protocol):
    """Who answers calls: a host, or whoever passes them on."""

    def answer(self, rights: Rights | None, caller: str, service: str, method: str, args: Sequence[Any]) -> Any:
        """Answer a call; without rights it is the head's, which has all."""
        ...

    def lasting(self, service: str, method: str) -> bool:
        """Whether answers of a method never change once given."""
        ...


class Processes(Launcher):
    """A process for each worker on this machine; one that dies is restarted where that is allowed."""

    def __init__(
        self,
        options: Options,
        nursery: Nursery | None = None,
        answering: Callable[[str], Answers] | None = None,
    ) -> None:
        """Begin with nothing running but a nursery; `answering` gives who answers a worker instead of the head."""
        self.homes, self.deadline, self.expendable = dict(options.homes), options.deadline, options.expendable
        self.blocks: dict[str, Block] = {}
        self.controls: dict[str, Pipe] = {}
        self._nursery, self._answering = nursery or Nursery(), answering
        self._selector = selectors.DefaultSelector()
        self._callers: dict[str, tuple[list[str], Rights]] = {}  # of each worker, the hosts that it calls
        self._early: dict[str, list[Any]] = {}  # links for a process that is not there yet: socket, caller, rights
        self._spare: dict[str, list[Pipe]] = {}  # the head's pipes into a process that no call is using
        self._threads: list[threading.Thread] = []
        self._cache = MessageCache()
        self._late: list[tuple[str, Mapping[str, Any]]] = []  # reports that came while something else was asked

    @staticmethod
    def prepare(modules: tuple[str, ...]) -> Nursery:
        """Start loading modules for the workers, before anything else is known."""
        return Nursery(modules)

    def open(self, head: Host) -> None:
        """Take the head, whose services workers may call."""
        self.head = head

    def share(self, name: str, tree: Mapping[str, Array]) -> Block:
        """Copy arrays into memory that is handed to every worker which names it in its arguments."""
        self.blocks[name] = Block(name, tree)
        return self.blocks[name]

    # Starting and ending.

    def start(self, worker: Worker, start: Mapping[str, Any]) -> None:
        """Start a process, and hand it its pipes and its shared memory."""
        control, end = Pipe.pair()
        try:
            worker.pid = self._nursery.start(worker.name, CHILD, end)
        except ServiceLost:
            self._nursery.close()
            self._nursery = Nursery(self._nursery.modules)
            worker.pid = self._nursery.start(worker.name, CHILD, end)
        end.close()
        worker.seat = self.controls[worker.name] = control
        homes = {service: self.homes.get(service, HEAD) for service in start["rights"] if service not in self.blocks}
        hosts = sorted({*homes.values()} - {worker.name})
        rights = Rights(worker.name, start["rights"], self.head.refused)
        self._callers[worker.name] = hosts, rights
        ends = [self._connect(host, rights) for host in hosts]
        wanted = named_in(start)
        blocks = [block for name, block in self.blocks.items() if name in wanted]
        layouts = {block._service: block.layout for block in blocks}
        descriptors = [*(end.fileno() for end in ends), *(block.descriptor for block in blocks)]
        control.send({**start, "homes": homes, "hosts": hosts, "blocks": layouts}, tuple(descriptors))
        for end in ends:
            end.close()
        for link in self._early.pop(worker.name, []):
            self._hand_over(control, *link)
        self._selector.register(control.socket, selectors.EVENT_READ, worker.name)
        if worker.lives and worker.name in self.expendable:
            self._relink(worker.name)

    def _relink(self, host: str) -> None:
        """Give those who called a process in its former life a pipe to the new one."""
        for name, (hosts, rights) in self._callers.items():
            if host in hosts and name in self.controls:
                end = self._connect(host, rights)
                with suppress(ServiceLost):  # its death is noticed where deaths are noticed
                    self.controls[name].send(["relink", host], (end.fileno(),))
                end.close()

    def stop(self, worker: Worker) -> None:
        """Ask a process to end."""
        with suppress(ShoalError):
            worker.seat.set_deadline(GRACE)
            worker.seat.send(["stop"])

    def end(self, worker: Worker, seconds: float) -> str:
        """Reap a process, by force if it does not end by itself, and everything it started."""
        if worker.seat is None:
            return "was not there"
        code = self._nursery.wait(worker.pid, seconds)
        if code is None:
            with suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGKILL)
            code = self._nursery.wait(worker.pid, GRACE)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(worker.pid, signal.SIGKILL)
        control = self.controls.pop(worker.name)
        self._forget(control)
        control.close()
        worker.seat = None
        for pipe in self._spare.pop(worker.name, []):
            pipe.close()
        if code is None or code < 0:
            return f"was killed by {signal.Signals(-(code or -signal.SIGKILL)).name}"
        return f"ended with exit code {code}"

    def _forget(self, control: Pipe) -> None:
        if control.socket.fileno() in self._selector.get_map():
            self._selector.unregister(control.socket)

    def close(self) -> None:
        """End the threads that answer calls, and the nursery."""
        for pipe in [pipe for pipes in self._spare.values() for pipe in pipes]:
            pipe.close()
        for link in [link for links in self._early.values() for link in links]:
            link[0].close()
        for thread in self._threads:
            thread.join(timeout=GRACE)
        for block in self.blocks.values():
            block.close()
        self.blocks.clear()
        self._selector.close()
        self._nursery.close()

    # Calls.

    def _connect(self, host: str, rights: Rights | None) -> socket.socket:
        """A socket whose other end the host answers, as far as the caller may call; without rights it is the head."""
        pipe, end = Pipe.pair()
        if host == HEAD:
            answers = self._answering(rights.caller) if self._answering and rights else self.head
            args = (pipe, answers, rights, self.head.bell, self._cache)
            thread = threading.Thread(target=answer_calls, args=args, name="calls", daemon=True)
            self._threads = [*(other for other in self._threads if other.is_alive()), thread]
            thread.start()
        elif host in self.controls:
            self._hand_over(self.controls[host], pipe.socket, rights)
        else:
            self._early.setdefault(host, []).append((pipe.socket, rights))
        return end

    def _hand_over(self, control: Pipe, end: socket.socket, rights: Rights | None) -> None:
        named = None if rights is None else [rights.caller, rights.named]
        with suppress(ServiceLost):  # its death is noticed where deaths are noticed
            control.send(["link", named], (end.fileno(),))
        end.close()

    def call(self, service: str, method: str, args: Sequence[Any]) -> Any:
        """Call a service in a worker's process; there are as many pipes as calls at a time."""
        host = self.homes.get(service, HEAD)
        if host == HEAD:
            raise ShoalError(f"there is no service {service!r}")
        try:
            pipe = self._spare.setdefault(host, []).pop()
        except IndexError:
            pipe = Pipe(self._connect(host, None))
            pipe.set_deadline(self.deadline)
        try:
            return ask(pipe, service, method, args)
        except (DeadlineExceeded, ServiceLost):
            pipe.close()  # a late answer must not be taken for another
            raise
        finally:
            if pipe.socket.fileno() >= 0:
                self._spare.setdefault(host, []).append(pipe)

    # Hearing.

    def poll(self, seconds: float) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Take in what processes report, and the end of their pipes."""
        late, self._late = self._late, []
        yield from late
        for key, _ in self._selector.select(seconds):
            if (control := self.controls.get(key.data)) is not None:
                yield key.data, self._hear(control)
                while control.pending and control.socket.fileno() >= 0:
                    yield key.data, self._hear(control)

    def _hear(self, control: Pipe) -> Mapping[str, Any]:
        try:
            changes: Mapping[str, Any] = control.receive()[0]
        except (ServiceLost, WireError):
            self._forget(control)
            return {"died": True}
        return changes

    def turn(self, worker: Worker) -> bool | None:
        """Ask for a unit of work."""
        with suppress(ServiceLost):  # its death is noticed where deaths are noticed
            worker.seat.send(["turn"])
        return None

    def stacks(self, worker: Worker) -> str:
        """Ask a process where its threads are."""
        limit, found = time.monotonic() + ASKED, ""
        late: list[tuple[str, Mapping[str, Any]]] = []
        if (control := self.controls.get(worker.name)) is None:
            return found
        with suppress(ServiceLost, WireError, DeadlineExceeded):
            control.send(["stacks"])
            while not found and time.monotonic() < limit:
                for name, changes in self.poll(0.05):
                    found = changes.get("stacks", found) if name == worker.name else found
                    late.append((name, {key: value for key, value in changes.items() if key != "stacks"}))
        self._late += late
        return found


def ask(pipe: Pipe, service: str, method: str, args: Sequence[Any]) -> Any:
    """Call a service through a pipe."""
    pipe.send((service, method, args, caller()))
    (went_well, value), _ = pipe.receive()
    if not went_well:
        raise ServiceFailed(value)
    return value


def answer_calls(pipe: Pipe, answers: Answers, rights: Rights | None, bell: Bell, cache: MessageCache) -> None:
    """Answer one caller until it goes; a broken caller harms only itself."""
    try:
        while True:
            (service, method, args, name), _ = pipe.receive(copy=False)
            try:
                value = answers.answer(rights, name, service, method, args)
                if shared_size(value) >= LARGE and answers.lasting(service, method):
                    pipe.send_kept(cache.keep(value, (True, value)))
                else:
                    pipe.send((True, value))
            except (ServiceFailed, Refused) as error:
                pipe.send((False, str(error)))
            except (ServiceLost, WireError):
                raise
            except Exception:
                pipe.send((False, traceback.format_exc()))
            else:
                if value is True:  # something was stored, which the worker here may wait for
                    bell.ring()
            del args
    except (ShoalError, OSError, ValueError, TypeError):
        pass
    finally:
        pipe.close()


class Child:
    """A host in a process of its own, steered through its control pipe."""

    def __init__(self, control: Pipe) -> None:
        """Take the first message, which says what to be."""
        self.control = control
        self.start, descriptors = control.receive()
        allow(self.start["allow"])
        hosts, layouts = self.start["hosts"], self.start["blocks"]
        sockets, memory = descriptors[: len(hosts)], descriptors[len(hosts) :]
        self.pipes = {host: Pipe(socket.socket(fileno=fd)) for host, fd in zip(hosts, sockets, strict=True)}
        for pipe in self.pipes.values():
            pipe.set_deadline(self.start["deadline"])
        name = self.start["name"]
        self.host = host = Host(name, connect=self._connect, spans=self.start["spans"])
        host.rights = Rights(name, self.start["rights"], host.refused)
        host.blocks = {name: opened(fd, layouts[name]) for name, fd in zip(layouts, memory, strict=True)}
        self.cache = MessageCache()
        self.turns: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._sending = threading.Lock()

    def _connect(self, service: str) -> Call:
        def call(method: str, args: Sequence[Any]) -> Any:
            pipe = self.pipes[self.start["homes"][service]]
            try:
                return ask(pipe, service, method, args)
            except DeadlineExceeded:
                pipe.close()  # a late answer must not be taken for another
                raise
            except OSError as error:
                raise ServiceLost(f"the other process has gone: {error}") from None

        return call

    def say(self, **changes: Any) -> None:
        """Report to the head."""
        with self._sending:
            self.control.send(changes)

    def listen(self) -> None:
        """Do what the head says; the end of its pipe is an order to end."""
        with suppress(ServiceLost, WireError):
            while not self.host.stopped.is_set():
                (order, *rest), descriptors = self.control.receive()
                if order == "link":
                    self._answer(rest[0], descriptors[0])
                elif order == "relink":
                    self.pipes[rest[0]] = pipe = Pipe(socket.socket(fileno=descriptors[0]))
                    pipe.set_deadline(self.start["deadline"])
                elif order == "turn":
                    self.turns.put(True)
                elif order == "stacks":
                    names = {threading.main_thread().ident or 0: self.start["name"]}
                    self.say(stacks=stacks(names), **self._state())
                else:
                    break
        self._end()

    def _answer(self, named: Any, descriptor: int) -> None:
        rights = None if named is None else Rights(named[0], named[1], self.host.refused)
        args = (Pipe(socket.socket(fileno=descriptor)), self.host, rights, self.host.bell, self.cache)
        threading.Thread(target=answer_calls, args=args, name="calls", daemon=True).start()

    def _end(self) -> None:
        """End in order, or by force if that takes too long."""
        self.host.stop()
        self.turns.put(False)
        time.sleep(ORPHANED)
        os._exit(1)

    def _state(self) -> dict[str, Any]:
        state = self.host.state()
        return {key: state[key] for key in ("report", "line", "spans") if key in state}

    def beat(self) -> None:
        """Give signs of life."""
        with suppress(ShoalError):
            while True:
                self.say(**self._state())
                if self.host.stopped.wait(BEAT):
                    return

    def run(self) -> None:
        """Run the worker to its end, and serve until asked to stop."""
        host = self.host
        for thread in (self.listen, self.beat):
            threading.Thread(target=thread, name=thread.__name__, daemon=True).start()
        host.begin(self.start)
        assert host.work is not None
        self.say(ready=True)
        try:
            if self.start["lockstep"]:
                while not host.activity.ended and self.turns.get():
                    if (moved := host.advance()) is not None:
                        self.say(turned=moved)
            else:
                host.drive()
        finally:
            host.work.close()
        if host.activity.ended:
            self.say(ended=True, **self._state())
        host.stopped.wait()


def main(descriptor: int) -> None:
    """Be the worker that the head describes."""
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    leave_termination_to_the_head()
    child = Child(Pipe(socket.socket(fileno=descriptor)))
    code = 0
    try:
        child.run()
    except BaseException as error:
        code = 1
        child.host.failed(error)
        with suppress(ShoalError):
            child.say(**child.host.state())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # no finaliser of a library may delay the end
