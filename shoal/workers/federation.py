"""Federated learning: what speaks for a group of workers, and what publishes and saves the merged weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from shoal import envs
from shoal.core.codec import Receiver, Sender
from shoal.core.errors import Diverged
from shoal.core.means import Means
from shoal.core.moments import at, found_in, merge, named, without
from shoal.core.rights import calls
from shoal.core.types import Array, Spec, Work
from shoal.workers.model import Model, pick_device
from shoal.workers.progress import PUBLICATIONS, Progress, Reports
from shoal.workers.saving import Saver, load_weights
from shoal.workers.shared_model import SharedModel

if TYPE_CHECKING:
    from shoal.experiment import Experiment
    from shoal.services.averager import Averager
    from shoal.services.checkpoints import Checkpoints
    from shoal.services.journal import Journal
    from shoal.services.parameters import Parameters


class Delegate:
    """Speaks for a group of gradient workers: sends what they changed, and brings back what all groups did."""

    def __init__(self, experiment: Experiment, model: SharedModel, averager: Averager, group: str) -> None:
        """Begin from the merged weights, whatever the block held."""
        self.model, self.averager, self.group = model, averager, group
        self.round, self.codec = experiment.federation.round, experiment.weights
        self.means = Means()
        self.steps = self.updates = 0
        self.moments = found_in(self._net())

    def _net(self) -> dict[str, Array]:
        """The group's weights, in memory that its workers share."""
        return {name.removeprefix("net/"): self.model.block[name] for name in self.model.block if name[:4] == "net/"}

    def publish(self, now: Progress) -> None:
        """Join, and continue from the merged weights."""
        weights = self._net()
        self.sender, self.receiver, self.sent = Sender(self.codec), Receiver(weights), 0
        self.sum = {name: np.zeros_like(array) for name, array in weights.items()}
        answer = self.averager.join(self.group)
        self.life = answer["life"]
        self._take(answer, None, now)
        self.steps, self.updates = now.steps, now.updates

    def after(self, metrics: Mapping[str, float]) -> None:
        """Exchange weights when a round is over."""
        self.means.add(metrics)
        now = self.model.now()
        if now.steps - self.steps >= self.round:
            self._exchange(now)

    def finish(self, spec: Spec) -> None:
        """Send what is left of a round, unless everyone is asked to stop; the other groups continue."""
        now = self.model.now()
        if not self.model.block["stop"] and now.steps > self.steps:
            self._exchange(now)
        self.model.block["stop"][...] = 1

    def _exchange(self, now: Progress) -> None:
        snapshot = {name: array.copy() for name, array in self._net().items()}
        self.sum = {name: self.sum[name] + (snapshot[name] - self.base[name]) for name in snapshot}
        for prefix in self.moments:  # of what was seen since, which is merged whole
            seen = without(at(snapshot, prefix), at(self.base, prefix))
            self.sum |= {name: np.asarray(value) for name, value in named(prefix, seen).items()}
        self.sender.publish(self.sent, self.sum)
        message = self.sender.message(self.sent - 1)
        steps, updates = now.steps - self.steps, now.updates - self.updates
        answer = self.averager.merge(
            self.group, self.life, self.receiver.version, steps, updates, message, self.means.take()
        )
        try:
            if "refused" in answer:
                raise Diverged(answer["refused"])
            self._take(answer, snapshot, now)
        except Diverged:  # continue from the merged weights
            self.publish(now)
        self.sent, self.steps, self.updates = self.sent + 1, now.steps, now.updates

    def _take(self, answer: Mapping[str, Any], snapshot: Mapping[str, Array] | None, now: Progress) -> None:
        """Move to the merged weights, and keep what the group's workers did since the snapshot, if there is one."""
        merged: Any = self.receiver.take(answer["message"])
        net = self._net()
        for prefix in self.moments:
            whole = at(merged, prefix)
            if snapshot is not None and (seen := without(at(net, prefix), at(snapshot, prefix))).count:
                whole = merge(whole, seen)
            for name, value in named(prefix, whole).items():
                net.pop(name)[...] = value
        for name, array in net.items():
            if snapshot is None:
                array[...] = merged[name]
            else:
                array += merged[name] - snapshot[name]
        self.base = {name: np.array(array) for name, array in merged.items()}
        self.model.block["elsewhere"][...] = answer["steps"] - now.steps
        if answer["stop"]:
            self.model.block["stop"][...] = 1


@calls(
    averager=("status", "newest", "stop"),
    parameters=("publish",),
    journal=("learned", "stopping", "state", "saved", "report"),
    checkpoints=("save",),
)
def oversee(
    experiment: Experiment, averager: Averager, parameters: Parameters, journal: Journal, checkpoints: Checkpoints
) -> Work:
    """Report, publish and save the merged weights until the steps are used up or the journal says stop."""
    model = Model(experiment.algorithm, envs.spec_of(experiment.environment), pick_device("cpu"))
    seen, published, stop = -1, None, False
    saver = Saver(experiment, checkpoints, journal, None, averager.status()["steps"])
    reports = Reports(journal, experiment.lockstep)
    every = max(experiment.evaluation_interval // PUBLICATIONS, 1)
    while not stop:
        status = averager.status()
        for line in status["refused"]:
            journal.report(line)
        if status["version"] == seen:
            stop = bool(journal.stopping())
            yield False
            continue
        seen = status["version"]
        now = Progress(status["steps"], status["updates"], seen)
        done, due = now.steps >= experiment.steps, saver.due(now.steps)
        stop = reports.learned(now, status["metrics"], done or due) or done
        if not stop and (published is None or due or now.steps - published >= every):
            load_weights(model.net, averager.newest())
            parameters.publish(now.version, now.steps, 0, False, model.weights())
            if published is None and not saver.last:
                saver.begin(now, model)
            published = now.steps
        if due and not stop:
            saver.save(now, model, scheduled=False)
        yield True
    averager.stop()
    load_weights(model.net, averager.newest())
    status = averager.status()
    now = Progress(status["steps"], status["updates"], status["version"])
    reports.learned(now, status["metrics"], urgent=True)
    saver.save(now, model, scheduled=False)
    parameters.publish(now.version + 1, now.steps, 0, True, model.weights())
