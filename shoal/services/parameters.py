"""The newest weights, for whoever asks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from shoal.core.tree import map_tree
from shoal.core.types import Array, Tree


def in_order(array: Array) -> Array:
    """A copy in C order, whatever the layout in which a network computes, so that it travels as it is."""
    return np.array(array, order="C")


class Parameters:
    """Holds one version of the weights: the newest."""

    def __init__(self) -> None:
        """Begin with none."""
        self.newest: dict[str, Any] | None = None

    def publish(self, version: int, steps: int, period: int, final: bool, weights: Tree) -> None:
        """Replace the weights; they are copied, since the learner goes on changing its own.

        A new period asks everyone to begin afresh, which makes the checkpoint before it a point to go on from exactly.
        """
        self.newest = {
            "version": version,
            "steps": steps,
            "period": period,
            "final": final,
            "weights": map_tree(in_order, weights),
        }

    def fetch(self, newer_than: int) -> Mapping[str, Any] | None:
        """The weights with their version and the steps they were trained for; None: nothing newer."""
        if self.newest is None or (self.newest["version"] <= newer_than):
            return None
        return self.newest

    def status(self) -> Mapping[str, Any] | None:
        """What `fetch` would bring, without the weights."""
        return self.newest and {key: value for key, value in self.newest.items() if key != "weights"}
