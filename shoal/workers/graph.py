"""An update as one CUDA graph: launched at once instead of kernel by kernel, which is most of a small update's time."""

from __future__ import annotations

from typing import Any

import torch

from shoal.core.tree import leaves, map_tree
from shoal.core.types import Batch, Loss

WARM = 3  # updates before the capture, in which libraries choose kernels and the optimizer makes its memory
MOVING = Batch._fields[:7]  # the parts of a batch that are tensors


def step(algorithm: Any, net: Any, target: Any, optimizer: Any, batch: Batch) -> Loss:
    """One step of the optimizer down the loss of a batch, and in the metrics whether it was `finite`.

    On the CPU a loss or gradient that is not finite changes nothing. On a GPU asking would mean waiting for it: there
    the step is taken, and whoever reads the metrics takes it back.
    """
    loss: Loss = algorithm.loss(net, target, batch)
    optimizer.zero_grad(set_to_none=True)
    total = (loss.each * batch.weight).mean()
    total.backward()  # type: ignore[no-untyped-call]
    if algorithm.clip_norm is not None:
        norm = torch.nn.utils.clip_grad_norm_(net.parameters(), algorithm.clip_norm)
        loss.metrics["gradient_norm"] = norm
    else:
        norm = torch.nn.utils.get_total_norm([part.grad for part in net.parameters() if part.grad is not None])
    finite = (total.detach() + norm).isfinite()
    loss.metrics["finite"] = finite.float()
    if finite.is_cuda or finite:
        optimizer.step()
    return loss


class Captured:
    """`step`, captured once and replayed for every batch after; the learning rate alone may change."""

    def __init__(self, optimizer: Any) -> None:
        """Make the optimizer keep on the GPU what it usually keeps in Python."""
        self.stream, self.warm = torch.cuda.Stream(), 0  # type: ignore[no-untyped-call]
        self.graph: torch.cuda.CUDAGraph | None = None
        for group in optimizer.param_groups:
            group["capturable"] = True
            group["lr"] = torch.tensor(group["lr"], device=group["params"][0].device)

    def __call__(self, algorithm: Any, net: Any, target: Any, optimizer: Any, batch: Batch) -> Loss:
        """Take a step; what it returns holds until the next one."""
        if self.warm < WARM:
            self.warm += 1
            return self._aside(algorithm, net, target, optimizer, batch)
        if self.graph is None:
            self.batch = batch._replace(**{name: map_tree(torch.clone, getattr(batch, name)) for name in MOVING})
            optimizer.zero_grad(set_to_none=True)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.loss = step(algorithm, net, target, optimizer, self.batch)
        for name in MOVING:
            for mine, new in zip(leaves(getattr(self.batch, name)), leaves(getattr(batch, name)), strict=True):
                mine.copy_(new)
        self.graph.replay()
        return self.loss

    def _aside(self, *args: Any) -> Loss:
        """Warm up on a stream of its own, as a capture demands."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            loss = step(*args)
        torch.cuda.current_stream().wait_stream(self.stream)
        return loss
