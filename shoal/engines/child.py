"""The inside of a worker's process: it answers calls to its services while its worker runs."""

from __future__ import annotations

import faulthandler
import inspect
import os
import queue
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from shoal.core.caller import call_as, caller
from shoal.core.errors import DeadlineExceeded, Fatal, Refused, ServiceFailed, ServiceLost, ShoalError, WireError
from shoal.core.randomness import Randomness, seed_everything
from shoal.core.recipe import allow, find, rebuild
from shoal.core.rights import Rights
from shoal.core.wire import shared_size
from shoal.engines.driving import Activity, Bell, Local, advance, drive, stacks
from shoal.engines.memory import opened
from shoal.transport.pipe import LARGE, MessageCache, Pipe

BEAT = 0.5  # seconds between signs of life
ORPHANED = 5.0  # seconds to end in order after the head has gone


class Remote:
    """A stand-in for a service in another process."""

    def __init__(self, name: str, connect: Callable[[], Pipe], activity: Activity) -> None:
        """Connect at the first call."""
        self._service = name
        self._connect = connect
        self._pipe: Pipe | None = None
        self._activity = activity

    def __getattr__(self, method: str) -> Any:
        """Find a method of the service."""
        if method.startswith("_"):
            raise AttributeError(method)
        name = f"{self._service}.{method}"

        def call(*args: Any) -> Any:
            if self._pipe is None:
                self._pipe = self._connect()
            self._activity.call(name)
            try:
                self._pipe.send((self._service, method, args, caller()))
                (answered, value), _ = self._pipe.receive()
            except (DeadlineExceeded, ServiceLost) as error:
                self._pipe = None  # its host may be started again
                raise type(error)(f"{name}: {error}") from None
            finally:
                self._activity.answered()
            if not answered:
                raise ServiceFailed(f"{name} raised:\n{value}")
            return value

        self.__dict__[method] = call
        return call


def answer_calls(
    pipe: Pipe,
    services: Mapping[str, Any],
    ready: threading.Event,
    bell: Bell,
    shelf: MessageCache,
    rights: Rights | None,
) -> None:
    """Answer one caller until it goes; a broken caller harms only itself, and none has all rights but the head."""
    ready.wait()
    try:
        while True:
            (name, method, args, told), _ = pipe.receive(copy=False)
            try:
                call_as(rights.caller if rights is not None else told)  # the head may call on behalf of another
                if rights is not None:
                    rights.check(name, method)
                function = getattr(services[name], method)
                value = function(*args)
                if getattr(function, "settled", False) and shared_size(value) >= LARGE:
                    pipe.send_kept(shelf.keep(value, (True, value)))
                else:
                    pipe.send((True, value))
            except (ServiceLost, WireError):
                raise
            except Refused as error:
                pipe.send((False, str(error)))
            except Exception:
                pipe.send((False, traceback.format_exc()))
            else:
                if value is True:  # something was taken in, which the worker here may wait for
                    bell.ring()
            del args
    except (ShoalError, OSError, ValueError, TypeError):
        pass
    finally:
        pipe.close()


class Child:
    """One worker and its services, steered by the head."""

    def __init__(self, control: Pipe) -> None:
        """Take the first message, which says what to be."""
        self.control = control
        self.start, descriptors = control.receive()
        allow(self.start["allow"])
        hosts, blocks = self.start["hosts"], self.start["blocks"]
        sockets, memory = descriptors[: len(hosts)], descriptors[len(hosts) :]
        self.pipes = {host: Pipe(socket.socket(fileno=fd)) for host, fd in zip(hosts, sockets, strict=True)}
        self.blocks = {name: opened(fd, blocks[name]) for name, fd in zip(blocks, memory, strict=True)}
        for pipe in self.pipes.values():
            pipe.set_deadline(self.start["deadline"])
        self.activity = Activity(self.start["name"])
        self.services: dict[str, Local] = {}
        self.refused: dict[str, int] = {}  # calls to services here that were not the caller's to make
        self.bell, self.shelf = Bell(), MessageCache()
        self.ready = threading.Event()
        self.stopped = threading.Event()
        self.turns: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._sending = threading.Lock()

    def say(self, *message: Any) -> None:
        """Tell the head."""
        with self._sending:
            self.control.send(message)

    def listen(self) -> None:
        """Do what the head says; its silence for good is an order to end."""
        try:
            while not self.stopped.is_set():
                (order, *rest), descriptors = self.control.receive()
                if order == "link":
                    caller, named = rest
                    rights = None if named is None else Rights(caller, named, self.refused)
                    pipe = Pipe(socket.socket(fileno=descriptors[0]))
                    threading.Thread(
                        target=answer_calls,
                        args=(pipe, self.services, self.ready, self.bell, self.shelf, rights),
                        name="calls",
                        daemon=True,
                    ).start()
                elif order == "next":
                    self.turns.put(True)
                elif order == "stacks":
                    self.say("stacks", stacks({threading.main_thread().ident or 0: self.activity.name}))
                elif order == "stop":
                    break
        except ShoalError:
            pass
        self.stopped.set()
        self.turns.put(False)
        self.bell.ring()
        timer = threading.Timer(ORPHANED, os._exit, (1,))
        timer.daemon = True
        timer.start()

    def _tell(self) -> None:
        refused = {"refused": self.refused.copy()} if self.refused else {}
        self.say("beat", {**self.activity.as_dict(), **refused}, self.activity.describe())

    def beat(self) -> None:
        """Give signs of life."""
        try:
            while True:
                self._tell()
                if self.stopped.wait(BEAT):
                    return
        except ShoalError:
            pass

    def find_service(self, name: str) -> Any:
        """The arrays of a shared block, or the stand-in of a service, here or elsewhere."""
        if name in self.blocks:
            return self.blocks[name]
        if name in self.services:
            return self.services[name]
        pipe = self.pipes[self.start["homes"][name]]
        return Remote(name, lambda: pipe, self.activity)

    def run(self) -> None:
        """Make the services, then run the worker to its end, and serve until told to stop."""
        for thread in (self.listen, self.beat):
            threading.Thread(target=thread, name=thread.__name__, daemon=True).start()
        for name, recipe in self.start["services"].items():
            args = [rebuild(arg, self.find_service) for arg in recipe["args"]]
            with Randomness(recipe["seed"]).active():
                self.services[name] = Local(name, find_service(recipe["make"])(*args), self.caller)
        self.ready.set()
        function = find_worker(self.start["work"])
        args = [rebuild(arg, self.find_service) for arg in self.start["args"]]
        seed_everything(self.start["seed"])
        work = function(*args)
        self.say("ready")
        try:
            if self.start["lockstep"]:
                while not self.activity.ended and self.turns.get():
                    if (moved := advance(work, self.activity)) is not None:
                        self.say("moved", moved)
            else:
                drive(work, self.activity, self.bell, self.stopped.is_set)
        finally:
            work.close()
        if self.activity.ended:
            self._tell()
            self.say("ended")
        self.stopped.wait()

    def caller(self) -> Activity | None:
        """The worker, where it is the one that calls a service here."""
        return self.activity if threading.current_thread() is threading.main_thread() else None


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


def main(descriptor: int) -> None:
    """Be the worker that the head describes."""
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    child = Child(Pipe(socket.socket(fileno=descriptor)))
    code = 0
    try:
        child.run()
    except ServiceLost as error:
        code = 1
        _tell(child, f"failed: {error}", False)
    except Fatal as error:  # its message says all that a user needs
        code = 1
        _tell(child, f"failed: {error}", True)
    except BaseException:
        code = 1
        _tell(child, "failed:\n" + traceback.format_exc(), False)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # no finaliser of a library may delay the end


def _tell(child: Child, text: str, fatal: bool) -> None:
    with suppress(ShoalError):
        child.say("failed", text, fatal)
