"""A network that follows the newest weights, and batches for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from shoal.core.algorithm import Algorithm
from shoal.core.codec import Receiver
from shoal.core.errors import Diverged
from shoal.core.tree import to_numpy, to_torch
from shoal.core.types import Array, Batch, Spec


def pick_device(name: str) -> torch.device:
    """Turn `auto` into the best device there is."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


class Follower:
    """The network of an actor or evaluator, and which version of the weights it holds."""

    def __init__(self, algorithm: Algorithm, spec: Spec, device: str) -> None:
        """Build the network, as yet untrained."""
        self.device = pick_device(device)
        self.net = algorithm.build(spec).to(self.device).eval()
        self.version, self.steps, self.period, self.final = -1, 0, 0, False
        self.receiver: Receiver | None = None

    def follow(self, parameters: Any) -> bool:
        """Load newer weights if there are any, and say whether there were."""
        newest = parameters.fetch(self.version)
        if newest is None:
            return False
        if "message" in newest:
            newest = self.decoded(newest, parameters)
        self.net.load_state_dict(to_torch(newest["weights"], self.device))
        self.version, self.steps = newest["version"], newest["steps"]
        self.period, self.final = newest["period"], newest["final"]
        return True

    def decoded(self, newest: Mapping[str, Any], parameters: Any) -> Mapping[str, Any]:
        """What was fetched, with its message decoded into weights."""
        if self.receiver is None:
            self.receiver = Receiver(to_numpy(self.net.state_dict()))
        try:
            weights = self.receiver.take(newest["message"])
        except Diverged:  # a learner that went back to its checkpoint gave other weights the same number
            newest = parameters.fetch(-1)
            weights = self.receiver.take(newest["message"])
        return {**newest, "weights": weights}

    def judge(self, algorithm: Algorithm, items: Mapping[str, Any]) -> Array:
        """First priorities of items, by the loss that will set their later ones."""
        return judge(algorithm, self.net, items, self.device)


def fresh_batch(items: Mapping[str, Any], device: torch.device) -> Batch:
    """Items that no store has seen, as a batch in which each counts alike."""
    count = len(items["version"])
    return to_batch({**items, "key": np.zeros(count, np.int64), "weight": np.ones(count, np.float32)}, device)


def judge(algorithm: Algorithm, net: nn.Module, items: Mapping[str, Any], device: torch.device) -> Array:
    """First priorities of items, by the loss that will set their later ones."""
    with torch.no_grad():
        priority: Array = algorithm.loss(net, net, fresh_batch(items, device)).priority.cpu().numpy()
    return priority


def to_batch(tree: Any, device: torch.device) -> Batch:
    """Move a batch to a device; keys and versions stay where they are."""
    stays = {"key": tree["key"], "version": tree["version"]}
    moves = {name: to_torch(value, device) for name, value in tree.items() if name not in stays}
    return Batch(**moves, **stays)
