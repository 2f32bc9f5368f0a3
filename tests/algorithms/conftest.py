"""Batches as an actor and a packer would make them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from shoal.core.tree import map_tree
from shoal.core.types import ActionSpec, ArraySpec, Batch, Spec, Step

DISCRETE = ActionSpec(3)
CONTINUOUS = ActionSpec(2, (-2.0, 0.0), (2.0, 1.0))
VECTOR = ArraySpec((4,), "float32")
SPECS = {
    "discrete": Spec(VECTOR, DISCRETE),
    "continuous": Spec(VECTOR, CONTINUOUS),
    "mapping": Spec({"a": VECTOR, "b": ArraySpec((1, 5, 4), "uint8")}, DISCRETE),
}


def observe(spec: Spec, items: int) -> Any:
    """Draw random observations."""

    def one(array: ArraySpec) -> torch.Tensor:
        if array.dtype == "uint8":
            return torch.randint(0, 256, (items, *array.shape), dtype=torch.uint8)
        return torch.randn(items, *array.shape)

    return map_tree(one, spec.observation)


def play(algorithm: Any, net: Any, spec: Spec, length: int = 15, items: int = 6) -> Batch:
    """Act in random episodes, some terminated, some truncated, each followed by its dummy step."""
    carry = algorithm.begin(net, items)
    first = torch.rand(items) < 0.5
    steps, acts = [], []
    for _ in range(length + 1):
        terminated, truncated = ~first & (torch.rand(items) < 0.15), ~first & (torch.rand(items) < 0.1)
        step = Step(observe(spec, items), torch.randn(items), (~terminated).float(), first)
        act = algorithm.act(net, step, carry, torch.linspace(0, 1, items))
        carry = act.carry
        steps.append(step)
        acts.append(act)
        first = terminated | truncated
    pile = [map_tree(lambda *each: torch.stack(each), parts[0], *parts[1:]) for parts in zip(*steps, strict=True)]
    observation, reward, discount, first = pile
    record = {key: torch.stack([act.record[key] for act in acts[:-1]]) for key in acts[0].record}
    for key in algorithm.experience.initial:
        record[key] = record[key][:1]
    return Batch(
        observation=observation,
        first=first,
        action=torch.stack([act.action for act in acts[:-1]]),
        reward=reward[1:],
        discount=discount[1:],
        record=record,
        weight=torch.rand(items),
        key=np.arange(items) + 100,
        version=np.arange(items) + 7,
    )


@pytest.fixture
def specs() -> dict[str, Spec]:
    """One of each kind of environment."""
    return SPECS


@pytest.fixture
def rollout() -> Any:
    """Return the function that plays."""
    torch.manual_seed(0)
    return play
