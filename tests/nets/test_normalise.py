"""Running moments against NumPy's of all the data at once."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shoal.core.types import ArraySpec
from shoal.nets.normalise import ObservationMoments, RunningMoments


def test_moments_are_those_of_all_the_data():
    random = np.random.default_rng(0)
    pieces = [random.normal(100 * i, 1 + i, size=(n, 3)).astype(np.float32) for i, n in enumerate([1, 50, 7, 2])]
    moments = RunningMoments((3,))
    for piece in pieces:
        moments.update(torch.tensor(piece))
    together = np.concatenate(pieces).astype(np.float64)
    assert moments.count == 60
    np.testing.assert_allclose(moments.mean, together.mean(0), rtol=1e-9)
    np.testing.assert_allclose(moments.var, together.var(0), rtol=1e-9)
    normal = moments.normalise(torch.tensor(np.concatenate(pieces)))
    np.testing.assert_allclose(normal, (together - together.mean(0)) / together.std(0), atol=1e-4)


def test_nothing_seen_changes_nothing():
    moments = RunningMoments((2,))
    moments.update(torch.zeros(0, 2))
    x = torch.randn(5, 2)
    torch.testing.assert_close(moments.normalise(x), x)


def test_outliers_are_cut_off():
    moments = RunningMoments(())
    moments.update(torch.randn(1000))
    np.testing.assert_array_equal(moments.normalise(torch.tensor([-1e6, 1e6])), [-10, 10])
    np.testing.assert_array_equal(moments.normalise(torch.tensor([-1e6, 1e6]), clip=3), [-3, 3])


def test_moments_travel_with_the_weights():
    here, there = RunningMoments((2,)), RunningMoments((2,))
    here.update(torch.randn(10, 2) + 5)
    there.load_state_dict(here.state_dict())
    x = torch.randn(4, 2)
    assert torch.equal(here.normalise(x), there.normalise(x))


@pytest.mark.parametrize("nested", [False, True])
def test_only_valid_steps_count_and_pixels_stay(nested):
    random = np.random.default_rng(0)
    x = random.normal(3, 2, size=(6, 4, 2)).astype(np.float32)
    mask = (random.random((6, 4)) < 0.6).astype(np.float32)
    spec = ArraySpec((2,), "float32")
    image = torch.full((6, 4, 1, 36, 36), 200, dtype=torch.uint8)
    if nested:
        moments = ObservationMoments({"x": spec, "image": ArraySpec((1, 36, 36), "uint8")})
        moments.update({"image": image, "x": torch.tensor(x)}, torch.tensor(mask))
        out = moments({"x": torch.tensor(x[0]), "image": image[0]})
        assert torch.equal(out["image"], image[0])
        normal = out["x"]
    else:
        moments = ObservationMoments(spec)
        moments.update(torch.tensor(x), torch.tensor(mask))
        normal = moments(torch.tensor(x[0]))
    valid = x[mask == 1].astype(np.float64)
    np.testing.assert_allclose(normal, (x[0] - valid.mean(0)) / valid.std(0), atol=1e-5)


def test_symbols_in_bytes_are_brought_to_mean_0_and_variance_1():
    seen = torch.randint(0, 11, (50, 4, 7, 7, 3), dtype=torch.uint8)
    moments = ObservationMoments(ArraySpec((7, 7, 3), "uint8"))
    moments.update(seen, torch.ones(50, 4))
    normal = moments(seen.flatten(0, 1))
    torch.testing.assert_close(normal.mean(0), torch.zeros(7, 7, 3), atol=1e-5, rtol=0)
    torch.testing.assert_close(normal.std(0, unbiased=False), torch.ones(7, 7, 3), atol=1e-4, rtol=0)
