"""Running moments, and observations brought to mean 0 and variance 1 by them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shoal.core.types import ArraySpec

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
        """Merge [N, ...] into the moments (Chan et al., doi:10.1080/00031305.1983.10483115)."""
        if len(x) == 0:
            return
        x = x.to(torch.float64)
        mean, var, total = x.mean(0), x.var(0, unbiased=False), self.count + len(x)
        delta = mean - self.mean
        share = len(x) / total
        spread = self.var * (1 - share) + var * share + delta.square() * share * (1 - share)
        self.var.copy_(spread)
        self.mean.add_(delta * share)
        self.count.copy_(total)

    def scale(self) -> Tensor:
        """One over the standard deviation."""
        return (self.var + EPSILON).rsqrt().float()

    def normalise(self, x: Tensor, clip: float = CLIP) -> Tensor:
        """Bring [..., *shape] to mean 0 and variance 1, and cut off the outliers."""
        return ((x.float() - self.mean.float()) * self.scale()).clamp(-clip, clip)


class ObservationMoments(nn.Module):
    """Moments of every floating point array of an observation; the other arrays pass unchanged."""

    def __init__(self, observation: Any) -> None:
        super().__init__()
        self.keys = tuple(observation) if isinstance(observation, Mapping) else None
        specs: list[ArraySpec] = [observation] if self.keys is None else [observation[key] for key in self.keys]
        self.parts = nn.ModuleList(
            RunningMoments(spec.shape) if spec.dtype.startswith("float") else nn.Identity() for spec in specs
        )

    def _pairs(self, observation: Any) -> list[tuple[nn.Module, Tensor]]:
        arrays = [observation] if self.keys is None else [observation[key] for key in self.keys]
        return list(zip(self.parts, arrays, strict=True))

    def update(self, observation: Any, mask: Tensor) -> None:
        """Merge the steps of [T, B, ...] where the mask [T, B] is not 0 into the moments."""
        for part, array in self._pairs(observation):
            if isinstance(part, RunningMoments):
                part.update(array[mask.bool()])

    def forward(self, observation: Any) -> Any:
        """Normalise a tree of [N, ...]."""
        arrays = [
            part.normalise(array) if isinstance(part, RunningMoments) else array
            for part, array in self._pairs(observation)
        ]
        return arrays[0] if self.keys is None else dict(zip(self.keys, arrays, strict=True))
