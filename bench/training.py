"""Training as a user starts it: steps per second, memory, seconds to the first update and to the target."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

WARMUP = 5.0  # seconds after the first update in which caches fill and queues find their level
PROGRESS = re.compile(r"%  step ([\d,]+)  ")
# The lines of progress are the clock, so they come often.
ENDLESS = ("steps=1000000000000", "evaluation.every=1000000000000", "log_every=0.25")
# Peers begin to learn after so many steps; how full the replay is does not change the rate.
CHANGES: dict[str, dict[str, Any]] = {"dqn_pong": {"algorithm.replay.minimum": 2_000}}
# Just enough to see that all of it runs.
SMALLEST: dict[str, dict[str, Any]] = {
    "impala_cartpole": {"actors": 1},
    "impala_pong": {"envs": 1, "algorithm.batch": 2, "algorithm.unroll": 4},
    "ppo_pong": {"actors": 1, "envs": 1, "algorithm.unroll": 8, "algorithm.epochs": 1, "algorithm.minibatches": 1},
    "dqn_pong": {"envs": 1, "algorithm.batch": 2, "algorithm.replay.minimum": 8, "algorithm.replay.capacity": 1_000,
                 "algorithm.replay.chunk": 1},
}  # fmt: skip


def changes(config: str, smallest: bool) -> dict[str, Any]:
    """What is measured otherwise than the config says."""
    return (SMALLEST if smallest else CHANGES).get(config, {})


def command(config: str, directory: str, *overrides: str) -> list[str]:
    """The command line that trains a config of this repository."""
    shoal = Path(sys.executable).with_name("shoal")
    return [str(shoal), "train", f"configs/{config}.yaml", *overrides, "--run-dir", directory]


def usage(root: int) -> tuple[dict[str, Any], dict[int, float]]:
    """Memory of a process and its descendants, and seconds of core-time by process."""
    head = psutil.Process(root)
    tree = [head, *head.children(recursive=True)]
    memory, times = [each.memory_full_info() for each in tree], [each.cpu_times() for each in tree]
    held = {f"{kind}_mb": sum(getattr(each, kind) for each in memory) / 1e6 for kind in ("rss", "pss")}
    spent = {process.pid: each.user + each.system for process, each in zip(tree, times, strict=True)}
    return held | {"processes": len(tree)}, spent


def measure(config: str, seconds: float, smallest: bool = False) -> dict[str, Any]:
    """Train for so many seconds after the warm-up, then interrupt; the rate runs from update to update."""
    with tempfile.TemporaryDirectory() as directory:
        launched = time.monotonic()
        others = [f"{key}={value}" for key, value in changes(config, smallest).items()]
        words = command(config, directory, *ENDLESS, *others)
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        try:
            found = _watch(process, launched, 0.0 if smallest else WARMUP, seconds)
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=30)
            workers = json.loads((Path(directory) / "summary.json").read_text())["workers"]
        finally:
            process.kill()
            process.wait()
    used = found.pop("used")
    rows = [{"worker": "head", "cores": used[process.pid]}]
    for name, worker in workers.items():
        waits = max(worker["waits"].items(), key=lambda item: item[1], default=(None, 0.0))
        row = {"worker": name, "cores": used.get(worker.get("pid")), "working": worker["working"]}
        rows.append(row | {"waits_most_for": waits[0], "waiting_for_it": waits[1]})
    return found | {"workers": rows}


def _watch(process: subprocess.Popen[str], launched: float, warmup: float, seconds: float) -> dict[str, Any]:
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
            return found | {"cores": sum(used.values()), "used": used}
    raise RuntimeError("training ended before it was measured:\n" + "".join(lines[-20:]))


def solve(config: str, seed: int, *overrides: str) -> dict[str, Any]:
    """Seconds from the start of the command to its end, which comes when an evaluation reaches the target."""
    with tempfile.TemporaryDirectory() as directory:
        launched = time.monotonic()
        subprocess.run(command(config, directory, f"seed={seed}", *overrides), capture_output=True)
        seconds = time.monotonic() - launched
        summary = json.loads((Path(directory) / "summary.json").read_text())
    return {
        "who": config,
        "seed": seed,
        "seconds": seconds,
        **{key: summary[key] for key in ("steps", "solved")},
    }
