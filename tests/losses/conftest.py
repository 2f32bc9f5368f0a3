"""Random experience with every kind of ending."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest


class Experience(NamedTuple):
    """Arrays of [T, B], but value [T+1, B]; what a mask hides is large, to show where it leaks."""

    log_rho: np.ndarray
    discount: np.ndarray
    reward: np.ndarray
    value: np.ndarray
    mask: np.ndarray


def make(seed: int, length: int = 24, items: int = 16) -> Experience:
    """Draw episodes that terminate, are truncated, and are padded in a quarter of the items."""
    random = np.random.default_rng(seed)
    discount = np.ones((length, items))
    mask = np.ones((length, items))
    for item in range(items):
        over = False
        for t in range(length):
            if over:
                padded = item % 4 == 0
                mask[t : length if padded else t + 1, item] = 0
                if padded:
                    break
                over = False
                continue
            ending = random.choice(["none", "terminated", "truncated"], p=[0.75, 0.15, 0.1])
            over = ending != "none"
            discount[t, item] = 0.0 if ending == "terminated" else 1.0
    reward = random.normal(size=(length, items)) + 1e3 * (1 - mask)
    value = random.normal(size=(length + 1, items))
    log_rho = random.normal(size=(length, items))
    return Experience(log_rho, 0.9 * discount, reward, value, mask)


@pytest.fixture(params=range(5))
def experience(request: pytest.FixtureRequest) -> Experience:
    """Five different draws."""
    drawn = make(request.param)
    assert (drawn.mask == 0).any()
    assert (drawn.discount == 0).any()
    return drawn
