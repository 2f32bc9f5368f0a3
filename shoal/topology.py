"""Who exists, and who talks to whom."""

from __future__ import annotations

from typing import Any

from shoal.engines.options import Options
from shoal.experiment import Experiment
from shoal.runs.console import show
from shoal.services.journal import Journal
from shoal.services.parameters import Parameters
from shoal.services.queue import Queue

MODULES = (
    "torch",
    "gymnasium",
    "shoal.experiment",
    "shoal.workers.actor",
    "shoal.workers.evaluator",
    "shoal.workers.learner",
)


def options(experiment: Experiment) -> Options:
    """Placement and limits: the store and the weights live with the learner, so only actors' calls travel."""
    return Options(
        seed=experiment.seed,
        lockstep=experiment.lockstep,
        homes={"store": "learner", "parameters": "learner"},
        observers=frozenset({"console"}),
        restartable=frozenset({"evaluator", *(f"actor-{index}" for index in range(experiment.actor_count))}),
        **experiment.limits.model_dump(),
    )


def actors_and_learner(experiment: Experiment, engine: Any) -> tuple[Any, Any]:
    """Actors fill a queue, a learner empties it, an evaluator looks on; returns the journal and the weights."""
    from shoal.workers.actor import act
    from shoal.workers.evaluator import evaluate
    from shoal.workers.learner import learn

    journal = engine.serve("journal", Journal, experiment.evaluation.target)
    parameters = engine.serve("parameters", Parameters)
    store = engine.serve("store", Queue, experiment.queue * experiment.batch_size)
    engine.run("learner", learn, experiment, store, parameters, journal)
    for index in range(experiment.actor_count):
        engine.run(f"actor-{index}", act, experiment, index, store, parameters, journal)
    engine.run("evaluator", evaluate, experiment, parameters, journal)
    engine.run("console", show, experiment, journal)
    return journal, parameters
