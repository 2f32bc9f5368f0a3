"""A network that follows the newest weights."""

from __future__ import annotations

from typing import Any

import torch

from shoal.core.algorithm import Algorithm
from shoal.core.tree import to_torch
from shoal.core.types import Spec


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

    def follow(self, parameters: Any) -> bool:
        """Load newer weights if there are any, and say whether there were."""
        newest = parameters.fetch(self.version)
        if newest is None:
            return False
        self.net.load_state_dict(to_torch(newest["weights"], self.device))
        self.version, self.steps = newest["version"], newest["steps"]
        self.period, self.final = newest["period"], newest["final"]
        return True
