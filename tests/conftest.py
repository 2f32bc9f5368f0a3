"""Fixtures of every test: nothing that a test started may outlive it."""

from __future__ import annotations

import gc
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin starve the others of a busy machine

import hypothesis
import pytest
import torch
from xdist.scheduler import LoadScopeScheduling

from shoal import topology
from shoal.display import plots
from shoal.engines.node import Node, listen
from shoal.transport import grpc
from shoal.transport.trust import Terms
from tests import leftovers
from tests.engines.simulated import Simulated, alone, simulated
from tests.pace import seconds

leftovers.listen_to_signals()
leftovers.mark()
torch.set_num_threads(1)
hypothesis.settings.register_profile("suite", derandomize=True, deadline=None)  # the same examples every time
hypothesis.settings.load_profile("suite")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # behaviour is the same everywhere; a few tests want a GPU

os.environ["GRPC_SSL_CIPHER_SUITES"] = grpc.CIPHERS  # Ray may load that library first
os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}  # not the one in a user's home

ROOT = Path(__file__).parents[1]
SHOAL = [sys.executable, "-c", "from shoal.cli.main import main; main()"]
LIMIT = 120.0  # seconds for a test on a usual machine
GRACE = 10.0  # seconds in which what is ending may end


# What is started once for all tests that share it, or is there once on a machine, by the names of these tests.
GROUPS = {
    "ray": re.compile(r"/test_ray\.py|/test_engines_alike\.py|[\[-]ray[\]-]|test_every_benchmark.*\[actors\]"),
    "machines": re.compile(r"/test_machines\.py"),
    "torchrpc": re.compile(r"cluster/torchrpc"),
}


def group(nodeid: str) -> str | None:
    """The group of a test, if it is in one."""
    return next((name for name, pattern in GROUPS.items() if pattern.search(nodeid)), None)


class Scheduling(LoadScopeScheduling):
    """One process runs all tests of a group; the marks that xdist has for that do nothing under some pytests."""

    def _split_scope(self, nodeid: str) -> str:
        return group(nodeid) or nodeid


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: Any, log: Any) -> Scheduling:
    """Deal the tests out by groups."""
    return Scheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes longest: groups, then whole runs; a Ray of a test's own comes before the one that stays."""

    def order(item: pytest.Item) -> tuple[bool, bool, bool]:
        names = {*getattr(item, "fixturenames", ())}
        shared = "only_ray" not in names or "ray_cluster" in names
        return group(item.nodeid) is None, shared, item.path.parent != ROOT / "tests"

    items.sort(key=order)


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Give each test the time that this machine needs for it now."""
    usual = LIMIT if item.get_closest_marker("long") is None else 10 * LIMIT
    (limit,) = (item.get_closest_marker("timeout") or pytest.mark.timeout(usual).mark).args
    item.add_marker(pytest.mark.timeout(seconds(limit)), append=False)
    yield


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_teardown() -> Iterator[None]:
    """Limit the cleaning up after a test that failed: its own limit has ended with it."""
    limit = seconds(LIMIT)
    if signal.getitimer(signal.ITIMER_REAL)[0] == 0:
        signal.signal(signal.SIGALRM, lambda *_: pytest.fail("the cleaning up takes too long"))
        signal.setitimer(signal.ITIMER_REAL, limit, limit)  # each of the fixtures may hang
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Show the tables that tests made, from whichever process they ran in."""
    for report in terminalreporter.getreports("passed"):
        for name, text in report.user_properties:
            if name == "table":
                terminalreporter.write_line(f"\n{text}")


@pytest.fixture(scope="session")
def only_ray() -> Iterator[None]:
    """Be the only one on this machine whose tests have a Ray cluster."""
    with alone():
        yield


@pytest.fixture(scope="session")
def ray_cluster(only_ray: None) -> Iterator[Simulated]:
    """Two simulated nodes of Ray, which take seconds to start, for all tests that want them."""
    with simulated(4, 4, environment=leftovers.unmarked()) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Fail a test that leaves something running or open, and end what it left."""
    before = leftovers.Before()
    yield
    limit = time.monotonic() + seconds(GRACE)
    while (new := before.left()) and time.monotonic() < limit:
        time.sleep(0.02)  # what is ending may take a moment; the limit is what counts
        gc.collect()  # memory that is mapped goes with the last array in it
    before.clear()
    assert not new, f"left behind: {new}"


DRAWN = ("test_main", "test_docs_examples", "test_plots", "test_run")  # where pictures of runs are looked at


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
        [*SHOAL, *words, "--allow", "tests"],
        env={**leftovers.unmarked(), "PYTHONPATH": str(ROOT)},
        stderr=subprocess.DEVNULL,
    )
    leftovers.KEPT.update({process.pid, int(address.rpartition(":")[2])})
    yield address
    process.kill()
    process.wait()


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[Any]]]:
    """Start a program that is ended in any case; what it leaves behind itself is the test's fault."""
    started: list[subprocess.Popen[Any]] = []

    def begin(words: list[object], **options: Any) -> subprocess.Popen[Any]:
        started.append(subprocess.Popen([*map(str, words)], **options))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()


@pytest.fixture
def command(start: Any, tmp_path: Path) -> Any:
    """Start `shoal` as a user does, in an empty folder."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "120"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return lambda *words: start([*SHOAL, *words], env=environment, cwd=tmp_path, **pipes)


@pytest.fixture
def hosted(request: pytest.FixtureRequest) -> Iterator[Callable[..., dict[str, Any]]]:
    """The settings that choose an engine and a link; for `cluster`, nodes wait on this machine."""
    nodes = ExitStack()
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
            node = Node(1, ("shoal", "tests"), topology.MODULES)
            nodes.callback(node.close)
            gate = listen(node, "127.0.0.1:0", Terms("node", link=link))
            nodes.callback(gate.close)
            known.append(gate.address)
        return {"engine": engine, "nodes": known, "network": {"link": link}}

    with nodes:
        yield choose
