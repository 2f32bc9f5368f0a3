"""A long run: the resident memory of every process, sampled, plotted, and its slope."""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

EVERY = 5.0  # seconds between samples
WARMUP = 0.25  # of the run, in which replay and caches fill
ENDLESS = ("steps=1000000000000", "evaluation.target=null", "evaluation.every=20000", "evaluation.episodes=2")
SMALL = ("algorithm.replay.capacity=20000", "actors=2", "threads=1", "checkpoints.every=100000")


def sample(root: psutil.Process) -> dict[str, float]:
    """Resident megabytes of a process and its descendants, by kind and number; Ray renames them all the time."""
    found = {}
    for each in [root, *root.children(recursive=True)]:
        try:
            words = each.cmdline() or [each.name()]
            title = words[0].partition(".")[0] if words[0].startswith("ray::") else Path(words[0]).name
            found[f"{title} {each.pid}"] = each.memory_info().rss / 1e6
        except psutil.NoSuchProcess:
            pass
    return found


def soak(engine: str, seconds: float, out: Path) -> list[dict[str, Any]]:
    """Train so long, and return a row for each process that was there all the time."""
    shoal = str(Path(sys.executable).with_name("shoal"))
    words = [shoal, "train", "configs/apex_dqn_cartpole.yaml", f"engine={engine}"]
    samples: list[tuple[float, dict[str, float]]] = []
    with tempfile.TemporaryDirectory() as place, (out / f"soak_{engine}.log").open("w") as log:
        process = subprocess.Popen([*words, *SMALL, *ENDLESS, "--run-dir", place], stdout=log, stderr=log)
        try:
            began, root = time.monotonic(), psutil.Process(process.pid)
            while (now := time.monotonic() - began) < seconds and process.poll() is None:
                samples.append((now, sample(root)))
                time.sleep(EVERY)
            assert process.poll() is None, f"the run ended early: see {log.name}"
            process.send_signal(signal.SIGINT)
            process.wait(timeout=60)
            told = json.loads((Path(place) / "summary.json").read_text())
        finally:
            process.kill()
            process.wait()
    (out / f"soak_{engine}.json").write_text(json.dumps({"samples": samples, "steps": told["steps"]}))
    begin = WARMUP * seconds
    settled = [(at, found) for at, found in samples if at >= begin]
    names = sorted(set.intersection(*(set(found) for _, found in settled)))
    rows = []
    for name in names:
        times = np.array([at / 60 for at, _ in settled])
        memory = np.array([found[name] for _, found in settled])
        slope, level = np.polyfit(times, memory, 1)
        rest = memory - (slope * times + level)
        error = rest.std(ddof=2) / (np.sqrt(len(times)) * times.std())
        rows.append({"engine": engine, "process": name, "mb": float(memory.mean()), "mb_per_min": float(slope),
                     "error": float(error), "last_over_first": float(memory[-1] / memory[0])})  # fmt: skip
    plot(engine, samples, names, out / f"soak_{engine}.png")
    return rows


def plot(engine: str, samples: list[tuple[float, dict[str, float]]], names: list[str], path: Path) -> None:
    """A line for each process."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5))
    for name in names:
        times = [at / 60 for at, found in samples if name in found]
        axes.plot(times, [found[name] for _, found in samples if name in found], label=name, linewidth=1)
    axes.set(xlabel="minutes", ylabel="resident MB", title=f"apex_dqn on CartPole, engine {engine}", ylim=(0, None))
    axes.legend(fontsize=6, ncols=2)
    figure.savefig(path, dpi=120, bbox_inches="tight")


def main() -> None:
    """Soak engines one after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engines", nargs="+")
    parser.add_argument("--seconds", type=float, default=1200.0)
    parser.add_argument("--out", type=Path, default=Path("."))
    options = parser.parse_args()
    for engine in options.engines:
        for row in soak(engine, options.seconds, options.out):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
