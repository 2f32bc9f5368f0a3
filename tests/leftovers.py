"""What tests left behind: found, named and ended, so that only the test that left it fails.

Every process that a test starts, and every one those start, inherits a mark in its environment. It is found by that
even after whoever started it is gone.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.engines.simulated import LOOPBACK

VARIABLE = "SHOAL_TEST"
# Of this process; tests that run tests pass theirs on as its beginning.
MARK = f"{os.environ.get(VARIABLE, '')}/{os.getpid()}-{secrets.token_hex(4)}"
KILLED = 10.0  # seconds that a busy machine may take to end what was killed
KEPT: set[int] = set()  # processes, and ports of torch's store, that are there for all tests


def mark() -> None:
    """Have every process that is started from now on carry this process's mark."""
    os.environ[VARIABLE] = MARK


def unmarked() -> dict[str, str]:
    """The environment of processes that are there for all tests."""
    return {name: value for name, value in os.environ.items() if name != VARIABLE}


def listen_to_signals() -> None:
    """Undo what a shell's background job inherits: there SIGINT is ignored, here and in whatever is started."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _read(pid: int | str, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:  # it has ended, or belongs to someone else
        return b""


def running(pid: int) -> bool:
    """Whether a process runs: one that has ended but was not waited for has no command line any more."""
    return _read(pid, "cmdline") != b""


def _children(pid: int | str) -> set[int]:
    found = set()
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            for child in map(int, _read(pid, f"task/{thread}/children").split()):
                if child not in KEPT:
                    found |= {child} | _children(child)
    return found


def processes() -> set[int]:
    """Processes that tests started and that are still there: this one's descendants, and whoever has the mark."""
    sign = f"{VARIABLE}={MARK}".encode()
    marked = {int(pid) for pid in os.listdir("/proc") if pid.isdigit() and sign in _read(pid, "environ")}
    return (_children("self") | marked) - KEPT - {os.getpid()}


def end(pids: set[int]) -> None:
    """Kill processes, and whoever they started meanwhile, for good."""
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            if os.getpgid(pid) == pid != os.getpgrp():
                os.killpg(pid, signal.SIGKILL)
            os.kill(pid, signal.SIGKILL)
    for pid in pids:
        try:
            os.waitpid(pid, 0)
        except ChildProcessError:  # not this process's own
            limit = time.monotonic() + KILLED
            while running(pid) and time.monotonic() < limit:
                time.sleep(0.01)


def blocks() -> set[str]:
    """Shared memory with a name, but for semaphores that others hold, such as a test beside this one."""
    found = set(os.listdir("/dev/shm"))
    if any(name.startswith("sem.") for name in found):
        mine = {os.getpid(), *processes()}
        others = [pid for pid in psutil.pids() if pid not in mine]
        held = b"".join(_read(pid, "maps") for pid in others)
        found = {name for name in found if not (name.startswith("sem.") and name.encode() in held)}
    return found


def sockets() -> set[str]:
    """What this process's descriptors of sockets and shared memory point to."""
    found = set()
    connections = psutil.Process().net_connections("tcp") if KEPT else []
    kept = {one.fd for one in connections for end in (one.laddr, one.raddr) if end and end.port in KEPT}
    kept |= connections_of_ray()
    for descriptor in os.listdir("/proc/self/fd"):
        if int(descriptor) in kept:
            continue
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:
            continue
        if target.startswith(("socket:", "/memfd:shoal")):
            found.add(target)
    return found


def connections_of_ray() -> set[int]:
    """Descriptors that Ray's library keeps once it has met a cluster: open to the shared one, or closed by another."""
    if "ray" not in sys.modules:
        return set()
    known = {one.fd: one.raddr for one in psutil.Process().net_connections("all")}
    kept = {fd for fd, peer in known.items() if getattr(peer, "ip", "").endswith(LOOPBACK)}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:") and int(name) not in known:
                kept.add(int(name))
    assert len(kept) < 10  # a handful, however often an engine came and went
    return kept


@dataclass
class Before:
    """What was there before a test."""

    threads: set[int | None] = field(default_factory=lambda: {thread.ident for thread in threading.enumerate()})
    sockets: set[str] = field(default_factory=sockets)
    blocks: set[str] = field(default_factory=blocks)

    def left(self) -> list[str]:
        """What is there now and was not."""
        new = [f"thread {one.name}" for one in threading.enumerate() if one.ident not in self.threads]
        new += [f"process {pid}: {_told(pid)}" for pid in sorted(processes())]
        new += [f"socket {name}" for name in sockets() - self.sockets]
        return new + [f"shared memory {name}" for name in blocks() - self.blocks]

    @staticmethod
    def clear() -> None:
        """End the processes; threads, sockets and memory stay, and the next test finds them there before it."""
        for _ in range(10):  # one that is killed may have just started another
            if not (left := processes()):
                break
            end(left)


def _told(pid: int) -> str:
    return (
        _read(pid, "cmdline").replace(b"\0", b" ")[:200].decode(errors="replace").strip() or "(ended, not waited for)"
    )
