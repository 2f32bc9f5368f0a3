"""The model: an update that was not finite is taken back."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from shoal.algorithms.dqn import Dqn
from shoal.algorithms.sac import Sac
from shoal.core.tree import map_tree
from shoal.core.types import ActionSpec, ArraySpec, Spec
from shoal.nets.optimizers import make_optimizer
from shoal.workers import model
from shoal.workers.model import Backup, Model, first_priorities
from shoal.workers.saving import contents, from_contents
from tests.algorithms.conftest import SPECS, play


def step(net: nn.Module, optimizer: Any, scale: float) -> None:
    """A step down the gradient of a made-up loss."""
    optimizer.zero_grad()
    (scale * net(torch.ones(2, 3)).square().sum()).backward()
    optimizer.step()


def tensors(optimizer: Any) -> list[torch.Tensor]:
    return [value for values in optimizer.state.values() for value in values.values()]


@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize(
    ("rule", "more"), [("adam", {}), ("rmsprop", {}), ("rmsprop", {"momentum": 0.9, "centered": True})]
)
def test_steps_that_are_taken_back_leave_no_trace(rule: str, more: dict[str, Any], before: int, captured: bool) -> None:
    """As on a GPU, where steps are taken before anybody asks whether they are finite."""
    torch.manual_seed(0)
    one = nn.Linear(3, 2)
    other = copy.deepcopy(one)
    optimizers = [make_optimizer(rule, net, 1e-2, 1e-8, **more) for net in (one, other)]
    optimizers[0].param_groups[0]["capturable"] = captured
    backup = Backup(one, optimizers[0])
    backup.stepped = True
    for _ in range(before):
        step(one, optimizers[0], 1.0)
        step(other, optimizers[1], 1.0)
    backup.keep()
    step(one, optimizers[0], 1.0)
    step(one, optimizers[0], float("nan"))
    held = tensors(optimizers[0])
    backup.restore()
    for _ in range(3):
        step(one, optimizers[0], 1.0)
        step(other, optimizers[1], 1.0)
    if captured or before:  # what a graph was captured with is still what the optimizer holds
        assert [*map(id, tensors(optimizers[0]))] == [*map(id, held)]
    for mine, theirs in zip(tensors(optimizers[0]), tensors(optimizers[1]), strict=True):
        assert torch.equal(mine, theirs)
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_priorities_draw_only_while_nobody_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []
    monkeypatch.setattr(model, "drawing", lambda device: asked.append(device) or nullcontext())
    algorithm, cpu = Sac(), torch.device("cpu")
    net = algorithm.build(SPECS["continuous"])
    batch = play(algorithm, net, SPECS["continuous"], length=1).arrays()
    items = {name: batch[name] for name in batch if name not in ("key", "weight")}
    assert len(first_priorities(algorithm, net, items, cpu)) == 6
    assert asked == [cpu]


def test_a_network_of_convolutions_goes_on_from_its_checkpoint() -> None:
    """Its weights have another memory layout than the arrays in a checkpoint."""
    torch.manual_seed(0)
    algorithm, spec, cpu = Dqn(), Spec(ArraySpec((2, 40, 40), "uint8"), ActionSpec(3)), torch.device("cpu")
    one, other = Model(algorithm, spec, cpu), Model(algorithm, spec, cpu)
    batches = [play(algorithm, one.net, spec, length=1) for _ in range(4)]
    for update in range(4):
        if update == 2:
            from_contents(other, map_tree(np.ascontiguousarray, contents(one)))
        one.update(algorithm, batches[update], update)
        if update >= 2:
            other.update(algorithm, batches[update], update)
    for mine, its in zip(one.net.parameters(), other.net.parameters(), strict=True):
        assert torch.equal(mine, its)
