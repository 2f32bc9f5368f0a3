"""A network and its optimizer as plain arrays, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shoal.core.errors import Fatal
from shoal.core.tree import to_numpy
from shoal.core.types import Array


def capture(net: Any, optimizer: Any) -> dict[str, Any]:
    """Weights with normalisers, and what the optimizer remembers; its settings come from the algorithm again."""
    return {"weights": to_numpy(net.state_dict()), "optimizer": to_numpy(flat(optimizer))}


def flat(optimizer: Any) -> dict[str, Any]:
    """The optimizer's memory as tensors, named by parameter and quantity."""
    return {
        f"{index}.{name}": torch.as_tensor(value)
        for index, quantities in optimizer.state_dict()["state"].items()
        for name, value in quantities.items()
        if value is not None
    }


def restore(net: Any, optimizer: Any, content: Mapping[str, Any]) -> None:
    """Put back what `capture` took; weights that do not fit the network are refused with the reason."""
    load_weights(net, content["weights"])
    state: dict[int, dict[str, Any]] = {}
    for key, array in content["optimizer"].items():
        index, _, name = key.partition(".")
        state.setdefault(int(index), {})[name] = torch.tensor(array)
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def load_weights(net: Any, weights: Mapping[str, Array]) -> None:
    """Load weights, or say how they and the network differ."""
    try:
        net.load_state_dict({name: torch.tensor(array) for name, array in weights.items()})
    except RuntimeError as error:
        raise Fatal(f"the saved weights do not fit the network of these settings: {error}") from None
