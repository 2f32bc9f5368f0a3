"""Value losses against their formulas."""

from __future__ import annotations

import numpy as np
import torch

from shoal.losses.value import explained_variance, squared_error


def test_squared_error_pulls_the_value_to_the_target():
    value = torch.randn(3, 2, requires_grad=True)
    target = torch.randn(3, 2, requires_grad=True)
    squared_error(value, target).sum().backward()
    torch.testing.assert_close(value.grad, (value - target).detach())
    assert target.grad is None


def test_clipped_error_is_the_larger_of_two():
    random = np.random.default_rng(0)
    value, target, old = random.normal(size=(3, 20, 5))
    loss = squared_error(*map(torch.tensor, (value, target, old)), 0.3)
    clipped = old + np.clip(value - old, -0.3, 0.3)
    np.testing.assert_allclose(loss, np.maximum((target - value) ** 2, (target - clipped) ** 2) / 2)


def test_explained_variance_looks_at_valid_steps_only():
    random = np.random.default_rng(0)
    value, target = random.normal(size=(2, 20, 5))
    mask = (random.random((20, 5)) < 0.7).astype(float)
    target[mask == 0] = 1e6
    valid = mask == 1
    expected = 1 - np.var((target - value)[valid]) / np.var(target[valid])
    np.testing.assert_allclose(explained_variance(*map(torch.tensor, (value, target, mask))), expected)
    assert explained_variance(torch.ones(2, 2), torch.eye(2), torch.ones(2, 2)) == 0
    assert explained_variance(torch.eye(2), torch.eye(2), torch.ones(2, 2)) == 1
