"""Training from beginning to end: start the workers, watch them, write down what came of it."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shoal import engines, topology
from shoal.core.types import INTERRUPTED
from shoal.experiment import Experiment, as_yaml, read, validate

log = logging.getLogger("shoal")


@dataclass(frozen=True)
class Run:
    """A finished run: where it lies and what came of it."""

    directory: Path
    summary: Mapping[str, Any]

    @property
    def solved(self) -> bool | None:
        """Whether the target was reached; None: there was none."""
        return self.summary["solved"]  # type: ignore[no-any-return]


def train(
    config: str | Path | Mapping[str, Any] | Experiment, run_dir: str | Path | None = None, **overrides: Any
) -> Run:
    """Train as a YAML file says, with settings overridden by name; dotted names go in as `**{"algorithm.lr": 1e-3}`."""
    tree = read(config.model_dump(mode="json") if isinstance(config, Experiment) else config, overrides)
    # Checking the settings loads the algorithm's libraries, which takes seconds: the workers' load meanwhile.
    prepared = engines.prepare(tree.get("engine", Experiment.model_fields["engine"].default), topology.MODULES)
    try:
        experiment = validate(tree)
        directory = Path(run_dir) if run_dir else new_directory(experiment)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.yaml").write_text(as_yaml(experiment))
    except BaseException:
        if prepared is not None:
            prepared.close()
        raise
    started = time.time()
    engine = engines.make(experiment.engine, topology.options(experiment), prepared)
    try:
        journal, parameters = topology.actors_and_learner(experiment, engine)
        with interrupts(lambda reason: journal.stop(reason)):
            engine.wait("learner", "evaluator")
        weights = parameters.fetch(-1)["weights"]
        summary = summarise(experiment, journal.snapshot(), engine.report(), weights, started)
        write_weights(directory / "weights.safetensors", weights)
        write_json(directory / "summary.json", summary)
    finally:
        engine.close()
    return Run(directory, summary)


def new_directory(experiment: Experiment) -> Path:
    """A folder of its own for a run, `runs/<environment>_<algorithm>_<unix time>`."""
    name = f"{experiment.environment.id}_{type(experiment.algorithm).__name__.lower()}_{int(time.time())}"
    base = Path("runs") / re.sub(r"[^\w.-]+", "-", name)
    return next(path for path in (base, *(Path(f"{base}-{n}") for n in range(2, 10_000))) if not path.exists())


@contextmanager
def interrupts(stop: Callable[[str], None]) -> Iterator[None]:
    """Let the first Ctrl-C or SIGTERM end the run in order, and the second at once."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return
    asked: list[int] = []

    def handle(number: int, frame: object) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)
        log.warning("%s: ending the run in order; once more ends it at once", signal.Signals(number).name)
        # In a thread, since the signal may have come in the middle of a call to the same service.
        threading.Thread(target=stop, args=(INTERRUPTED,), daemon=True).start()

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
    experiment: Experiment,
    told: Mapping[str, Any],
    workers: Mapping[str, Any],
    weights: Mapping[str, Any],
    started: float,
) -> dict[str, Any]:
    """The figures of a run."""
    evaluations = [
        {key: item[key] for key in ("steps", "seconds", "mean", "length", "metrics")} for item in told["evaluations"]
    ]
    scores = [item["mean"] for item in evaluations]
    target = experiment.evaluation.target
    seconds = time.time() - started
    return {
        "environment": experiment.environment.id,
        "algorithm": type(experiment.algorithm).__name__.lower(),
        "engine": experiment.engine,
        "steps": told["steps"],
        "updates": told["updates"],
        "episodes": told["episodes"],
        "faults": told["faults"],
        "seconds": round(seconds, 3),
        "steps_per_s": round(told["steps"] / seconds, 1),
        "seconds_to_first_update": told["first_update"],
        "last_evaluation": scores[-1] if scores else None,
        "best_evaluation": max(scores) if scores else None,
        "solved": None if target is None else bool(scores) and max(scores) >= target,
        "stopped_by": told["stopped_by"] or "steps",
        "weights_sha256": fingerprint(weights),
        "metrics": told["metrics"],
        "evaluations": evaluations,
        "workers": workers,
    }


def write_weights(path: Path, weights: Mapping[str, Any]) -> None:
    """Write the policy's weights, its normalisers among them, whole or not at all."""
    from safetensors.numpy import save_file

    draft = path.with_suffix(".tmp")
    save_file(dict(weights), draft)
    draft.replace(path)


def write_json(path: Path, content: Any) -> None:
    """Write a file whole or not at all."""
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(content, indent=2) + "\n")
    draft.replace(path)
