"""Optimizers against the papers' formulas."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from shoal.nets.optimizers import RmsProp, make_optimizer
from shoal.workers.saving import from_arrays, to_arrays


def rmsprop(
    gradients: list[Any], lr: float, epsilon: float, decay: float, momentum: float, centered: bool
) -> list[Any]:
    """arXiv:1602.01783, eq. 8 and 9, and arXiv:1308.0850, eq. 38 to 40, number by number; the weights after each step.

    What begins at 0 are the weights, n (mean square), g (mean) and the change.
    """
    shape = gradients[0].shape
    weights, n, g, change = (np.zeros(shape) for _ in range(4))
    after = []
    for gradient in gradients:
        for place in np.ndindex(shape):
            e = gradient[place]
            n[place] = decay * n[place] + (1 - decay) * e**2
            g[place] = decay * g[place] + (1 - decay) * e
            spread = n[place] - g[place] ** 2 if centered else n[place]
            change[place] = momentum * change[place] - lr * e / np.sqrt(spread + epsilon)
            weights[place] += change[place]
        after.append(weights.copy())
    return after


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("captured", [False, True])
def test_rmsprop_is_the_papers(centered: bool, momentum: float, captured: bool) -> None:
    rng = np.random.default_rng(0)
    gradients = [rng.normal(size=(3, 2)) * scale for scale in (1.0, 0.01, 3.0, 0.5, 1e-3, 2.0)]
    weights = nn.Parameter(torch.zeros(3, 2, dtype=torch.float64))
    optimizer = RmsProp([weights], 0.1, 0.02, 0.9, momentum, centered)
    if captured:
        optimizer.param_groups[0]["lr"] = torch.tensor(0.1, dtype=torch.float64)
    expected = rmsprop(gradients, 0.1, 0.02, 0.9, momentum, centered)
    for gradient, after in zip(gradients, expected, strict=True):
        weights.grad = torch.tensor(gradient)
        optimizer.step()
        np.testing.assert_allclose(weights.detach().numpy(), after, rtol=1e-9)


def test_a_constant_gradient_is_no_negative_variance() -> None:
    weights = nn.Parameter(torch.zeros(4))
    optimizer = RmsProp([weights], 1e-3, 1e-12, centered=True)
    for _ in range(3000):
        weights.grad = torch.full((4,), 0.1)
        optimizer.step()
    assert weights.isfinite().all()


@pytest.mark.parametrize("rule", ["rmsprop", "adam"])
def test_what_was_saved_goes_on_as_if_nothing_had_been(rule: str) -> None:
    torch.manual_seed(0)
    nets = [nn.Linear(3, 2)]
    nets.append(copy.deepcopy(nets[0]))
    optimizers = [make_optimizer(rule, net, 0.01, 1e-4, momentum=0.5, centered=True) for net in nets]
    for number in range(6):
        if number == 3:
            from_arrays(nets[1], optimizers[1], to_arrays(nets[0], optimizers[0]))
        x = torch.randn(5, 3)
        for net, optimizer in zip(nets[: 1 if number < 3 else 2], optimizers, strict=False):
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
    assert torch.equal(nets[0].weight, nets[1].weight)


def test_what_does_not_learn_has_no_state() -> None:
    net = nn.Linear(3, 2)
    net.bias.requires_grad_(False)
    optimizer = make_optimizer("rmsprop", net, 0.1, 1e-4)
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert [*optimizer.state] == [net.weight]
