"""Small services and workers that the engine tests run; a module, so that other processes can import it."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from shoal.core.caller import caller
from shoal.core.doing import here, span
from shoal.core.errors import Fatal, ServiceLost
from shoal.core.rights import calls
from shoal.core.types import Work


class Shelf:
    """Keeps what it is given."""

    def __init__(self, label: str = "") -> None:
        self.label = label
        self.kept: dict[str, Any] = {}
        self.calls = 0
        self.random = np.random.randint(2**31)

    def put(self, key: str, value: Any) -> bool:
        self.kept[key] = _copied(value)
        return True

    def append(self, key: str, value: Any) -> int:
        self.kept.setdefault(key, []).append(value)
        return len(self.kept[key])

    def get(self, key: str) -> Any:
        self.calls += 1
        return self.kept.get(key)

    def double(self, value: Any) -> Any:
        return value * 2

    def fail(self) -> None:
        raise ValueError("the shelf broke")

    def pid(self) -> int:
        return os.getpid()

    def hang(self) -> None:
        threading.Event().wait()

    def drawn(self) -> int:
        return self.random

    def sign(self, key: str) -> None:
        """Note who calls."""
        self.kept[key] = caller()


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return value.copy() if isinstance(value, np.ndarray) else value


SIZE = 200_000  # numbers, more than what is copied through a pipe


def publishes(parameters: Any, board: Any, readers: list[str], versions: int) -> Work:
    """Publish a version whenever all readers have the one before."""
    for version in range(versions):
        while any(len(board.get(name) or []) < version for name in readers):
            yield False
        parameters.publish(version, 0, 0, False, {"numbers": np.full(SIZE, version, np.float32)})
        yield True


def follows(parameters: Any, board: Any, name: str, versions: int) -> Work:
    """Fetch every version, and see at the end that none has changed."""
    found: list[Any] = []
    while len(found) < versions:
        newest = parameters.fetch(len(found) - 1)
        if newest is not None:
            found.append(newest)
            board.append(name, newest["version"])
        yield newest is not None
    assert [newest["version"] for newest in found] == [*range(versions)]
    for version, newest in enumerate(found):
        np.testing.assert_array_equal(newest["weights"]["numbers"], np.full(SIZE, version, np.float32))


def idle() -> Work:
    while True:
        yield False


def answer(shelf: Any, name: str, value: Any) -> Work:
    shelf.put(name, shelf.double(value))
    yield True


def toils(shelf: Any, seconds: float) -> Work:
    """Compute for some seconds of core-time, in a part of its work that has a name."""
    with span("toil"):
        until = time.process_time() + seconds
        while time.process_time() < until:
            pass
    shelf.put("done", True)
    yield True


def sign(shelves: list[Any], key: str) -> Work:
    for shelf in shelves:
        shelf.sign(key)
    yield True


def outlives(notes: Any, shelf: Any) -> Work:
    """Kill the process of a service, and end once it answers again."""
    victim = shelf.pid()
    shelf.put("kept", 1)
    notes.append("caller pids", os.getpid())
    os.kill(victim, signal.SIGKILL)
    while True:
        try:
            if shelf.pid() != victim:
                break
        except ServiceLost:
            notes.put("lost", True)
        yield False
    notes.put("kept", shelf.get("kept"))
    yield True


def echo(shelf: Any) -> Work:
    """Copy whatever lies under `question` to `answer`, and end."""
    while (value := shelf.get("question")) is None:
        yield False
    shelf.put("answer", value)
    yield True


def draw(shelf: Any, name: str, count: int) -> Work:
    """Append draws of every kind of randomness to one shared list."""
    import random

    import torch

    for _ in range(count):
        shelf.append("draws", [name, random.random(), float(np.random.rand()), float(torch.rand(()))])
        yield True


def raises(shelf: Any) -> Work:
    yield True
    raise ValueError("a worker broke")


def raises_fatally(shelf: Any) -> Work:
    yield True
    raise Fatal("no use trying again")


def calls_failing(shelf: Any) -> Work:
    shelf.fail()
    yield True


def calls_hanging(shelf: Any) -> Work:
    shelf.hang()
    yield True


def count_up(shelf: Any, name: str) -> Work:
    """Say the process, then count without end."""
    shelf.append(f"{name} pids", os.getpid())
    count = 0
    while True:
        count += 1
        shelf.put(name, count)
        yield True


def count_to_the_end(shelf: Any, name: str, ended: str) -> Work:
    """Count without end, and leave a file where that was ended in order."""
    try:
        yield from count_up(shelf, name)
    finally:
        Path(ended).touch()


def until(shelf: Any, key: str, value: Any) -> Work:
    """End when a value lies on the shelf."""
    while shelf.get(key) != value:
        yield False


def until_longer(shelf: Any, key: str, length: int) -> Work:
    """End when a list on the shelf is long enough."""
    while len(shelf.get(key) or []) < length:
        yield False


def kill_once(shelf: Any, key: str) -> Work:
    """Kill the process whose number lies on the shelf, and end."""
    while not (pids := shelf.get(key)):
        yield False
    os.kill(pids[-1], signal.SIGKILL)
    yield True


def dies_at_once(shelf: Any) -> Work:
    shelf.append("lives", os.getpid())
    os.kill(os.getpid(), signal.SIGKILL)
    yield True


def freezes(shelf: Any) -> Work:
    """Stop the whole process, heartbeat included."""
    shelf.append("frozen", os.getpid())
    os.kill(os.getpid(), signal.SIGSTOP)
    while True:  # the signal may be taken by another thread, and a little later
        time.sleep(0.01)
    yield True


RELEASED = threading.Event()  # of which every process has its own


def stuck(shelf: Any) -> Work:
    """Stay inside the second unit of work."""
    yield True
    RELEASED.wait(3600)
    yield True


def stuck_in(shelf: Any, what: str) -> Work:
    """Stay inside something that has a name."""
    yield True
    here().begin(what, "a thing")
    RELEASED.wait(3600)
    yield True


def tell_signals(shelf: Any) -> Work:
    """Say what this process, and one that it forks, does with signals."""
    shelf.put("SIGINT", int(signal.getsignal(signal.SIGINT)))  # type: ignore[arg-type]
    signal.raise_signal(signal.SIGTERM)
    if not (forked := os.fork()):
        signal.raise_signal(signal.SIGTERM)
        os._exit(0)
    shelf.put("SIGTERM of what it forked", os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]))
    yield True


def spins() -> Work:
    """Compute without end."""
    yield True
    while True:
        time.monotonic()


def stuck_in_a_library(silent: bool) -> Work:
    """Wait for oneself where no signal is heard; silently, where no other thread of Python runs either."""
    library = (ctypes.PyDLL if silent else ctypes.CDLL)(None)
    mutex = ctypes.create_string_buffer(64)
    yield True
    for _ in range(2):
        library.pthread_mutex_lock(mutex)
    yield True


def fill(shelf: Any, items: int) -> Work:
    """Put until the bounded service is full, then report how much went in."""
    done = 0
    while shelf.put({"x": np.zeros((1, items), np.float32), "version": np.zeros(items, np.int64)}, None):
        done += items
        yield True
    while True:
        yield False


def starts_a_child(shelf: Any) -> Work:
    """Leave a grandchild of the head behind."""
    import subprocess

    process = subprocess.Popen(["sleep", "600"])
    shelf.put("grandchild", process.pid)
    while True:
        yield False


def slow_start(shelf: Any) -> Work:
    time.monotonic()
    yield True


def write_block(block: Any, index: int, value: float) -> Work:
    """Write one's own cell, then wait until every cell is written, and sum them up in another array."""
    block["cells"][index] = value
    while not block["cells"].all():
        yield False
    block["sums"][index] = block["cells"].sum()
    yield True


def watch_block(shelf: Any, block: Any) -> Work:
    """Say the process and the mapping of the block in it, then count in it without end."""
    with open("/proc/self/maps") as file:
        inodes = [int(line.split()[4]) for line in file if "/memfd:shoal numbers" in line]
    shelf.append("inodes", inodes)
    shelf.append("found", float(block["count"]))
    shelf.append("block pids", os.getpid())  # last, since whoever reads it may kill this process
    while True:
        block["count"] += 1
        yield True


class Reader:
    """Reads a block wherever it lives."""

    def __init__(self, block: Any) -> None:
        self.block = block

    def read(self, name: str) -> Any:
        return self.block[name].copy()


@calls(shelf=("put",))
def oversteps(shelf: Any, kept: Any) -> Work:
    """Call what was declared, then what was not."""
    shelf.put("declared", 1)
    yield True
    shelf.get("declared")
    yield True


@calls(shelf=("put", "append"))
def looks_aside(shelf: Any, kept: Any) -> Work:
    """Call a service that was given but not declared."""
    kept.put("undeclared", 1)
    yield True
