"""Bootstrap intervals against a slow transcription, and curves on a common grid."""

from __future__ import annotations

import random
import tracemalloc

import numpy as np
import pytest

from shoal.display import statistics
from shoal.display.statistics import band, describe, interval


def slow_interval(values, level, resamples):
    """Efron & Tibshirani 1993, section 13.3, word by word."""
    source = random.Random(1)
    means = sorted(sum(source.choices(values, k=len(values))) / len(values) for _ in range(resamples))
    tail = (1 - level) / 2
    return means[round(resamples * tail)], means[round(resamples * (1 - tail)) - 1]


@pytest.mark.parametrize("level", [0.5, 0.95])
def test_interval_is_that_of_the_book(level):
    values = np.random.default_rng(3).gamma(1.0, 10.0, size=12).tolist()
    expected = slow_interval(values, level, 20_000)
    width = expected[1] - expected[0]
    np.testing.assert_allclose(interval(values, level), expected, atol=0.03 * width)  # two random draws
    assert interval(values, level) == interval(values, level)
    assert interval(values, level) != interval(values, level, seed=1)


def test_many_values_give_the_normal_interval():
    values = np.random.default_rng(0).normal(5.0, 2.0, size=2000)
    half = 1.96 * values.std() / np.sqrt(2000)
    np.testing.assert_allclose(interval(values), [values.mean() - half, values.mean() + half], atol=0.1 * half)


def test_chunks_change_nothing(monkeypatch):
    values = np.arange(50.0)
    whole = interval(values, resamples=1000)
    monkeypatch.setattr(statistics, "CHUNK", 777)
    assert interval(values, resamples=1000) == whole
    monkeypatch.setattr(statistics, "CHUNK", 1)
    assert interval(values, resamples=1000) == whole


def test_memory_stays_small():
    values = np.random.default_rng(0).normal(size=10_000)
    tracemalloc.start()
    interval(values, resamples=1000)  # 80 MB, drawn at once
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 40e6


def test_small_samples():
    assert interval([7]) == (7.0, 7.0)
    assert interval([0.1] * 3) == (0.1, 0.1)  # whose mean is a little more
    with pytest.raises(ValueError, match="at least one value"):
        interval([])
    for level in (0, 1, 95):
        with pytest.raises(ValueError, match=f"between 0 and 1, not at {level}"):
            interval([1, 2], level)


def test_describe():
    told = describe([1, 2, 3, 10])
    low, high = interval([1, 2, 3, 10])
    assert told == {
        "episodes": 4,
        "mean": 4.0,
        "median": 2.5,
        "low": low,
        "high": high,
        "std": pytest.approx(12.5**0.5),
        "min": 1.0,
        "max": 10.0,
    }
    assert 1 <= low < 4 < high <= 10
    assert {type(value) for value in told.values()} == {int, float}
    assert describe([3])["std"] == 0.0
    with pytest.raises(ValueError, match="at least one"):
        describe([])


def test_band_keeps_what_all_curves_cover():
    long, short = ([0, 100, 200], [0, 10, 20]), ([50, 150], [15, 25])
    steps, mean, low, high = band([long, short], points=3)
    assert steps.tolist() == [50, 100, 150]
    assert mean.tolist() == [10, 15, 20]  # of 5, 10, 15 and 15, 20, 25
    assert low.tolist() == [5, 10, 15]  # with two curves a quarter of the draws takes one of them twice
    assert high.tolist() == [15, 20, 25]


def test_band_is_the_interval_at_every_point():
    values = np.random.default_rng(0).normal(size=(6, 4))
    steps, mean, low, high = band([(range(4), row) for row in values], points=4)
    assert steps.tolist() == [0, 1, 2, 3]
    np.testing.assert_allclose(mean, values.mean(axis=0))
    expected = [interval(column) for column in values.T]
    np.testing.assert_allclose(np.stack([low, high], axis=1), expected)


def test_band_of_one_curve_and_of_one_point():
    steps, mean, low, high = band([([20, 10], [2, 1])])  # in any order
    assert len(steps) == 200
    np.testing.assert_allclose(mean, steps / 10)
    np.testing.assert_array_equal(low, mean)
    np.testing.assert_array_equal(high, mean)
    steps, mean, _, _ = band([([5], [1]), ([5], [3])])
    assert (steps.tolist(), mean.tolist()) == ([5], [2])


@pytest.mark.parametrize(
    ("curves", "words"),
    [
        ([], "at least one curve"),
        ([([0, 1], [0, 1]), ([2, 3], [0, 1])], "no step in common: one begins at 2, another ends at 1"),
        ([([], [])], "one at least"),
        ([([1, 2], [1])], "as many values as steps"),
    ],
)
def test_bad_curves(curves, words):
    with pytest.raises(ValueError, match=words):
        band(curves)
