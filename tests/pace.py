"""How slow this machine is at the moment, so that time limits hold on a slower or a busier one."""

from __future__ import annotations

import time
from functools import cache

USUAL = 0.016  # seconds that the loop below takes on the machines the limits were chosen on


@cache
def slowness() -> float:
    """How many times longer this machine takes than usual, and at least 1; measured once in a process."""
    fastest = float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        sum(number * number for number in range(200_000))
        fastest = min(fastest, time.perf_counter() - begin)
    return max(fastest / USUAL, 1.0)


def seconds(limit: float) -> float:
    """A time limit that was chosen on a usual machine, as this one needs it."""
    return limit * slowness()
