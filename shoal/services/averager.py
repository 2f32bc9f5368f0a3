"""Merges what groups of workers have learned apart: an average of their changes, in which stale ones count less."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.core.codec import Codec, Receiver, Sender
from shoal.core.errors import ShoalError
from shoal.core.moments import at, found_in, merge, named
from shoal.core.tree import not_finite
from shoal.core.types import Array
from shoal.services.inspection import Refusals

ACTIVE = 4  # rounds of merges after which a group that sent nothing no longer counts
LARGEST = 1e4  # by which a weight may change in one round: no network learns in such steps


@dataclass
class Member:
    """A group: what it has sent in all, and how much its last change weighed."""

    life: int  # how many groups had joined before it
    receiver: Receiver
    sum: dict[str, Array]
    raw: float | None = None  # None: it has not merged yet
    merged: int = 0  # the version that its last change led to


class Averager:
    """θ ← θ + wᵢ Δᵢ whenever group i sends its change Δᵢ, with wᵢ ∝ stepsᵢ / (1 + stalenessᵢ).

    The staleness of a change is the number of merges since the weights it began from; the weights wᵢ of the groups that
    are at work, each by its last change, sum to 1, so that one round of all groups adds an average. A group that has
    not merged yet counts like the one that does. Running moments are no weights: those of new samples are merged in
    whole, and nothing is averaged.
    """

    def __init__(
        self,
        weights: Mapping[str, Array],
        codec: Codec,
        steps: int = 0,
        updates: int = 0,
        most: int | None = None,
    ) -> None:
        """Begin with these weights and counts; a change that claims more than `most` steps is refused."""
        self.weights = {name: np.array(array) for name, array in weights.items()}
        self.moments, self.most = found_in(weights), most
        self.sender = Sender(codec)
        self.version, self.steps, self.updates = 0, steps, updates
        self.members: dict[str, Member] = {}
        self.metrics: dict[str, float] = {}
        self.refusals = Refusals()
        self.joined = 0
        self.received = self.sent = 0  # bytes of weights
        self.stopped = False
        self.sender.publish(self.version, self.weights)

    def join(self, group: str) -> Mapping[str, Any]:
        """Admit a group that begins, or begins again, and return all weights."""
        zeros = {name: np.zeros_like(array) for name, array in self.weights.items()}
        self.members[group] = Member(self.joined, Receiver(self.weights), zeros, merged=self.version)
        self.joined += 1
        return {**self._answer(-1), "life": self.joined - 1}

    def merge(
        self, group: str, life: int, version: int, steps: int, updates: int, message: Any, metrics: Mapping[str, float]
    ) -> Mapping[str, Any]:
        """Merge a group's change since a version, sent as the sum of all its changes, and return the newest weights.

        A group that has begun again elsewhere counts from zero, so what its former life still sends no longer applies.
        An invalid change alters nothing: the answer has the reason under `refused`, and the group should join again.
        """
        if (member := self.members.get(group)) is None or member.life != life:
            raise ShoalError(f"{group} has not joined, or has begun again since")
        try:
            self._check(version, steps, updates, metrics)
            whole: Any = member.receiver.take(message)
            raw = steps / (1 + self.version - version)
            share, merged = self._merged(member, whole, raw)
        except ShoalError as error:
            return {"refused": self.refusals.add("a change", str(error))}
        self.received += sum(link.nbytes for link in message["links"])
        self.refusals.accept()
        self.weights = merged
        member.raw, member.merged = raw, self.version + 1
        member.sum = {name: np.array(array) for name, array in whole.items()}
        self.version, self.steps, self.updates = self.version + 1, self.steps + steps, self.updates + updates
        self.metrics = {**metrics, "staleness": float(self.version - 1 - version), "share": float(share)}
        self.sender.publish(self.version, self.weights)
        return self._answer(version)

    def _check(self, version: Any, steps: Any, updates: Any, metrics: Any) -> None:
        """Refuse impossible counts and metrics."""
        for name, value in (("version", version), ("steps", steps), ("updates", updates)):
            if type(value) is not int or value < 0:
                raise ShoalError(f"{name} is {value!r}, not an integer of at least 0")
        if version > self.version:
            raise ShoalError(f"version {version} does not exist yet: the newest is {self.version}")
        if self.most is not None and steps > self.most:
            raise ShoalError(f"{steps:,} steps are more than a change can have: {self.most:,}")
        for name, value in metrics.items():
            if type(value) not in (int, float) or not math.isfinite(value):
                raise ShoalError(f"metric {name} is {value!r}, not a finite number")

    def _merged(self, member: Member, whole: Mapping[str, Array], raw: float) -> tuple[float, dict[str, Array]]:
        """The share of a change, and the weights with it."""
        active = [each for each in self.members.values() if each.merged >= self.version - ACTIVE * len(self.members)]
        others = sum(raw if each.raw is None else each.raw for each in active if each is not member)
        share = raw / max(raw + others, 1e-9)
        merged: dict[str, Array] = {}
        for prefix in self.moments:
            merged |= self._with_moments(prefix, whole)
        for name, array in self.weights.items():
            if name in merged:
                continue
            change = whole[name] - member.sum[name]
            if array.dtype.kind == "f":
                if not (np.abs(change) <= LARGEST).all():  # NaN among them
                    largest = f"{name} changed by {np.abs(change).max():.3g} in a round"
                    raise ShoalError(next(iter(not_finite(change, name)), largest))
                merged[name] = array + (share * change).astype(array.dtype)
            else:  # counts
                merged[name] = array + change
        return share, merged

    def _with_moments(self, prefix: str, whole: Mapping[str, Array]) -> dict[str, Array]:
        """The running moments under a name, with those of the samples that a group saw since it last merged."""
        now, seen = at(self.weights, prefix), at(whole, prefix)
        if problems := not_finite(named(prefix, seen)):
            raise ShoalError(problems[0])
        if seen.count < 0 or (seen.var < 0).any():
            raise ShoalError(f"{prefix}: a count or a variance is negative")
        new = named(prefix, merge(now, seen) if seen.count else now)
        return {name: np.asarray(value) for name, value in new.items()}

    def _answer(self, held: int) -> Mapping[str, Any]:
        message = self.sender.message(held)
        self.sent += sum(link.nbytes for link in message["links"])
        return {"message": message, "steps": self.steps, "stop": self.stopped}

    def status(self) -> Mapping[str, Any]:
        """How far all groups together have come, the metrics of the last change, and what was refused since."""
        counts = {"version": self.version, "steps": self.steps, "updates": self.updates}
        traffic = {"received_mb": self.received / 1e6, "sent_mb": self.sent / 1e6}
        return {**counts, "metrics": {**self.metrics, **traffic}, "refused": self.refusals.drain()}

    def newest(self) -> Mapping[str, Array]:
        """The merged weights."""
        return self.weights

    def stop(self) -> None:
        """Ask every group to end, in the next answer to it."""
        self.stopped = True
