"""Means over the steps that count: a mask is 0 on the dummy step between episodes and on padding."""

from __future__ import annotations

from torch import Tensor


def time_mean(each: Tensor, mask: Tensor) -> Tensor:
    """Sum the valid steps of [T, B] over time and divide by T, giving [B].

    Dividing by T, not by the number of valid steps, gives every valid step of a batch the same weight.
    """
    return (each * mask).mean(0)


def masked_mean(each: Tensor, mask: Tensor) -> Tensor:
    """Mean of [T, B] over the valid steps, a scalar."""
    return (each * mask).sum() / mask.sum().clamp(min=1.0)


def standardise(each: Tensor, mask: Tensor, epsilon: float = 1e-8) -> Tensor:
    """Shift and scale [T, B] to mean 0 and variance 1 over the valid steps; 0 on the others."""
    centred = (each - masked_mean(each, mask)) * mask
    return centred / (masked_mean(centred.square(), mask).sqrt() + epsilon)
