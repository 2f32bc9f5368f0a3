"""A mixture of stores: how much of each batch comes from which, and how its items are chosen and kept."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Literal, Self

from pydantic import Field, model_validator

from shoal.core.settings import Replaying, Schedule, Settings

ROUNDING = 1e-6  # by which fractions may miss a sum of 1: thirds are written with as many digits as people like
CAPACITY = 1_000  # items of a replay part that says nothing else
NAME = re.compile(r"[a-z][a-z0-9_]*")  # of a part: it appears in metrics and in checkpoints
BY_ITEM = ("key", "version", "weight", "fresh", "part", "uses")  # [N]; all else in a batch has time before the items
KEPT = ("capacity", "minimum", "compress", "save")
CHOSEN = (*KEPT, "distance", "norm", "strategy", "candidates", "insertion", "contenders")
# The settings that each kind of part has, besides its kind and fraction.
KINDS: dict[str, tuple[str, ...]] = {
    "queue": ("capacity", "when_full"),
    "uniform": KEPT,
    "prioritized": (*KEPT, "alpha"),
    "attentive": CHOSEN,
    "elite": CHOSEN,
}


class Part(Settings):
    """One store of a mixture."""

    kind: Literal["queue", "uniform", "prioritized", "attentive", "elite"] = Field(
        description="queue: fresh experience, each item once; the others keep it and draw it again: at random, by "
        "priority, near to the newest state, or near to what the present network makes of it."
    )
    fraction: float = Field(gt=0, le=1, description="Share of each batch; those of all parts add up to 1.")
    capacity: int | None = Field(
        None, ge=1, description="Most items; null: 1,000, or for the queue the setting `queue` times its items a batch."
    )
    when_full: Literal["wait", "keep_latest", "keep_oldest", "alternate"] = Field(
        "wait",
        description="What a full queue does: actors wait, the oldest items make room, new ones are dropped, or both in "
        "turn.",
    )
    minimum: int | None = Field(
        None, ge=1, description="Items before the first draw; null: as many as this part gives to a batch."
    )
    alpha: float = Field(0.6, gt=0, le=1, description="How much priorities count in a draw; prioritized only.")
    distance: Literal["ln_norm", "cosine", "kl"] = Field(
        "ln_norm", description="How the distance of features is measured; kl: of their softmax."
    )
    norm: float = Field(2.0, ge=1, description="The p of the p-norm that `ln_norm` is.")
    strategy: Literal[1, 2, 3, 4] = Field(
        1,
        description="1: the nearest candidates; 2: the nearest of each of as many groups of like distance; 3 and 4: "
        "the same, but those chosen least often so far come first.",
    )
    # AAAI-20, "Attentive Experience Replay": λ goes down to 1 in equal steps.
    candidates: Schedule = Field(
        Schedule(start=6.0, end=1.0), description="Candidates per item that is chosen, λ; 1: all are taken."
    )
    insertion: Literal["oldest", "elite"] = Field(
        "oldest", description="What makes room in a full store: the oldest item, or the farthest of some `contenders`."
    )
    contenders: int = Field(20, ge=1, description="Random items of which elite insertion overwrites the farthest.")
    compress: bool = Field(False, description="Compress images with LZ4: a fraction of the memory, slower draws.")
    save: bool = Field(False, description="Save the items in checkpoints too; lockstep always does.")

    @model_validator(mode="after")
    def _fits_kind(self) -> Self:
        """Refuse what this kind would not read, so that nobody believes it has an effect."""
        for name, field in type(self).model_fields.items():
            if name not in ("kind", "fraction", *KINDS[self.kind]) and getattr(self, name) != field.default:
                raise ValueError(f"a part of kind {self.kind} has no {name}; it has: {', '.join(KINDS[self.kind])}")
        if not (math.isfinite(self.candidates.start) and min(self.candidates.start, self.candidates.end or 1.0) >= 1):
            raise ValueError(f"candidates {self.candidates.start:g}: at least 1 for each item that is chosen")
        if self.minimum is not None and self.minimum > self.room:
            raise ValueError(f"minimum {self.minimum} is never reached: capacity is {self.room}")
        return self

    @property
    def room(self) -> int:
        """Most items of a part that keeps them."""
        return self.capacity or CAPACITY

    @property
    def selects(self) -> bool:
        """Whether the learner chooses among candidates, by distances."""
        return self.kind in ("attentive", "elite")

    def replaying(self, count: int) -> Replaying:
        """The settings of the replay in which it keeps its items, of which a batch gets `count`."""
        return Replaying(
            capacity=self.room,
            minimum=self.minimum or min(count, self.room),
            alpha=self.alpha if self.kind == "prioritized" else 0.0,
            compress=self.compress,
        )


Mixing = Mapping[str, Part]


def ordered(parts: Mixing) -> list[str]:
    """The names of the parts, whatever order they were given in: the queue, then the others by name."""
    return sorted(parts, key=lambda name: (parts[name].kind != "queue", name))


def queue_of(parts: Mixing) -> str:
    """The name of the part for fresh experience."""
    return ordered(parts)[0]


def keeps_features(parts: Mixing | None) -> bool:
    """Whether actors must record the features that their network saw."""
    return any(part.kind == "elite" for part in (parts or {}).values())


def shares(parts: Mixing, size: int) -> dict[str, int]:
    """How many of `size` items each part gives, by largest remainder.

    Each gets its exact share rounded down, and what is left goes one by one to those that lost most; between equals,
    to the first by name.
    """
    exact = {name: parts[name].fraction * size for name in sorted(parts)}
    whole = {name: math.floor(share + ROUNDING) for name, share in exact.items()}
    by_loss = sorted(exact, key=lambda name: (whole[name] - exact[name], name))
    for name in by_loss[: size - sum(whole.values())]:
        whole[name] += 1
    return whole


def problem_of(parts: Mixing, size: int, envs: int = 0, measurable: bool = True) -> str:
    """Why no batch of `size` items can be mixed from these parts, with the place, empty if one can.

    An actor puts `envs` items at once, 0 where that is not known yet; distances may not be `measurable`.
    """
    if wrong := [name for name in parts if not NAME.fullmatch(name)]:
        return f": {wrong[0]!r} is not a name for a part: use small letters, digits and _, such as old"
    queues = [name for name, part in parts.items() if part.kind == "queue"]
    if len(queues) != 1:
        found = f"{' and '.join(queues)} are" if queues else "none is"
        return f": exactly one part must be of kind queue, where fresh experience comes in and sets the pace; {found}"
    if abs((total := sum(part.fraction for part in parts.values())) - 1) > ROUNDING:
        listed = " + ".join(f"{part.fraction:g} ({name})" for name, part in parts.items())
        return f": the fractions {listed} add up to {total:g}, not to 1"
    counts = shares(parts, size)
    for name, part in parts.items():
        if not counts[name]:
            return (
                f".{name}: gets no item: {part.fraction:g} of a batch of {size}, shared in whole items by largest "
                "remainder: raise its fraction, or algorithm.batch"
            )
        if part.kind != "queue" and part.room < envs:
            return f".{name}.capacity {part.room}: the {envs} items of one actor do not fit"
        if part.selects and not measurable:
            return f".{name}: this algorithm has no features to measure distances by: use kind uniform or prioritized"
    return ""
