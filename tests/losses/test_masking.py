"""Means over the valid steps."""

from __future__ import annotations

import numpy as np
import torch

from shoal.losses.masking import masked_mean, standardise, time_mean

EACH = torch.tensor([[1.0, 2.0], [3.0, 99.0], [5.0, 99.0]])
MASK = torch.tensor([[1.0, 1.0], [1.0, 0.0], [1.0, 0.0]])


def test_time_mean_gives_every_valid_step_the_same_weight():
    np.testing.assert_allclose(time_mean(EACH, MASK), [9 / 3, 2 / 3])


def test_masked_mean():
    assert masked_mean(EACH, MASK) == (1 + 2 + 3 + 5) / 4
    assert masked_mean(EACH, torch.zeros_like(MASK)) == 0


def test_standardise_looks_at_valid_steps_only():
    valid = np.array([1.0, 2.0, 3.0, 5.0])
    result = standardise(EACH, MASK)
    expected = (valid - valid.mean()) / valid.std()
    np.testing.assert_allclose(result[MASK.bool()], expected, rtol=1e-5)
    assert (result[MASK == 0] == 0).all()


def test_standardise_survives_a_constant():
    assert (standardise(torch.full((2, 2), 7.0), torch.ones(2, 2)) == 0).all()
