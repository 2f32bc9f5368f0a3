"""How slow and how busy this machine is at the moment, so that time limits hold on a slower or a busier one."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

USUAL = 0.016  # seconds of core-time that the loop takes on the machines the limits were chosen on
MOST = 20.0  # a limit that is never reached limits nothing
EVERY = 5.0  # seconds for which a measurement counts as fresh
_measured: tuple[float, float] = (-EVERY, 1.0)  # when, and how slow


def slowness() -> float:
    """How many times longer things take here than on a usual machine with nothing else to do, at least 1."""
    global _measured
    if time.monotonic() - _measured[0] > EVERY:
        _measured = time.monotonic(), _measure()
    return _measured[1]


def _measure() -> float:
    """The core's own speed, times how many want a core: by the waiting seen here, or by the load of the last minute."""
    spent = lasted = float("inf")
    for _ in range(3):
        begin, used = time.perf_counter(), time.process_time()
        sum(number * number for number in range(200_000))
        spent, lasted = min(spent, time.process_time() - used), min(lasted, time.perf_counter() - begin)
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    return min(max(spent / USUAL, 1.0) * max(lasted / spent, load, 1.0), MOST)


def long(*values: Any, **options: Any) -> Any:
    """Parameters with which a test is run by `make test-all` only: others show the same in less time."""
    return pytest.param(*values, marks=pytest.mark.long, **options)


def seconds(limit: float) -> float:
    """A time limit that was chosen on a usual machine, as this one needs it now."""
    return limit * slowness()
