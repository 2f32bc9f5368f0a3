"""What a sample of scores, or of curves, says about what is behind it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from shoal.core.types import Array

CHUNK = 1 << 20  # numbers drawn at once: 8 MB


def interval(values: ArrayLike, level: float = 0.95, resamples: int = 10_000, seed: int = 0) -> tuple[float, float]:
    """The percentile bootstrap interval of the mean (Efron & Tibshirani 1993, section 13.3)."""
    sample = np.asarray(values, np.float64).ravel()
    if not sample.size:
        raise ValueError("an interval needs at least one value")
    low, high = _bootstrap(sample[:, None], level, resamples, seed)
    return float(low[0]), float(high[0])


def describe(scores: ArrayLike) -> dict[str, Any]:
    """Episodes, mean, its 95 % interval (low, high), median, std (dividing by their number), min, max."""
    sample = np.asarray(scores, np.float64).ravel()
    low, high = interval(sample)
    return {
        "episodes": sample.size,
        "mean": float(sample.mean()),
        "median": float(np.median(sample)),
        "low": low,
        "high": high,
        "std": float(sample.std()),
        "min": float(sample.min()),
        "max": float(sample.max()),
    }


def interquartile_mean(scores: Array) -> Array:
    """The mean of the middle half of scores [..., runs, tasks], over both (Agarwal et al. 2021, arXiv:2108.13264, 4.3).

    A quarter of them, rounded down, is left out at either end: below four scores it is the mean.
    """
    ordered = np.sort(scores.reshape(*scores.shape[:-2], -1), axis=-1)
    cut = ordered.shape[-1] // 4
    return np.asarray(ordered[..., cut : ordered.shape[-1] - cut].mean(axis=-1))


def mean(scores: Array) -> Array:
    """The mean of scores [..., runs, tasks] over both."""
    return np.asarray(scores.mean(axis=(-2, -1)))


def improvement(scores: Array, others: Array) -> Array:
    """How likely a run of one kind [..., runs, tasks] beats one of another [..., other runs, tasks], over the tasks.

    Agarwal et al. 2021, arXiv:2108.13264, section 4.3, the statistic of Mann and Whitney: an equal score counts half.
    """
    own, their = scores[..., :, None, :], others[..., None, :, :]
    return np.asarray(((own > their) + 0.5 * (own == their)).mean(axis=(-3, -2, -1)))


def stratified(
    measure: Callable[..., Array],
    *samples: ArrayLike,
    level: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> tuple[float, float]:
    """The percentile interval of a measure of samples [runs, tasks] by the stratified bootstrap.

    Agarwal et al. 2021, arXiv:2108.13264, section 4.1: runs are drawn anew for each task apart from the others, and for
    each sample apart from the others.
    """
    scores = [np.asarray(sample, np.float64) for sample in samples]
    if any(sample.ndim != 2 or len(sample) < 2 for sample in scores):
        raise ValueError("an interval needs two runs of each task at least")
    random = np.random.default_rng(seed)
    # Two samples are compared pair by pair.
    together = max(1, CHUNK // math.prod(len(sample) for sample in scores) // scores[0].shape[1])
    found = []
    for start in range(0, resamples, together):
        count = min(together, resamples - start)
        drawn = [
            np.take_along_axis(sample[None], random.integers(len(sample), size=(count, *sample.shape)), axis=1)
            for sample in scores
        ]
        found.append(measure(*drawn))
    low, high = np.quantile(np.concatenate(found), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def band(curves: Sequence[tuple[ArrayLike, ArrayLike]], points: int = 200) -> tuple[Array, Array, Array, Array]:
    """Steps, mean, low and high: the mean of several curves, each of (steps, values), with its 95 % interval.

    Curves are interpolated linearly onto a common grid. It runs from the largest of their first steps to the
    smallest of their last ones: where curves have different lengths, the longer are cut, since a mean over
    fewer of them would jump. Where they have no step in common that is an error.
    """
    if not curves:
        raise ValueError("a band needs at least one curve")
    ordered = [_ordered(steps, values) for steps, values in curves]
    start, end = max(steps[0] for steps, _ in ordered), min(steps[-1] for steps, _ in ordered)
    if start > end:
        raise ValueError(f"the curves have no step in common: one begins at {start:g}, another ends at {end:g}")
    grid = np.linspace(start, end, points if start < end else 1)
    values = np.array([np.interp(grid, *curve) for curve in ordered])  # [curves, points]
    return grid, values.mean(axis=0), *_bootstrap(values)


def _ordered(steps: ArrayLike, values: ArrayLike) -> tuple[Array, Array]:
    """A curve with rising steps."""
    across, along = np.asarray(values, np.float64), np.asarray(steps, np.float64)
    if not along.size or along.shape != across.shape:
        raise ValueError(f"a curve needs as many values as steps, and one at least: {along.shape}, {across.shape}")
    order = np.argsort(along, kind="stable")
    return along[order], across[order]


def _bootstrap(values: Array, level: float = 0.95, resamples: int = 10_000, seed: int = 0) -> tuple[Array, Array]:
    """Low and high [points] of the mean along axis 0 of values [sample, points]."""
    if not 0 < level < 1:
        raise ValueError(f"the level must lie between 0 and 1, not at {level}")
    size, points = values.shape
    random = np.random.default_rng(seed)
    means = np.empty((resamples, points))
    together = max(1, CHUNK // values.size)
    for start in range(0, resamples, together):
        chunk = means[start : start + together]
        chunk[:] = values[random.integers(size, size=(len(chunk), size))].mean(axis=1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2], axis=0)
    alike = values.min(axis=0) == values.max(axis=0)  # where sums would only add rounding errors
    return np.where(alike, values[0], low), np.where(alike, values[0], high)
