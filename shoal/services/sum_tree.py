"""Sums over many numbers, so that one can be drawn in proportion to its size."""

from __future__ import annotations

from typing import Any

import numpy as np

from shoal.core.sampling import strata
from shoal.core.types import Array

FAN = 16  # numbers under one sum: wide enough for few levels, narrow enough for short rows


class SumTree:
    """A sum tree of two levels of blocks under a row of tops; every step is one NumPy call for the whole batch."""

    def __init__(self, capacity: int) -> None:
        """Begin with zeros."""
        tops = -(-capacity // FAN**2)
        self.values = np.zeros((tops * FAN, FAN))
        self.blocks = np.zeros((tops, FAN))
        self.tops = np.zeros(tops)

    def set(self, index: Array, value: Array) -> None:
        """Set numbers; where an index comes twice, the last value stays."""
        self.values.reshape(-1)[index] = value
        block = index // FAN
        self.blocks.reshape(-1)[block] = self.values.take(block, axis=0).sum(1)
        top = block // FAN
        self.tops[top] = self.blocks.take(top, axis=0).sum(1)

    def get(self, index: Array) -> Array:
        """The numbers themselves."""
        return self.values.reshape(-1)[index]

    def total(self) -> float:
        """The sum of all."""
        return float(self.tops.sum())

    def draw(self, size: int, dice: Any = np.random) -> Array:
        """Draw in proportion to the numbers, one from each of `size` equal parts of the total (stratified)."""
        ends = self.tops.cumsum()
        place = strata(ends[-1], size, dice)
        top = np.minimum(ends.searchsorted(place, side="right"), len(ends) - 1)
        block, place = _within(self.blocks, top, place - ends[top] + self.tops[top])
        index, _ = _within(self.values, block, place)
        return index


def _within(rows: Array, which: Array, place: Array) -> tuple[Array, Array]:
    """Find the place in its row: the entry below which it lies, and how far into that entry."""
    row = rows.take(which, axis=0)
    ends = row.cumsum(1)
    entry = (ends <= place[:, None]).sum(1)
    beyond = entry == rows.shape[1]
    if beyond.any():  # rounding led past the last entry: take the last that is not empty
        entry[beyond] = rows.shape[1] - 1 - (row[beyond, ::-1] > 0).argmax(1)
    each = np.arange(len(entry))
    return which * rows.shape[1] + entry, place - ends[each, entry] + row[each, entry]
