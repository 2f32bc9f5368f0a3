"""What several critics say together, against slow transcriptions of the papers."""

from __future__ import annotations

import numpy as np
import torch

from shoal.losses.critics import lowest, truncated


def test_the_critic_with_the_lowest_mean_speaks_for_all() -> None:
    random = np.random.default_rng(0)
    outputs = random.normal(size=(3, 7, 5))
    means = random.normal(size=(3, 7))
    found = lowest(torch.tensor(outputs), torch.tensor(means)).numpy()
    for item in range(7):
        np.testing.assert_array_equal(found[item], outputs[means[:, item].argmin(), item])


def test_of_single_values_the_lowest_is_the_minimum() -> None:
    values = torch.randn(2, 9, 1)
    assert torch.equal(lowest(values, values.mean(-1)), values.amin(0))


def test_the_highest_quantiles_of_all_critics_together_are_dropped() -> None:
    quantiles = np.random.default_rng(1).normal(size=(2, 6, 5))
    found = truncated(torch.tensor(quantiles), 2).numpy()
    assert found.shape == (6, 6)
    for item in range(6):
        pooled = sorted(number for critic in quantiles[:, item] for number in critic)
        np.testing.assert_array_equal(found[item], pooled[: 2 * 5 - 2 * 2])


def test_without_dropping_all_quantiles_stay() -> None:
    quantiles = torch.randn(2, 3, 4)
    assert torch.equal(truncated(quantiles, 0).sort(-1).values, quantiles.transpose(0, 1).reshape(3, 8).sort(-1).values)
