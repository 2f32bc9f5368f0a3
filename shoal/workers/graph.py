"""GPU work beside others': updates as CUDA graphs, launched at once instead of kernel by kernel, and streams."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

import torch
from torch import nn

from shoal.core.algorithm import Algorithm, HasPhase
from shoal.core.tree import leaves, map_tree
from shoal.core.types import Batch, Loss, Work

if TYPE_CHECKING:
    from shoal.experiment import Experiment
    from shoal.workers.model import OptimizerStep, Optimizes

Given = ParamSpec("Given")
WARM = 3  # updates before a capture, in which libraries choose kernels and the optimizer makes its state
MOST = 4  # shapes of batches that are captured; each keeps memory of its own
MOVING = tuple(name for name in Batch._fields if name not in ("key", "version"))  # the parts that are tensors
DRAWS = threading.Lock()  # of random numbers on the GPU, which no thread may make while another one captures


@contextmanager
def drawing(device: torch.device) -> Iterator[None]:
    """Draw random numbers on a device: not while an update is captured in another thread."""
    if device.type != "cuda":
        yield
        return
    with DRAWS:
        yield


def beside(work: Callable[Concatenate[Experiment, Given], Work]) -> Callable[Concatenate[Experiment, Given], Work]:
    """Let a worker that learns do its GPU work in a stream of its own, so that nobody's work there waits for it."""

    @wraps(work)
    def aside(experiment: Experiment, /, *given: Given.args, **named: Given.kwargs) -> Work:
        from shoal.workers.model import pick_device

        yield from streamed(work(experiment, *given, **named), pick_device(experiment.device))

    return aside


def streamed(work: Work, device: torch.device) -> Work:
    """Advance a worker with its GPU work in a stream of its own."""
    if device.type != "cuda":
        yield from work
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    try:
        while True:
            with torch.cuda.stream(stream):
                moved = next(work, None)
            if moved is None:
                return
            yield moved
    finally:
        work.close()


class NotCaptured(RuntimeError):
    """An update that cannot be captured, and why."""


def make_capturable(optimizer: Optimizes) -> None:
    """Make an optimizer keep on the GPU what it usually keeps in Python."""
    for group in optimizer.param_groups:
        group["capturable"] = True
        group["lr"] = torch.tensor(group["lr"], device=group["params"][0].device)
    # Torch warns of steps that are not captured, as the first ones are.
    optimizer._warned_capturable_if_run_uncaptured = True  # type: ignore[attr-defined]


class Captured:
    """A step of the optimizer, captured for each shape of batches and replayed; only the learning rate may change.

    Where an algorithm's updates take turns at several forms, each of these is captured.
    """

    def __init__(self, step: OptimizerStep, optimizer: Optimizes) -> None:
        """Capture nothing yet."""
        self.step, self.stream = step, torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.seen: dict[Any, int] = {}  # by form and shape: the updates before its capture
        self.graphs: dict[Any, Graph] = {}
        make_capturable(optimizer)

    def __call__(
        self, algorithm: Algorithm[Any], net: nn.Module, target: nn.Module, optimizer: Optimizes, batch: Batch
    ) -> Loss:
        """Take a step; what it returns is valid until the next one."""
        arguments = algorithm, net, target, optimizer
        form = algorithm.phase(net) if isinstance(algorithm, HasPhase) else 0
        key = form, *(tuple(leaf.shape) for leaf in moving_leaves(batch))
        if key in self.graphs:
            return self.graphs[key].replay(batch)
        seen = self.seen[key] = self.seen.get(key, 0) + 1
        if seen <= WARM or len(self.graphs) == MOST:
            return self._aside(*arguments, batch)
        try:
            self.graphs[key] = graph = Graph(self.step, *arguments, batch)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            reason = error.__context__ or error  # what went wrong first: then the end of the capture fails, too
            raise NotCaptured((str(reason) or type(reason).__name__).splitlines()[0]) from None
        return graph.replay(batch)

    def _aside(self, *args: Any) -> Loss:
        """Warm up on a stream of its own, as a capture demands."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            loss = self.step(*args)
        torch.cuda.current_stream().wait_stream(self.stream)
        return loss


class Graph:
    """A captured step, and the batch from which it learns."""

    def __init__(
        self,
        step: OptimizerStep,
        algorithm: Algorithm[Any],
        net: nn.Module,
        target: nn.Module,
        optimizer: Optimizes,
        batch: Batch,
    ) -> None:
        """Capture it; nothing is computed yet."""
        kept = {name: map_tree(torch.clone, value) for name in MOVING if (value := getattr(batch, name)) is not None}
        self.batch = batch._replace(**kept)
        optimizer.zero_grad(set_to_none=True)
        self.graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        # A capture that fails may leave its own stream as the current one.
        with DRAWS, torch.cuda.stream(torch.cuda.current_stream()):
            try:
                # What other threads do meanwhile is theirs.
                with torch.cuda.graph(self.graph, pool, capture_error_mode="thread_local"):
                    self.loss = step(algorithm, net, target, optimizer, self.batch)
            except BaseException:
                give_up(pool)
                raise

    def replay(self, batch: Batch) -> Loss:
        """Take the step with another batch of the same shape."""
        for mine, new in zip(moving_leaves(self.batch), moving_leaves(batch), strict=True):
            mine.copy_(new)
        self.graph.replay()
        return self.loss


def give_up(pool: Any) -> None:
    """End a capture that failed for torch, too: else nobody could draw random numbers on this GPU any more."""
    device = torch.cuda.current_device()
    with suppress(RuntimeError):  # it may have ended
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)
    generator = torch.cuda.default_generators[device]
    generator.graphsafe_set_state(generator.clone_state())  # the same numbers, but not of a capture


def moving_leaves(batch: Batch) -> list[torch.Tensor]:
    """The tensors of a batch, in a fixed order."""
    return [leaf for name in MOVING if (part := getattr(batch, name)) is not None for leaf in leaves(part)]
