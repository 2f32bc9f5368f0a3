"""Fixtures of every test: nothing that a test started may outlive it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin starve the others of a busy machine

import hypothesis
import psutil
import pytest
import torch

from shoal import topology
from shoal.engines.links.greeting import Terms
from shoal.engines.node import Node, listen

torch.set_num_threads(1)
hypothesis.settings.register_profile("suite", derandomize=True, deadline=None)  # the same examples every time
hypothesis.settings.load_profile("suite")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # behaviour is the same everywhere; a few tests want a GPU


def open_sockets() -> set[str]:
    """What this process's descriptors of sockets and shared memory point to."""
    found = set()
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:
            continue
        if target.startswith(("socket:", "/memfd:shoal")):
            found.add(target)
    return found


def left_over(before: tuple[set[int], set[str], set[str]]) -> list[str]:
    """Threads, processes, sockets and shared memory that were not there before."""
    threads, sockets, blocks = before
    new = [f"thread {thread.name}" for thread in threading.enumerate() if thread.ident not in threads]
    new += [f"process {child.pid} {child.name()}" for child in psutil.Process().children(recursive=True)]
    new += [f"socket {name}" for name in open_sockets() - sockets]
    new += [f"shared memory {name}" for name in set(os.listdir("/dev/shm")) - blocks]
    return new


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Fail a test that leaves something running or open."""
    before = {thread.ident or 0 for thread in threading.enumerate()}, open_sockets(), set(os.listdir("/dev/shm"))
    yield
    limit = time.monotonic() + 10
    while (new := left_over(before)) and time.monotonic() < limit:
        time.sleep(0.02)  # what is ending may take a moment; the limit is what counts
    assert not new, f"left behind: {new}"


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Any]:
    """Start `shoal` as a user does, in an empty folder; whatever is left is ended."""
    started: list[subprocess.Popen[str]] = []
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "COLUMNS": "120"}

    def start(*words: object) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", "from shoal.cli import main; main()", *map(str, words)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=tmp_path,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            stream.close()


@pytest.fixture
def hosted() -> Iterator[Callable[..., dict[str, Any]]]:
    """The settings that choose an engine; for `cluster`, nodes wait on this machine."""
    nodes: list[Any] = []
    addresses: list[str] = []

    def choose(engine: str, machines: int = 1) -> dict[str, Any]:
        if engine != "cluster":
            return {"engine": engine}
        while len(addresses) < machines:
            nodes.append(Node(1, ("shoal", "tests"), topology.MODULES))
            gate = listen(nodes[-1], "127.0.0.1:0", Terms("node"))
            nodes.append(gate)
            addresses.append(gate.address)
        return {"engine": engine, "nodes": addresses}

    yield choose
    for one in nodes:
        one.close()
