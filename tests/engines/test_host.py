"""How a worker is driven."""

from __future__ import annotations

import pytest

from shoal.core.types import Work
from shoal.engines import host
from shoal.engines.host import LATENESS, LONGEST, SHORTEST, Host


class Clock:
    """Time that passes only while a worker waits, and the pauses it made."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pauses: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def process_time(self) -> float:
        return 0.0

    def wait(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds

    def ring(self) -> None: ...


@pytest.mark.parametrize("waits", [[0.2] * 2, [0.2, 0.001, 0.001], [1.0, 0.2, 0.2], [0.0, 0.2]])
def test_who_waited_long_looks_rarely_and_is_never_late_by_much(
    waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    looks: list[int] = []
    late: list[float] = []

    def work() -> Work:
        for seconds in waits:
            begun, count = clock.now, 0
            while clock.now < begun + seconds:
                count += 1
                yield False
            looks.append(count)
            late.append(clock.now - begun - seconds)
            yield True

    monkeypatch.setattr(host, "time", clock)
    driven = Host("worker")
    driven.bell, driven.work = clock, work()  # type: ignore[assignment]
    driven.drive()
    assert all(SHORTEST <= pause <= LONGEST for pause in clock.pauses)
    before = 0.0
    for lateness, seconds in zip(late, waits, strict=True):
        assert lateness <= max(LATENESS * max(seconds, before), SHORTEST) + 1e-9
        before = seconds + lateness
    for first, second, count in zip(waits, waits[1:], looks[1:], strict=False):
        if 0 < second <= first:
            assert count <= 1 / LATENESS + 1
