"""Value losses, one number per step."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.losses.masking import masked_mean


def squared_error(value: Tensor, target: Tensor, old_value: Tensor | None = None, clip: float | None = None) -> Tensor:
    """Return ½ (target − V)² for [T, B]; no gradient flows through the target.

    With a clip, V may move at most that far from its old value before its gradient stops: the larger of the
    clipped and the unclipped error counts (arXiv:2005.12729, §3, "value function clipping").
    """
    target = target.detach()
    error = (target - value).square()
    if clip is not None:
        assert old_value is not None
        clipped = old_value + (value - old_value).clamp(-clip, clip)
        error = torch.maximum(error, (target - clipped).square())
    return 0.5 * error


@torch.no_grad()
def explained_variance(value: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    """Return 1 − Var(target − V) / Var(target) over the valid steps: 1 is perfect, 0 a constant's worth."""

    def variance(each: Tensor) -> Tensor:
        return masked_mean((each - masked_mean(each, mask)).square(), mask)

    return 1.0 - variance(target - value) / variance(target).clamp(min=1e-8)
