"""Optimizers, in the papers' form."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer


def make_optimizer(
    rule: str,
    net: nn.Module,
    lr: float,
    epsilon: float,
    decay: float = 0.99,
    momentum: float = 0.0,
    centered: bool = False,
) -> Optimizer:
    """The optimizer by its name: `rmsprop`, whose ε is inside the root, or `adam`, whose ε is outside."""
    learned = [parameter for parameter in net.parameters() if parameter.requires_grad]
    if rule == "adam":
        return Adam(learned, lr, eps=epsilon, fused=True)
    return RmsProp(learned, lr, epsilon, decay, momentum, centered)


class RmsProp(Optimizer):
    """RMSProp with ε inside the root, as papers have it; torch's adds ε to the root.

    arXiv:1602.01783, section 4, eq. 8 and 9; with `centered` arXiv:1308.0850, eq. 38 to 40:
    v ← αv + (1 − α)g², m ← αm + (1 − α)g, Δ ← μΔ + η g / √(v − m² + ε), θ ← θ − Δ, and m is 0 unless centred.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        lr: float,
        epsilon: float,
        decay: float = 0.99,
        momentum: float = 0.0,
        centered: bool = False,
    ) -> None:
        """Begin with v, m and Δ of 0."""
        defaults = {"lr": lr, "epsilon": epsilon, "decay": decay, "momentum": momentum, "centered": centered}
        super().__init__(parameters, defaults)

    def _state(self, name: str, parameters: list[nn.Parameter]) -> list[Tensor]:
        for parameter in parameters:
            if name not in self.state[parameter]:
                self.state[parameter][name] = torch.zeros_like(parameter)
        return [self.state[parameter][name] for parameter in parameters]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Take a step for all parameters at once, which is faster than one by one."""
        assert closure is None
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not parameters:
                continue
            gradients = [parameter.grad for parameter in parameters]
            decay = group["decay"]
            squares = self._state("square", parameters)
            torch._foreach_mul_(squares, decay)
            torch._foreach_addcmul_(squares, gradients, gradients, 1 - decay)
            roots = torch._foreach_add(squares, group["epsilon"])
            if group["centered"]:
                means = self._state("mean", parameters)
                torch._foreach_lerp_(means, gradients, 1 - decay)
                # Rounding may leave a variance a little below 0.
                torch._foreach_addcmul_(roots, means, means, -1.0)
                torch._foreach_maximum_(roots, group["epsilon"])
            torch._foreach_sqrt_(roots)
            changes = [*torch._foreach_div(gradients, roots)]
            torch._foreach_mul_(changes, group["lr"])  # a number, or a tensor where updates are captured on a GPU
            if group["momentum"]:
                moving = self._state("change", parameters)
                torch._foreach_mul_(moving, group["momentum"])
                torch._foreach_add_(moving, changes)
                changes = moving
            torch._foreach_sub_(parameters, changes)
        return None
