"""Learning: batches from the store become new weights."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch

from shoal import envs
from shoal.core.settings import at
from shoal.core.tree import map_tree, to_numpy, to_torch
from shoal.core.types import Batch, Work
from shoal.workers.policy import pick_device


def learn(experiment: Any, store: Any, parameters: Any, journal: Any) -> Work:
    """Update the network until the steps are used up or the journal says stop; one unit of work is one batch."""
    algorithm = experiment.algorithm
    device = pick_device(experiment.device)
    torch.set_num_threads(experiment.learner_threads)
    net = algorithm.build(envs.spec_of(experiment.environment)).to(device)
    optimizer = algorithm.optimizer(net)
    steps = updates = version = 0
    parameters.publish(version, steps, False, to_numpy(net.state_dict()))
    stop, asked = False, time.monotonic()
    yield True
    while steps < experiment.steps and not stop:
        oldest = 0 if algorithm.max_lag is None else version - algorithm.max_lag
        tree = store.get(experiment.batch_size, oldest)
        if tree is None:
            if time.monotonic() - asked > 0.2:
                stop, asked = bool(journal.stopping()), time.monotonic()
            yield False
            continue
        torch.set_num_threads(experiment.learner_threads)
        batch = to_batch(tree, device)
        now = at(algorithm, steps / experiment.steps)
        metrics = {"lag": float((version - batch.version).mean()), "lr": now.lr.now}
        steps += int(batch.mask.sum())
        priority, count, numbers = update(now, net, optimizer, batch)
        updates, version = updates + count, version + 1
        if priority is not None:
            store.update(batch.key, priority)
        done = steps >= experiment.steps
        parameters.publish(version, steps, done, to_numpy(net.state_dict()))
        stop = journal.learned(steps, updates, {**metrics, **numbers})
        yield True
    if stop:
        parameters.publish(version + 1, steps, True, to_numpy(net.state_dict()))


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
