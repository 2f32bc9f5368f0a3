"""The queue of fresh experience: the oldest policy's first, each item used once."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from shoal.core.tree import copied, map_tree, settle, zeros_for
from shoal.core.types import Array, Tree
from shoal.services.inspection import Refusals, items_problem

LATE = 30.0  # seconds after which experience that was announced is no longer waited for


class Announced(NamedTuple):
    """Items that an actor is working on: how many, with weights of which version, and since when."""

    items: int
    version: int
    since: float


class Queue:
    """A bounded queue in memory that is allocated once; when it is full, `put` answers False and actors wait.

    The age of experience is bounded before it is made: an actor asks whether it may begin. Items in the queue and items
    announced come before the new ones, and each batch of them adds one version to the weights by the time the new ones
    are learned from. The learner in turn waits for an actor whose items would otherwise be too old. So nothing has to
    be dropped, and a slow actor's experience counts like a fast one's.
    """

    def __init__(
        self,
        capacity: int,
        batch: int = 1,
        max_lag: int | None = None,
        choices: Sequence[int] = (),
        exact: bool = False,
        when_full: str = "wait",
    ) -> None:
        """Hold at most `capacity` items; a batch of them is at most `max_lag` versions old.

        `choices` has the number of choices for each number of an action, 0 where it is continuous. Under `exact` the
        clock decides nothing. Unless actors `wait` when it is full, old or new items are dropped: `keep_latest`,
        `keep_oldest`, or `alternate` between the two.
        """
        self.capacity, self.batch, self.max_lag, self.choices, self.exact = capacity, batch, max_lag, choices, exact
        self.when_full = when_full
        self.overflows = self.dropped = 0  # puts that found no room, and the items that were lost by them
        self.memory: Any = None  # as the items, [T or T+1, capacity, ...]
        self.version = np.zeros(capacity, np.int64)
        self.arrived = np.zeros(capacity, np.int64)  # the learner's version when an item arrived
        self.free = deque(range(capacity))
        self.filled: deque[int] = deque()
        self.taken = 0  # items returned so far, which are their keys
        self.next = 0  # version of the weights that the next batch will change
        self.announced: dict[int, Announced] = {}  # by actor
        self.ages = {"age_of_weights": 0.0, "age_of_data": 0.0}
        self.refusals = Refusals()

    def admit(self, actor: int, version: int, count: int) -> bool:
        """Whether an actor may begin `count` items with these weights; False: fetch newer ones, and ask again."""
        self.announced.pop(actor, None)
        if self.max_lag is None:
            return True
        before = len(self.filled) + sum(announced.items for announced in self._coming())
        # Counted for the last of the new items. With a lag of 0 it is the first: otherwise no actor might be at work
        # while a batch is incomplete.
        last = before + (count - 1 if self.max_lag else 0)
        if before + count > self.capacity or self.next + last // self.batch - version > self.max_lag:
            return False
        self.announced[actor] = Announced(count, version, time.monotonic())
        return True

    def _coming(self) -> list[Announced]:
        """What actors are working on, without those that take too long."""
        limit = -math.inf if self.exact else time.monotonic() - LATE
        return [announced for announced in self.announced.values() if announced.since > limit]

    def put(self, items: Mapping[str, Tree], priority: Array | None = None, actor: int | None = None) -> bool:
        """Copy items in, all or none; False: full, come back. Invalid items are refused and counted.

        `actor` is who announced them, if anyone did.
        """
        version = np.asarray(items["version"])
        if not len(version):
            return True
        if len(version) > self.capacity:
            raise ValueError(f"{len(version)} items at once do not fit a queue of {self.capacity}")
        if self.when_full == "wait" and len(version) > len(self.free):
            return False
        if actor is not None:
            self.announced.pop(actor, None)
        if problem := items_problem(items, None, self.choices):
            self.refusals.add("experience", problem)
            return True
        if len(version) > len(self.free) and not self._make_room(len(version)):
            self.refusals.accept()
            return True
        content = {key: value for key, value in items.items() if key != "version"}
        if self.memory is None:
            self.memory = map_tree(lambda x: zeros_for(x, len(x), self.capacity, *x.shape[2:]), content)
        slots = list(islice(self.free, len(version)))
        index = _index(slots)

        def write(memory: Array, x: Array) -> None:
            if x.shape != (shape := (len(memory), len(slots), *memory.shape[2:])):
                raise ValueError(f"items of shape {x.shape}, but earlier ones had {shape}")
            memory[:, index] = x

        map_tree(write, self.memory, content)
        settle(self.memory)
        self.version[slots], self.arrived[slots] = version, self.next
        for slot in slots:  # only now, so that items which do not fit take no place
            self.free.popleft()
            self.filled.append(slot)
        self.refusals.accept()
        return True

    def _make_room(self, count: int) -> bool:
        """Drop the oldest items for `count` new ones; False: it is the turn of the new ones to be dropped."""
        self.overflows += 1
        newest = self.when_full == "keep_oldest" or (self.when_full == "alternate" and self.overflows % 2 == 0)
        lost = count if newest else count - len(self.free)
        self.dropped += lost
        if not newest:
            self.free.extend(self.filled.popleft() for _ in range(lost))
        return not newest

    def get(self, size: int, version: int = 0, beta: float = 1.0, seed: int | None = None) -> Mapping[str, Tree] | None:
        """A batch for weights of this version: items of the oldest policy first, then in the order of arrival.

        None: not enough yet, or an actor is still working on items that would be too old for the next batch.
        """
        self.next = version
        if len(self.filled) < size:
            return None
        if self.max_lag and any(version + 1 - announced.version > self.max_lag for announced in self._coming()):
            return None  # after this batch, what is under way would be too old
        order = np.argsort(self.version[list(self.filled)], kind="stable")
        if (np.diff(order) < 0).any():
            waiting = list(self.filled)
            self.filled = deque(waiting[place] for place in order)
        slots = [self.filled.popleft() for _ in range(size)]
        self.free.extend(slots)
        index = _index(slots)
        batch = map_tree(lambda memory: copied(memory[:, index]), self.memory)
        settle(batch)  # before others write where it was
        key = np.arange(self.taken, self.taken + size)
        self.taken, self.next = self.taken + size, version + 1
        self.ages = ages(version, self.version[slots], self.arrived[slots])
        return {**batch, "key": key, "version": self.version[slots], "weight": np.ones(size, np.float32)}

    def update(self, key: Array, priority: Array) -> None:
        """Nothing to do: no item comes twice."""

    def settle(self) -> Mapping[str, Array]:
        """Forget what waits: its actors will begin again."""
        self.free.extend(self.filled)
        self.filled.clear()
        self.announced.clear()
        self.overflows = 0
        self.free = deque(sorted(self.free))  # as at the beginning, so that the same puts take the same places
        return {}

    def restore(self, saved: Mapping[str, Array]) -> None:
        """Nothing was kept."""

    def refused(self) -> list[str]:
        """What was refused since the last call, in words."""
        return self.refusals.drain()

    def status(self) -> Mapping[str, float]:
        """How full it is, how many puts were refused and items dropped, and the ages of the last batch."""
        counts = {"refused": self.refusals.total, "dropped": self.dropped}
        return {"filled": len(self.filled), "capacity": self.capacity, **counts, **self.ages}


def ages(version: int, acted: Array, arrived: Array) -> dict[str, float]:
    """How many versions a batch's policies were behind when it arrived, and how many it waited since, on average."""
    return {
        "age_of_weights": float((arrived - acted).mean()),
        "age_of_data": float((version - arrived).mean()),
    }


def _index(slots: list[int]) -> Any:
    """A slice where the slots run on, since slices copy faster than lists."""
    if slots and slots == list(range(slots[0], slots[0] + len(slots))):
        return slice(slots[0], slots[0] + len(slots))
    return slots
