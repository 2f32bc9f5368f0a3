"""Advice followed: situations that advice on speed is about, and how much faster a run is that follows it."""

from __future__ import annotations

import json
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from shoal.bench.measuring import Row
from shoal.bench.training import train
from shoal.core.errors import SettingsError, ShoalError, nearest
from shoal.display import advice

ENDLESS = {"steps": 10**12, "evaluation.every": 10**12, "evaluation.target": None, "log_every": 2}
# `Still` with seconds stands for an environment that waits for something, such as a game or a robot.
WAITS: Mapping[str, Any] = {"environment.id": "Still", "environment.arguments": {"seconds": 0.002}, "envs": 2}
SITUATIONS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "more actors": ("impala_cartpole", {**WAITS, "actors": 1}),
    "more gradient workers": ("a3c_cartpole", {**WAITS, "actors": 1, "envs": 1}),
    "more environments": ("impala_cartpole", {"actors": 1, "envs": 1, "algorithm.epochs": 1}),
    "act while learning": ("ppo_cartpole", {**WAITS, "engine": "processes", "actors": 4, "algorithm.epochs": 20}),
    "rarer evaluations": ("ppo_cartpole", {"evaluation.every": 2_000, "evaluation.episodes": 100}),
    "use all cores": ("impala_pong", {"engine": "inline", "actors": 1, "envs": 8}),
    "local inference": ("impala_cartpole", {"inference": "central", "actors": 1, "algorithm.epochs": 1}),
    "larger batches": ("impala_cartpole", {"algorithm.batch": 4, "algorithm.minibatches": 1, "actors": 1}),
}


def chosen(names: Sequence[str]) -> list[str]:
    """Situations by their names, all where none is given."""
    for name in names:
        if name not in SITUATIONS:
            raise SettingsError(f"{name}: choose one of {', '.join(SITUATIONS)}{nearest(name, SITUATIONS)}")
    return [*(names or SITUATIONS)]


def measure(names: Sequence[str], seconds: float, rounds: int) -> Iterator[Row]:
    """A row for each situation: what was advised, the gain that was expected, and that which came."""
    for name in names:
        config, settings = SITUATIONS[name]
        with tempfile.TemporaryDirectory() as place:
            rate, found = run(config, {**ENDLESS, **settings}, seconds, Path(place))
        advised = next((each for each in found if each.rule == name), None)
        row = {"situation": name, "config": config, "steps_per_s": rate, "first": found[0].rule if found else None}
        if advised is None or not advised.changes:
            yield {**row, "expected": None, "x": None, "set": "not advised"}
            continue
        ratios, words = [], " ".join(f"{key}={advice.shown(value)}" for key, value in advised.changes.items())
        for turn in range(rounds):
            rates = {}
            for followed in [True, False] if turn % 2 == 0 else [False, True]:
                both = {**ENDLESS, **settings, **(advised.changes if followed else {})}
                with tempfile.TemporaryDirectory() as place:
                    rates[followed] = run(config, both, seconds, Path(place))[0]
            ratios.append(rates[True] / rates[False])
        yield {**row, "set": words, "expected": advised.gain, "x": median(ratios), "least_x": min(ratios),
               "most_x": max(ratios)}  # fmt: skip


def run(config: str, settings: Mapping[str, Any], seconds: float, place: Path) -> tuple[float, list[advice.Advice]]:
    """Train for some seconds after the first update: steps per second from then on, and what is advised."""
    process = train(config, str(place), *(f"{key}={advice.shown(value)}" for key, value in settings.items()))
    try:
        begin = status(place, process, 0)
        time.sleep(seconds)
        end = status(place, process, begin["steps"])
        found = advice.of(place)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    return (end["steps"] - begin["steps"]) / (end["time"] - begin["time"]), found


def status(place: Path, process: Any, above: int) -> Mapping[str, Any]:
    """How the run stands, once it has made more steps than these."""
    while process.poll() is None:
        try:
            found: Mapping[str, Any] = json.loads((place / "status.json").read_text())
            if found["steps"] > above:
                return found
        except (OSError, ValueError):
            pass  # not written yet
        time.sleep(0.1)
    said = process.stderr.read() if process.stderr else ""
    raise ShoalError(f"training ended before it was measured:\n{said[-2000:]}")
