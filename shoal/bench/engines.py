"""The same work on every engine: what a call costs, how fast arrays travel, and how fast a run trains."""

from __future__ import annotations

import importlib.util
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from shoal import engines
from shoal.bench.measuring import Row, Slot, core_seconds, library, payloads, rest, timed
from shoal.core.errors import SettingsError, nearest
from shoal.core.tree import size_of
from shoal.core.types import Work
from shoal.engines.options import Machines, Network, Options
from shoal.runs.launching import launch
from shoal.transport import LINKS

# What each needs besides Shoal itself.
NEEDS = {"ray": "ray", "cluster/websocket": "websockets", "cluster/grpc": "grpc"}
CALLS = ("small", "weights", "rollout")
TRAINING: dict[str, Any] = {
    "environment": {"id": "CartPole-v1"},
    "algorithm": {"name": "impala", "batch": 16, "network": {"hidden": [64, 64]}},
    "actors": 1,
    "envs": 8,
    "threads": 1,
    "steps": 30_000,
    "log_every": 0.5,
    "evaluation": {"every": 10**9, "episodes": 1},
    "checkpoints": {"every": 10**9},
}


class Results:
    """A service for what was measured."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self.found: dict[str, Any] = {}

    def add(self, name: str, value: Mapping[str, Any]) -> None:
        """Keep a result."""
        self.found[name] = value

    def all(self) -> dict[str, Any]:
        """Every result."""
        return self.found


def ask(slot: Any, results: Any, name: str, seconds: float) -> Work:
    """Call the slot for these seconds, and report how long calls took."""
    tree = payloads().get(name)
    if name == "weights":
        slot.put(tree)
    call = {"small": lambda: slot.same(7), "weights": slot.get, "rollout": lambda: slot.put(tree)}[name]
    for _ in range(20 if name == "small" else 3):  # connections, buffers, caches
        call()
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < 10 or time.perf_counter() - began < seconds:
        timed(times, call)
        yield True
    p50, p99 = map(float, np.percentile(times, (50, 99)))
    results.add(name, {"calls": len(times), "p50": p50, "p99": p99, "mb_s": size_of(tree or {}) / p50 / 1e6})


def contestants() -> dict[str, str]:
    """Every engine, and `cluster` over every link, with the package that it lacks here, or nothing."""
    names = [name for name in engines.ENGINES if name != "cluster"] + [f"cluster/{link}" for link in LINKS]
    missing = {name: NEEDS[name] for name in names if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None}
    return {name: missing.get(name, "") for name in names}


def chosen(names: list[str]) -> list[str]:
    """The contestants that are named, or all that can run here."""
    known = contestants()
    for name in names:
        if name not in known:
            raise SettingsError(f"there is no engine {name!r}: choose from {', '.join(known)}{nearest(name, known)}")
        if known[name]:
            raise SettingsError(f"{name} needs the package {known[name]}, which is not installed")
    return names or [name for name, missing in known.items() if not missing]


def free_address() -> str:
    """An address of loopback at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


@contextmanager
def hosted(name: str) -> Iterator[dict[str, Any]]:
    """The settings that choose an engine; for `cluster`, with a node in another process of this machine."""
    engine, _, link = name.partition("/")
    if engine != "cluster":
        yield {"engine": engine}
        return
    address = free_address()
    words = ["node", "--join", address, "--link", link, "--rank", "1", "--world", "2", "--slots", "4"]
    words += ["--insecure", "--allow", "shoal.bench"]
    process = launch(*words, stderr=subprocess.DEVNULL)
    try:
        network = {"listen": address, "link": link, "world": 2, "insecure": True}
        yield {"engine": "cluster", "network": network}
    finally:
        process.kill()
        process.wait()


def options_of(settings: Mapping[str, Any], remote: Iterable[str], **more: Any) -> Options:
    """The options of the engine that is chosen; on `cluster`, some workers live on the node."""
    if settings["engine"] == "cluster":
        more["machines"] = Machines(network=Network(**settings["network"]), remote=frozenset(remote))
    return Options(**more)


def measure_calls(name: str, seconds: float) -> Row:
    """Calls of one worker to a service that lives with another, as actors call the learner's."""
    head = library().Process()
    with ExitStack() as stack:
        settings = stack.enter_context(hosted(name))
        options = options_of(settings, CALLS, homes={f"{what}_slot": "host" for what in CALLS})
        engine = engines.make(settings["engine"], options, engines.prepare(settings["engine"], (__name__,)))
        stack.callback(engine.close)
        slots = {what: engine.serve(f"{what}_slot", Slot) for what in CALLS}
        results = engine.serve("results", Results)
        engine.run("host", rest)
        spent: dict[str, float] = {}
        for what in CALLS:
            before = core_seconds(head)
            engine.run(what, ask, slots[what], results, what, seconds)
            engine.wait(what)
            spent[what] = core_seconds(head) - before
        found = results.all()
    return {
        "small_p50_us": 1e6 * found["small"]["p50"],
        "small_p99_us": 1e6 * found["small"]["p99"],
        **{f"{what}_mb_s": found[what]["mb_s"] for what in ("weights", "rollout")},
        "head_cpu_ms_per_1000": 1e6 * spent["small"] / found["small"]["calls"],
    }


def measure_training(name: str) -> float:
    """Steps per second of a small run, from the first line of its metrics, if there are several, to the last."""
    from shoal.training import train

    with hosted(name) as settings, tempfile.TemporaryDirectory() as place:
        rows = train({**TRAINING, **settings}, Path(place) / "run").rows()
    marks = [(row["seconds"], row["steps"]) for row in rows if row.get("steps")]
    (begin, first), (end, last) = marks[0] if len(marks) > 1 else (0.0, 0), marks[-1]
    return float((last - first) / max(end - begin, 1e-9))


def measure(names: list[str], seconds: float) -> Iterator[Row]:
    """A row for each engine, as it is done."""
    for name in names:
        yield {"engine": name, **measure_calls(name, seconds), "steps_per_s": measure_training(name)}
