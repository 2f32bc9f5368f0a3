"""Acting and learning at once: every worker sends gradients to one network that all of them share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from shoal.core.algorithm import Algorithm, HasReplay, HasReplayRatio
from shoal.core.doing import span
from shoal.core.means import Means
from shoal.core.randomness import derive, seed_everything
from shoal.core.rights import calls
from shoal.core.settings import at
from shoal.core.types import Array, Spec, Store, Work
from shoal.envs import Envs, make
from shoal.workers.federation import Delegate
from shoal.workers.health import Health
from shoal.workers.model import first_priorities
from shoal.workers.packing import Items, fresh_batch, to_batch
from shoal.workers.progress import PUBLICATIONS, Progress, Reports
from shoal.workers.rollout import Rollout
from shoal.workers.saving import Saver
from shoal.workers.shared_model import CPU, SharedModel

if TYPE_CHECKING:
    from shoal.experiment import Experiment
    from shoal.services.averager import Averager
    from shoal.services.checkpoints import Checkpoints
    from shoal.services.journal import Journal
    from shoal.services.parameters import Parameters


@calls(
    parameters=("publish",),
    journal=("acted", "learned", "state", "saved", "report", "stage"),
    checkpoints=("save", "save_batch"),
    store=("put", "get", "update", "settle"),
    averager=("join", "merge"),
)
def gradient(
    experiment: Experiment,
    index: int,
    block: Mapping[str, Array],
    parameters: Parameters | None,
    journal: Journal,
    checkpoints: Checkpoints | None,
    store: Store | None,
    averager: Averager | None = None,
    group: str = "",
) -> Work:
    """Learn from experience of its own until the run is over; one unit of work is one piece of it.

    All that matters lives in the block, so any worker may die and be started again. The one with the highest index is
    the chief: under lockstep, a round of turns ends with it. Where there is an averager, it speaks for its group there.
    """
    own = int(np.random.randint(2**31))
    model: SharedModel | None = None
    chief: Chief | Delegate | None = None
    while model is None or not over(experiment, model):
        period = int(block["period"])
        stage = journal.stage() if experiment.curriculum else 0
        root = derive(own, "stage", stage) if stage else own
        with span("make"):
            envs = make(experiment.environment_in(stage), experiment.env_count, seed=derive(root, period))
        try:
            if model is None:
                model = SharedModel(experiment.algorithm, envs.spec, block, index)
                if index == experiment.actor_count - 1:
                    if averager is not None:
                        chief = Delegate(experiment, model, averager, group)
                    else:
                        assert parameters is not None
                        assert checkpoints is not None
                        chief = Chief(experiment, model, parameters, journal, checkpoints, store)
                    chief.publish(model.now())
                health = Health(checkpoints, chief.saver if isinstance(chief, Chief) else None)
                yield True  # so that a resumed run, too, evaluates the weights it begins with
            if experiment.lockstep:  # a period depends on its number only, not on what came before
                seed_everything(derive(root, period, "choices"))
            yield from act_and_learn(experiment, model, envs, (period, stage), chief, journal, store, health)
        finally:
            envs.close()
    if chief is not None:
        chief.finish(envs.spec)


def over(experiment: Experiment, model: SharedModel) -> bool:
    """Whether the run is."""
    return bool(model.block["stop"]) or model.now().steps >= experiment.steps


def act_and_learn(
    experiment: Experiment,
    model: SharedModel,
    envs: Envs,
    begun: tuple[int, int],
    chief: Chief | Delegate | None,
    journal: Journal,
    store: Store | None,
    health: Health,
) -> Work:
    """Act and learn until the run is over, or a period or stage of the curriculum other than those begun with is."""
    block, index = model.block, model.index
    rollout, means = Rollout(experiment, index, envs, model.own, CPU), Means()
    period, stage = begun
    while not over(experiment, model) and block["period"] == period:
        if experiment.curriculum and journal.stage() != stage:
            return
        now, before = model.now(), rollout.steps
        algorithm = at(experiment.algorithm, now.steps + int(block["elsewhere"]), experiment.steps)
        model.follow()
        model.own.eval()
        while (items := rollout.act(algorithm, now.updates)) is None:
            pass
        rollout.report(algorithm, journal)
        model.own.train()
        torch.set_num_threads(experiment.learner_threads)
        for metrics in learn_from(experiment, algorithm, model, items, store):
            if problem := health.look(metrics, model.own, model.last, now.updates):
                journal.report(problem)
            means.add(metrics)
        block["steps"][index] += rollout.steps - before
        numbers = means.take()
        if chief is not None:
            chief.after(numbers)
        yield True


def learn_from(
    experiment: Experiment, algorithm: Algorithm[Any], model: SharedModel, items: Items, store: Store | None
) -> Iterator[dict[str, float]]:
    """Update from fresh items, and from the replay that all workers share; yields the metrics of every update.

    An algorithm with a `replay_ratio` learns from fresh items first and then that many times on average from the replay
    (arXiv:1611.01224, algorithm 1: the number is drawn from a Poisson distribution). Another learns from its replay
    only, as often as `samples_per_insert` lets it.
    """
    ratio = algorithm.replay_ratio if isinstance(algorithm, HasReplayRatio) else None
    priority: Array | None = None
    if store is None or ratio is not None:
        priority, metrics = model.update(algorithm, fresh_batch(items, CPU))
        yield metrics
    if store is None:
        return
    assert isinstance(algorithm, HasReplay)
    assert algorithm.replay is not None
    size, beta, limit = experiment.batch_size, algorithm.replay.beta.now, algorithm.replay.samples_per_insert
    if experiment.actor_priorities:
        priority = first_priorities(algorithm, model.own, items, CPU)
    while not store.put(items, priority):  # learning is behind
        yield from learn_again(algorithm, model, store, size, beta, 1)
    times = (1 if limit is None else None) if ratio is None else np.random.poisson(ratio)
    yield from learn_again(algorithm, model, store, size, beta, times)


def learn_again(
    algorithm: Algorithm[Any], model: SharedModel, store: Store, size: int, beta: float, times: int | None
) -> Iterator[dict[str, float]]:
    """Update from batches of the store: this many, or as many as it gives."""
    while times is None or times > 0:
        seed = int(np.random.randint(2**31))
        tree = store.get(size, model.now().updates, beta, seed)
        if tree is None:
            return
        batch = to_batch(tree, CPU)
        model.follow()
        priority, metrics = model.update(algorithm, batch)
        if priority is not None:
            store.update(batch.key, priority)
        yield metrics
        times = times and times - 1


class Chief:
    """What one worker does for all: reports, checkpoints, weights for the evaluator, and the end of the run."""

    def __init__(
        self,
        experiment: Experiment,
        model: SharedModel,
        parameters: Parameters,
        journal: Journal,
        checkpoints: Checkpoints,
        store: Store | None,
    ) -> None:
        """Continue from where the block stands."""
        self.experiment, self.model, self.parameters = experiment, model, parameters
        self.saver = Saver(experiment, checkpoints, journal, store, model.now().steps)
        self.reports = Reports(journal, experiment.lockstep)
        self.every = max(experiment.evaluation_interval // PUBLICATIONS, 1)
        self.published = 0
        if not model.now().version:  # nothing was published before
            self.saver.begin(model.now(), model)

    def after(self, metrics: Mapping[str, float]) -> None:
        """Do what is due after a unit of work."""
        now, block = self.model.now(), self.model.block
        done, due = now.steps >= self.experiment.steps, self.saver.due(now.steps)
        if self.reports.learned(now, metrics, done or due):
            block["stop"][...] = 1
        if done or block["stop"]:
            return
        if due:
            self.saver.save(now, self.model, scheduled=True)
            block["period"][...] = now.period
        if due or now.steps - self.published >= self.every:
            self.publish(now)

    def publish(self, now: Progress, model: SharedModel | None = None, final: bool = False) -> None:
        """Publish the weights; by counts and not by the clock, which must not decide what is evaluated."""
        self.model.block["version"][...] = now.version + 1
        self.parameters.publish(now.version + 1, now.steps, now.period, final, (model or self.model).weights())
        self.published = now.steps

    def finish(self, spec: Spec) -> None:
        """Save and publish the last weights; a copy, since another worker may still be in its last update."""
        block = self.model.block
        block["stop"][...] = 1
        copied = {name: block[name].copy() for name in block}
        last = SharedModel(self.experiment.algorithm, spec, copied, self.model.index)
        now = last.now()
        self.reports.learned(now, {}, urgent=True)
        self.saver.save(now, last, scheduled=False)
        self.publish(now, last, final=True)
