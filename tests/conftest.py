"""Fixtures of every test: nothing that a test started may outlive it."""

from __future__ import annotations

import gc
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin starve the others of a busy machine

import hypothesis
import psutil
import pytest
import torch

from shoal import topology
from shoal.engines.links.terms import Terms
from shoal.engines.node import Node, listen
from shoal.runs import plots
from tests.engines.simulated import LOOPBACK, Simulated, simulated

torch.set_num_threads(1)
hypothesis.settings.register_profile("suite", derandomize=True, deadline=None)  # the same examples every time
hypothesis.settings.load_profile("suite")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # behaviour is the same everywhere; a few tests want a GPU

os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}  # not the one in a user's home


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests that want a Ray cluster together, and begin with those that take longest."""
    for item in items:
        given = item.callspec.params.values() if hasattr(item, "callspec") else ()
        if any(isinstance(value, str) and value == "ray" for value in given):
            item.add_marker(pytest.mark.xdist_group("ray"))
    items.sort(key=lambda item: item.get_closest_marker("xdist_group") is None)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Show the tables that tests made, from whichever process they ran in."""
    for report in terminalreporter.getreports("passed"):
        for name, text in report.user_properties:
            if name == "table":
                terminalreporter.write_line(f"\n{text}")


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Simulated]:
    """Two simulated nodes of Ray, which take seconds to start, for all tests that want them."""
    with simulated(4, 4) as cluster:
        yield cluster


def open_sockets() -> set[str]:
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


KEPT: set[int] = set()  # processes, and ports of torch's store, that are there for all tests


def children(process: psutil.Process | None = None) -> list[str]:
    """The processes that this one has started, and theirs, but for those that are kept."""
    found = []
    for child in (process or psutil.Process()).children():
        if child.pid not in KEPT:
            with suppress(psutil.NoSuchProcess):
                found += [f"process {child.pid} {child.name()}", *children(child)]
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


def left_over(before: tuple[set[int], set[str], set[str]]) -> list[str]:
    """Threads, processes, sockets and shared memory that were not there before."""
    threads, sockets, blocks = before
    new = [f"thread {thread.name}" for thread in threading.enumerate() if thread.ident not in threads]
    new += children()
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
        gc.collect()  # memory that is mapped goes with the last array in it
    assert not new, f"left behind: {new}"


DRAWN = ("test_cli", "test_docs_examples", "test_plots", "test_run")  # where pictures of runs are looked at


@pytest.fixture(autouse=True)
def undrawn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the picture at the end of each run, which takes longer than most of them."""
    if not request.path.stem.startswith(DRAWN):
        monkeypatch.setattr(plots, "curve", lambda rows, path, *_: path)


@pytest.fixture(scope="session")
def counted_node() -> Iterator[str]:
    """The address at which a node of a process of its own looks for a head by torch RPC, one head after the other."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    words = ["node", "--link", "torchrpc", "--join", address, "--rank", "1", "--world", "2", "--slots", "2"]
    process = subprocess.Popen(
        [sys.executable, "-c", "from shoal.cli import main; main()", *words, "--allow", "tests"],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        stderr=subprocess.DEVNULL,
    )
    KEPT.update({process.pid, int(address.rpartition(":")[2])})
    yield address
    process.kill()
    process.wait()


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
def hosted(request: pytest.FixtureRequest) -> Iterator[Callable[..., dict[str, Any]]]:
    """The settings that choose an engine and a link; for `cluster`, nodes wait on this machine."""
    nodes: list[Any] = []
    addresses: dict[str, list[str]] = {}

    def choose(name: str, machines: int = 1) -> dict[str, Any]:
        engine, _, link = name.partition("/")
        if engine == "ray":
            return {"engine": engine, "ray": {"address": request.getfixturevalue("ray_cluster").address}}
        if engine != "cluster":
            return {"engine": engine}
        if link == "torchrpc":  # of which there is one in a process
            address = request.getfixturevalue("counted_node")
            return {"engine": engine, "network": {"link": link, "listen": address, "world": 2}}
        link = link or "websocket"
        known = addresses.setdefault(link, [])
        while len(known) < machines:
            nodes.append(Node(1, ("shoal", "tests"), topology.MODULES))
            gate = listen(nodes[-1], "127.0.0.1:0", Terms("node", link=link))
            nodes.append(gate)
            known.append(gate.address)
        return {"engine": engine, "nodes": known, "network": {"link": link}}

    yield choose
    for one in nodes:
        one.close()
