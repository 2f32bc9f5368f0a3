"""Draws in proportion to numbers, and the weights that correct for them."""

from __future__ import annotations

from typing import Any

import numpy as np

from shoal.core.types import Array


def strata(total: float, size: int, dice: Any) -> Array:
    """A place in each of `size` equal parts of a total."""
    places: Array = (np.arange(size) + dice.random_sample(size)) * (total / size)
    return places


def importance(relative: Array, beta: float) -> Array:
    """Weights of at most 1 for items whose chances are these, as multiples of a uniform draw's."""
    rare = relative**-beta  # arXiv:1511.05952, section 3.4
    weights: Array = (rare / rare.max()).astype(np.float32)
    return weights
