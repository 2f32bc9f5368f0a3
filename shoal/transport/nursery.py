"""Where worker processes start: a process that loads the libraries once and forks a worker whenever it is asked.

Loading torch takes a second or more of a core. The nursery does it once, beside the head, before any thread has
started; its children begin with everything loaded and share that memory. It serves one head, over a pipe like all
others: a request carries the control socket of the new worker, the answer is its process number, and the end of each
child is reported with its exit code.
"""

from __future__ import annotations

import importlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

from shoal.core.errors import ServiceLost
from shoal.transport.pipe import Pipe

STARTING = 120.0  # seconds in which libraries may load


class Nursery:
    """The head's side: starts workers and knows how they ended."""

    def __init__(self, modules: tuple[str, ...] = ()) -> None:
        """Start the process; it loads the modules while the head goes on."""
        self.modules = modules
        self._pipe, end = Pipe.pair()
        self._pipe.set_deadline(STARTING)
        self._process = python("shoal.transport.nursery", "nursery", end, *modules)
        self._codes: dict[int, int] = {}

    def start(self, name: str, module: str, control: socket.socket) -> int:
        """Start a process that runs a module's `main` with its end of the control pipe; return its process number."""
        self._pipe.send(["start", name, module], (control.fileno(),))
        return int(self._receive("started"))

    def wait(self, pid: int, seconds: float) -> int | None:
        """The exit code of a worker, negative for a signal; None: it is still running."""
        limit = time.monotonic() + seconds
        while pid not in self._codes and (left := limit - time.monotonic()) > 0:
            if self._pipe.pending or select.select([self._pipe.socket], [], [], left)[0]:
                try:
                    self._receive("")
                except (
                    ServiceLost
                ):  # the nursery itself was killed: its children may live on, but no exit code is known
                    self._codes[pid] = -signal.SIGKILL
        return self._codes.get(pid)

    def _receive(self, kind: str) -> int:
        """Receive messages until one of the kind has come; with no kind, one."""
        while True:
            (what, number, code), _ = self._pipe.receive()
            if what == "ended":
                self._codes[number] = code
            if what == kind or not kind:
                return int(number)

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        try:
            self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def python(module: str, name: str, end: socket.socket, *words: str) -> subprocess.Popen[bytes]:
    """Run the main function of one of the engine's modules in a new interpreter, and hand it a socket."""
    code = f"from {module} import main; main({end.fileno()}, *{words!r})"
    environment = {"OPENBLAS_NUM_THREADS": "1", **os.environ}  # a process that forks should have one thread
    process = subprocess.Popen(
        # -P: nothing is imported from the current folder; the name is for process lists.
        [sys.executable, "-P", "-c", code, f"shoal {name}"],
        pass_fds=[end.fileno()],
        stdin=subprocess.DEVNULL,
        env={**environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        start_new_session=True,  # a Ctrl-C in the terminal reaches only the head, which ends its workers in order
    )
    end.close()
    return process


def leave_termination_to_the_head() -> None:
    """Survive SIGTERM, which Slurm and systemd send to all processes of a run: the head ends them in order.

    What this process forks or runs still ends by it.
    """
    own = os.getpid()

    def handle(number: int, frame: object) -> None:
        if os.getpid() != own:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    signal.signal(signal.SIGTERM, handle)


def main(descriptor: int, *modules: str) -> None:
    """Load the modules, then start workers until the head ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started the head may have changed them
    leave_termination_to_the_head()
    for module in modules:
        with suppress(ImportError):  # whoever needs it will report it
            importlib.import_module(module)
    head = Pipe(socket.socket(fileno=descriptor))
    bell, ringer = os.pipe()
    os.set_blocking(ringer, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(ringer, warn_on_full_buffer=False)
    while True:
        sources: list[Any] = [head.socket, bell]
        ready, _, _ = select.select(sources, [], [])
        with suppress(ServiceLost):
            if bell in ready:
                os.read(bell, 4096)
                _report_ends(head)
        while head.socket in ready or head.pending:
            ready = []
            try:
                (_, name, module), (control,) = head.receive()
            except ServiceLost:
                os._exit(0)
            head.send(["started", _start(name, module, control, [head.socket.fileno(), bell, ringer]), 0])


def _report_ends(head: Pipe) -> None:
    """Reap the children that ended, and report how."""
    with suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            head.send(["ended", found[0], os.waitstatus_to_exitcode(found[1])])


def _start(name: str, module: str, control: int, others: list[int]) -> int:
    """Fork a worker; where it is not safe to fork a process with loaded libraries, start a new interpreter."""
    if sys.platform != "linux":
        return python(module, name, socket.socket(fileno=control)).pid
    pid = os.fork()
    if not pid:
        _be_worker(name, module, control, others)
    os.close(control)
    return pid


def _be_worker(name: str, module: str, control: int, others: list[int]) -> None:
    """Become the worker, in the child after the fork."""
    try:
        with open("/proc/self/comm", "w") as file:
            file.write(name[:15])
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for descriptor in others:
            os.close(descriptor)
        os.setsid()  # a group of its own, so that what it starts can be ended with it
        importlib.import_module(module).main(control)
    finally:
        os._exit(1)
