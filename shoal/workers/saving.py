"""What a checkpoint holds, and when one is due."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from shoal.core.errors import Fatal
from shoal.core.tree import to_numpy
from shoal.core.types import Array
from shoal.workers.progress import Progress

if TYPE_CHECKING:
    from shoal.experiment import Experiment
    from shoal.services.checkpoints import Checkpoints
    from shoal.services.journal import Journal
    from shoal.workers.model import Model
    from shoal.workers.shared_model import SharedModel

LONGEST = 300.0  # seconds between checkpoints, however slow the steps are


def to_arrays(net: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Weights with normalisers, and the optimizer's state; its settings come from the algorithm again."""
    return {"weights": to_numpy(net.state_dict()), "optimizer": to_numpy(optimizer_state(optimizer))}


def optimizer_state(optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """The optimizer's state as tensors, named by parameter and quantity."""
    return {
        f"{index}.{name}": torch.as_tensor(value)
        for index, quantities in optimizer.state_dict()["state"].items()
        for name, value in quantities.items()
        if value is not None
    }


@torch.no_grad()
def from_arrays(net: nn.Module, optimizer: Optimizer, content: Mapping[str, Any]) -> None:
    """Restore what `to_arrays` returned; weights that do not fit the network are refused with the reason."""
    load_weights(net, content["weights"])
    state: dict[int, dict[str, Any]] = {}
    for key, array in content["optimizer"].items():
        index, _, name = key.partition(".")
        state.setdefault(int(index), {})[name] = torch.tensor(array)
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    for parameter, quantities in optimizer.state.items():
        for name, value in quantities.items():
            # Fused kernels go through memory in its order, which for convolutions is another than that of the array.
            if value.shape == parameter.shape and value.stride() != parameter.stride():
                quantities[name] = torch.empty_like(parameter).copy_(value)


def load_weights(net: nn.Module, weights: Mapping[str, Array]) -> None:
    """Load weights, or say how they and the network differ."""
    try:
        net.load_state_dict({name: torch.tensor(array) for name, array in weights.items()})
    except RuntimeError as error:
        raise Fatal(f"the saved weights do not fit the network of these settings: {error}") from None


def contents(model: Model | SharedModel) -> dict[str, Any]:
    """The arrays of a model: what `to_arrays` has, and the target network."""
    target = {"target": to_numpy(model.target.state_dict())} if model.every else {}
    return {**to_arrays(model.net, model.optimizer), **target}


def from_contents(model: Model, saved: Mapping[str, Any]) -> None:
    """Restore what `contents` returned."""
    from_arrays(model.net, model.optimizer, saved)
    if model.every:
        load_weights(model.target, saved.get("target", saved["weights"]))


class Settles(Protocol):
    """What a checkpoint asks of a store, or of several."""

    def settle(self) -> Mapping[str, Array]: ...

    def restore(self, saved: Mapping[str, Array]) -> None: ...


def resume(saved: Mapping[str, Any] | None, model: Model, store: Settles, journal: Journal) -> Progress:
    """Continue from a checkpoint, or begin where there is none."""
    now = Progress.of(saved)
    if saved is not None:
        from_contents(model, saved)
        store.restore(saved.get("store", {}))
        journal.went_back(now.steps)
    return now


class Saver:
    """Saves checkpoints at intervals of steps, and after some minutes unless the clock must not matter."""

    def __init__(
        self,
        experiment: Experiment,
        checkpoints: Checkpoints,
        journal: Journal,
        store: Settles | None,
        steps: int,
        good: int | None = None,
    ) -> None:
        """Count from these steps; `good` are those of the checkpoint that the run continues from."""
        self.checkpoints, self.journal = checkpoints, journal
        self.interval, self.exact = experiment.checkpoint_interval, experiment.lockstep
        kept = [experiment.replay] if experiment.replay else [*(experiment.mixture or {}).values()]
        self.store = store if self.exact or any(part.save for part in kept) else None
        self.last, self.saved = steps, time.monotonic()
        self.good = good  # steps of the newest checkpoint

    def due(self, steps: int) -> bool:
        """Whether it is time."""
        late = not self.exact and time.monotonic() - self.saved > LONGEST
        return late or steps - self.last >= self.interval

    def begin(self, now: Progress, model: Model | SharedModel) -> None:
        """Save a run at its beginning, so that it can be resumed as soon as there are weights."""
        self._write(now, model, None, scheduled=True)

    def save(self, now: Progress, model: Model | SharedModel, scheduled: bool) -> None:
        """Save, unless nothing was learned since the last time; under lockstep a scheduled one opens a new period."""
        if now.steps > self.last:
            now.period += scheduled and self.exact
            self._write(now, model, self.store, scheduled)
        self.last, self.saved = now.steps, time.monotonic()

    def _write(self, now: Progress, model: Model | SharedModel, store: Settles | None, scheduled: bool) -> None:
        content = contents(model)
        if store is not None:
            content["store"] = store.settle()
        state = {**asdict(now), "scheduled": scheduled, "journal": self.journal.state()}
        problem = self.checkpoints.save({**content, "state": state})
        self.journal.saved(now.steps, problem)
        self.good = self.good if problem else now.steps
