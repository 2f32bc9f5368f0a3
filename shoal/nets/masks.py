"""Action masks: which actions are allowed in a state, as the observation says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shoal.core.types import MASK

LOWEST = -1e8  # the logit or value of an action that is not allowed; an infinity would turn into NaN where it meets a 0


def split_mask(observation: Any) -> tuple[Any, Tensor | None]:
    """An observation, or its spec, without the mask, and the mask."""
    if not isinstance(observation, Mapping) or MASK not in observation:
        return observation, None
    return {name: part for name, part in observation.items() if name != MASK}, observation[MASK]


def masked(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Scores [..., A] where the mask [..., A] allows an action; where it allows none, as after the end, all are."""
    if mask is None:
        return scores
    allowed = mask > 0.5
    return torch.where(allowed | ~allowed.any(-1, keepdim=True), scores, LOWEST)
