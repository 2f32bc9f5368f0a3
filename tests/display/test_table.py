"""A run as a table."""

from __future__ import annotations

import pytest

from shoal.core.errors import ShoalError
from shoal.display.table import table


def row(episodes, **metrics):
    """A row of metrics.jsonl: ten steps and one second per episode."""
    return {
        "kind": "train",
        "episodes": episodes,
        "steps": 10 * episodes,
        "seconds": float(episodes),
        "time": 0.0,
        "return": float(episodes),
        "length": 10.0,
        "metrics": metrics,
    }


def test_means_are_over_the_last_hundred_episodes():
    rows = [row(count, q=float(count), epsilon=1 / count) for count in range(1, 301)]
    found = table([{"kind": "evaluation", "steps": 5}, *rows], every=150)
    assert [one["episode"] for one in found] == [149, 299, 300]
    assert found[1]["q"] == pytest.approx(sum(range(200, 300)) / 100)
    assert found[1]["epsilon"] == 1 / 299
    assert [one["seconds"] for one in found] == [149, 150, 1]


def test_columns_are_those_that_the_run_has():
    (found,) = table([row(1), row(2)], every=10)
    assert [*found] == ["episode", "step", "return", "length", "seconds", "time"]


def test_a_long_run_has_about_twenty_rows():
    assert 20 <= len(table([row(count) for count in range(1, 1001)])) <= 21


def test_a_run_without_episodes_is_refused():
    with pytest.raises(ShoalError, match="no episode has ended"):
        table([row(0)])
