"""The queue of fresh experience: first in, first out, each item used once."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from itertools import islice
from typing import Any

import numpy as np

from shoal.core.tree import map_tree
from shoal.core.types import Array, Tree


class Queue:
    """A bounded queue in memory that is allocated once; a full one says so, which slows the actors down."""

    def __init__(self, capacity: int) -> None:
        """Hold at most so many items."""
        self.capacity = capacity
        self.memory: Any = None  # as the items, [T or T+1, capacity, ...]
        self.version = np.zeros(capacity, np.int64)
        self.free = deque(range(capacity))
        self.filled: deque[int] = deque()
        self.taken = 0  # items ever handed out, which are their keys
        self.dropped = 0

    def put(self, items: Mapping[str, Tree], priority: Array | None = None) -> bool:
        """Copy items in, all or none; False: full, come back."""
        version = np.asarray(items["version"])
        content = {key: value for key, value in items.items() if key != "version"}
        if len(version) > self.capacity:
            raise ValueError(f"{len(version)} items at once do not fit a queue of {self.capacity}")
        if len(version) > len(self.free):
            return False
        if self.memory is None:
            self.memory = map_tree(lambda x: np.empty((len(x), self.capacity, *x.shape[2:]), x.dtype), content)
        slots = list(islice(self.free, len(version)))
        index = _index(slots)

        def write(memory: Array, x: Array) -> None:
            if x.shape != (shape := (len(memory), len(slots), *memory.shape[2:])):
                raise ValueError(f"items of shape {x.shape} came where those before had {shape}")
            memory[:, index] = x

        map_tree(write, self.memory, content)
        self.version[slots] = version
        for slot in slots:  # only now, so that items which do not fit take no place
            self.free.popleft()
            self.filled.append(slot)
        return True

    def get(self, size: int, oldest: int = 0, beta: float = 1.0) -> Mapping[str, Tree] | None:
        """A batch of the items that waited longest, dropping those of policies before `oldest`."""
        if len(self.filled) < size:
            return None
        stale = [slot for slot in self.filled if self.version[slot] < oldest]
        if stale:
            self.dropped += len(stale)
            self.free.extend(stale)
            self.filled = deque(slot for slot in self.filled if self.version[slot] >= oldest)
            if len(self.filled) < size:
                return None
        slots = [self.filled.popleft() for _ in range(size)]
        self.free.extend(slots)
        index = _index(slots)
        batch = map_tree(lambda memory: memory[:, index].copy(), self.memory)
        key = np.arange(self.taken, self.taken + size)
        self.taken += size
        return {**batch, "key": key, "version": self.version[slots], "weight": np.ones(size, np.float32)}

    def update(self, key: Array, priority: Array) -> None:
        """Nothing to do: no item comes twice."""

    def settle(self) -> Mapping[str, Array]:
        """Forget what waits: its actors will begin anew."""
        self.free.extend(self.filled)
        self.filled.clear()
        self.free = deque(sorted(self.free))  # as at the beginning, so that the same puts take the same places
        return {}

    def restore(self, saved: Mapping[str, Array]) -> None:
        """Nothing was kept."""

    def status(self) -> Mapping[str, int]:
        """How full it is, and how many items were too old to use."""
        return {"filled": len(self.filled), "capacity": self.capacity, "dropped": self.dropped}


def _index(slots: list[int]) -> Any:
    """A slice where the slots run on, since slices copy faster than lists."""
    if slots and slots == list(range(slots[0], slots[0] + len(slots))):
        return slice(slots[0], slots[0] + len(slots))
    return slots
