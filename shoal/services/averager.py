"""Merges what groups of workers have learned apart: an average of their changes, in which stale ones count less."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.core.codec import Codec, Receiver, Sender
from shoal.core.errors import ShoalError
from shoal.core.types import Array

ACTIVE = 4  # rounds of merges after which a group that sent nothing no longer counts


@dataclass
class Member:
    """A group: what it has sent in all, and how much its last change weighed."""

    life: int  # how many groups had joined before it
    receiver: Receiver
    sum: dict[str, Array]
    raw: float = 0.0
    merged: int = 0  # the version that its last change led to


class Averager:
    """θ ← θ + wᵢ Δᵢ whenever group i sends its change Δᵢ, with wᵢ ∝ stepsᵢ / (1 + stalenessᵢ).

    The staleness of a change is the number of merges since the weights it began from; the weights wᵢ of the groups that
    are at work, each by its last change, sum to 1, so that one round of all groups adds an average.
    """

    def __init__(self, weights: Mapping[str, Array], codec: Codec, steps: int = 0, updates: int = 0) -> None:
        """Begin with these weights, after so many steps and updates."""
        self.weights = {name: np.array(array) for name, array in weights.items()}
        self.sender = Sender(codec)
        self.version, self.steps, self.updates = 0, steps, updates
        self.members: dict[str, Member] = {}
        self.metrics: dict[str, float] = {}
        self.joined = 0
        self.received = self.sent = 0  # bytes of weights
        self.stopped = False
        self.sender.publish(self.version, self.weights)

    def join(self, group: str) -> Mapping[str, Any]:
        """Take in a group that begins, or begins again; it is told the weights whole."""
        zeros = {name: np.zeros_like(array) for name, array in self.weights.items()}
        self.members[group] = Member(self.joined, Receiver(self.weights), zeros, merged=self.version)
        self.joined += 1
        return {**self._answer(-1), "life": self.joined - 1}

    def merge(
        self, group: str, life: int, version: int, steps: int, updates: int, message: Any, metrics: Mapping[str, float]
    ) -> Mapping[str, Any]:
        """Take a group's change since a version, told as the sum of all its changes, and return the newest weights.

        A group that has begun again elsewhere counts from zero, so what its former life still sends fits no more.
        """
        if (member := self.members.get(group)) is None or member.life != life:
            raise ShoalError(f"{group} has not joined, or has begun again since")
        whole: Any = member.receiver.take(message)
        self.received += sum(link.nbytes for link in message["links"])
        member.raw = steps / (1 + self.version - version)
        member.merged = self.version + 1
        active = [each for each in self.members.values() if each.merged >= self.version - ACTIVE * len(self.members)]
        share = member.raw / max(sum(each.raw for each in active), 1e-9)
        for name, array in self.weights.items():
            change = whole[name] - member.sum[name]
            if array.dtype.kind == "f":
                array += (share * change).astype(array.dtype)
            else:  # counts
                array += change
        member.sum = {name: np.array(array) for name, array in whole.items()}
        self.version, self.steps, self.updates = self.version + 1, self.steps + steps, self.updates + updates
        self.metrics = {**metrics, "staleness": float(self.version - 1 - version), "share": float(share)}
        self.sender.publish(self.version, self.weights)
        return self._answer(version)

    def _answer(self, held: int) -> Mapping[str, Any]:
        message = self.sender.message(held)
        self.sent += sum(link.nbytes for link in message["links"])
        return {"message": message, "steps": self.steps, "stop": self.stopped}

    def status(self) -> Mapping[str, Any]:
        """How far all groups together have come, and the metrics of the last change."""
        counts = {"version": self.version, "steps": self.steps, "updates": self.updates}
        told = {"megabytes_received": self.received / 1e6, "megabytes_sent": self.sent / 1e6}
        return {**counts, "metrics": {**self.metrics, **told}}

    def newest(self) -> Mapping[str, Array]:
        """The merged weights."""
        return self.weights

    def stop(self) -> None:
        """Tell every group to end, when it next asks."""
        self.stopped = True
