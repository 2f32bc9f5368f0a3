"""Learning: batches from the store become new weights."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch

from shoal import envs
from shoal.core.randomness import derive, seed_everything
from shoal.core.rights import calls
from shoal.core.settings import at
from shoal.core.types import Batch, Store, Tree, Work
from shoal.workers.health import Health
from shoal.workers.model import Model, pick_device
from shoal.workers.packing import to_batch
from shoal.workers.progress import Progress, Reports
from shoal.workers.saving import Saver, resume
from shoal.workers.selection import Selection
from shoal.workers.sharding import Shards

if TYPE_CHECKING:
    from shoal.experiment import Experiment
    from shoal.services.checkpoints import Checkpoints
    from shoal.services.journal import Journal
    from shoal.services.parameters import Parameters
    from shoal.services.shard import Shard

ASK = 0.2  # seconds between questions whether to stop, while there is nothing to learn from


@calls(
    store=("status", "get", "draw", "choose", "look", "allow", "update", "settle", "restore", "refused"),
    parameters=("publish",),
    journal=("learned", "went_back", "state", "saved", "report"),
    checkpoints=("load", "save", "save_batch"),
)
def learn(
    experiment: Experiment,
    store: Store | list[Shard],
    parameters: Parameters,
    journal: Journal,
    checkpoints: Checkpoints,
) -> Work:
    """Update the network until the steps are used up or the journal says stop; one unit of work is one batch."""
    if isinstance(store, list):
        assert experiment.replay is not None
        store = Shards(store, experiment.replay, experiment.batch_size)
    algorithm, lockstep = experiment.algorithm, experiment.lockstep
    torch.set_num_threads(experiment.learner_threads)
    own = int(np.random.randint(2**31))
    model = Model(algorithm, envs.spec_of(experiment.environment), pick_device(experiment.device), lockstep)
    saved = checkpoints.load(lockstep)
    now = resume(saved, model, store, journal)
    if lockstep:
        seed_everything(derive(own, now.period))
    saver = Saver(experiment, checkpoints, journal, store, now.steps, None if saved is None else now.steps)
    reports, count, health = Reports(journal, lockstep), Count(store, now.steps), Health(checkpoints, saver)
    every = experiment.replay.publish if experiment.replay else 1
    prioritized = experiment.mixture is not None or (experiment.replay is not None and experiment.replay.alpha > 0)
    selection = Selection.of(experiment)
    sent = parameters.publish(now.version, now.steps, now.period, False, model.weights())
    if saved is None:
        saver.begin(now, model)
    yield True
    stop, asked, published, reported = False, time.monotonic(), now.version, 0.0
    done = now.steps >= experiment.steps
    while not (done or stop):
        status = store.status()
        tree = draw(experiment, store, now) if selection is None else selection.draw(store, model, now)
        if (problems := status["refused"] + status.get("lost", 0)) != reported:
            reported = problems
            for problem in store.refused():
                journal.report(problem)
        if tree is None:
            now.steps = count.received(status, now.steps)
            done = now.steps >= experiment.steps
            if lockstep or time.monotonic() - asked > ASK:  # the clock must not decide what lockstep learns
                stop, asked = journal.learned(now.steps, now.updates, {}), time.monotonic()
            yield False
            continue
        torch.set_num_threads(experiment.learner_threads)
        batch = to_batch(tree, model.device)
        present = at(algorithm, now.steps, experiment.steps)
        metrics = {
            "lag": float((now.version - batch.version).mean()),
            **ages(store),
            "lr": present.lr.now,
            "queue": status["filled"] / status["capacity"],
            "weights_mb": sent / 1e6,
            **(selection.metrics if selection else {}),
        }
        priority, updates, numbers = model.update(present, batch, now.updates)
        for problem in filter(None, (model.step.news(), health.look(numbers, model.net, batch, now.updates))):
            journal.report(problem)
        now.steps = count.learned(status, now.steps, batch)
        now.updates, now.version = now.updates + updates, now.version + 1
        if priority is not None and prioritized:
            store.update(batch.key, priority)
        done, due = now.steps >= experiment.steps, saver.due(now.steps)
        stop = reports.learned(now, {**metrics, **numbers}, done or due)
        if due and not done and not stop:
            saver.save(now, model, scheduled=True)
            if lockstep:
                seed_everything(derive(own, now.period))
                published = now.version - every
        if now.version - published >= every and not done and not stop:
            sent = parameters.publish(now.version, now.steps, now.period, False, model.weights())
            published = now.version
        yield True
    saver.save(now, model, scheduled=False)
    parameters.publish(now.version + 1, now.steps, now.period, True, model.weights())


def draw(experiment: Experiment, store: Store, now: Progress) -> Mapping[str, Tree] | None:
    """A batch to learn from, or None."""
    beta = experiment.replay.beta.at(now.steps, experiment.steps).now if experiment.replay else 1.0
    return store.get(experiment.batch_size, now.version, beta)


def ages(store: Store) -> dict[str, float]:
    """How old the last batch was."""
    status = store.status()
    return {name: status[name] for name in ("age_of_weights", "age_of_data")}


class Count:
    """Counts environment steps: a replay reports those it received, others' are counted when first learned from."""

    def __init__(self, store: Store, steps: int) -> None:
        """Continue from these steps."""
        self.before = steps - int(store.status().get("steps", 0))

    def received(self, status: Mapping[str, float], steps: int) -> int:
        """The steps so far, when there was nothing to learn from."""
        return self.before + int(status["steps"]) if "steps" in status else steps

    def learned(self, status: Mapping[str, float], steps: int, batch: Batch) -> int:
        """The steps so far, after a batch."""
        return self.received(status, steps) if "steps" in status else steps + int(batch.news.sum())
