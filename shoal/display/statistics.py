"""What a sample of scores, or of curves, says about the mean behind it."""

from __future__ import annotations

from collections.abc import Sequence
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
