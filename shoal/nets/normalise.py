"""Running moments, and observations brought to mean 0 and variance 1 by them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shoal.core.moments import Moments, merge
from shoal.core.tree import leaves, map_tree
from shoal.core.types import SMALLEST_IMAGE, ArraySpec

CLIP = 10.0  # as VecNormalize of Stable-Baselines3 does, for observations and rewards alike
EPSILON = 1e-8  # likewise


class RunningMoments(nn.Module):
    """Count, mean and variance of all that was seen, in buffers that travel with the weights."""

    count: Tensor
    mean: Tensor
    var: Tensor

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("var", torch.ones(shape, dtype=torch.float64))

    @torch.no_grad()
    def update(self, x: Tensor) -> None:
        """Merge [N, ...] into the moments."""
        if len(x) == 0:
            return
        x = x.to(torch.float64)
        seen = Moments(len(x), x.mean(0), x.var(0, unbiased=False))
        for buffer, new in zip(self.buffers(), merge(Moments(self.count, self.mean, self.var), seen), strict=True):
            buffer.copy_(new)

    def scale(self) -> Tensor:
        """One over the standard deviation."""
        return (self.var + EPSILON).rsqrt().float()

    def normalise(self, x: Tensor, clip: float = CLIP) -> Tensor:
        """Bring [..., *shape] to mean 0 and variance 1, and cut off the outliers."""
        return ((x.float() - self.mean.float()) * self.scale()).clamp(-clip, clip)


def _is_picture(spec: ArraySpec) -> bool:
    """Whether an array is an image of pixels: in a small one, bytes are symbols."""
    return spec.dtype == "uint8" and len(spec.shape) == 3 and min(spec.shape[1:]) >= SMALLEST_IMAGE


class ObservationMoments(nn.Module):
    """Moments of every array of an observation but large images, which pass unchanged."""

    def __init__(self, observation: Any) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            nn.Identity() if _is_picture(spec) else RunningMoments(spec.shape) for spec in leaves(observation)
        )

    def update(self, observation: Any, mask: Tensor) -> None:
        """Merge the steps of [T, B, ...] where the mask [T, B] is not 0 into the moments."""
        for part, array in zip(self.parts, leaves(observation), strict=True):
            if isinstance(part, RunningMoments):
                part.update(array[mask.bool()])

    def forward(self, observation: Any) -> Any:
        """Normalise a tree of [N, ...]."""
        parts = iter(self.parts)

        def normalise(array: Tensor) -> Tensor:
            part = next(parts)
            return part.normalise(array) if isinstance(part, RunningMoments) else array

        return map_tree(normalise, observation)
