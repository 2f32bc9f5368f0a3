"""Training from beginning to end: start the workers, watch them, write the results."""

from __future__ import annotations

import hashlib
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shoal import engines, envs, sizing, topology
from shoal.configs import read
from shoal.core import machine
from shoal.core.errors import Fatal, SettingsError, ShoalError
from shoal.core.settings import Replaying
from shoal.core.tree import map_tree, to_numpy, to_torch
from shoal.core.types import INTERRUPTED, Engine, Spec, Step
from shoal.display import console
from shoal.envs import given
from shoal.experiment import Experiment, check_environment, validate
from shoal.run import Run
from shoal.runs import checkpoint, directory, files, loggers, metrics, provenance, trace
from shoal.runs.launching import page_of
from shoal.services.journal import Journal
from shoal.services.replay import Replay
from shoal.topology import replay_shape
from shoal.workers.recorder import shares
from shoal.writing import as_yaml

log = logging.getLogger("shoal")
SAMPLE = 64  # items whose memory is measured
PACKED = 8  # how much smaller LZ4 makes images, at a conservative guess
ONE = 1.0  # seconds in which signals count as one: `timeout` sends one to the process and one to its group


def train(
    config: str | Path | Mapping[str, Any] | Experiment | None = None,
    run_dir: str | Path | None = None,
    *,
    env: Any = None,
    watch: bool = False,
    trace: bool = False,
    **overrides: Any,
) -> Run:
    """Train as a YAML file says, with settings overridden by name; dotted names go in as `**{"algorithm.lr": 1e-3}`.

    `env` replaces the config's environment: a Gymnasium id, a class or function that makes one, or an environment.
    `watch` shows the run in a browser; `trace` writes who did what when to `trace.json`.
    """
    if config is None and env is None and not overrides:
        raise SettingsError('give a config, such as "ppo_cartpole", or an environment and an algorithm')
    content = config.model_dump(mode="json") if isinstance(config, Experiment) else config
    tree = read({} if content is None else content)
    if env is not None:
        tree["environment"] = given.settings_of(env)  # arguments of the config's own would hardly fit
    tree = read(tree, overrides)
    if env is not None and given.is_local(tree["environment"]["id"]) and "engine" not in tree:
        tree["engine"] = "inline"  # the only process that can make it is this one
    with prepared(tree) as (experiment, engine):
        folder = Path(run_dir) if run_dir else directory.fresh(experiment.environment.id, experiment.algorithm_name)
        directory.create(folder)
        with directory.locked(folder):
            directory.clear(folder)
            return carry_out(experiment, engine, folder, {}, watch, trace)


def resume(run: str | Path, *, watch: bool = False, trace: bool = False, **overrides: Any) -> Run:
    """Continue a run from its newest checkpoint; settings such as `steps` may be overridden."""
    folder = directory.locate(run)
    tree = read(folder / directory.CONFIG, overrides)
    directory.check_code(folder, tree)
    with prepared(tree) as (experiment, engine), directory.locked(folder):
        return carry_out(experiment, engine, folder, resume_point(folder, experiment), watch, trace)


def resume_point(folder: Path, experiment: Experiment) -> dict[str, Any]:
    """The state of the checkpoint to resume from, empty where there is none; everything after it is dropped."""
    checkpoint.tidy(folder)
    found = checkpoint.resumable(folder, experiment.lockstep)
    state = checkpoint.read_state(found) if found else {}
    if (steps := state.get("steps", 0)) >= experiment.steps:
        raise SettingsError(f"{folder} has used up its {steps:,} steps; to continue, give it more: steps={2 * steps}")
    if found is not None:
        check_fit(experiment, found)
    checkpoint.rewind(folder, state.get("steps", 0))
    if found is None:
        log.warning("%s has no checkpoint to resume from: starting over", folder)
    else:
        state["journal"]["evaluations"] = evaluations_until(folder, state)
    return state


def evaluations_until(folder: Path, state: Mapping[str, Any]) -> list[Any]:
    """The evaluations up to a checkpoint, also those that ended only after it was saved."""
    known = {result["steps"]: result for result in state["journal"]["evaluations"]}
    for row in metrics.read(folder):
        if row["kind"] == "evaluation" and row["steps"] <= state["steps"]:
            known.setdefault(row["steps"], {key: value for key, value in row.items() if key not in ("kind", "time")})
    return [known[steps] for steps in sorted(known)]


def check_fit(experiment: Experiment, path: Path) -> None:
    """Refuse settings whose network does not take the weights of a checkpoint, before anything is changed."""
    from shoal.policy import Policy

    try:
        Policy(experiment, path)
    except Fatal as error:
        raise SettingsError(str(error)) from None


@contextmanager
def prepared(tree: Mapping[str, Any]) -> Iterator[tuple[Experiment, Any]]:
    """The experiment, and what its engine has begun; whatever is not taken over is closed.

    Checking the settings loads the algorithm's libraries, which takes seconds: the workers' load meanwhile.
    """
    begun = engines.prepare(tree.get("engine", Experiment.model_fields["engine"].default), topology.MODULES)
    try:
        experiment = validate(tree)
        check_environment(experiment)
        loggers.check(experiment.loggers or ())
        check_memory(experiment)
        for name in ("device", "actor_device"):
            if getattr(experiment, name) == "cuda" and not torch.cuda.is_available():
                raise SettingsError(f"{name}: no usable CUDA device on this machine; allowed: auto, cpu")
        yield experiment, begun
    except BaseException:
        if begun is not None:
            begun.close()
        raise


def carry_out(
    experiment: Experiment,
    begun: Any,
    folder: Path,
    state: Mapping[str, Any],
    watch: bool = False,
    traced: bool = False,
) -> Run:
    """Run an experiment in its folder, from a checkpoint's state or from the beginning, shown and traced if asked."""
    with console.logging_to(folder / directory.LOG):
        experiment = sizing.sized(experiment)
        files.write(folder / directory.CONFIG, as_yaml(experiment))
        provenance.write(folder, Path.cwd())
        steps = state.get("steps", 0)
        log.info(
            "%s %s in %s", f"resuming at step {steps:,}:" if steps else "training", console.title(experiment), folder
        )
        options = replace(topology.options(experiment, steps), spans=trace.EACH if traced else 0)
        engine = engines.make(experiment.engine, options, begun)
        try:
            try:
                writer = trace.Trace(trace.file_of(folder, steps), engine.spans) if traced else None
                journal, parameters, last = topology.start(experiment, engine, folder, state, writer)
                shown = page_of(folder) if watch else nullcontext()
                with interrupts(lambda: ask_to_end(engine, journal)), shown:
                    engine.wait(*last)
                weights, counts, report = parameters.weights(), journal.snapshot(), engine.report()
            finally:
                engine.close()
        except ShoalError as error:
            directory.note(folder, f"failed: {error}")
            if checkpoint.learned(folder):
                raise type(error)(f"{error}\nthe checkpoints are kept; continue with: shoal resume {folder}") from error
            raise
        run = Run(folder)
        run.finish(summarise(experiment, counts, report, weights))
        return run


def ask_to_end(engine: Engine, journal: Journal) -> None:
    """Let the run end in order, and nothing that is stuck delay it for long."""
    engine.hurry()
    journal.stop(INTERRUPTED)


@contextmanager
def interrupts(stop: Callable[[], None]) -> Iterator[None]:
    """Let the first Ctrl-C or SIGTERM end the run in order, and the second at once."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return
    asked: list[float] = []

    def handle(number: int, frame: object) -> None:
        now = time.monotonic()
        if asked and now - asked[0] < ONE:
            return
        if asked:
            log.warning("stopping at once; the newest checkpoint is kept")
            raise KeyboardInterrupt
        asked.append(now)
        log.warning("%s: saving a checkpoint and stopping; a second signal stops at once", signal.Signals(number).name)
        # In a thread, since the signal may have come in the middle of a call to the same service.
        threading.Thread(target=stop, daemon=True).start()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def fingerprint(weights: Mapping[str, Any]) -> str:
    """SHA-256 over names, types, shapes and bytes of the weights."""
    digest = hashlib.sha256()
    for name, array in sorted(weights.items()):
        digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def summarise(
    experiment: Experiment, counts: Mapping[str, Any], report: Mapping[str, Any], weights: Mapping[str, Any]
) -> dict[str, Any]:
    """The results of a run; seconds count over all its starts."""
    evaluations = [
        {key: item[key] for key in ("steps", "seconds", "mean", "length", "metrics", "cut") if key in item}
        for item in counts["evaluations"]
    ]
    scores = [item["mean"] for item in evaluations]
    target = experiment.evaluation.target
    return {
        "environment": experiment.environment.id,
        "sticky": experiment.environment.sticky,
        "algorithm": experiment.algorithm_name,
        "engine": experiment.engine,
        "steps": counts["steps"],
        "steps_requested": experiment.steps,
        "updates": counts["updates"],
        "episodes": counts["episodes"],
        "faults": counts["faults"],
        "seconds": round(counts["seconds"], 3),
        "steps_per_s": round(counts["steps"] / counts["seconds"], 1),
        "seconds_to_first_update": counts["first_update"],
        "last_evaluation": scores[-1] if scores else None,
        "best_evaluation": max(scores) if scores else None,
        "target": target,
        "solved": None if target is None else bool(scores) and max(scores) >= target,
        "stopped_by": counts["stopped_by"] or "steps",
        "weights_sha256": fingerprint(weights),
        "metrics": counts["metrics"],
        "evaluations": evaluations,
        "workers": {name: shares(worker) for name, worker in report.items()},
    }


def check_memory(experiment: Experiment) -> None:
    """Log how much memory each replay takes, and refuse one that does not fit beside those before it."""
    replays = {"algorithm.replay": experiment.replay} if experiment.replay else {}
    for name, part in (experiment.mixture or {}).items():
        if part.kind != "queue":
            replays[f"algorithm.mixture.{name}"] = part.replaying(1)
    free = machine.available_memory()
    for setting, replay in replays.items():
        each = item_bytes(experiment, replay, envs.spec_of(experiment.environment))
        total = each * replay.capacity
        sum_ = f"{replay.capacity:,} items × {size(each)} = {size(total)}"
        if free is not None and total > free:
            raise SettingsError(
                f"{setting}.capacity: {sum_}, but only {size(free)} of memory is free; "
                f"{int(0.8 * free / each):,} items would fit"
            )
        log.info("%s: %s%s", setting.rpartition(".")[2], sum_, "" if free is None else f" of {size(free)} free memory")
        free = None if free is None else int(free - total)


def item_bytes(experiment: Experiment, replay: Replaying, spec: Spec) -> float:
    """Bytes that one item takes, measured on a small replay of items as this algorithm records them."""
    algorithm = experiment.algorithm
    length, initial = algorithm.experience.length, algorithm.experience.initial
    net = algorithm.build(spec)
    seen = map_tree(lambda leaf: np.zeros((1, *leaf.shape), leaf.dtype), spec.observation)
    step = Step(seen, np.zeros(1, np.float32), np.ones(1, np.float32), np.ones(1, np.bool_))
    with torch.inference_mode():
        choice = algorithm.act(net, Step(*map(to_torch, step)), algorithm.begin(net, 1), torch.zeros(1))

    def over_time(times: int) -> Any:
        return lambda x: np.repeat(x[None], times, 0)

    record = {
        name: over_time(1 if name in initial else length)(value) for name, value in to_numpy(choice.record).items()
    }
    items = {
        "observation": map_tree(over_time(length + 1), seen),
        "first": over_time(length + 1)(step.first),
        "action": over_time(length)(choice.action.numpy()),
        "reward": over_time(length)(step.reward),
        "discount": over_time(length)(step.discount),
        "record": record,
        "version": np.zeros(1, np.int64),
    }
    plain = replay.model_copy(update={"capacity": SAMPLE, "compress": False, "minimum": 1})
    store = Replay(plain, 1, *replay_shape(experiment, spec))
    store.put(items)
    pictures = sum(pool.capacity * pool.size for pool in store.frames.values())
    numbers = sum(array.nbytes for array in (*store.memory.values(), store.keys, store.version, store.sums.values))
    return float((numbers + pictures / (PACKED if replay.compress else 1)) / SAMPLE)


def size(count: float) -> str:
    """A number of bytes to read."""
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
