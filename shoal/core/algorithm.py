"""The protocol of an algorithm: frozen settings with a few pure methods."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from shoal.core.settings import Schedule
from shoal.core.types import Act, Batch, Loss, NStep, Sequence, Spec, Step

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer


@runtime_checkable
class Algorithm(Protocol):
    """What the workers ask of an algorithm; its fields are its hyperparameters."""

    @property
    def lr(self) -> Schedule:
        """Learning rate."""
        ...

    @property
    def batch(self) -> int | None:
        """Items per update; None: one from every environment of every actor."""
        ...

    @property
    def epochs(self) -> int:
        """Passes over each batch."""
        ...

    @property
    def minibatches(self) -> int:
        """Pieces into which each pass is cut."""
        ...

    @property
    def clip_norm(self) -> float | None:
        """Largest gradient norm."""
        ...

    @property
    def max_lag(self) -> int | None:
        """Largest number of policy versions between acting and learning; 0: actors wait for the learner."""
        ...

    @property
    def experience(self) -> NStep | Sequence:
        """How an actor's stream is cut."""
        ...

    def build(self, spec: Spec) -> nn.Module:
        """Make the network."""
        ...

    def optimizer(self, net: nn.Module) -> Optimizer:
        """Make the optimizer."""
        ...

    def begin(self, net: nn.Module, size: int) -> Any:
        """Return the first carry for `size` environments."""
        ...

    def act(self, net: nn.Module, step: Step, carry: Any, rank: Tensor | None) -> Act:
        """Choose actions; a rank in [0, 1] per environment sets the exploration, None means evaluation."""
        ...

    def prepare(self, net: nn.Module, batch: Batch) -> Batch:
        """Update running statistics and compute, once per batch, what its epochs share."""
        ...

    def loss(self, net: nn.Module, target: nn.Module, batch: Batch) -> Loss:
        """Return a loss and a priority per item."""
        ...
