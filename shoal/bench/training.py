"""Training as a user starts it: steps per second, memory, seconds to the first update and to the target."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any

from shoal.bench.measuring import Row, core_seconds, library
from shoal.core.errors import ShoalError
from shoal.runs import metrics
from shoal.runs.launching import launch

WARMUP = 5.0  # seconds after the first update in which caches fill and queues find their level
PROGRESS = re.compile(r"%  step ([\d,]+)  ")
# The lines of progress are the clock, so they come often.
ENDLESS = ("steps=1000000000000", "evaluation.every=1000000000000", "log_every=0.25")
# Peers begin to learn after this many steps; how full the replay is does not change the rate.
CHANGES: dict[str, dict[str, Any]] = {
    "dqn_pong": {"algorithm.replay.minimum": 2_000},
    "sac_halfcheetah": {"algorithm.replay.minimum": 1_000},
    "td3_halfcheetah": {"algorithm.replay.minimum": 1_000},
}
# Just enough to see that everything runs.
SMALLEST: dict[str, dict[str, Any]] = {
    "impala_cartpole": {"actors": 1},
    "impala_pong": {"envs": 1, "algorithm.batch": 2, "algorithm.unroll": 4},
    "ppo_pong": {"actors": 1, "envs": 1, "algorithm.unroll": 8, "algorithm.epochs": 1, "algorithm.minibatches": 1},
    "dqn_pong": {"envs": 1, "algorithm.batch": 2, "algorithm.replay.minimum": 8, "algorithm.replay.capacity": 1_000,
                 "algorithm.replay.chunk": 1},
    "sac_halfcheetah": {"algorithm.batch": 2, "algorithm.replay.minimum": 8, "algorithm.replay.samples_per_insert": 2},
    "td3_halfcheetah": {"algorithm.batch": 2, "algorithm.replay.minimum": 8, "algorithm.replay.samples_per_insert": 2},
}  # fmt: skip


def changes(config: str, smallest: bool) -> dict[str, Any]:
    """What is changed in a config to measure it."""
    return (SMALLEST if smallest else CHANGES).get(config, {})


def train(config: str, directory: str, *overrides: str) -> subprocess.Popen[str]:
    """Start `shoal train` with a config that comes with Shoal; its progress can be read from standard error."""
    words = ("train", config, *overrides, "--run-dir", directory)
    return launch(*words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def usage(root: int) -> tuple[Row, dict[int, float]]:
    """Memory of a process and its descendants, and the CPU time of each process."""
    head = library().Process(root)
    tree = [head, *head.children(recursive=True)]
    memory = [each.memory_full_info() for each in tree]
    held = {f"{kind}_mb": sum(getattr(each, kind) for each in memory) / 1e6 for kind in ("rss", "pss")}
    return held | {"processes": len(tree)}, {each.pid: core_seconds(each) for each in tree}


def measure(
    config: str,
    seconds: float,
    smallest: bool = False,
    overrides: Mapping[str, Any] = MappingProxyType({}),
    meter: Callable[[float], Row] = lambda begin: {},
) -> Row:
    """Train for these seconds after the warm-up, then interrupt; the rate runs from update to update.

    A meter says what it saw since the measured window began.
    """
    with tempfile.TemporaryDirectory() as directory:
        launched = time.monotonic()
        settings = {**changes(config, smallest), **overrides}
        process = train(config, directory, *ENDLESS, *(f"{key}={value}" for key, value in settings.items()))
        try:
            found = _watch(process, launched, 0.0 if smallest else WARMUP, seconds, meter)
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=120)
            summary = json.loads((Path(directory) / "summary.json").read_text())
            found |= learned(metrics.read(Path(directory), "train"), found["window_s"])
        finally:
            process.kill()
            process.wait()
    used = found.pop("used")
    rows = [{"worker": "head", "cores": used[process.pid]}]
    for name, worker in summary["workers"].items():
        waits = max(worker["waits"].items(), key=lambda item: item[1], default=(None, 0.0))
        row = {"worker": name, "cores": used.get(worker.get("pid")), "working": worker["working"]}
        rows.append(row | {"waits_most_for": waits[0], "waiting_for_it": waits[1]})
    return found | {"workers": rows, "metrics": summary["metrics"]}


def learned(rows: Sequence[Row], window: float) -> Row:
    """Updates per second over the last seconds of a run, how long each waited for its batch, and the last return."""
    since = [row for row in rows if row["seconds"] >= rows[-1]["seconds"] - window]
    begin = since[0] if len(since) > 1 else rows[0]
    lasted = rows[-1]["seconds"] - begin["seconds"]
    waited = [row["metrics"]["batch_ms"] for row in since if "batch_ms" in row["metrics"]]
    return {
        "updates_per_s": (rows[-1]["updates"] - begin["updates"]) / lasted if lasted else 0.0,
        "batch_ms": sum(waited) / len(waited) if waited else 0.0,
        "return": rows[-1].get("return"),
    }


def _watch(
    process: subprocess.Popen[str], launched: float, warmup: float, seconds: float, meter: Callable[[float], Row]
) -> Row:
    """Read the progress until the window closes."""
    lines: list[str] = []
    steps = begin_steps = 0
    first = begin = 0.0
    before: dict[int, float] = {}
    for line in process.stderr or ():
        now = time.monotonic()
        lines.append(line)
        match = PROGRESS.search(line)
        if not match or (seen := int(match[1].replace(",", ""))) == steps:
            continue
        steps, first = seen, first or now
        if not before and now - first >= warmup:
            before, begin, begin_steps = usage(process.pid)[1], now, steps
        elif before and (window := now - begin) >= seconds:
            held, after = usage(process.pid)
            used = {pid: (spent - before.get(pid, 0)) / window for pid, spent in after.items()}
            rate = (steps - begin_steps) / window
            found = {"steps_per_s": rate, "first_update_s": first - launched, "window_s": window, **held}
            return found | {"cores": sum(used.values()), "used": used} | meter(begin)
    raise ShoalError("training ended before it was measured:\n" + "".join(lines[-20:]))


def solve(config: str, seed: int, *overrides: str, directory: Path | None = None) -> Row:
    """Seconds from the start of the command to its end, which comes when an evaluation reaches the target."""
    with nullcontext(str(directory)) if directory else tempfile.TemporaryDirectory() as place:
        launched = time.monotonic()
        process = train(config, place, f"seed={seed}", *overrides)
        try:
            process.communicate()
        finally:
            process.kill()
            process.wait()
        seconds = time.monotonic() - launched
        summary = json.loads((Path(place) / "summary.json").read_text())
    return {"who": config, "seed": seed, "seconds": seconds, "steps": summary["steps"], "solved": summary["solved"]}
