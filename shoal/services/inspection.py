"""Looking over what workers send: numbers that are none, or that cannot be, are refused, counted and reported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from shoal.core.caller import caller
from shoal.core.errors import ShoalError
from shoal.core.tree import not_finite
from shoal.core.types import Array

ROW = 100  # refusals in a row, from whomever, after which the next is an error
LARGEST = 1e18  # of a priority: beyond it, sums of many lose the small ones, and then overflow


class Refusals:
    """Counts what was refused, by who sent it, and reports it now and then."""

    def __init__(self) -> None:
        """Begin with none."""
        self.total = self.row = 0
        self._counts: dict[str, int] = {}
        self._news: list[str] = []

    def add(self, what: str, reason: str) -> str:
        """Count something that the present caller sent; the first is reported, then every tenfold number.

        Where nothing else comes, going on would be waiting for ever: then it is an error of the caller's.
        """
        who = caller() or "someone"
        self.total, self.row = self.total + 1, self.row + 1
        self._counts[who] = count = self._counts.get(who, 0) + 1
        line = f"refused {what} of {who}: {reason}"
        if count == 10 ** (len(str(count)) - 1):
            self._news.append(line if count == 1 else f"{line} ({count:,} refused so far)")
        if self.row >= ROW:
            raise ShoalError(f"{line}; so were the {ROW} before, and nothing good came between them")
        return line

    def accept(self) -> None:
        """Take note that something good came."""
        self.row = 0

    def drain(self) -> list[str]:
        """What there is to report since the last call."""
        news, self._news = self._news, []
        return news


def items_problem(items: Mapping[str, Any], priority: Array | None, choices: int) -> str:
    """What is wrong with items of experience, empty if nothing; discrete actions lie below `choices`."""
    version = items["version"]
    if not isinstance(version, np.ndarray) or version.dtype.kind not in "iu" or version.ndim != 1 or not len(version):
        return "their versions are no list of whole numbers"
    if version.min() < 0:
        return f"version {version.min()} is negative"
    record = {name: np.isnan(value) for name, value in items.get("record", {}).items() if value.dtype.kind == "f"}
    for name, nan in record.items():  # an infinity may be meant, such as the score of an action that is not allowed
        if nan.any():
            return f"record.{name} holds nan"
    if problems := not_finite({key: value for key, value in items.items() if key != "record"}):
        return problems[0]
    action = items.get("action")
    if choices and action is not None:
        if action.dtype.kind not in "iu":
            return f"actions are {action.dtype}, and not one of {choices} choices"
        if action.size and (action.min() < 0 or action.max() >= choices):
            return f"an action lies outside 0 to {choices - 1}"
    return "" if priority is None else priority_problem(priority, len(version))


def priority_problem(priority: Array, count: int) -> str:
    """What is wrong with the priorities of so many items, empty if nothing."""
    if not isinstance(priority, np.ndarray) or priority.shape != (count,) or priority.dtype.kind not in "fiu":
        return f"priorities are not {count} numbers"
    # Written so that NaN is found too.
    if (np.abs(priority) <= LARGEST).all():
        return ""
    return next(iter(not_finite(priority, "priority")), f"a priority is above {LARGEST:g}")
