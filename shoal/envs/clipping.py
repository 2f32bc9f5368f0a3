"""Clipping of rewards: what is learned from, while scores stay as the environment gives them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

import numpy as np

from shoal.core.types import Array

Clip: TypeAlias = Literal["sign", "clamp", "soft_asymmetric"]


def soft_asymmetric(reward: Array) -> Array:
    """Return 0.3 · min(tanh r, 0) + 5 · max(tanh r, 0): optimistic (arXiv:1802.01561, fig. D.1)."""
    squeezed = np.tanh(reward)
    return np.where(reward < 0, 0.3, 5.0) * squeezed


CLIPS: dict[Clip | None, Callable[[Array], Array]] = {
    None: lambda reward: reward,
    "sign": np.sign,
    "clamp": lambda reward: np.clip(reward, -1, 1),
    "soft_asymmetric": soft_asymmetric,
}


def clipped(reward: Array, clip: Clip | None) -> Array:
    """Turn rewards [B], as environments give them, into those of a step."""
    return CLIPS[clip](reward).astype(np.float32)
