"""The nouns: what flows between workers and services, and how time is counted.

Time, stated once. A step at instant t holds the observation, and the reward and discount earned by the
action chosen at t-1. A batch is already shifted: action[t] was chosen at observation[t], and reward[t] and
discount[t] answer it. Only the packer shifts. An episode ends with its true last observation; the action
chosen there is a dummy that leads to the next step with `first`, so every transition into a `first` step is
masked: `batch.mask[t] = not first[t+1]`. Padding repeats `first` steps, so the same mask covers it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypeAlias, TypeVar

from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

Array: TypeAlias = NDArray[Any]
Tree: TypeAlias = Array | Mapping[str, "Tree"]
Method = TypeVar("Method", bound=Callable[..., Any])


class Step(NamedTuple):
    """What B environments say at one instant."""

    observation: Any  # tree of [B, ...]
    reward: Any  # [B] float32, earned by the previous action
    discount: Any  # [B] float32, 0 where the episode ended by its own rules, 1 if it goes on or was cut off
    first: Any  # [B] bool, this observation opens an episode


class Act(NamedTuple):
    """One choice for B environments."""

    action: Tensor  # [B] or [B, A]
    record: dict[str, Tensor]  # [B, ...] stored with the step
    carry: Any  # threaded to the next call


class Batch(NamedTuple):
    """Experience for one update; time runs along axis 0 and items along axis 1."""

    observation: Any  # tree of [T+1, B, ...]
    first: Tensor  # [T+1, B] bool
    action: Tensor  # [T, B, ...]
    reward: Tensor  # [T, B]
    discount: Tensor  # [T, B]
    record: dict[str, Tensor]  # [T, B, ...]; [1, B, ...] where declared initial
    weight: Tensor  # [B]
    key: Array  # [B] int64
    version: Array  # [B] int64
    fresh: Tensor | None = None  # [B] bool, items not drawn before, of a mixture those of the queue; None: all of them

    def arrays(self) -> dict[str, Any]:
        """What it holds, by name."""
        return {name: value for name, value in self._asdict().items() if value is not None}

    @property
    def news(self) -> Tensor:
        """[T, B] float: the mask without items that were drawn before, for statistics that count every step once."""
        return self.mask if self.fresh is None else self.mask * self.fresh

    @property
    def mask(self) -> Tensor:
        """[T, B] float: 0 on the dummy transition between episodes and on padding."""
        return (~self.first[1:]).float()


class Loss(NamedTuple):
    """A loss per item, before importance weights."""

    each: Tensor  # [B]
    priority: Tensor  # [B]
    metrics: dict[str, Tensor]


@dataclass(frozen=True)
class NStep:
    """Cut the stream into n-step transitions (T = 1), shorter where the episode ends sooner."""

    n: int = 1
    gamma: float = 0.99

    length: ClassVar[int] = 1
    overlap: ClassVar[int] = 0
    initial: ClassVar[tuple[str, ...]] = ()


@dataclass(frozen=True)
class Sequence:
    """Cut the stream into runs of `length` actions, each starting `length - overlap` after the previous one."""

    length: int
    overlap: int = 0
    across: bool = True  # False: a sequence stops where its episode stops, and is padded
    initial: tuple[str, ...] = ()  # records of which only the first is kept, such as a recurrent state


@dataclass(frozen=True)
class ArraySpec:
    """Shape and type of one observation array, without the batch axis."""

    shape: tuple[int, ...]
    dtype: str
    stack: int = 1  # instants stacked along the first axis, all but one of which earlier observations showed
    largest: float = 255.0  # of bytes: what networks see as 1


SMALLEST_IMAGE = 36  # pixels: the convolutions of the Nature network leave nothing of a smaller one
MASK = "action_mask"  # the part of an observation that says which actions are allowed


@dataclass(frozen=True)
class ActionSpec:
    """A choice among `size` actions, a vector of `size` numbers between `low` and `high`, or several of these at once.

    A joint action is a vector of `size` numbers: those of its parts side by side, a choice being one.
    """

    size: int
    low: tuple[float, ...] = ()  # empty: discrete
    high: tuple[float, ...] = ()
    parts: tuple[ActionSpec, ...] = ()  # of a joint action, none of them joint itself

    @property
    def discrete(self) -> bool:
        """Whether the action is one of `size` choices."""
        return not self.low and not self.parts

    @property
    def choices(self) -> tuple[int, ...]:
        """The number of choices for each number of an action; 0 where it is continuous."""
        if self.parts:
            return tuple(count for part in self.parts for count in part.choices)
        return (0,) * self.size if self.low else (self.size,)


def joint(parts: Iterable[ActionSpec]) -> ActionSpec:
    """Several actions at once, as one."""
    flat = tuple(leaf for part in parts for leaf in (part.parts or (part,)))
    return ActionSpec(sum(len(part.choices) for part in flat), parts=flat)


@dataclass(frozen=True)
class Spec:
    """What an environment shows and takes."""

    observation: Any  # ArraySpec, or a mapping of them
    action: ActionSpec


INTERRUPTED = "interrupted"  # why a run ends early when its user asks for it

Work: TypeAlias = Generator[bool, None, None]  # yields True when it did work, False when it waits


class Store(Protocol):
    """Where experience waits: never blocks."""

    def admit(self, actor: int, version: int, count: int) -> bool:
        """Whether an actor may begin `count` items with weights of this version; False: fetch newer ones first."""
        ...

    def put(self, items: Mapping[str, Tree], priority: Array | None = None, actor: int | None = None) -> bool:
        """Copy the items of an actor in; False: full or over the limit, come back."""
        ...

    def get(self, size: int, version: int = 0, beta: float = 1.0, seed: int | None = None) -> Mapping[str, Tree] | None:
        """Return a batch for weights of this version as a tree; None: not enough yet.

        Where items are drawn by priority, `beta` is how far importance weights correct for it. Where several workers
        draw at random, each brings a seed: what a store's own generator gives would depend on where the store lives.
        """
        ...

    def update(self, key: Array, priority: Array) -> None:
        """Set priorities; unknown keys are ignored."""
        ...

    def settle(self) -> Mapping[str, Array]:
        """Reach a state that a checkpoint can hold, and return it."""
        ...

    def restore(self, saved: Mapping[str, Array]) -> None:
        """Continue from what `settle` returned."""
        ...

    def refused(self) -> list[str]:
        """What was refused since the last call, in words."""
        ...

    def status(self) -> Mapping[str, float]:
        """Counts by name: `filled`, `capacity` and how many puts were `refused`, at least."""
        ...


class Engine(Protocol):
    """Where services and workers live; it knows nothing of what they do."""

    def serve(self, name: str, make: Callable[..., Any], *args: Any) -> Any:
        """Start a service and return a stand-in that looks like it."""
        ...

    @property
    def shares(self) -> bool:
        """Whether it has memory that all workers of a machine share."""
        ...

    def share(self, name: str, tree: Mapping[str, Array]) -> Any:
        """Copy arrays into that memory and return a stand-in for it.

        A worker that gets the stand-in as an argument sees a mapping of names to arrays, and so does the head.
        """
        ...

    def run(self, name: str, work: Callable[..., Work], *args: Any) -> None:
        """Start a worker."""
        ...

    def wait(self, *names: str) -> None:
        """Return when the named workers have ended; raise what any worker raised, with its traceback."""
        ...

    def hurry(self) -> None:
        """Wait no longer than a grace period for anyone who is stuck: the user asked for the end of the run."""
        ...

    def report(self) -> Mapping[str, Any]:
        """What each worker has done with its time, by name."""
        ...

    def spans(self) -> Iterable[tuple[str, str, Any]]:
        """What workers did since the last call, where a trace is wanted: worker, machine, spans."""
        ...

    def close(self) -> None:
        """End everything; nothing survives it."""
        ...


def immutable(method: Method) -> Method:
    """Mark a service's method whose answers never change once given: engines may send one copy of each to many."""
    method.immutable = True  # type: ignore[attr-defined]
    return method
