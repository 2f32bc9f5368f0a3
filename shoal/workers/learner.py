"""Learning: batches from the store become new weights."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import torch

from shoal import envs
from shoal.core.randomness import derive, seed_everything
from shoal.core.settings import at
from shoal.core.tree import map_tree, to_numpy, to_torch
from shoal.core.types import Batch, Work
from shoal.workers.policy import pick_device
from shoal.workers.snapshot import capture, restore

LONGEST = 300.0  # seconds between checkpoints, however slow the steps come


@dataclass
class Progress:
    """How far a learner has come; this is what a checkpoint keeps of it beside the arrays."""

    steps: int = 0
    updates: int = 0
    version: int = 0
    period: int = 0  # scheduled checkpoints so far under lockstep; each begins everyone's randomness anew


def learn(experiment: Any, store: Any, parameters: Any, journal: Any, checkpoints: Any) -> Work:
    """Update the network until the steps are used up or the journal says stop; one unit of work is one batch."""
    algorithm = experiment.algorithm
    device = pick_device(experiment.device)
    torch.set_num_threads(experiment.learner_threads)
    own = int(np.random.randint(2**31))
    net = algorithm.build(envs.spec_of(experiment.environment)).to(device)
    optimizer = algorithm.optimizer(net)
    now = go_on(net, optimizer, checkpoints.load(experiment.lockstep), journal)
    if experiment.lockstep:
        seed_everything(derive(own, now.period))
    saver = Saver(experiment, now.steps)
    done = now.steps >= experiment.steps
    parameters.publish(now.version, now.steps, now.period, done, to_numpy(net.state_dict()))
    stop, asked = False, time.monotonic()
    yield True
    while not done and not stop:
        oldest = 0 if algorithm.max_lag is None else now.version - algorithm.max_lag
        waiting = fill_of(store)
        tree = store.get(experiment.batch_size, oldest)
        if tree is None:
            if time.monotonic() - asked > 0.2:
                stop, asked = bool(journal.stopping()), time.monotonic()
            yield False
            continue
        torch.set_num_threads(experiment.learner_threads)
        batch = to_batch(tree, device)
        present = at(algorithm, now.steps / experiment.steps)
        metrics = {"lag": float((now.version - batch.version).mean()), "lr": present.lr.now, "queue": waiting}
        now.steps += int(batch.mask.sum())
        priority, count, numbers = update(present, net, optimizer, batch)
        now.updates, now.version = now.updates + count, now.version + 1
        if priority is not None:
            store.update(batch.key, priority)
        stop = journal.learned(now.steps, now.updates, {**metrics, **numbers})
        done = now.steps >= experiment.steps
        if saver.due(now.steps) and not done and not stop:
            if experiment.lockstep:
                now.period += 1
                store.clear()
                seed_everything(derive(own, now.period))
            saver.save(checkpoints, journal, now, net, optimizer, scheduled=True)
        parameters.publish(now.version, now.steps, now.period, done, to_numpy(net.state_dict()))
        yield True
    saver.save(checkpoints, journal, now, net, optimizer, scheduled=False)
    if stop:
        parameters.publish(now.version + 1, now.steps, now.period, True, to_numpy(net.state_dict()))


def go_on(net: Any, optimizer: Any, saved: Mapping[str, Any] | None, journal: Any) -> Progress:
    """Begin, or go on where a checkpoint stands."""
    if saved is None:
        return Progress()
    restore(net, optimizer, saved)
    now = Progress(**{field.name: saved["state"][field.name] for field in fields(Progress)})
    journal.went_back(now.steps)
    return now


class Saver:
    """Knows when a checkpoint is due: after so many steps, and after a while unless the clock must not matter."""

    def __init__(self, experiment: Any, steps: int) -> None:
        """Count from these steps."""
        self.interval, self.exact = experiment.checkpoint_interval, experiment.lockstep
        self.last, self.saved = steps, time.monotonic()

    def due(self, steps: int) -> bool:
        """Whether it is time."""
        late = not self.exact and time.monotonic() - self.saved > LONGEST
        return late or steps - self.last >= self.interval

    def save(self, checkpoints: Any, journal: Any, now: Progress, net: Any, optimizer: Any, scheduled: bool) -> None:
        """Save, unless nothing was learned since the last time."""
        if now.steps > self.last:
            state = {**asdict(now), "scheduled": scheduled, "journal": journal.state()}
            problem = checkpoints.save({**capture(net, optimizer), "state": state})
            journal.saved(now.steps, problem)
        self.last, self.saved = now.steps, time.monotonic()


def fill_of(store: Any) -> float:
    """How full the store is, between 0 and 1."""
    status = store.status()
    return float(status["filled"] / status["capacity"])


def to_batch(tree: Any, device: torch.device) -> Batch:
    """Move a batch to the learner's device; keys and versions stay where they are."""
    stays = {"key": tree["key"], "version": tree["version"]}
    moves = {name: to_torch(value, device) for name, value in tree.items() if name not in stays}
    return Batch(**moves, **stays)


def update(algorithm: Any, net: Any, optimizer: Any, batch: Batch) -> tuple[Any, int, dict[str, float]]:
    """Go over a batch in epochs and minibatches; return new priorities, if items can come again, and metrics."""
    for group in optimizer.param_groups:
        group["lr"] = algorithm.lr.now
    prepared = algorithm.prepare(net, batch)
    whole = algorithm.epochs == algorithm.minibatches == 1
    metrics: dict[str, torch.Tensor] = {}
    pieces = 0
    for piece in [prepared] if whole else cut(prepared, algorithm.epochs, algorithm.minibatches):
        loss = algorithm.loss(net, net, piece)
        optimizer.zero_grad(set_to_none=True)
        (loss.each * piece.weight).mean().backward()
        if algorithm.clip_norm is not None:
            loss.metrics["gradient_norm"] = torch.nn.utils.clip_grad_norm_(net.parameters(), algorithm.clip_norm)
        optimizer.step()
        pieces += 1
        for name, value in loss.metrics.items():
            metrics[name] = metrics.get(name, 0.0) + value.detach()
    priority = loss.priority.detach().cpu().numpy() if whole else None
    return priority, pieces, {name: float(value) / pieces for name, value in metrics.items()}


def cut(batch: Batch, epochs: int, minibatches: int) -> Iterator[Batch]:
    """Shuffle the items anew for each epoch, and deal them into minibatches."""
    size = batch.action.shape[1]
    for _ in range(epochs):
        order = torch.randperm(size)
        for piece in order.tensor_split(minibatches):
            index = piece.to(batch.action.device)
            pick = lambda x, index=index: x.index_select(1, index)  # noqa: E731
            yield batch._replace(
                **{name: map_tree(pick, getattr(batch, name)) for name in Batch._fields[:6]},
                weight=batch.weight[index],
                key=batch.key[piece.numpy()],
                version=batch.version[piece.numpy()],
            )
