"""Learning: batches from the store become new weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from shoal import envs
from shoal.core.randomness import derive, seed_everything
from shoal.core.rights import calls
from shoal.core.settings import at, moving
from shoal.core.types import Store, Work
from shoal.workers.graph import beside
from shoal.workers.health import Health
from shoal.workers.joint import Joint, Stores, unless
from shoal.workers.model import Model, alone, pick_device
from shoal.workers.prefetch import Batches
from shoal.workers.progress import Count, Reports
from shoal.workers.saving import Saver, resume
from shoal.workers.sharding import Shards

if TYPE_CHECKING:
    from shoal.experiment import Experiment
    from shoal.services.checkpoints import Checkpoints
    from shoal.services.journal import Journal
    from shoal.services.parameters import Parameters
    from shoal.services.reduction import Reduction
    from shoal.services.shard import Shard


@calls(
    store=("status", "get", "draw", "choose", "look", "allow", "update", "settle", "restore", "refused"),
    parameters=("publish",),
    journal=("learned", "went_back", "state", "saved", "report"),
    checkpoints=("load", "save", "save_batch"),
    others=("settle", "restore"),
    reduction=("begin", "put", "take"),
)
def learn(
    experiment: Experiment,
    store: Store | list[Shard],
    parameters: Parameters,
    journal: Journal,
    checkpoints: Checkpoints,
    others: list[Store],
    reduction: Reduction | None,
) -> Work:
    """Update the network until the steps are used up or the journal says stop; one unit of work is one batch.

    Where there are several learners, this is the one that publishes, saves and reports for all.
    """
    work = learning(experiment, store, parameters, journal, checkpoints, others, reduction)
    yield from beside(work, pick_device(experiment.device))


def learning(
    experiment: Experiment,
    store: Store | list[Shard],
    parameters: Parameters,
    journal: Journal,
    checkpoints: Checkpoints,
    others: list[Store],
    reduction: Reduction | None,
) -> Work:
    """The same, wherever its GPU work goes."""
    if isinstance(store, list):
        assert experiment.replay is not None
        store = Shards(store, experiment.replay, experiment.batch_size)
    algorithm, lockstep = experiment.algorithm, experiment.lockstep
    torch.set_num_threads(experiment.learner_threads)
    mark = int(np.random.randint(2**31))
    model = Model(algorithm, envs.spec_of(experiment.environment), pick_device(experiment.device), lockstep)
    saved = checkpoints.load(lockstep)
    kept = Stores([store, *others]) if others else store
    now = resume(saved, model, kept, journal)
    if lockstep:
        seed_everything(derive(mark, now.period))
    saver = Saver(experiment, checkpoints, journal, kept, now.steps, None if saved is None else now.steps)
    reports, count, health = Reports(journal, lockstep), Count(store, now.steps), Health(checkpoints, saver)
    every = experiment.replay.publish if experiment.replay else 1
    joint, step = None, alone(model.step)
    if reduction is not None:
        joint = Joint(reduction, model, experiment.learners, store if experiment.prioritized else None)
        joint.begin(model, now)
        step = joint.step
    sent = parameters.publish(now.version, now.steps, now.period, False, model.weights())
    if saved is None:
        saver.begin(now, model)
    yield True
    stop, published, reported = False, now.version, 0.0
    done = now.steps >= experiment.steps
    with Batches(experiment, store, model, now) as batches:
        while not (done or stop):
            torch.set_num_threads(experiment.learner_threads)
            status = store.status()
            drawn = batches.take(now)
            if (problems := status["refused"] + status.get("lost", 0)) != reported:
                reported = problems
                for problem in store.refused():
                    journal.report(problem)
            if drawn is None:
                now.steps = now.steps if joint else count.begin + count.received(status)
                done = now.steps >= experiment.steps
                stop = reports.waiting(now)
                yield False
                continue
            batch, present = drawn.batch, at(algorithm, now.steps, experiment.steps)
            metrics = {
                "lag": float((now.version - batch.version).mean()),
                "lr": present.lr.now,
                **moving(present),
                "queue": status["filled"] / status["capacity"],
                "weights_mb": sent / 1e6,
                **drawn.metrics,
            }
            own = count.learned(status, batch)
            if joint is not None:
                joint.own = own
            updating = model.updating(present, batch, now.updates, step)
            updated = yield from unless(lambda: reports.waiting(now), updating)
            if updated is None:
                break
            priority, updates, numbers = updated
            for problem in filter(None, (model.step.news(), health.look(numbers, model.net, batch, now.updates))):
                journal.report(problem)
            now.steps = count.begin + (joint.steps if joint else own)
            now.updates, now.version = now.updates + updates, now.version + 1
            if priority is not None and experiment.prioritized and joint is None:
                store.update(batch.key, priority)
            done, due = now.steps >= experiment.steps, saver.due(now.steps)
            stop = reports.learned(now, {**metrics, **numbers}, done or due)
            if due and not done and not stop:
                saver.save(now, model, scheduled=True)
                if lockstep:
                    seed_everything(derive(mark, now.period))
                    published = now.version - every
            if now.version - published >= every and not done and not stop:
                sent = parameters.publish(now.version, now.steps, now.period, False, model.weights())
                published = now.version
            yield True
    saver.save(now, model, scheduled=False)
    parameters.publish(now.version + 1, now.steps, now.period, True, model.weights())
