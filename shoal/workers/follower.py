"""A network that follows the newest weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from shoal.core.algorithm import Algorithm
from shoal.core.codec import Receiver
from shoal.core.errors import Diverged
from shoal.core.tree import to_numpy, to_torch
from shoal.core.types import Spec
from shoal.workers.model import pick_device

if TYPE_CHECKING:
    from shoal.services.parameters import Parameters


class Follower:
    """The network of an actor or evaluator, and which version of the weights it holds."""

    def __init__(self, algorithm: Algorithm[Any], spec: Spec, device: str) -> None:
        """Build the network, as yet untrained."""
        self.device = pick_device(device)
        self.net: nn.Module = algorithm.build(spec).to(self.device).eval()
        self.version, self.steps, self.period, self.final = -1, 0, 0, False
        self.receiver: Receiver | None = None

    def follow(self, parameters: Parameters) -> bool:
        """Load newer weights if there are any, and say whether there were."""
        newest = parameters.fetch(self.version)
        if newest is None:
            return False
        if "message" in newest:
            newest = self._decoded(newest, parameters)
        self.net.load_state_dict(to_torch(newest["weights"], self.device))
        self.version, self.steps = newest["version"], newest["steps"]
        self.period, self.final = newest["period"], newest["final"]
        return True

    def _decoded(self, newest: Mapping[str, Any], parameters: Parameters) -> Mapping[str, Any]:
        """What was fetched, with its message decoded into weights."""
        if self.receiver is None:
            self.receiver = Receiver(to_numpy(self.net.state_dict()))
        try:
            weights = self.receiver.take(newest["message"])
        except Diverged:  # a learner that went back to its checkpoint gave other weights the same number
            whole = parameters.fetch(-1)
            assert whole is not None  # nobody holds that version
            newest, weights = whole, self.receiver.take(whole["message"])
        return {**newest, "weights": weights}
