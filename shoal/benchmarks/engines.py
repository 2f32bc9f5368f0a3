"""The same work on every engine: what a call costs, how fast arrays travel, and how fast a run trains."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from shoal import engines
from shoal.benchmarks import library
from shoal.core.errors import SettingsError, nearest
from shoal.core.types import Work
from shoal.engines.options import Machines, Network, Options
from shoal.transport import LINKS

# What each needs beside Shoal itself.
NEEDS = {"ray": "ray", "cluster/websocket": "websockets", "cluster/grpc": "grpc"}
SIZES = {"small": 0, "weights": 6_748_160, "rollout": 564_480}  # of the Nature network, and of 20 stacked frames
TRAINED = 30_000  # steps
TRAINING: dict[str, Any] = {
    "environment": {"id": "CartPole-v1"},
    "algorithm": {"name": "impala", "batch": 16, "network": {"hidden": [64, 64]}},
    "actors": 1,
    "envs": 8,
    "threads": 1,
    "steps": TRAINED,
    "log_every": 0.5,
    "evaluation": {"every": 10**9, "episodes": 1},
    "checkpoints": {"every": 10**9},
}


class Shelf:
    """A service that keeps one tree."""

    kept: Any = None

    def same(self, number: int) -> int:
        """Give back a number."""
        return number

    def put(self, tree: Any) -> bool:
        """Keep a copy of a tree, as stores do."""
        self.kept = {name: np.array(value) for name, value in tree.items()}
        return False

    def get(self) -> Any:
        """Give back the tree."""
        return self.kept


class Board:
    """A service for what was measured."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self.told: dict[str, Any] = {}

    def tell(self, name: str, value: Mapping[str, Any]) -> None:
        """Keep a finding."""
        self.told[name] = value

    def all(self) -> dict[str, Any]:
        """Every finding."""
        return self.told


def rest() -> Work:
    """Wait for ever: its process answers calls."""
    while True:
        yield False


def ask(shelf: Any, board: Any, name: str, size: int, seconds: float) -> Work:
    """Call the shelf for so long, and tell how long calls took."""
    rng = np.random.default_rng(0)
    tree = {"numbers": rng.standard_normal(size // 4, np.float32)}
    if name == "weights":
        shelf.put(tree)
    call = {"small": lambda: shelf.same(7), "weights": shelf.get, "rollout": lambda: shelf.put(tree)}[name]
    for _ in range(20 if name == "small" else 3):  # connections, buffers, caches
        call()
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < 10 or time.perf_counter() - began < seconds:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
        yield True
    p50, p99 = np.percentile(times, (50, 99))
    board.tell(name, {"calls": len(times), "p50": float(p50), "p99": float(p99)})


def contestants() -> dict[str, str]:
    """Every engine, and `cluster` by every link, with what is missing for it here; empty: nothing."""
    names = [name for name in engines.ENGINES if name != "cluster"] + [f"cluster/{link}" for link in LINKS]
    missing = {name: NEEDS[name] for name in names if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None}
    return {name: missing.get(name, "") for name in names}


def chosen(names: list[str]) -> list[str]:
    """The contestants that are named, or all that can run here."""
    known = contestants()
    for name in names:
        if name not in known:
            raise SettingsError(f"there is no {name!r}: choose of {', '.join(known)}{nearest(name, known)}")
        if known[name]:
            raise SettingsError(f"{name} needs the package {known[name]}, which is not installed")
    return names or [name for name, missing in known.items() if not missing]


@contextmanager
def hosted(name: str) -> Iterator[dict[str, Any]]:
    """The settings that choose an engine; for `cluster`, with a node in another process of this machine."""
    engine, _, link = name.partition("/")
    if engine != "cluster":
        yield {"engine": engine}
        return
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    words = ["node", "--join", address, "--link", link, "--rank", "1", "--world", "2", "--slots", "4"]
    words += ["--insecure", "--allow", "shoal.benchmarks"]
    process = subprocess.Popen(
        [sys.executable, "-c", "from shoal.cli.main import main; main()", *words],
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        network = {"listen": address, "link": link, "world": 2, "insecure": True}
        yield {"engine": "cluster", "network": network}
    finally:
        process.kill()
        process.wait()


def measure_calls(name: str, seconds: float) -> dict[str, Any]:
    """Calls of one worker to a service that lives with another, as actors call the learner's."""
    psutil = library()

    head = psutil.Process()

    def spent() -> float:
        times = head.cpu_times()
        return float(times.user + times.system)

    with ExitStack() as stack:
        settings = stack.enter_context(hosted(name))
        network = Network(**settings.get("network", {}))
        machines = Machines(network=network, remote=frozenset(SIZES)) if settings["engine"] == "cluster" else None
        options = Options(homes={"shelf": "host"}, machines=machines)
        engine = engines.make(settings["engine"], options, engines.prepare(settings["engine"], (__name__,)))
        stack.callback(engine.close)
        shelf, board = engine.serve("shelf", Shelf), engine.serve("board", Board)
        engine.run("host", rest)
        cores = 0.0
        for what, size in SIZES.items():
            before = spent()
            engine.run(what, ask, shelf, board, what, size, seconds)
            engine.wait(what)
            cores = spent() - before if what == "small" else cores
        told = board.all()
    return {
        "small_p50_us": 1e6 * told["small"]["p50"],
        "small_p99_us": 1e6 * told["small"]["p99"],
        **{f"{what}_mb_s": SIZES[what] / told[what]["p50"] / 1e6 for what in ("weights", "rollout")},
        "head_cpu_ms_per_1000": 1e6 * cores / told["small"]["calls"],
    }


def measure_training(name: str) -> float:
    """Steps per second of a small run, from the first line of its log, if there are several, to the last."""
    from shoal.training import train

    with hosted(name) as settings, tempfile.TemporaryDirectory() as place:
        rows = train({**TRAINING, **settings}, Path(place) / "run").rows()
    marks = [(row["seconds"], row["steps"]) for row in rows if row.get("steps")]
    (begin, first), (end, last) = marks[0] if len(marks) > 1 else (0.0, 0), marks[-1]
    return float((last - first) / max(end - begin, 1e-9))


def measure(names: list[str], seconds: float) -> Iterator[dict[str, Any]]:
    """A row for each engine, as it is done."""
    for name in names:
        yield {"engine": name, **measure_calls(name, seconds), "steps_per_s": measure_training(name)}
