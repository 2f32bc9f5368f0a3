"""Wrappers that come with Shoal, named by import path in `environment.wrappers`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np

from shoal.core.errors import Fatal
from shoal.core.types import Array


class Partial(gymnasium.ObservationWrapper[Array, Any, Array]):
    """Shows some of an observation's numbers only: the others must be inferred from what was shown before."""

    def __init__(self, env: gymnasium.Env[Array, Any], keep: Sequence[int]) -> None:
        """Keep the numbers at these places, counted from 0."""
        super().__init__(env)
        space = env.observation_space
        if not isinstance(space, gymnasium.spaces.Box) or len(space.shape) != 1:
            raise Fatal(f"Partial is for observations that are a row of numbers, not {space}")
        if not keep or not all(type(place) is int and 0 <= place < space.shape[0] for place in keep):
            raise Fatal(f"Partial: keep must have places from 0 to {space.shape[0] - 1}, got {[*keep]}")
        self.keep = np.array(keep)
        self.observation_space = gymnasium.spaces.Box(space.low[self.keep], space.high[self.keep], dtype=np.float32)

    def observation(self, observation: Array) -> Array:
        """What is shown of an observation."""
        return np.asarray(observation[self.keep], np.float32)
