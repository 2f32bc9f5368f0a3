"""Bootstrap intervals against a slow transcription, and curves on a common grid."""

from __future__ import annotations

import random
import tracemalloc

import numpy as np
import pytest

from shoal.display import statistics
from shoal.display.statistics import band, describe, improvement, interquartile_mean, interval, mean, stratified


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


def slow_interquartile_mean(scores):
    """Agarwal et al. 2021, arXiv:2108.13264, section 4.3: discard the bottom and top quarter, average the rest."""
    flat = sorted(score for run in scores for score in run)
    cut = int(0.25 * len(flat))
    kept = flat[cut : len(flat) - cut]
    return sum(kept) / len(kept)


def slow_improvement(scores, others):
    """The same section: over tasks, the mean of S(x, y), which is 1 if y < x, 1/2 if y = x, else 0."""
    tasks = []
    for task in range(len(scores[0])):
        total = 0.0
        for own in scores:
            for their in others:
                total += 1.0 if their[task] < own[task] else 0.5 if their[task] == own[task] else 0.0
        tasks.append(total / (len(scores) * len(others)))
    return sum(tasks) / len(tasks)


def slow_stratified(measure, *samples, resamples):
    """Section 4.1: for every task apart, as many runs as there are, drawn with replacement."""
    source = random.Random(5)
    found = []
    for _ in range(resamples):
        drawn = [
            [list(run) for run in zip(*(source.choices(column, k=len(column)) for column in zip(*sample, strict=True)),
                                      strict=True)]
            for sample in samples
        ]  # fmt: skip
        found.append(measure(*drawn))
    found.sort()
    return found[round(resamples * 0.025)], found[round(resamples * 0.975) - 1]


@pytest.mark.parametrize("shape", [(3, 1), (4, 1), (5, 3), (8, 4)])
def test_interquartile_mean_is_that_of_the_paper(shape):
    scores = np.random.default_rng(1).gamma(1.0, 10.0, size=(2, *shape))
    expected = [slow_interquartile_mean(part.tolist()) for part in scores]
    np.testing.assert_allclose(interquartile_mean(scores), expected)
    assert interquartile_mean(np.array([[0.0], [1.0], [2.0], [900.0]])) == 1.5


def test_probability_of_improvement_is_that_of_the_paper():
    source = np.random.default_rng(2)
    scores, others = source.integers(0, 4, size=(5, 3)), source.integers(1, 5, size=(4, 3))  # many are equal
    assert improvement(scores, others) == pytest.approx(slow_improvement(scores.tolist(), others.tolist()))
    assert improvement(scores, others) + improvement(others, scores) == pytest.approx(1)
    assert improvement(scores, scores) == 0.5
    assert improvement(scores + 10, others) == 1


@pytest.mark.parametrize("pairs", [False, True])
def test_stratified_intervals_are_those_of_the_paper(pairs):
    source = np.random.default_rng(4)
    samples = [source.normal(0.0, 1.0, size=(6, 3)) + 10 * np.arange(3)]
    samples += [source.normal(0.8, 1.0, size=(4, 3)) + 10 * np.arange(3)] if pairs else []
    fast, slow = (improvement, slow_improvement) if pairs else (interquartile_mean, slow_interquartile_mean)
    expected = slow_stratified(slow, *(sample.tolist() for sample in samples), resamples=3000)
    width = expected[1] - expected[0]
    found = stratified(fast, *samples)
    np.testing.assert_allclose(found, expected, atol=0.06 * width)  # two random draws
    assert found == stratified(fast, *samples)
    # Runs drawn from all tasks at once would vary by the tasks' distance: far more.
    assert width < 2


def test_chunks_change_no_stratified_interval(monkeypatch):
    sample = np.random.default_rng(0).normal(size=(5, 2))
    whole = stratified(mean, sample, resamples=1000)
    monkeypatch.setattr(statistics, "CHUNK", 777)
    np.testing.assert_allclose(stratified(mean, sample, resamples=1000), whole, atol=0.2)
    np.testing.assert_allclose(stratified(mean, sample[:, :1]), interval(sample[:, 0]), atol=0.05)


def test_one_run_is_no_sample():
    with pytest.raises(ValueError, match="two runs of each task"):
        stratified(mean, [[1.0, 2.0]])
    with pytest.raises(ValueError, match="two runs of each task"):
        stratified(improvement, [[1.0], [2.0]], [[1.0]])
