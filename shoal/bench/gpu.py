"""Pong on a GPU: speed beside that of the bare environments, how busy the GPU is, and the time to a score."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from shoal.bench import training
from shoal.bench.limits import bare
from shoal.bench.measuring import Row
from shoal.core.errors import ShoalError

SMI = ("nvidia-smi", "--query-gpu=utilization.gpu,memory.used", "--format=csv,noheader,nounits", "--loop-ms=200")
VISIBLE = "CUDA_VISIBLE_DEVICES"  # the GPUs that torch uses, the first of them by itself
GAMES = 30
EVERY = 100_000  # steps between two evaluations on the way to a score


class Card:
    """What the GPU of a run does meanwhile, by NVIDIA's own tool."""

    def __init__(self, words: Sequence[str] = SMI) -> None:
        """Begin to listen."""
        self.samples: list[tuple[float, float, float]] = []  # when, percent busy, MiB in use
        self.words = [*words, f"--id={os.environ.get(VISIBLE, '').split(',')[0].strip() or 0}"]
        try:
            self.process: subprocess.Popen[str] | None = subprocess.Popen(self.words, stdout=subprocess.PIPE, text=True)
        except FileNotFoundError:
            self.process = None
            return
        self.thread = threading.Thread(target=self._listen, args=(self.process.stdout,), daemon=True)
        self.thread.start()

    def _listen(self, lines: Iterable[str]) -> None:
        for line in lines:
            try:
                busy, memory = (float(part) for part in line.split(","))
            except ValueError:  # such as [N/A], or the line of another GPU cut short
                continue
            self.samples.append((time.monotonic(), busy, memory))

    def since(self, begin: float) -> Row:
        """Its mean busy share and its peak memory since a moment; None where nothing is known."""
        found = [(busy, memory) for at, busy, memory in self.samples if at >= begin]
        if not found:
            return {"gpu_busy": None, "gpu_mb": None}
        busy, memory = zip(*found, strict=True)
        return {"gpu_busy": sum(busy) / len(busy) / 100, "gpu_mb": max(memory) * 1.048576}

    def close(self) -> None:
        """Stop listening."""
        if self.process:
            self.process.terminate()
            self.process.wait()
            self.thread.join()
            assert self.process.stdout
            self.process.stdout.close()


def check() -> None:
    """Refuse a machine without a GPU."""
    import torch

    if not torch.cuda.is_available():
        raise ShoalError("shoal bench gpu needs a GPU that torch can use, and there is none: see shoal doctor")


def speed(configs: Sequence[str], seconds: float, rounds: int, overrides: Mapping[str, Any]) -> Iterator[Row]:
    """Steps per second on GPU and CPU in turn, beside the bare environments on all cores; a row for each config."""
    for config in configs:
        alone = bare(config, min(seconds, 5.0), overrides)
        found: dict[str, list[Row]] = {"cuda": [], "cpu": []}
        for turn in range(rounds):
            for device in [*found][:: -1 if turn % 2 else 1]:
                found[device].append(_measured(config, seconds, {**overrides, "device": device}, device))
        rates = {device: [one["steps_per_s"] for one in each] for device, each in found.items()}
        ratios = [gpu / cpu for gpu, cpu in zip(rates["cuda"], rates["cpu"], strict=True)]
        row = sorted(found["cuda"], key=lambda one: one["steps_per_s"])[(rounds - 1) // 2]
        yield {
            "config": config,
            **row,
            "environments": alone,
            "x_environments": row["steps_per_s"] / alone,
            "cpu_steps_per_s": median(rates["cpu"]),
            "x_cpu": median(ratios),
            "least_x_cpu": min(ratios),
            "most_x_cpu": max(ratios),
        }


def _measured(config: str, seconds: float, overrides: Mapping[str, Any], device: str) -> Row:
    if device == "cpu":  # all of it, so that the figure is that of a machine without a GPU
        overrides = {**overrides, "actor_device": "cpu"}
    card = Card()
    try:
        found = training.measure(config, seconds, overrides=overrides, meter=card.since)
    finally:
        card.close()
    working = {row["worker"]: row["working"] for row in found["workers"] if "working" in row}
    kept = ("steps_per_s", "first_update_s", "cores", "pss_mb", "gpu_busy", "gpu_mb")
    return {**{key: found[key] for key in kept}, "learner_busy": working.get("learner")}


def to_score(
    configs: Sequence[str], seeds: int, target: float, folder: Path, overrides: Mapping[str, Any]
) -> Iterator[Row]:
    """Seconds from the start of the command until 30 whole games reach a mean, one run at a time; a row for each."""
    from shoal.run import Run

    ends = {"evaluation.target": target, "evaluation.episodes": GAMES, "evaluation.every": EVERY, "device": "cuda"}
    settings = [f"{key}={value}" for key, value in {**ends, **overrides}.items()]
    for config in configs:
        for seed in range(seeds):
            place = folder / config / f"seed-{seed}"
            row = training.solve(config, seed, *settings, directory=place)
            found = Run(place).summary
            yield {
                "config": config,
                **{key: row[key] for key in ("seed", "seconds", "steps", "solved")},
                "first_update_s": found.get("seconds_to_first_update"),
                "score": found.get("last_evaluation"),
            }
