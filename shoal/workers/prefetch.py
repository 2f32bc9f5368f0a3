"""Batches to learn from, drawn when the learner asks for one, or ahead by a thread while it still updates."""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, Self

import torch
from torch import nn

from shoal.core.doing import span
from shoal.core.errors import Fatal
from shoal.core.tree import map_tree
from shoal.core.types import Batch, Store
from shoal.workers.graph import MOVING
from shoal.workers.model import Model
from shoal.workers.packing import to_batch
from shoal.workers.progress import Progress, draw
from shoal.workers.selection import Selection

if TYPE_CHECKING:
    from shoal.experiment import Experiment

CPU = torch.device("cpu")
WINDOW = 8  # batches after which the number of those prepared ahead may change by one
WAITING = 0.05  # share of its time for which a learner may wait for batches before one more is prepared ahead
WORTH = 0.02  # CPU time, as a share of a learner's time, that preparing batches must take to be worth a thread


class Drawn(NamedTuple):
    """A batch, and what was seen when it was drawn."""

    batch: Batch
    metrics: Mapping[str, float]
    seconds: float  # of CPU time that it took to prepare: where others have the cores, a thread is of no use


class Ahead:
    """How many batches to prepare ahead: more while the learner waits for them, fewer while it does not."""

    def __init__(self, least: int, most: int) -> None:
        """Begin with the least."""
        self.least, self.most, self.depth = least, most, least
        self._begin()

    def _begin(self) -> None:
        self.since, self.batches, self.spares, self.waited, self.spent = time.perf_counter(), 0, 0, 0.0, 0.0

    def note(self, waited: float, spent: float, spare: bool) -> None:
        """Take how long a batch was waited for, the CPU time that it took, and whether another one was ready."""
        self.batches, self.spares = self.batches + 1, self.spares + spare
        self.waited, self.spent = self.waited + waited, self.spent + spent
        if self.batches < WINDOW:
            return
        total = time.perf_counter() - self.since
        if self.spares == WINDOW or self.spent < WORTH * total:
            self.depth = max(self.depth - 1, self.least)
        elif self.waited > WAITING * total:
            self.depth = min(self.depth + 1, self.most)
        self._begin()


class Batches:
    """The batches of a learner, in the order in which they are drawn.

    One that is drawn ahead follows the priorities of then, and was chosen by the network as it was when it was ordered.
    """

    def __init__(self, experiment: Experiment, store: Store, model: Model, now: Progress) -> None:
        """Begin with the batch that changes the present version of the weights."""
        self.experiment, self.store, self.model = experiment, store, model
        self.selection = Selection.of(experiment)
        on_gpu, (least, most) = model.device.type == "cuda", experiment.prefetched
        if on_gpu and self.selection and least:
            raise Fatal(f"prefetch {least}: on a GPU a mixture cannot choose by distance ahead: set prefetch to 0")
        # What it is worth on a GPU was not measured.
        self.ahead = Ahead(least, least if on_gpu else most)
        self.version = now.version  # that the next batch to be drawn will change: every batch makes one
        self.coming: deque[Future[Drawn | None]] = deque()
        self.pool: ThreadPoolExecutor | None = None  # of one thread, once there is anything for it to do
        self.net: nn.Module = model.net  # that chooses ahead, a copy by then, as updates change this one meanwhile

    def __enter__(self) -> Self:
        """Begin."""
        return self

    def __exit__(self, *error: object) -> None:
        """End the thread, and forget what it prepared."""
        if self.pool is not None:
            self.pool.shutdown(cancel_futures=True)

    def take(self, now: Progress) -> Drawn | None:
        """The next batch; None: the store has not enough yet."""
        start, drawn, device = time.perf_counter(), None, self.model.device
        idle = self.ahead.depth > 0 and not self.coming  # since there was too little to draw ahead
        with span("batch"):
            while self.coming and drawn is None:
                drawn = self.coming.popleft().result()
            if drawn is None:
                drawn = self._prepare(replace(now), self.model.net, device)
        if drawn is None:
            return None
        waited = time.perf_counter() - start
        self.ahead.note(0.0 if idle else waited, drawn.seconds, bool(self.coming) and self.coming[0].done())
        while len(self.coming) < self.ahead.depth:
            self.coming.append(self._order(now))
        if self.experiment.lockstep:  # then the clock is in no metric
            return drawn
        metrics = {**drawn.metrics, "prefetched": float(self.ahead.depth), "batch_ms": 1000 * waited}
        uploaded = changed(drawn.batch, lambda tensor: tensor.to(device, non_blocking=True))
        return drawn._replace(batch=uploaded, metrics=metrics)

    def _prepare(self, now: Progress, net: nn.Module, device: torch.device) -> Drawn | None:
        """Draw a batch, by this network where it has to choose."""
        start, now.version = time.thread_time(), self.version
        if self.selection is None:
            tree = draw(self.experiment, self.store, now)
        else:
            tree = self.selection.draw(self.store, net, device, now)
        if tree is None:
            return None
        self.version += 1
        metrics = {**ages(self.store), **(self.selection.metrics if self.selection else {})}
        return Drawn(to_batch(tree, device), metrics, time.thread_time() - start)

    def _order(self, now: Progress) -> Future[Drawn | None]:
        """Have the thread prepare a batch, with the weights of now."""
        if self.pool is None:
            self.pool = ThreadPoolExecutor(1, "prefetch", torch.set_num_threads, (self.experiment.learner_threads,))
            self.net = copy.deepcopy(self.model.net)
        weights = {name: value.clone() for name, value in self.model.net.state_dict().items()} if self.selection else {}
        return self.pool.submit(self._prepare_ahead, replace(now), weights)

    def _prepare_ahead(self, now: Progress, weights: Mapping[str, torch.Tensor]) -> Drawn | None:
        if weights:
            self.net.load_state_dict(weights)
        drawn = self._prepare(now, self.net, CPU)
        if drawn is None or self.model.device.type == "cpu":
            return drawn
        return drawn._replace(batch=changed(drawn.batch, torch.Tensor.pin_memory))


def changed(batch: Batch, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
    """A batch with all its tensors changed."""
    tensors = {name: value for name in MOVING if (value := getattr(batch, name)) is not None}
    return batch._replace(**{name: map_tree(change, value) for name, value in tensors.items()})


def ages(store: Store) -> dict[str, float]:
    """How old the last batch was."""
    status = store.status()
    return {name: status[name] for name in ("age_of_weights", "age_of_data")}
