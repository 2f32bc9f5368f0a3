"""Where learners average their gradients: each puts its own for a round, and takes the mean of all."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shoal.core.caller import caller
from shoal.core.errors import Refused
from shoal.core.types import Array, immutable

NUMBERS = 1000  # that a member may send beside its gradient


class Reduction:
    """The mean over the members' vectors, round by round; it does not depend on who came first.

    A vector that holds anything but finite numbers spoils its round for all members alike: none of them may learn from
    it. A member is known by the name under which it calls.
    """

    def __init__(self, members: Sequence[str]) -> None:
        """Wait for vectors of these members, the first of which leads."""
        self.members = [*members]
        self.opening: Mapping[str, Any] | None = None  # what all members begin with
        self.size = 0  # of a vector
        self.round = 0  # the one that is open
        self.parts: dict[str, tuple[Array, Mapping[str, float]]] = {}
        self.mean: Mapping[str, Any] = {}  # of the round before

    def begin(self, size: int, opening: Mapping[str, Any]) -> None:
        """Open the first round of vectors of this size, from the state that the leader gives to all."""
        self._member(lead=True)
        if type(size) is not int or size < 1:
            raise Refused(f"vectors of {size!r:.60} numbers are refused: it must be an integer of at least 1")
        self.size, self.opening = size, opening
        self.round, self.mean = 0, {}
        self.parts.clear()

    def state(self) -> Mapping[str, Any] | None:
        """What the leader began with; None: it has not yet."""
        return self.opening

    def put(self, round_: int, vector: Array, numbers: Mapping[str, float]) -> bool:
        """Add a member's vector to the open round, and numbers whose means are wanted too."""
        name = self._member()
        if round_ != self.round or self.opening is None:
            raise Refused(f"a gradient of {name} for round {round_!r:.60} is refused: round {self.round} is open")
        if not isinstance(vector, np.ndarray) or vector.dtype != np.float32 or vector.shape != (self.size,):
            raise Refused(f"a gradient of {name} is refused: it must have {self.size:,} numbers of type float32")
        if len(numbers) > NUMBERS or not all(type(number) is float for number in numbers.values()):
            raise Refused(f"the numbers beside the gradient of {name} are refused: at most {NUMBERS}, each a float")
        self.parts[name] = np.array(vector), dict(numbers)
        if len(self.parts) == len(self.members):
            self._close()
        return True

    @immutable
    def take(self, round_: int) -> Mapping[str, Any] | None:
        """The means over all members, without a `vector` if the round was spoiled; None: not all have come yet."""
        return self.mean if round_ == self.round - 1 else None

    def _close(self) -> None:
        """Average the vectors in the order of the members, whoever came first."""
        vectors = [self.parts[name][0] for name in self.members]
        numbers = [self.parts[name][1] for name in self.members]
        self.round, self.mean = self.round + 1, {"numbers": means(numbers)}
        self.parts.clear()
        total = vectors[0]
        for vector in vectors[1:]:
            total += vector
        total /= len(vectors)
        if np.isfinite(total).all():
            self.mean = {**self.mean, "vector": total}

    def _member(self, lead: bool = False) -> str:
        name = caller()
        if name not in (self.members[:1] if lead else self.members):
            raise Refused(f"{name or 'someone'} has no part in the reduction of {', '.join(self.members)}")
        return name


def means(numbers: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each number that all have, if it is finite for all."""
    shared = [name for name in numbers[0] if all(name in each for each in numbers)]
    found = {name: sum(each[name] for each in numbers) / len(numbers) for name in shared}
    return {name: value for name, value in found.items() if math.isfinite(value)}
