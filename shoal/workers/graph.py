"""An update as one CUDA graph: launched at once instead of kernel by kernel, which is most of a small update's time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shoal.core.algorithm import Algorithm
from shoal.core.tree import leaves, map_tree
from shoal.core.types import Batch, Loss

if TYPE_CHECKING:
    from shoal.workers.model import OptimizerStep, Optimizes

WARM = 3  # updates before the capture, in which libraries choose kernels and the optimizer makes its state
MOVING = Batch._fields[:7]  # the parts of a batch that are tensors


class Captured:
    """A step of the optimizer, captured once and replayed for every later batch; only the learning rate may change."""

    def __init__(self, step: OptimizerStep, optimizer: Optimizes) -> None:
        """Make the optimizer keep on the GPU what it usually keeps in Python."""
        self.step, self.stream, self.warm = step, torch.cuda.Stream(), 0  # type: ignore[no-untyped-call]
        self.graph: torch.cuda.CUDAGraph | None = None
        for group in optimizer.param_groups:
            group["capturable"] = True
            group["lr"] = torch.tensor(group["lr"], device=group["params"][0].device)

    def __call__(
        self, algorithm: Algorithm[Any], net: nn.Module, target: nn.Module, optimizer: Optimizes, batch: Batch
    ) -> Loss:
        """Take a step; what it returns is valid until the next one."""
        if self.warm < WARM:
            self.warm += 1
            return self._aside(algorithm, net, target, optimizer, batch)
        if self.graph is None:
            self.batch = batch._replace(**{name: map_tree(torch.clone, getattr(batch, name)) for name in MOVING})
            optimizer.zero_grad(set_to_none=True)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.loss = self.step(algorithm, net, target, optimizer, self.batch)
        for name in MOVING:
            for mine, new in zip(leaves(getattr(self.batch, name)), leaves(getattr(batch, name)), strict=True):
                mine.copy_(new)
        self.graph.replay()
        return self.loss

    def _aside(self, *args: Any) -> Loss:
        """Warm up on a stream of its own, as a capture demands."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            loss = self.step(*args)
        torch.cuda.current_stream().wait_stream(self.stream)
        return loss
