"""Who exists, and who talks to whom."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal import envs
from shoal.core.randomness import derive
from shoal.core.tree import map_tree
from shoal.core.types import Spec
from shoal.engines.options import Options
from shoal.experiment import Experiment
from shoal.runs.checkpoint import Checkpoints
from shoal.runs.recorder import record
from shoal.services.journal import Journal
from shoal.services.parameters import Parameters
from shoal.services.queue import Queue
from shoal.services.replay import Replay

MODULES = (
    "torch",
    "gymnasium",
    "shoal.experiment",
    "shoal.workers.actor",
    "shoal.workers.evaluator",
    "shoal.workers.learner",
)


def options(experiment: Experiment, resumed_at: int = 0) -> Options:
    """Placement and limits: what a learner works with lives with it, so only actors' calls travel."""
    # A resumed run must not draw again what it drew at first; under lockstep, periods see to that.
    again = resumed_at and not experiment.lockstep
    return Options(
        seed=derive(experiment.seed, "resumed", resumed_at) if again else experiment.seed,
        lockstep=experiment.lockstep,
        homes={"store": "learner", "parameters": "learner", "checkpoints": "learner"},
        observers=frozenset({"recorder"}),
        restartable=frozenset({"evaluator", *(f"actor-{index}" for index in range(experiment.actor_count))}),
        # A learner goes back to its checkpoint; under lockstep that would not repeat what the others did since.
        revivable=frozenset() if experiment.lockstep else frozenset({"learner"}),
        **experiment.limits.model_dump(),
    )


def serve_store(experiment: Experiment, engine: Any) -> Any:
    """A queue where every item is used once, a replay where it is drawn again."""
    if experiment.replay is None:
        return engine.serve("store", Queue, experiment.queue * experiment.batch_size)
    shape = replay_shape(experiment, envs.spec_of(experiment.environment))
    return engine.serve("store", Replay, experiment.replay, experiment.batch_size, *shape)


def replay_shape(experiment: Experiment, spec: Spec) -> tuple[int, Any]:
    """The overlap of items, and the instants in each observation, by which a replay knows what is new."""
    stack = map_tree(lambda leaf: leaf.stack, spec.observation)
    return getattr(experiment.algorithm.experience, "overlap", 0), stack


def actors_and_learner(experiment: Experiment, engine: Any, run: Path, state: Mapping[str, Any]) -> tuple[Any, Any]:
    """Actors fill a store, a learner takes from it, an evaluator looks on; returns the journal and the weights.

    `state` is that of the checkpoint from which the run goes on, empty at its beginning.
    """
    from shoal.workers.actor import act
    from shoal.workers.evaluator import evaluate
    from shoal.workers.learner import learn

    journal = engine.serve("journal", Journal, experiment.evaluation.target, state.get("journal"))
    parameters = engine.serve("parameters", Parameters)
    store = serve_store(experiment, engine)
    checkpoints = engine.serve("checkpoints", Checkpoints, str(run.resolve()), experiment.checkpoints.keep)
    engine.run("learner", learn, experiment, store, parameters, journal, checkpoints)
    for index in range(experiment.actor_count):
        engine.run(f"actor-{index}", act, experiment, index, state.get("period", 0), store, parameters, journal)
    engine.run("evaluator", evaluate, experiment, parameters, journal, checkpoints)
    engine.run("recorder", record, experiment, run, state.get("steps", 0), journal, engine.report)
    return journal, parameters
