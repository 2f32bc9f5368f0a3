"""Moments that are merged and taken apart, against those of all samples at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shoal.core.moments import Moments, at, found_in, merge, named, without


def moments(samples: Any) -> Moments:
    """Those of samples [n, ...], by NumPy."""
    return Moments(np.float64(len(samples)), samples.mean(0), samples.var(0))


def close(found: Moments, expected: Moments) -> None:
    for one, two in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("offset", [0.0, 1e3])
def test_merging_gives_the_moments_of_all_samples_and_taking_apart_those_of_the_rest(offset: float) -> None:
    random = np.random.default_rng(0)
    old, new = random.normal(offset, 3, (500, 2)), random.normal(offset + 7, 0.5, (20, 2))
    both = merge(moments(old), moments(new))
    close(both, moments(np.concatenate([old, new])))
    found = without(both, moments(old))
    np.testing.assert_allclose(found.count, 20)
    np.testing.assert_allclose(found.mean, new.mean(0), rtol=1e-8)
    np.testing.assert_allclose(found.var, new.var(0), rtol=1e-4)


def test_nothing_between_two_looks_is_nothing() -> None:
    some = moments(np.ones((4, 2)))
    assert without(some, some).count == 0


def test_a_variance_never_falls_below_zero() -> None:
    """What two workers did to memory that they share, at once, need not fit together."""
    found = without(Moments(np.float64(12), np.array([1.0]), np.array([0.5])), Moments(10.0, np.zeros(1), np.ones(1)))
    assert found.var >= 0


def test_running_moments_are_found_among_weights_by_their_names() -> None:
    names = ["torso.weight", "a.0.count", "a.0.mean", "a.0.var", "count", "b.mean", "b.var", "c.count", "c.mean"]
    assert found_in(names) == ["a.0."]
    arrays = {name: np.array(index) for index, name in enumerate(names)}
    assert named("a.0.", at(arrays, "a.0.")) == {"a.0.count": 1, "a.0.mean": 2, "a.0.var": 3}
