"""One network and one optimizer in memory that every worker shares, without a lock (arXiv:1602.01783, section 4).

The block is a flat mapping of arrays: `net/…` and `target/…` are state dicts, `optimizer/…` is the optimizer's state,
named as in a checkpoint, and the rest are counts. `steps` and `updates` have a cell for each worker, which it alone
writes, so that none is lost; `version`, `period`, `stop` and the steps of other groups, `elsewhere`, are the chief's.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from shoal import envs
from shoal.core.algorithm import Algorithm
from shoal.core.randomness import Randomness, derive
from shoal.core.settings import moving
from shoal.core.tree import to_numpy
from shoal.core.types import Array, Batch, Spec
from shoal.workers.model import Backup, Following, target_every, tau_of, update
from shoal.workers.progress import Progress
from shoal.workers.saving import load_weights, optimizer_state

if TYPE_CHECKING:
    from shoal.experiment import Experiment

CPU = torch.device("cpu")


def initial_block(experiment: Experiment, saved: Mapping[str, Any] | None) -> dict[str, Array]:
    """What the block holds at first: a fresh network and optimizer, or those of a checkpoint."""
    algorithm, workers = experiment.algorithm, experiment.actor_count
    with Randomness(derive(experiment.seed, "network")).active():
        net = algorithm.build(envs.spec_of(experiment.environment))
    state = {
        "weights": to_numpy(net.state_dict()),
        "optimizer": to_numpy(blank_state(algorithm, net)),
        **(saved or {}),
    }
    load_weights(net, state["weights"])  # raises if they do not fit
    tree = {f"net/{name}": array for name, array in state["weights"].items()}
    tree |= {f"optimizer/{name}": array for name, array in state["optimizer"].items()}
    now, copies = Progress.of(saved), 0
    if every := target_every(algorithm):
        tree |= {f"target/{name}": array for name, array in state.get("target", state["weights"]).items()}
        copies = now.updates // every
    for name in ("steps", "updates"):
        tree[name] = np.zeros(workers, np.int64)
        tree[name][0] = getattr(now, name)
    cells = {"version": now.version, "period": now.period, "copies": copies, "stop": 0, "elsewhere": 0}
    return tree | {name: np.array(value, np.int64) for name, value in cells.items()}


def blank_state(algorithm: Algorithm[Any], net: nn.Module) -> dict[str, torch.Tensor]:
    """The optimizer's state before its first step; to see what it holds, the optimizer takes a step by zero."""
    net = copy.deepcopy(net)
    for parameter in net.parameters():  # zeros, so that no weight decay leaves a trace either
        parameter.data.zero_()
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    optimizer = algorithm.optimizer(net)
    optimizer.step()
    state = optimizer_state(optimizer)
    for name, value in state.items():
        if name.endswith(".step"):
            value.zero_()
    return state


def lay_over(net: nn.Module, block: Mapping[str, Array], prefix: str) -> nn.Module:
    """Let a network's weights and buffers be those of the block."""
    for name, tensor in net.state_dict(keep_vars=True).items():
        tensor.data = torch.from_numpy(block[prefix + name])
    return net


class SharedModel:
    """A worker's access: a network of its own that follows the shared one, and steps that change the shared one."""

    def __init__(self, algorithm: Algorithm[Any], spec: Spec, block: Mapping[str, Array], index: int) -> None:
        """Look at the block as the worker with this index; the optimizer is a stock one over shared memory."""
        self.block, self.index = block, index
        self.own: nn.Module = algorithm.build(spec)
        self.net = lay_over(copy.deepcopy(self.own), block, "net/")
        for name, buffer in self.own.named_buffers():
            if f"net/{name}" in block:
                buffer.data = torch.from_numpy(block[f"net/{name}"])  # running statistics are everyone's at once
        self.pairs = [*zip(self.net.parameters(), self.own.parameters(), strict=True)]
        self.every = target_every(algorithm)
        self.target = self.own
        if self.every:
            self.target = lay_over(copy.deepcopy(self.own), block, "target/").requires_grad_(False)
        self.following = Following(self.net, self.target)
        self.optimizer = self._over_block(algorithm.optimizer(self.net))
        self.backup = Backup(self.own, self.optimizer)
        self.last: Batch  # the one learned from most recently

    def _over_block(self, optimizer: Optimizer) -> Optimizer:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for key in self.block:
            if key.startswith("optimizer/"):
                index, _, name = key.removeprefix("optimizer/").partition(".")
                optimizer.state[parameters[int(index)]][name] = torch.from_numpy(self.block[key])
        return optimizer

    @torch.no_grad()
    def follow(self) -> None:
        """Bring the own network up to the shared one."""
        for shared, own in self.pairs:
            own.copy_(shared)

    def update(self, algorithm: Algorithm[Any], batch: Batch) -> tuple[Array | None, dict[str, float]]:
        """Learn from a batch on the own network, and change the shared one; return priorities and metrics."""
        lag = float(self.now().updates - batch.version.mean())
        priority, count, metrics = update(algorithm, self.own, self.target, self, batch, self.backup)
        self.last = batch
        self.block["updates"][self.index] += count
        if self.every and (copies := self.now().updates // self.every) > self.block["copies"]:
            self.block["copies"][...] = copies
            self.following.move(tau_of(algorithm))
        return priority, {"lag": lag, "lr": algorithm.lr.now, **moving(algorithm), **metrics}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups: to an update, this is the optimizer."""
        return self.optimizer.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of the own network."""
        self.own.zero_grad(set_to_none)

    def step(self) -> None:
        """Apply the own network's gradients to the shared one, whatever the others do meanwhile, and follow it."""
        for shared, own in self.pairs:  # the block has one memory layout; a network may compute in another
            shared.grad = None if own.grad is None else own.grad.contiguous()
        self.optimizer.step()
        self.follow()

    def now(self) -> Progress:
        """How far all workers together have come."""
        block = self.block
        return Progress(
            int(block["steps"].sum()), int(block["updates"].sum()), int(block["version"]), int(block["period"])
        )

    def weights(self) -> Mapping[str, Array]:
        """The shared network's weights, including its normalisers."""
        return to_numpy(self.net.state_dict())  # type: ignore[no-any-return]
