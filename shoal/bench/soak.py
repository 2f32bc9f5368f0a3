"""A long run: the resident memory of every process, sampled, plotted, and its slope."""

from __future__ import annotations

import json
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from shoal.bench.measuring import Row, library
from shoal.core.errors import ShoalError
from shoal.runs.launching import launch

EVERY = 5.0  # seconds between samples
WARMUP = 0.25  # of the run, in which replay and caches fill
ENDLESS = ("steps=1000000000000", "evaluation.target=null", "evaluation.every=20000", "evaluation.episodes=2")
SMALL = ("algorithm.replay.capacity=20000", "actors=2", "threads=1", "checkpoints.every=100000")
Samples = list[tuple[float, dict[str, float]]]  # seconds since the start, and resident MB by process


def sample(root: Any) -> dict[str, float]:
    """Resident megabytes of a process and its descendants, by kind and number; Ray renames them all the time."""
    found = {}
    for each in [root, *root.children(recursive=True)]:
        try:
            words = each.cmdline() or [each.name()]
            title = words[0].partition(".")[0] if words[0].startswith("ray::") else Path(words[0]).name
            found[f"{title} {each.pid}"] = each.memory_info().rss / 1e6
        except library().NoSuchProcess:
            pass
    return found


def soak(engine: str, seconds: float, out: Path) -> list[Row]:
    """Train for these seconds, and return a row for each process that lived through all of the run after warm-up."""
    samples, steps = run(engine, seconds, out / f"soak_{engine}.log")
    (out / f"soak_{engine}.json").write_text(json.dumps({"samples": samples, "steps": steps}))
    settled = [(at, found) for at, found in samples if at >= WARMUP * seconds]
    names = sorted(set.intersection(*(set(found) for _, found in settled)))
    times = np.array([at / 60 for at, _ in settled])
    rows = []
    for name in names:
        memory = np.array([found[name] for _, found in settled])
        slope, level = np.polyfit(times, memory, 1)
        rest = memory - (slope * times + level)
        error = rest.std(ddof=2) / (np.sqrt(len(times)) * times.std())
        rows.append({"engine": engine, "process": name, "mb": float(memory.mean()), "mb_per_min": float(slope),
                     "error": float(error), "last_over_first": float(memory[-1] / memory[0])})  # fmt: skip
    plot(engine, samples, names, out / f"soak_{engine}.png")
    return rows


def run(engine: str, seconds: float, log: Path) -> tuple[Samples, int]:
    """Train and sample the memory; returns the samples and the steps that were trained."""
    words = ("train", "apex_dqn_cartpole", f"engine={engine}", *SMALL, *ENDLESS)
    samples: Samples = []
    with tempfile.TemporaryDirectory() as place, log.open("w") as file:
        process = launch(*words, "--run-dir", place, stdout=file, stderr=file)
        try:
            began, root = time.monotonic(), library().Process(process.pid)
            while (now := time.monotonic() - began) < seconds and process.poll() is None:
                samples.append((now, sample(root)))
                time.sleep(min(EVERY, seconds / 10))
            if process.poll() is not None:
                raise ShoalError(f"the run ended early: see {log}")
            process.send_signal(signal.SIGINT)
            process.wait(timeout=60)
            return samples, json.loads((Path(place) / "summary.json").read_text())["steps"]
        finally:
            process.kill()
            process.wait()


def plot(engine: str, samples: Samples, names: list[str], path: Path) -> None:
    """A line for each process."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), dpi=120)
    axes = figure.subplots()
    for name in names:
        times = [at / 60 for at, found in samples if name in found]
        axes.plot(times, [found[name] for _, found in samples if name in found], label=name, linewidth=1)
    axes.set(xlabel="minutes", ylabel="resident MB", title=f"apex_dqn on CartPole, engine {engine}", ylim=(0, None))
    axes.legend(fontsize=6, ncols=2)
    figure.savefig(path, bbox_inches="tight")
