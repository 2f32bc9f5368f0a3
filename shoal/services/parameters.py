"""The newest weights, for actors and evaluators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from shoal.core.codec import Codec, Sender
from shoal.core.tree import map_tree, size_of
from shoal.core.types import Array, immutable


def in_order(array: Array) -> Array:
    """A copy in C order, whatever the layout in which a network computes, so that it travels as it is."""
    return np.array(array, order="C")


class Parameters:
    """Holds one version of the weights, the newest, and counts what it sends."""

    def __init__(self, codec: Codec | None = None) -> None:
        """Begin with none; the codec encodes weights for sending, without one they are sent as they are."""
        self.newest: dict[str, Any] | None = None
        self.sender = None if codec is None or codec.plain else Sender(codec)
        self.answers: dict[int, dict[str, Any]] = {}  # of the newest version, by the version that the caller holds
        self.fetches = self.bytes = 0

    def publish(self, version: int, steps: int, period: int, final: bool, weights: Mapping[str, Array]) -> int:
        """Replace the weights, and return the bytes sent so far; the learner may continue to change its own.

        A new period asks everyone to begin again, so that a run can continue exactly from the checkpoint before it.
        """
        # A run that continues from a checkpoint begins with exact weights, so a period must. The last ones are final.
        exact = final or self.newest is None or self.newest["period"] != period
        self.newest = {"version": version, "steps": steps, "period": period, "final": final}
        if self.sender is None:
            self.newest["weights"] = map_tree(in_order, weights)
        else:
            self.sender.publish(version, weights, exact)
            self.answers.clear()
        return self.bytes

    @immutable
    def fetch(self, newer_than: int) -> Mapping[str, Any] | None:
        """The weights with their version and the steps they were trained for; None: the caller holds them.

        A learner that went back to its checkpoint counts on from there, so the holder of a later version gets this one.
        With a codec they are a message for a receiver that holds version `newer_than`, or nothing: -1.
        """
        if self.newest is None or self.newest["version"] == newer_than:
            return None
        self.fetches += 1
        if self.sender is None:
            self.bytes += size_of(self.newest["weights"])
            return self.newest
        if newer_than not in self.answers:  # most who ask hold one of the last few versions
            self.answers[newer_than] = {**self.newest, "message": self.sender.message(newer_than)}
        answer = self.answers[newer_than]
        self.bytes += sum(link.nbytes for link in answer["message"]["links"])
        return answer

    @immutable
    def weights(self) -> Mapping[str, Array]:
        """The newest weights, as followers hold them after a fetch; the final ones are exact."""
        if self.sender is None:
            assert self.newest is not None
            return self.newest["weights"]  # type: ignore[no-any-return]
        return self.sender.weights()  # type: ignore[return-value]  # a mapping was published

    def status(self) -> Mapping[str, Any] | None:
        """What `fetch` would bring, without the weights, and how much it has brought so far."""
        if self.newest is None:
            return None
        known = {key: value for key, value in self.newest.items() if key != "weights"}
        return {**known, "fetches": self.fetches, "bytes": self.bytes}
