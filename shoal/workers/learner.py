"""Learning: batches from the store become new weights."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch

from shoal import envs
from shoal.core.randomness import derive, seed_everything
from shoal.core.rights import calls
from shoal.core.settings import at, moving
from shoal.core.types import Array, Batch, Store, Work
from shoal.workers.graph import beside
from shoal.workers.health import Health
from shoal.workers.joint import Joint, Stores, unless
from shoal.workers.model import Model, alone, pick_device
from shoal.workers.prefetch import Batches
from shoal.workers.progress import Count, Progress, Reports
from shoal.workers.saving import Saver, resume
from shoal.workers.sharding import Shards

if TYPE_CHECKING:
    from shoal.experiment import Experiment
    from shoal.services.checkpoints import Checkpoints
    from shoal.services.journal import Journal
    from shoal.services.parameters import Parameters
    from shoal.services.reduction import Reduction
    from shoal.services.shard import Shard


@beside
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
    if isinstance(store, list):
        assert experiment.replay is not None
        store = Shards(store, experiment.replay, experiment.batch_size)
    lockstep = experiment.lockstep
    torch.set_num_threads(experiment.learner_threads)
    mark = int(np.random.randint(2**31))
    model = Model(experiment.algorithm, envs.spec_of(experiment.environment), pick_device(experiment.device), lockstep)
    saved = checkpoints.load(lockstep)
    kept = Stores([store, *others]) if others else store
    now = resume(saved, model, kept, journal)
    if lockstep:
        seed_everything(derive(mark, now.period))
    saver = Saver(experiment, checkpoints, journal, kept, now.steps, None if saved is None else now.steps)
    published = Published(experiment, parameters, model)
    published.publish(now)
    updates = Updates(experiment, model, store, journal, now, Health(checkpoints, saver), reduction)
    if saved is None:
        saver.begin(now, model)
    yield True
    with Batches(experiment, store, model, now) as batches:
        while not updates.over:
            if not (yield from updates.make(batches)):
                continue
            due = saver.due(now.steps)
            updates.report(published.sent, due)
            if due and not updates.over:
                saver.save(now, model, scheduled=True)
                if lockstep:
                    seed_everything(derive(mark, now.period))
                    published.publish(now)
            if published.due(now) and not updates.over:
                published.publish(now)
            yield True
    saver.save(now, model, scheduled=False)
    published.publish(now, final=True)


class Updates:
    """Batches from the store become updates of the model, alone or jointly with others; the journal hears of them."""

    def __init__(
        self,
        experiment: Experiment,
        model: Model,
        store: Store,
        journal: Journal,
        now: Progress,
        health: Health,
        reduction: Reduction | None,
    ) -> None:
        """Go on from how far the model has come."""
        self.experiment, self.model, self.store, self.now = experiment, model, store, now
        self.journal, self.health = journal, health
        self.reports, self.count = Reports(journal, experiment.lockstep), Count(store, now.steps)
        self.joint: Joint | None = None
        if reduction is not None:
            self.joint = Joint(reduction, model, experiment.learners, store if experiment.prioritized else None)
            self.joint.begin(model, now)
        self.step = self.joint.step if self.joint else alone(model.step)
        self.metrics: dict[str, float] = {}  # of the last one
        self.refused = 0.0  # that the journal has heard of
        self.stop, self.done = False, now.steps >= experiment.steps

    @property
    def over(self) -> bool:
        """Whether there are to be no more."""
        return self.done or self.stop

    def make(self, batches: Batches) -> Generator[bool, None, bool]:
        """Learn from a batch; False: there was none, or the others no longer come to it."""
        torch.set_num_threads(self.experiment.learner_threads)
        experiment, now, status = self.experiment, self.now, self.store.status()
        drawn = batches.take(now)
        self._tell(status)
        if drawn is None:
            now.steps = now.steps if self.joint else self.count.begin + self.count.received(status)
            self.done = now.steps >= experiment.steps
            self.stop = self.reports.waiting(now)
            yield False
            return False
        batch, present = drawn.batch, at(experiment.algorithm, now.steps, experiment.steps)
        metrics = {
            "lag": float((now.version - batch.version).mean()),
            "lr": present.lr.now,
            **moving(present),
            "queue": status["filled"] / status["capacity"],
            **drawn.metrics,
        }
        own = self.count.learned(status, batch)
        if self.joint is not None:
            self.joint.own = own
        updating = self.model.updating(present, batch, now.updates, self.step)
        updated = yield from unless(lambda: self.reports.waiting(now), updating)
        if updated is None:
            self.stop = True
            return False
        self._made(batch, own, *updated)
        self.metrics = {**metrics, **updated[2]}
        return True

    def _tell(self, status: Mapping[str, float]) -> None:
        """Have the journal hear what the store refused."""
        if (refused := status["refused"] + status.get("lost", 0)) != self.refused:
            self.refused = refused
            for problem in self.store.refused():
                self.journal.report(problem)

    def _made(self, batch: Batch, own: int, priority: Array | None, updates: int, numbers: dict[str, float]) -> None:
        """Note what came of a batch, and how far that is."""
        now = self.now
        news = "" if self.joint else self.model.step.news()  # which several learners have no use for
        for problem in (news, self.health.look(numbers, self.model.net, batch, now.updates)):
            if problem:
                self.journal.report(problem)
        now.steps = self.count.begin + (self.joint.steps if self.joint else own)
        now.updates, now.version = now.updates + updates, now.version + 1
        if priority is not None and self.experiment.prioritized and self.joint is None:
            self.store.update(batch.key, priority)
        self.done = now.steps >= self.experiment.steps

    def report(self, sent: int, urgent: bool) -> None:
        """Report the last update, with the bytes of weights that were sent so far."""
        metrics = {**self.metrics, "weights_mb": sent / 1e6}
        self.stop = self.reports.learned(self.now, metrics, self.done or urgent)


class Published:
    """The weights that the others hold, renewed after every so many versions."""

    def __init__(self, experiment: Experiment, parameters: Parameters, model: Model) -> None:
        """Publish nothing yet."""
        self.parameters, self.model = parameters, model
        self.every = experiment.replay.publish if experiment.replay else 1
        self.version = self.sent = 0  # the newest of them, and the bytes that were sent so far

    def due(self, now: Progress) -> bool:
        """Whether it is time for newer ones."""
        return now.version - self.version >= self.every

    def publish(self, now: Progress, final: bool = False) -> None:
        """Publish them as they are; final ones have a version of their own."""
        weights, version = self.model.weights(), now.version + final
        self.sent = self.parameters.publish(version, now.steps, now.period, final, weights)
        self.version = version
