"""The network that learns, with its target network and its optimizer, and how a batch changes them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Iterator, Mapping
from functools import cached_property
from typing import Any, Protocol, TypeAlias

import torch
from torch import nn

from shoal.core.algorithm import (
    Algorithm,
    HasCapture,
    HasEpochs,
    HasMinibatches,
    HasParts,
    HasTarget,
    HasTargetKl,
    HasTau,
)
from shoal.core.doing import span
from shoal.core.errors import Fatal
from shoal.core.tree import map_tree, to_numpy
from shoal.core.types import Array, Batch, Loss, Spec
from shoal.workers.graph import Captured, NotCaptured, drawing
from shoal.workers.packing import Items, fresh_batch


class Optimizes(Protocol):
    """What an update asks of an optimizer."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...

    def zero_grad(self, set_to_none: bool = True) -> None: ...

    def step(self) -> Any: ...


OptimizerStep: TypeAlias = Callable[[Algorithm[Any], nn.Module, nn.Module, Optimizes, Batch], Loss]
# Likewise, but it yields while it waits for others to bring their part.
JointStep: TypeAlias = Callable[[Algorithm[Any], nn.Module, nn.Module, Optimizes, Batch], Generator[bool, None, Loss]]
Updated: TypeAlias = tuple[Array | None, int, dict[str, float]]  # new priorities, the updates made, and metrics


def pick_device(name: str) -> torch.device:
    """Turn `auto` into the best device there is."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def target_every(algorithm: Algorithm[Any]) -> int | None:
    """Updates between moves of a target network; None: there is none."""
    return algorithm.target_every if isinstance(algorithm, HasTarget) else None


def tau_of(algorithm: Algorithm[Any]) -> float:
    """How far a target network moves towards the weights when it is due; 1: it becomes a copy."""
    return algorithm.tau if isinstance(algorithm, HasTau) else 1.0


class Following:
    """The tensors of a target network beside those that it follows, found once: the search takes longer than a move."""

    def __init__(self, net: nn.Module, target: nn.Module) -> None:
        """Find them."""
        self.moved: list[torch.Tensor] = [*target.parameters()]
        self.followed: list[torch.Tensor] = [*net.parameters()]
        self.buffers = [*zip(target.buffers(), net.buffers(), strict=True)]

    @torch.no_grad()
    def move(self, tau: float) -> None:
        """Move the target network towards the network, or all the way to it."""
        if tau == 1:
            torch._foreach_copy_(self.moved, self.followed)
        else:
            torch._foreach_lerp_(self.moved, self.followed, tau)
        for moved, buffer in self.buffers:
            moved.copy_(buffer)


class Model:
    """The network that learns, the target network that follows it now and then, and the optimizer."""

    def __init__(self, algorithm: Algorithm[Any], spec: Spec, device: torch.device, exact: bool = False) -> None:
        """Build them; for an algorithm without a target network, the network is its own target.

        Under `exact`, a batch that does not fit into memory is an error and not cut.
        """
        self.device = device
        self.net: nn.Module = algorithm.build(spec).to(device)
        self.every = target_every(algorithm)
        self.target = copy.deepcopy(self.net).requires_grad_(False) if self.every else self.net
        self.following = Following(self.net, self.target)
        self.algorithm, self.exact = algorithm, exact

    @cached_property
    def optimizer(self) -> Any:
        """The optimizer, made when it is first asked for: that loads much of torch, and actors wait for weights."""
        return self.algorithm.optimizer(self.net)

    @cached_property
    def step(self) -> Divided:
        """How a step is taken."""
        captured = self.device.type == "cuda" and isinstance(self.algorithm, HasCapture) and self.algorithm.capturable
        return Divided(Captured(optimizer_step, self.optimizer) if captured else optimizer_step, self.exact)

    @cached_property
    def backup(self) -> Backup:
        """What an update changes, to be restored."""
        return Backup(self.net, self.optimizer)

    def update(self, algorithm: Algorithm[Any], batch: Batch, updates: int) -> Updated:
        """Learn from a batch, given the updates so far; return new priorities, the updates made, and metrics."""
        return finished(self.updating(algorithm, batch, updates, alone(self.step)))

    def updating(
        self, algorithm: Algorithm[Any], batch: Batch, updates: int, step: JointStep
    ) -> Generator[bool, None, Updated]:
        """The same with others, in steps that yield while they wait for them."""
        parts = self.net, self.target, self.optimizer
        priority, count, metrics = yield from passes(algorithm, *parts, batch, self.backup, step)
        if self.every and updates // self.every != (updates + count) // self.every:
            self.following.move(tau_of(algorithm))
        return priority, count, metrics

    def weights(self) -> Mapping[str, Array]:
        """The network's weights, including its normalisers."""
        return to_numpy(self.net.state_dict())  # type: ignore[no-any-return]


class Divided:
    """A step of the optimizer that cuts batches which the device's memory does not hold, from then on.

    One that cannot be captured is taken kernel by kernel from then on.

    Gradients of the pieces add up to those of the whole: a loss is a mean over its items. Advantages that are
    standardised are so within each piece.
    """

    def __init__(self, step: OptimizerStep, exact: bool) -> None:
        """Take whole batches to begin with."""
        self.step, self.exact, self.pieces, self._news = step, exact, 1, ""

    def __call__(
        self, algorithm: Algorithm[Any], net: nn.Module, target: nn.Module, optimizer: Optimizes, batch: Batch
    ) -> Loss:
        """Take a step, in as few pieces as there is memory for."""
        arguments = algorithm, net, target, optimizer, batch
        while True:
            try:
                return self.step(*arguments) if self.pieces == 1 else optimizer_step(*arguments, self.pieces)
            except NotCaptured as error:
                self.step = optimizer_step
                self._news = (
                    f"an update could not be captured as a CUDA graph ({error}): from now on the GPU is given its "
                    "kernels one by one, which changes nothing but the speed"
                )
                continue
            except torch.OutOfMemoryError as error:
                problem = str(error).splitlines()[0]
            self._cut(problem, len(batch.weight))  # out here, where the error no longer holds on to tensors
            optimizer.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()

    def _cut(self, problem: str, items: int) -> None:
        if self.exact:
            raise Fatal(
                f"a batch does not fit into the GPU's memory, and in lockstep it is not cut: lower algorithm.batch or "
                f"algorithm.unroll; {problem}"
            )
        if self.pieces >= items:
            raise Fatal(f"not even one item of a batch fits into the GPU's memory: lower algorithm.unroll; {problem}")
        self.pieces = min(2 * self.pieces, items)
        self.step = optimizer_step  # a graph was captured for the whole batch
        self._news = (
            f"a batch does not fit into the GPU's memory: from now on each is cut into {self.pieces} pieces, whose "
            f"gradients are added ({problem})"
        )

    def news(self) -> str:
        """What there is to report, once; empty if nothing."""
        news, self._news = self._news, ""
        return news


class Backup:
    """What an update changes, as it was before, to be restored if the update was not finite.

    On the CPU no optimizer takes a step down a gradient that is not finite, so only running statistics are kept.
    """

    def __init__(self, net: nn.Module, optimizer: Any) -> None:
        """Keep nothing yet."""
        self.net, self.optimizer = net, optimizer
        self.stepped = any(part.is_cuda for part in net.parameters())
        self.statistics = [*net.buffers()]
        self.now: list[torch.Tensor] = []
        self.before: list[torch.Tensor] = []

    @torch.no_grad()
    def keep(self) -> None:
        """Copy it."""
        now = self.statistics
        if self.stepped:
            state = [value for values in self.optimizer.state.values() for value in values.values()]
            now = [*now, *self.net.parameters(), *(value for value in state if isinstance(value, torch.Tensor))]
        if len(now) != len(self.before):
            self.before = [torch.empty_like(part) for part in now]
        self.now = now
        if now:
            torch._foreach_copy_(self.before, now)

    @torch.no_grad()
    def restore(self) -> None:
        """Undo the update."""
        if self.now:
            torch._foreach_copy_(self.now, self.before)
        if not self.stepped:
            return
        kept = {id(part) for part in self.now}
        captured = any(group.get("capturable") for group in self.optimizer.param_groups)
        for parameter, values in [*self.optimizer.state.items()]:
            begun = [part for part in values.values() if isinstance(part, torch.Tensor) and id(part) not in kept]
            if begun and captured:  # a graph may write there by now; Adam and RMSProp begin with zeros
                torch._foreach_zero_(begun)
            elif begun:
                del self.optimizer.state[parameter]


def optimizer_step(
    algorithm: Algorithm[Any], net: nn.Module, target: nn.Module, optimizer: Optimizes, batch: Batch, pieces: int = 1
) -> Loss:
    """One step of the optimizer down the loss of a batch, and in the metrics whether it was `finite`.

    On the CPU a loss or gradient that is not finite changes nothing. On a GPU asking would mean waiting for it: there
    the step is taken, and whoever reads the metrics takes it back.
    """
    loss, total = differentiated(algorithm, net, target, optimizer, batch, min(pieces, len(batch.weight)))
    descend(algorithm, net, optimizer, loss, total)
    return loss


def descend(algorithm: Algorithm[Any], net: nn.Module, optimizer: Optimizes, loss: Loss, total: torch.Tensor) -> None:
    """Clip the gradients, and step down them if they and the loss are finite."""
    if algorithm.clip_norm is not None:
        parts = algorithm.parts(net) if isinstance(algorithm, HasParts) else [net]
        norms = [torch.nn.utils.clip_grad_norm_(part.parameters(), algorithm.clip_norm) for part in parts]
        norm = norms[0] if len(norms) == 1 else torch.stack(norms).norm()
        loss.metrics["gradient_norm"] = norm
    else:
        norm = torch.nn.utils.get_total_norm([part.grad for part in net.parameters() if part.grad is not None])
    finite = (total + norm).isfinite()
    loss.metrics["finite"] = finite.float()
    if finite.is_cuda or finite:
        optimizer.step()


def differentiated(
    algorithm: Algorithm[Any], net: nn.Module, target: nn.Module, optimizer: Optimizes, batch: Batch, pieces: int
) -> tuple[Loss, torch.Tensor]:
    """The loss of a batch, of its items and in total, after a backward pass for each of its pieces."""
    if pieces == 1:
        loss = algorithm.loss(net, target, batch)
        optimizer.zero_grad(set_to_none=True)
        total = (loss.each * batch.weight).mean()
        total.backward()  # type: ignore[no-untyped-call]
        return detached(loss), total.detach()
    optimizer.zero_grad(set_to_none=True)
    losses, shares, totals = [], [], []
    for index in torch.arange(len(batch.weight)).tensor_split(pieces):
        part = items(batch, index)
        loss = algorithm.loss(net, target, part)
        total = (loss.each * part.weight).sum() / len(batch.weight)
        total.backward()  # type: ignore[no-untyped-call]
        losses.append(detached(loss))
        shares.append(len(index) / len(batch.weight))
        totals.append(total.detach())
    each, priority = (torch.cat([getattr(loss, name) for loss in losses]) for name in ("each", "priority"))
    means = {
        name: torch.stack([share * loss.metrics[name] for share, loss in zip(shares, losses, strict=True)]).sum()
        for name in losses[0].metrics
    }
    return Loss(each, priority, means), torch.stack(totals).sum()


def detached(loss: Loss) -> Loss:
    """A loss without its graph, which would tie the next backward pass to the stream of this one."""
    metrics = {name: value.detach() for name, value in loss.metrics.items()}
    return Loss(loss.each.detach(), loss.priority.detach(), metrics)


def update(
    algorithm: Algorithm[Any],
    net: nn.Module,
    target: nn.Module,
    optimizer: Optimizes,
    batch: Batch,
    backup: Backup,
    step: OptimizerStep = optimizer_step,
) -> Updated:
    """Go over a batch alone, as in `passes`."""
    return finished(passes(algorithm, net, target, optimizer, batch, backup, alone(step)))


def alone(step: OptimizerStep) -> JointStep:
    """A step that waits for nobody."""

    def stepping(
        algorithm: Algorithm[Any], net: nn.Module, target: nn.Module, optimizer: Optimizes, batch: Batch
    ) -> Generator[bool, None, Loss]:
        yield from ()
        with span("update"):
            return step(algorithm, net, target, optimizer, batch)

    return stepping


def finished(work: Generator[bool, None, Updated]) -> Updated:
    """The result of an update that waits for nobody."""
    try:
        next(work)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    raise AssertionError("an update that waits for others cannot be finished at once")


def passes(
    algorithm: Algorithm[Any],
    net: nn.Module,
    target: nn.Module,
    optimizer: Optimizes,
    batch: Batch,
    backup: Backup,
    step: JointStep,
) -> Generator[bool, None, Updated]:
    """Go over a batch in epochs and minibatches; return new priorities, if items can come again, and metrics.

    Where a loss or a gradient was not finite, the update is undone as far as it was not skipped, and the only metric is
    how many pieces of the batch were `skipped`.
    """
    for group in optimizer.param_groups:
        rate = algorithm.lr.now * group.get("rate", 1.0)
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
    backup.keep()
    prepared = algorithm.prepare(net, batch)
    epochs = algorithm.epochs if isinstance(algorithm, HasEpochs) else 1
    minibatches = algorithm.minibatches if isinstance(algorithm, HasMinibatches) else 1
    most = algorithm.target_kl if isinstance(algorithm, HasTargetKl) else None
    whole = epochs == minibatches == 1
    sums: dict[str, torch.Tensor] = {}
    pieces = 0
    for piece in [prepared] if whole else shuffled(prepared, epochs, minibatches):
        loss = yield from step(algorithm, net, target, optimizer, piece)
        pieces += 1
        for name, value in loss.metrics.items():
            sums[name] = sums.get(name, 0.0) + value.detach()
        if most is not None and loss.metrics["kl"] > most:
            break
    # One copy for all of it: every look at a GPU's number waits for the GPU.
    numbers = torch.cat([loss.priority.detach(), *(value.reshape(1) for value in sums.values())]).cpu().numpy()
    totals = dict(zip(sums, numbers[len(loss.priority) :].tolist(), strict=True))
    if (fine := round(totals.pop("finite"))) < pieces:
        backup.restore()
        return None, 0 if loss.each.is_cuda else fine, {"skipped": float(pieces - fine)}
    means = {name: total / pieces for name, total in totals.items()}
    return numbers[: len(loss.priority)] if whole else None, pieces, means


def shuffled(batch: Batch, epochs: int, minibatches: int) -> Iterator[Batch]:
    """Shuffle the items again for each epoch, and deal them into minibatches."""
    size = batch.action.shape[1]
    if minibatches > size:
        raise Fatal(f"algorithm.minibatches {minibatches}: this batch has only {size} items to be cut into them")
    for _ in range(epochs):
        order = torch.randperm(size)
        for piece in order.tensor_split(minibatches):
            yield items(batch, piece)


def items(batch: Batch, which: torch.Tensor) -> Batch:
    """Some items of a batch, by their index."""
    index, on_host = which.to(batch.action.device), which.numpy()
    return batch._replace(
        **{name: map_tree(lambda x: x.index_select(1, index), getattr(batch, name)) for name in Batch._fields[:6]},
        weight=batch.weight[index],
        key=batch.key[on_host],
        version=batch.version[on_host],
        fresh=None if batch.fresh is None else batch.fresh[index],
    )


def first_priorities(algorithm: Algorithm[Any], net: nn.Module, fresh: Items, device: torch.device) -> Array:
    """Priorities of new items, by the loss that will set their later ones."""
    with torch.no_grad(), drawing(device):  # some losses draw
        return algorithm.loss(net, net, fresh_batch(fresh, device)).priority.cpu().numpy()
