"""Acting and learning at once: every worker sends gradients to one network that all of them share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import fmean
from typing import Any

import numpy as np
import torch

from shoal import envs
from shoal.core.randomness import derive, seed_everything
from shoal.core.rights import calls
from shoal.core.settings import at
from shoal.core.types import Array, Work
from shoal.workers.federate import Delegate
from shoal.workers.learner import LOOKS, Health, Progress, Reports, Saver
from shoal.workers.policy import fresh_batch, judge, to_batch
from shoal.workers.shared import CPU, Shared
from shoal.workers.stream import Stream


@calls(
    parameters=("publish",),
    journal=("acted", "learned", "state", "saved", "report"),
    checkpoints=("save", "save_batch"),
    store=("put", "get", "update", "settle"),
    averager=("join", "merge"),
)
def gradient(
    experiment: Any,
    index: int,
    block: Mapping[str, Array],
    parameters: Any,
    journal: Any,
    checkpoints: Any,
    store: Any,
    averager: Any = None,
    group: str = "",
) -> Work:
    """Learn from experience of one's own until the run is over; one unit of work is one piece of it.

    All that matters lives in the block, so any worker may die and be started again. The one with the highest index is
    the chief: under lockstep, a round of turns ends with it. Where there is an averager, it speaks for its group there.
    """
    own = int(np.random.randint(2**31))
    model: Shared | None = None
    chief: Chief | Delegate | None = None
    while model is None or not over(experiment, model):
        period = int(block["period"])
        worlds = envs.make(experiment.environment, experiment.envs, seed=derive(own, period))
        try:
            if model is None:
                model = Shared(experiment.algorithm, worlds.spec, block, index)
                if index == experiment.actor_count - 1:
                    if averager is not None:
                        chief = Delegate(experiment, model, averager, group)
                    else:
                        chief = Chief(experiment, model, parameters, journal, checkpoints, store)
                    chief.publish(model.now())
                health = Health(checkpoints, getattr(chief, "saver", None))
                yield True  # so that a resumed run, too, scores the weights it begins with
            if experiment.lockstep:  # a period depends on its number only, not on what came before
                seed_everything(derive(own, period, "choices"))
            yield from learn(experiment, model, worlds, period, chief, journal, store, health)
        finally:
            worlds.close()
    if chief is not None:
        chief.finish(worlds.spec)


def over(experiment: Any, model: Shared) -> bool:
    """Whether the run is."""
    return bool(model.block["stop"]) or model.now().steps >= experiment.steps


def learn(
    experiment: Any,
    model: Shared,
    worlds: envs.Worlds,
    period: int,
    chief: Chief | Delegate | None,
    journal: Any,
    store: Any,
    health: Health,
) -> Work:
    """Act and learn until the run is over or a new period begins."""
    block, index = model.block, model.index
    stream = Stream(experiment, index, worlds, model.own, CPU)
    while not over(experiment, model) and block["period"] == period:
        now, before = model.now(), stream.steps
        algorithm = at(experiment.algorithm, min((now.steps + int(block["elsewhere"])) / experiment.steps, 1.0))
        model.follow()
        model.own.eval()
        while (items := stream.act(algorithm, now.updates)) is None:
            pass
        stream.report(algorithm, journal)
        model.own.train()
        torch.set_num_threads(experiment.learner_threads)
        told = []
        for metrics in learn_from(experiment, algorithm, model, items, store):
            if problem := health.look(metrics, model.own, model.last, now.updates):
                journal.report(problem)
            told.append(metrics)
        block["steps"][index] += stream.steps - before
        if chief is not None:
            names = dict.fromkeys(name for numbers in told for name in numbers)
            chief.after({name: fmean(numbers[name] for numbers in told if name in numbers) for name in names})
        yield True


def learn_from(experiment: Any, algorithm: Any, model: Shared, items: Any, store: Any) -> Iterator[dict[str, float]]:
    """Update by fresh items, and by what the store all workers share gives; the metrics of every update.

    An algorithm that names a `replay_ratio` learns from fresh items first and then, on average, so many times again
    (arXiv:1611.01224, algorithm 1: the number is drawn from a Poisson distribution). Another learns from its replay
    only, as often as `samples_per_insert` lets it.
    """
    ratio, priority = getattr(algorithm, "replay_ratio", None), None
    if store is None or ratio is not None:
        priority, metrics = model.update(algorithm, fresh_batch(items, CPU))
        yield metrics
    if store is None:
        return
    if experiment.judged_by_actors:
        priority = judge(algorithm, model.own, items, CPU)
    while not store.put(items, priority):  # the learning is behind
        yield from learn_again(experiment, algorithm, model, store, 1)
    if ratio is not None:
        yield from learn_again(experiment, algorithm, model, store, np.random.poisson(ratio))
    else:
        endless = algorithm.replay.samples_per_insert is None
        yield from learn_again(experiment, algorithm, model, store, 1 if endless else None)


def learn_again(
    experiment: Any, algorithm: Any, model: Shared, store: Any, times: int | None
) -> Iterator[dict[str, float]]:
    """Update by so many batches of the store, or by as many as it gives."""
    while times is None or times > 0:
        seed = int(np.random.randint(2**31))
        tree = store.get(experiment.batch_size, model.now().updates, algorithm.replay.beta.now, seed)
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
        self, experiment: Any, model: Shared, parameters: Any, journal: Any, checkpoints: Any, store: Any
    ) -> None:
        """Go on from where the block stands."""
        self.experiment, self.model, self.parameters = experiment, model, parameters
        self.journal, self.checkpoints, self.store = journal, checkpoints, store
        self.saver = Saver(experiment, model.now().steps)
        self.reports = Reports(journal, experiment.lockstep)
        self.every = max(experiment.evaluation_interval // LOOKS, 1)
        self.published = 0
        if not model.now().version:  # nothing was published before
            self.saver.begin(checkpoints, journal, model.now(), model)

    def after(self, metrics: Mapping[str, float]) -> None:
        """Do what is due after a unit of work."""
        now, block = self.model.now(), self.model.block
        done, due = now.steps >= self.experiment.steps, self.saver.due(now.steps)
        if self.reports.learned(now, metrics, done or due):
            block["stop"][...] = 1
        if done or block["stop"]:
            return
        if due:
            self.saver.save(self.checkpoints, self.store, self.journal, now, self.model, scheduled=True)
            block["period"][...] = now.period
        if due or now.steps - self.published >= self.every:
            self.publish(now)

    def publish(self, now: Progress, model: Shared | None = None, final: bool = False) -> None:
        """Hand the weights to whoever asks; by counts and not by the clock, which must not decide what is scored."""
        self.model.block["version"][...] = now.version + 1
        self.parameters.publish(now.version + 1, now.steps, now.period, final, (model or self.model).weights())
        self.published = now.steps

    def finish(self, spec: Any) -> None:
        """Save and publish the last weights; a copy, since another worker may still be in its last update."""
        block = self.model.block
        block["stop"][...] = 1
        last = Shared(self.experiment.algorithm, spec, {name: block[name].copy() for name in block}, self.model.index)
        now = last.now()
        self.reports.learned(now, {}, urgent=True)
        self.saver.save(self.checkpoints, self.store, self.journal, now, last, scheduled=False)
        self.publish(now, last, final=True)
