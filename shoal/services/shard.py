"""One part of a replay that is spread over processes; whoever draws from all of them sees to the proportions."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shoal.core.settings import Replaying
from shoal.core.types import Array, Tree
from shoal.services.inspection import LARGEST
from shoal.services.replay import Replay


class Shard:
    """A replay that holds its share of the items, draws what the learner asks for, and takes as many as are allowed.

    It begins with a new `life`: what was known of the items of another life does not apply to these.
    """

    def __init__(
        self, settings: Replaying, batch: int, overlap: int = 0, stack: Any = 1, choices: Sequence[int] = ()
    ) -> None:
        """Take the settings of the whole replay; the rest is as for a replay."""
        count, limited = settings.shards, settings.samples_per_insert is not None
        mine = {"capacity": math.ceil(settings.capacity / count), "samples_per_insert": None}
        self.store = Replay(settings.model_copy(update=mine), batch, overlap, stack, choices)
        self.life = secrets.randbits(62)
        # Items in all, until the learner sets another number.
        self.allowed: float = math.ceil(settings.minimum / count) if limited else math.inf

    def admit(self, actor: int, version: int, count: int) -> bool:
        """Whether an actor may begin: always, as for a replay."""
        return True

    def put(self, items: Mapping[str, Tree], priority: Array | None = None, actor: int | None = None) -> bool:
        """Copy items in over the oldest; False: the learner is behind, come back."""
        return self.store.inserted < self.allowed and self.store.put(items, priority, actor)

    def look(self, version: int | None = None) -> Mapping[str, float]:
        """How things stand; the version is that of the weights which the next batch will change, if that is known."""
        self.store.next = self.store.next if version is None else version
        return {**self.store.status(), "life": self.life, "total": self.store.sums.total()}

    def allow(self, items: float) -> None:
        """Take up to this number of items in all from now on."""
        self.allowed = items

    def draw(self, life: int, size: int, version: int, seed: int) -> Mapping[str, Any] | None:
        """Draw items of this life, with the `chance` that each had in this shard; None: it has none."""
        return self.store.draw(size, version, seed) | self.store.ages if self._has(life) else None

    def update(self, life: int, key: Array, priority: Array, highest: float) -> None:
        """Set priorities of items of this life; an item without one gets the `highest` in any shard."""
        if 0 <= highest <= LARGEST:  # not if it is NaN
            self.store.highest = max(self.store.highest, highest)
        if life == self.life and len(key):
            self.store.update(key, priority)

    def settle(self) -> Mapping[str, Array]:
        """Everything, for a checkpoint."""
        return {**self.store.settle(), "allowed": np.array(self.allowed)}

    def restore(self, saved: Mapping[str, Array]) -> None:
        """Put back what `settle` returned."""
        self.allowed = float(saved["allowed"])
        self.store.restore({name: array for name, array in saved.items() if name != "allowed"})

    def refused(self) -> list[str]:
        """What was refused since the last call, in words."""
        return self.store.refused()

    def _has(self, life: int) -> bool:
        return life == self.life and self.store.filled > 0
