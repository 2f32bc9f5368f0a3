"""Checks of what workers send: data that is not finite or out of range is refused, counted and reported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shoal.core.caller import caller
from shoal.core.doing import Seldom
from shoal.core.errors import ShoalError
from shoal.core.tree import not_finite, to_numpy
from shoal.core.types import Array

ROW = 100  # refusals in a row, from any sender, that make the last of them an error
LARGEST = 1e18  # of a priority: beyond it, sums of many lose the small ones, and then overflow


class Refusals:
    """Counts what was refused, by sender, and reports it ever more rarely."""

    def __init__(self) -> None:
        """Begin with none."""
        self.total = self.row = 0
        self._senders: dict[str, Seldom] = {}
        self._news: list[str] = []

    def add(self, what: str, reason: str, sender: str = "") -> str:
        """Count a refusal of what the present caller sent, or earlier a sender, and return it in words.

        Where nothing valid comes in between, the run would wait for ever: then it is an error of the caller's.
        """
        who = sender or caller() or "someone"
        self.total, self.row = self.total + 1, self.row + 1
        line = f"refused {what} of {who}: {reason}"
        if (seldom := self._senders.setdefault(who, Seldom())).due():
            self._news.append(line if seldom.count == 1 else f"{line} ({seldom.count:,} refused so far)")
        if self.row >= ROW and not sender:
            raise ShoalError(f"{line}; {ROW} were refused in a row, with nothing valid in between")
        return line

    def accept(self) -> None:
        """Note that something valid was received."""
        self.row = 0

    def drain(self) -> list[str]:
        """What there is to report since the last call."""
        news, self._news = self._news, []
        return news


def items_problem(items: Mapping[str, Any], priority: Array | None, choices: Sequence[int]) -> str:
    """What is wrong with items of experience, empty if nothing.

    `choices` has the number of choices for each number of an action, 0 where it is continuous.
    """
    version = items["version"]
    if not isinstance(version, np.ndarray) or version.dtype.kind not in "iu" or version.ndim != 1 or not len(version):
        return "their versions are not a list of integers"
    if version.min() < 0:
        return f"version {version.min()} is negative"
    items = {key: value if key == "observation" else to_numpy(value) for key, value in items.items()}
    record = {name: np.isnan(value) for name, value in items.get("record", {}).items() if value.dtype.kind == "f"}
    for name, nan in record.items():  # an infinity may be intended, such as the logit of an action that is not allowed
        if nan.any():
            return f"record.{name} holds nan"
    if problems := not_finite({key: value for key, value in items.items() if key != "record"}):
        return problems[0]
    action = items.get("action")
    if any(choices) and action is not None and (problem := action_problem(action, choices)):
        return problem
    return "" if priority is None else priority_problem(priority, len(version))


def action_problem(action: Array, choices: Sequence[int]) -> str:
    """What is wrong with actions [T, B] or [T, B, K], empty if nothing."""
    if all(choices) and action.dtype.kind not in "iu":
        return f"actions are of type {action.dtype}, not integers below {max(choices)}"
    if len(choices) > 1 and action.shape[-1:] != (len(choices),):
        return f"actions of shape {action.shape} do not have {len(choices)} numbers each"
    for column, count in zip(action.reshape(-1, len(choices)).T, choices, strict=True):
        if count and column.size and (column.min() < 0 or column.max() >= count or (column % 1).any()):
            return f"an action lies outside 0 to {count - 1}"
    return ""


def priority_problem(priority: Array, count: int) -> str:
    """What is wrong with the priorities of `count` items, empty if nothing."""
    if not isinstance(priority, np.ndarray) or priority.shape != (count,) or priority.dtype.kind not in "fiu":
        return f"priorities are not {count} numbers"
    # Written so that NaN is found too.
    if (np.abs(priority) <= LARGEST).all():
        return ""
    return next(iter(not_finite(priority, "priority")), f"a priority is above {LARGEST:g}")
