"""One network and one optimizer in memory that every worker shares, without a lock (arXiv:1602.01783, section 4).

The block is a flat mapping of arrays: `net/…` and `target/…` are state dicts, `optimizer/…` is what the optimizer
remembers, named as in a checkpoint, and the rest are counts. `steps` and `updates` have a cell for each worker, which
it alone writes, so that none is lost; `version`, `period`, `stop` and the steps of other groups, `elsewhere`, are the
chief's.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from shoal import envs
from shoal.core.randomness import Randomness, derive
from shoal.core.tree import to_numpy
from shoal.core.types import Array, Batch
from shoal.workers.learner import Keeper, Progress, update
from shoal.workers.snapshot import flat, load_weights

CPU = torch.device("cpu")


def contents(experiment: Any, saved: Mapping[str, Any] | None) -> dict[str, Array]:
    """What the block holds at first: a fresh network and optimizer, or those of a checkpoint."""
    algorithm, workers = experiment.algorithm, experiment.actor_count
    with Randomness(derive(experiment.seed, "network")).active():
        net = algorithm.build(envs.spec_of(experiment.environment))
    state = {
        "weights": to_numpy(net.state_dict()),
        "optimizer": to_numpy(blank_memory(algorithm, net)),
        **(saved or {}),
    }
    load_weights(net, state["weights"])  # says so where they do not fit
    tree = {f"net/{name}": array for name, array in state["weights"].items()}
    tree |= {f"optimizer/{name}": array for name, array in state["optimizer"].items()}
    now = Progress(**{field.name: saved["state"][field.name] for field in fields(Progress)}) if saved else Progress()
    copies = 0
    if every := getattr(algorithm, "target_every", None):
        tree |= {f"target/{name}": array for name, array in state.get("target", state["weights"]).items()}
        copies = now.updates // every
    for name in ("steps", "updates"):
        tree[name] = np.zeros(workers, np.int64)
        tree[name][0] = getattr(now, name)
    cells = {"version": now.version, "period": now.period, "copies": copies, "stop": 0, "elsewhere": 0}
    return tree | {name: np.array(value, np.int64) for name, value in cells.items()}


def blank_memory(algorithm: Any, net: nn.Module) -> dict[str, Any]:
    """What the optimizer remembers before its first step; to see what that is, it takes one that leads nowhere."""
    net = copy.deepcopy(net)
    for parameter in net.parameters():  # zeros, so that no weight decay leaves a trace either
        parameter.data.zero_()
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    optimizer = algorithm.optimizer(net)
    optimizer.step()
    memory = flat(optimizer)
    for name, value in memory.items():
        if name.endswith(".step"):
            value.zero_()
    return memory


def lay_over(net: nn.Module, block: Mapping[str, Array], prefix: str) -> nn.Module:
    """Let a network's weights and buffers be those of the block."""
    for name, tensor in net.state_dict(keep_vars=True).items():
        tensor.data = torch.from_numpy(block[prefix + name])
    return net


class Shared:
    """A worker's access: a network of its own that follows the shared one, and steps that change the shared one."""

    def __init__(self, algorithm: Any, spec: Any, block: Mapping[str, Array], index: int) -> None:
        """Look at the block as the worker with this index; the optimizer is a stock one over shared memory."""
        self.block, self.index = block, index
        self.own = algorithm.build(spec)
        self.net = lay_over(copy.deepcopy(self.own), block, "net/")
        for name, buffer in self.own.named_buffers():
            if f"net/{name}" in block:
                buffer.data = torch.from_numpy(block[f"net/{name}"])  # running statistics are everyone's at once
        self.pairs = [*zip(self.net.parameters(), self.own.parameters(), strict=True)]
        self.every: int | None = getattr(algorithm, "target_every", None)
        self.target = self.own
        if self.every:
            self.target = lay_over(copy.deepcopy(self.own), block, "target/").requires_grad_(False)
        self.optimizer = self._over_block(algorithm.optimizer(self.net))
        self.keeper = Keeper(self.own, self.optimizer)
        self.last: Batch  # that was learned from

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

    def update(self, algorithm: Any, batch: Batch) -> tuple[Any, dict[str, float]]:
        """Learn from a batch on the own network, and change the shared one; return priorities and metrics."""
        lag = float(self.now().updates - batch.version.mean())
        priority, count, metrics = update(algorithm, self.own, self.target, self, batch, self.keeper)
        self.last = batch
        self.block["updates"][self.index] += count
        if self.every and (copies := self.now().updates // self.every) > self.block["copies"]:
            self.block["copies"][...] = copies
            self.target.load_state_dict(self.net.state_dict())
        return priority, {"lag": lag, "lr": algorithm.lr.now, **metrics}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups: to an update, this is the optimizer."""
        return self.optimizer.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of the own network."""
        self.own.zero_grad(set_to_none)

    def step(self) -> None:
        """Apply the own network's gradients to the shared one, whatever the others do meanwhile, and follow it."""
        for shared, own in self.pairs:  # the block knows one order of memory only; a network may compute in another
            shared.grad = None if own.grad is None else own.grad.contiguous()
        self.optimizer.step()
        self.follow()

    def now(self) -> Progress:
        """How far all workers together have come."""
        block = self.block
        return Progress(
            int(block["steps"].sum()), int(block["updates"].sum()), int(block["version"]), int(block["period"])
        )

    def weights(self) -> Any:
        """The shared network's weights, normalisers among them."""
        return to_numpy(self.net.state_dict())
