"""The limit that cores set: the core-time that one step costs in environment, policy and learner.

Actors and learner are those of a training run, called in turn in one process per core, with no engine between
them. All cores are measured at once, since they share caches and memory.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from shoal.bench import training
from shoal.bench.measuring import Row
from shoal.core.types import ActionSpec


def limits(
    config: str, seconds: float, smallest: bool = False, overrides: Mapping[str, Any] = MappingProxyType({})
) -> Row:
    """Rates of the bare environment on one core and on all, core-time per step, and the rate it allows."""
    cores = usable()[: 1 if smallest else None]
    changes = {**training.changes(config, smallest), **overrides}
    (alone,) = together = _on_cores(config, seconds, changes, cores[:1])
    if len(cores) > 1:
        together = _on_cores(config, seconds, changes, cores)
    parts = ("environment", "acting", "learning")
    environment, acting, learning = (1e6 * float(np.mean([one[part] for one in together])) for part in parts)
    return {
        "environment_us": environment,
        "policy_us": acting - environment,
        "learning_us": learning,
        "limit": len(cores) * 1e6 / (acting + learning),
        "environment_one_core": alone["rate"],
        "environment_all_cores": sum(each["rate"] for each in together),
    }


def bare(config: str, seconds: float, overrides: Mapping[str, Any] = MappingProxyType({})) -> float:
    """Steps per second of the environments alone, under random actions, on all cores at once."""
    return sum(each["rate"] for each in _on_cores(config, seconds, dict(overrides), usable(), _alone))


def usable() -> list[int]:
    """The cores that this process may use."""
    return sorted(os.sched_getaffinity(0))


def _on_cores(
    config: str, seconds: float, changes: dict[str, Any], cores: list[int], work: Callable[..., None] | None = None
) -> list[dict[str, float]]:
    context = multiprocessing.get_context("spawn")
    answers, barrier = context.SimpleQueue(), context.Barrier(len(cores))
    shared = (config, seconds, changes, barrier, answers)
    processes = [context.Process(target=work or _measure, args=(*shared, core), daemon=True) for core in cores]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        if process.exitcode:
            raise RuntimeError(f"measuring {config} failed with exit code {process.exitcode}")
    return [answers.get() for _ in processes]


def _measure(config: str, seconds: float, changes: dict[str, Any], barrier: Any, answers: Any, core: int) -> None:
    """Seconds of one core per step: of the environments alone, of acting with them, and of learning."""
    experiment, alone = _step(config, seconds, changes, barrier, core)
    barrier.wait(timeout=120)
    answers.put(alone | _take_turns(experiment, seconds))


def _alone(config: str, seconds: float, changes: dict[str, Any], barrier: Any, answers: Any, core: int) -> None:
    """The environments only."""
    answers.put(_step(config, seconds, changes, barrier, core)[1])


def _step(
    config: str, seconds: float, changes: dict[str, Any], barrier: Any, core: int
) -> tuple[Any, dict[str, float]]:
    """The experiment, and the rate and core-time of its environments under random actions."""
    os.sched_setaffinity(0, {core})
    from shoal import envs
    from shoal.experiment import load

    experiment = load(config, {"steps": 10**12, "threads": 1, **changes})
    vector = envs.make(experiment.environment, experiment.env_count, seed=core)
    actions = random_actions(vector.spec.action, vector.size)
    vector.reset()
    barrier.wait(timeout=120)
    count, start, spent = 0, time.perf_counter(), time.process_time()
    while (lasted := time.perf_counter() - start) < seconds:
        vector.step(actions[count % len(actions)])
        count += 1
    steps = count * vector.size
    alone = {"rate": steps / lasted, "environment": (time.process_time() - spent) / steps}
    vector.close()
    return experiment, alone


def random_actions(action: ActionSpec, size: int, count: int = 1000) -> Any:
    """Actions [count, size] or [count, size, A]."""
    if action.discrete:
        return np.random.randint(action.size, size=(count, size))
    return np.random.uniform(action.low, action.high, (count, size, action.size))


def _take_turns(experiment: Any, seconds: float) -> dict[str, float]:
    """Core-time per step of actors and learner, from the first update on."""
    from shoal import engines, topology

    engine = engines.make("inline", topology.options(experiment))
    with tempfile.TemporaryDirectory() as scratch:
        journal, _, _ = topology.start(experiment, engine, Path(scratch), {})
        turns = {
            name: worker.seat.work for name, worker in engine.workers.items() if name not in ("evaluator", "recorder")
        }
        spent, start, steps = {"acting": 0.0, "learning": 0.0}, 0.0, 0
        while not start or time.perf_counter() - start < seconds or journal.snapshot()["steps"] == steps:
            for name, work in turns.items():
                before = time.process_time()
                next(work)
                spent["learning" if name == "learner" else "acting"] += time.process_time() - before
            if not start and journal.snapshot()["updates"]:  # the first update was only to warm up
                spent, start, steps = dict.fromkeys(spent, 0.0), time.perf_counter(), journal.snapshot()["steps"]
        steps = journal.snapshot()["steps"] - steps
        engine.close()
    return {name: value / steps for name, value in spent.items()}
