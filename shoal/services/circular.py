"""The circular buffer: batches that are learned from several times in turn, until fresh ones take their place."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from shoal.core.settings import Circling
from shoal.core.tree import flat
from shoal.core.types import Array, Tree
from shoal.services.queue import Queue
from shoal.services.replay import nested

AGES = ("age_of_weights", "age_of_data")


class Held(NamedTuple):
    """A batch in the buffer: its items, the version of the weights at its first use and its ages then, and its uses."""

    items: Mapping[str, Tree]
    version: int
    ages: Mapping[str, float]
    uses: int


class Circular:
    """A queue before a ring of batches, each learned from in turn a number of times (arXiv:1912.00167, §3.2).

    A batch that was used up makes room for a fresh one, so all are used equally often, and the oldest goes first. While
    the ring is full, fresh items wait in the queue; when that is full, `put` answers False and actors wait.
    """

    def __init__(
        self, settings: Circling, capacity: int, batch: int, choices: Sequence[int] = (), exact: bool = False
    ) -> None:
        """Let at most `capacity` items wait for a place; `choices` and `exact` are the queue's."""
        self.settings = settings
        self.queue = Queue(capacity, batch, None, choices, exact)
        self.ring: deque[Held] = deque()  # the next to be used first
        self.ages: Mapping[str, float] = self.queue.ages

    def admit(self, actor: int, version: int, count: int) -> bool:
        """Whether an actor may begin: always, since a batch that is used again is older each time."""
        return self.queue.admit(actor, version, count)

    def put(self, items: Mapping[str, Tree], priority: Array | None = None, actor: int | None = None) -> bool:
        """Copy items in, all or none; False: full, come back."""
        return self.queue.put(items, priority, actor)

    def get(self, size: int, version: int = 0, beta: float = 1.0, seed: int | None = None) -> Mapping[str, Tree] | None:
        """A fresh batch if there is one and a place for it, else the next of the ring; None: there is neither."""
        fresh = self.queue.get(size, version) if len(self.ring) < self.settings.batches else None
        if fresh is not None:
            held = Held(fresh, version, self.queue.ages, 0)
        elif self.ring:
            held = self.ring.popleft()
        else:
            return None
        if held.uses + 1 < self.settings.times:
            self.ring.append(held._replace(uses=held.uses + 1))
        self.queue.next = version + 1
        self.ages = {**held.ages, "age_of_data": held.ages["age_of_data"] + version - held.version}
        return {**held.items, "fresh": np.full(size, held.uses == 0)}

    def update(self, key: Array, priority: Array) -> None:
        """Nothing to do: batches are used in turn."""

    def settle(self) -> Mapping[str, Array]:
        """Forget what waits, since its actors will begin again, and return what is held."""
        self.queue.settle()
        saved = {
            f"{place}|{name}": leaf
            for place, held in enumerate(self.ring)
            for name, leaf in flat(held.items, separator="/")
        }
        facts = [[held.version, held.uses, *(held.ages[age] for age in AGES)] for held in self.ring]
        saved["facts"] = np.array(facts, np.float64).reshape(-1, 2 + len(AGES))
        return {**saved, "counts": np.array([self.queue.taken, self.queue.next])}

    def restore(self, saved: Mapping[str, Array]) -> None:
        """Hold again what `settle` returned."""
        if not saved:
            return
        self.queue.taken, self.queue.next = saved["counts"].tolist()
        self.ring.clear()
        for place, (version, uses, *ages) in enumerate(saved["facts"].tolist()):
            mine = f"{place}|"
            parts = {name.removeprefix(mine): leaf for name, leaf in saved.items() if name.startswith(mine)}
            self.ring.append(Held(nested(parts), int(version), dict(zip(AGES, ages, strict=True)), int(uses)))

    def refused(self) -> list[str]:
        """What was refused since the last call, in words."""
        return self.queue.refused()

    def status(self) -> Mapping[str, float]:
        """How full the queue is, how many batches will be used again, what was refused, and the last batch's ages."""
        return {**self.queue.status(), "held": len(self.ring), **self.ages}
