"""What workers ask of an algorithm: frozen settings with a few pure methods, and the hooks it may have besides."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Sequence_
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from shoal.core.mixing import Mixing
from shoal.core.settings import Circling, Replaying, Schedule
from shoal.core.types import Act, Batch, Loss, NStep, Sequence, Spec, Step

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

Net = TypeVar("Net", bound="nn.Module")


@runtime_checkable
class Algorithm(Protocol[Net]):
    """What every algorithm has; its fields are its hyperparameters."""

    @property
    def lr(self) -> Schedule:
        """Learning rate."""
        ...

    @property
    def batch(self) -> int | None:
        """Items per update; None: one from every environment of every actor."""
        ...

    @property
    def clip_norm(self) -> float | None:
        """Largest gradient norm; None: unlimited."""
        ...

    @property
    def experience(self) -> NStep | Sequence:
        """How an actor's stream is cut."""
        ...

    def build(self, spec: Spec) -> Net:
        """Make the network."""
        ...

    def optimizer(self, net: Net) -> Optimizer:
        """Make the optimizer."""
        ...

    def begin(self, net: Net, size: int) -> Any:
        """Return the first carry for `size` environments."""
        ...

    def act(self, net: Net, step: Step, carry: Any, rank: Tensor | None) -> Act:
        """Choose actions; a rank in [0, 1] per environment sets the exploration, None means evaluation."""
        ...

    def prepare(self, net: Net, batch: Batch) -> Batch:
        """Update running statistics and compute, once per batch, what its epochs share."""
        ...

    def loss(self, net: Net, target: Net, batch: Batch) -> Loss:
        """Return a loss and a priority per item."""
        ...


# The hooks, each of which an algorithm may have or not.


@runtime_checkable
class HasEpochs(Protocol):
    """Passes over each batch; else 1."""

    @property
    def epochs(self) -> int: ...


@runtime_checkable
class HasMinibatches(Protocol):
    """Pieces into which each pass over a batch is cut; else 1."""

    @property
    def minibatches(self) -> int: ...


@runtime_checkable
class HasTargetKl(Protocol):
    """KL divergence, the metric `kl` of the loss, at which the passes over a batch stop; None or no hook: never."""

    @property
    def target_kl(self) -> float | None: ...


@runtime_checkable
class HasMaxLag(Protocol):
    """Most policy versions between acting and learning; 0: actors wait for the learner; None or no hook: unlimited."""

    @property
    def max_lag(self) -> int | None: ...


@runtime_checkable
class HasTarget(Protocol):
    """Updates between moves of a target network, by default to a copy of the weights; else there is none."""

    @property
    def target_every(self) -> int: ...


@runtime_checkable
class HasTau(Protocol):
    """How far a target network moves towards the weights when it is due; else it becomes a copy of them."""

    @property
    def tau(self) -> float: ...


@runtime_checkable
class HasParts(Protocol):
    """Parts of the network whose gradients have a norm each; else there is one norm of all."""

    def parts(self, net: Any) -> Sequence_[nn.Module]: ...


@runtime_checkable
class HasReplay(Protocol):
    """How experience is kept and drawn again; None or no hook: every item is used once."""

    @property
    def replay(self) -> Replaying | None: ...


@runtime_checkable
class HasCircular(Protocol):
    """How many batches are held, and how often each is used; None or no hook: every item is used once."""

    @property
    def circular(self) -> Circling | None: ...


@runtime_checkable
class HasMixture(Protocol):
    """The stores of which each gives its share of a batch; None or no hook: there is one store."""

    @property
    def mixture(self) -> Mixing | None: ...


@runtime_checkable
class HasFeatures(Protocol):
    """What the network makes of each observation of a batch, [T+1, B, F]; an elite store wants it in the record too."""

    def features(self, net: Any, batch: Batch) -> Tensor: ...


@runtime_checkable
class HasReplayRatio(Protocol):
    """Updates from the replay after each fresh one, on average; else all learning is from the replay."""

    @property
    def replay_ratio(self) -> float: ...


@runtime_checkable
class HasActorPriorities(Protocol):
    """Whether actors compute the first priority of each item; else it is the highest so far."""

    @property
    def actor_priorities(self) -> bool: ...


@runtime_checkable
class HasCapture(Protocol):
    """Whether an update can be captured as a CUDA graph: its loss looks at no data and at no schedule but `lr`."""

    @property
    def capturable(self) -> bool: ...


@runtime_checkable
class HasPhase(Protocol):
    """Which of its forms an update takes, known after `prepare`: each is captured by itself; else there is one."""

    def phase(self, net: Any) -> int: ...


@runtime_checkable
class HasRewardInput(Protocol):
    """Whether the network sees the reward of the last action; else it does not."""

    @property
    def sees_reward(self) -> bool: ...


@runtime_checkable
class HasTopology(Protocol):
    """The topology that the algorithm is made for; else actors and a learner."""

    @property
    def topology(self) -> str: ...


@runtime_checkable
class HasValues(Protocol):
    """What a choice is based on, as tensors by name, for recordings of episodes."""

    def values(self, net: Any, step: Step, carry: Any) -> Mapping[str, Tensor]: ...


@runtime_checkable
class HasChoices(Protocol):
    """A bandit's pulls since the last call, each as [arm, score], and a first carry that knows earlier ones."""

    def choices(self, carry: Any) -> list[list[float]]: ...

    def informed(self, carry: Any, pulls: Sequence_[list[float]]) -> Any: ...
