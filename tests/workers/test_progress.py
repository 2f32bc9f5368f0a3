"""How a learner reports: often enough to be followed, and never for long."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from shoal.workers import progress
from shoal.workers.progress import GAP, LONGEST, Progress, Reports


class Slow:
    """A journal whose answers take some time, by a clock that nothing else moves."""

    def __init__(self) -> None:
        self.now, self.takes = 100.0, 0.0
        self.reports: list[tuple[float, int, Mapping[str, float]]] = []

    def monotonic(self) -> float:
        return self.now

    def learned(self, steps: int, updates: int, metrics: Mapping[str, float]) -> bool:
        self.reports.append((self.now, steps, dict(metrics)))
        self.now += self.takes
        return steps >= 10_000


@pytest.fixture
def journal(monkeypatch: pytest.MonkeyPatch) -> Slow:
    slow = Slow()
    monkeypatch.setattr(progress, "time", slow)
    return slow


def report_for(seconds: float, reports: Reports, journal: Slow) -> int:
    """Update every millisecond; returns the number of reports."""
    before, until, steps = len(journal.reports), journal.now + seconds, 0
    while journal.now < until:
        journal.now += 0.001
        steps += 1
        reports.learned(Progress(steps=steps), {"loss": float(steps)}, urgent=False)
    return len(journal.reports) - before


@pytest.mark.parametrize("takes", [0.0001, 0.01, 0.035, 0.2])
def test_reports_take_a_small_share_of_the_time_however_slow_they_are(takes: float, journal: Slow) -> None:
    journal.takes = takes
    reports = Reports(journal, exact=False)
    count = report_for(20.0, reports, journal)
    assert count * takes <= 0.2 * 20 if takes > LONGEST / 20 else count * takes <= 0.06 * 20
    assert count >= 15  # at least about one a second
    if takes < GAP / 20:
        assert count > 800  # a fast one is sent at every gap


def test_reports_hold_the_means_of_all_updates_since_the_last(journal: Slow) -> None:
    reports = Reports(journal, exact=False)
    reports.learned(Progress(), {"loss": 1.0}, urgent=False)
    for loss in (2.0, 4.0):
        reports.learned(Progress(), {"loss": loss}, urgent=False)
    journal.now += 2 * GAP
    reports.learned(Progress(), {"loss": 6.0}, urgent=False)
    assert [metrics["loss"] for _, _, metrics in journal.reports] == [1.0, 4.0]


def test_what_is_urgent_or_in_lockstep_is_reported_at_once(journal: Slow) -> None:
    journal.takes = 0.5
    reports = Reports(journal, exact=False)
    reports.learned(Progress(), {}, urgent=False)
    assert not reports.learned(Progress(steps=20_000), {}, urgent=False)
    assert reports.learned(Progress(steps=20_000), {}, urgent=True)
    exact = Reports(journal, exact=True)
    before = len(journal.reports)
    for _ in range(5):
        exact.learned(Progress(), {}, urgent=False)
    assert len(journal.reports) == before + 5
