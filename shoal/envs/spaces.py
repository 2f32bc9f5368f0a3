"""Spaces of Gymnasium as arrays: observations, actions, and masks of actions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from shoal.core.errors import Fatal
from shoal.core.types import MASK, SMALLEST_IMAGE, ActionSpec, Array, ArraySpec, joint

Write: TypeAlias = Callable[[Any, int, Any], None]  # (arrays [B, ...], row, value of the space)
Decode: TypeAlias = Callable[[Array], Any]  # actions [B] or [B, A] → one value of the space per environment


def observations(space: Any) -> tuple[Any, Write]:
    """Return the array specs of a space, and a function that writes a value of it into arrays [B, ...].

    Pictures of bytes stay bytes, every other number becomes float32, and categories become one-hot float32. Bytes,
    and the numbers of pictures, are brought to at most 1 by the bounds of their space.
    """
    from gymnasium import spaces

    if isinstance(space, spaces.Box):
        return _box(space)
    if isinstance(space, spaces.MultiBinary):
        return ArraySpec(tuple(space.shape), "float32"), _write_array(tuple(space.shape))
    if isinstance(space, spaces.Discrete):
        return _one_hot(np.array([space.n]), np.array([space.start]))
    if isinstance(space, spaces.MultiDiscrete):
        return _one_hot(space.nvec.ravel(), space.start.ravel())
    if isinstance(space, spaces.Dict):
        return _mapping(dict(space.items()), keys=list(space))
    if isinstance(space, spaces.Tuple):
        return _mapping({str(index): part for index, part in enumerate(space)}, keys=list(range(len(space))))
    raise Fatal(
        f"observation space {space} is not supported; "
        "allowed are Box, Discrete, MultiDiscrete, MultiBinary, and Dict or Tuple of these; "
        "to leave out or encode a part of an observation, name a wrapper in environment.wrappers, "
        "such as FilterObservation or minigrid.wrappers:ImgObsWrapper"
    )


def _box(space: Any) -> tuple[ArraySpec, Write]:
    """Bytes stay bytes in pictures that convolutions can take; other bytes and pictures are divided by their bounds."""
    shape = tuple(space.shape)
    arrange = _arrangement(shape)
    arranged = arrange(np.empty(shape)).shape
    picture = len(arranged) == 3 and min(arranged[1:]) >= SMALLEST_IMAGE
    low, high = space.low.astype(np.float64), space.high.astype(np.float64)
    if space.dtype == np.uint8 and picture:
        return ArraySpec(arranged, "uint8", largest=max(high.max(), 1.0)), _write_array(shape, arrange)
    bound = np.maximum(np.abs(low), np.abs(high))
    known = (space.dtype == np.uint8 or picture) and np.isfinite(bound).all()
    scale = 1 / np.where(bound > 0, bound, 1.0) if known and (bound > 0).any() else None
    return ArraySpec(arranged, "float32"), _write_array(shape, arrange, scale)


def _arrangement(shape: tuple[int, ...]) -> Callable[[Array], Array]:
    """How an array becomes a picture [C, H, W], as convolutions want it, if it looks like one.

    Those are [H, W, C] with C ≤ 4 < H, a large [H, W], and a stack [S, H, W, 3] of large coloured ones.
    """
    if len(shape) == 3 and shape[2] <= 4 < shape[0]:
        return lambda array: array.transpose(2, 0, 1)
    if len(shape) == 2 and min(shape) >= SMALLEST_IMAGE:
        return lambda array: array[None]
    if len(shape) == 4 and shape[3] == 3 and min(shape[1:3]) >= SMALLEST_IMAGE:
        return lambda array: np.moveaxis(array, 3, 1).reshape(-1, *shape[1:3])
    return lambda array: array


def _write_array(
    shape: tuple[int, ...], arrange: Callable[[Array], Array] = lambda array: array, scale: Array | None = None
) -> Write:
    def write(arrays: Any, row: int, value: Any) -> None:
        if getattr(value, "shape", None) != shape and np.shape(value) != shape:  # NumPy would stretch it
            raise ValueError(f"observation of shape {np.shape(value)}, but its space has {shape}")
        arrays[row] = arrange(np.asarray(value) if scale is None else value * scale)

    return write


def _one_hot(counts: Array, starts: Array) -> tuple[ArraySpec, Write]:
    offsets = np.cumsum(counts) - counts

    def write(arrays: Any, row: int, value: Any) -> None:
        category = np.ravel(value) - starts
        if ((category < 0) | (category >= counts)).any():
            raise ValueError(f"observation {value} is outside its space")
        arrays[row] = 0.0
        arrays[row, offsets + category] = 1.0

    return ArraySpec((int(counts.sum()),), "float32"), write


def _mapping(parts: Mapping[str, Any], keys: list[Any]) -> tuple[dict[str, Any], Write]:
    converted = {name: observations(part) for name, part in parts.items()}
    writers = [(name, key, converted[name][1]) for name, key in zip(parts, keys, strict=True)]

    def write(arrays: Any, row: int, value: Any) -> None:
        for name, key, write_part in writers:
            write_part(arrays[name], row, value[key])

    return {name: spec for name, (spec, _) in converted.items()}, write


def actions(space: Any) -> tuple[ActionSpec, Decode]:
    """Return the spec of an action space, and a function that turns a batch of actions into values of it.

    A box of any shape becomes a vector, whose numbers are clipped to the bounds. The bounds must be finite:
    a policy needs to know the scale on which to explore. Several choices, or any actions at once, are a joint action.
    """
    from gymnasium import spaces

    if isinstance(space, spaces.Discrete):
        return ActionSpec(int(space.n)), _decode_discrete(int(space.n), space.start)
    if isinstance(space, spaces.MultiDiscrete):
        return _several(space.nvec, space.start, space.dtype)
    if isinstance(space, spaces.MultiBinary):
        return _several(np.full(space.shape, 2), np.zeros(space.shape, np.int64), space.dtype)
    if isinstance(space, spaces.Tuple | spaces.Dict):
        return _actions_at_once(space)
    if not isinstance(space, spaces.Box) or not np.issubdtype(space.dtype, np.floating):
        raise Fatal(
            f"action space {space} is not supported; allowed are Discrete, MultiDiscrete, MultiBinary, Box of floats, "
            "and Dict or Tuple of these"
        )
    low, high = space.low.ravel(), space.high.ravel()
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        raise Fatal(
            f"action space {space} has infinite bounds; give it finite ones, "
            "for example with gymnasium.wrappers.TransformAction"
        )

    def decode(action: Array) -> Array:
        if not np.isfinite(action).all():
            raise Fatal("the policy chose an action that is not finite: its network has diverged")
        clipped: Array = np.clip(action, low, high).astype(space.dtype)
        return clipped.reshape(-1, *space.shape)

    return ActionSpec(low.size, tuple(low.tolist()), tuple(high.tolist())), decode


def _several(counts: Array, start: Array, dtype: Any) -> tuple[ActionSpec, Decode]:
    """Several choices at once, in an array of the shape of their counts."""
    sizes = counts.ravel()

    def decode(action: Array) -> Array:
        if (action < 0).any() or (action >= sizes).any():
            raise Fatal(f"actions {action.tolist()} must lie between 0 and {(sizes - 1).tolist()}")
        shifted: Array = action.reshape(-1, *counts.shape).astype(dtype) + start.astype(dtype)
        return shifted

    return joint(ActionSpec(int(size)) for size in sizes), decode


def _actions_at_once(space: Any) -> tuple[ActionSpec, Decode]:
    """The actions of a Tuple or Dict."""
    from gymnasium import spaces

    keys = [*space] if isinstance(space, spaces.Dict) else [*range(len(space))]
    made = [actions(space[key]) for key in keys]
    widths = [len(spec.choices) for spec, _ in made]

    def decode(action: Array) -> list[Any]:
        pieces = np.split(action, np.cumsum(widths)[:-1], axis=1)
        columns = []
        for (spec, part), piece in zip(made, pieces, strict=True):
            whole = piece.astype(np.int64) if all(spec.choices) else piece
            columns.append(part(whole[:, 0] if spec.discrete else whole))
        rows = zip(*columns, strict=True)
        return [dict(zip(keys, row, strict=True)) if isinstance(space, spaces.Dict) else row for row in rows]

    return joint(spec for spec, _ in made), decode


def _decode_discrete(size: int, start: np.integer[Any]) -> Decode:
    def decode(action: Array) -> Array:
        check_actions(action, size)
        # In the type of the space, which checks such a number faster than a Python one.
        shifted: Array = action.astype(start.dtype) + start
        return shifted

    return decode


def check_mask(observation: Any, action: ActionSpec) -> None:
    """Refuse a mask that does not fit the actions."""
    if isinstance(observation, Mapping) and MASK in observation:
        wanted = sum(action.choices)
        if observation[MASK].shape != (wanted,):
            raise Fatal(
                f"{MASK} of shape {observation[MASK].shape}: it must have a number for each of the {wanted} choices"
            )


def check_allowed(action: Array, mask: Array, choices: Sequence[int], playing: Array) -> None:
    """Refuse actions [B] or [B, K] that the masks [B, A] do not allow, where an episode goes on."""
    start = 0
    for column, count in enumerate(choices):
        if count:
            chosen = (action[:, column] if action.ndim > 1 else action).astype(np.int64)
            allowed = mask[:, start : start + count]
            wrong = playing & allowed.any(1) & (allowed[np.arange(len(chosen)), chosen] == 0)
            if wrong.any():
                row = int(np.flatnonzero(wrong)[0])
                raise Fatal(f"action {chosen[row]} was chosen, but {MASK} only allows {np.flatnonzero(allowed[row])}")
            start += count


def check_actions(action: Array, size: int) -> None:
    """Refuse an action that does not exist: some environments hang on one, others take the last instead."""
    chosen = action.tolist()  # a short list is searched faster than a short array
    if min(chosen) < 0 or max(chosen) >= size:
        raise Fatal(f"actions {chosen} must lie between 0 and {size - 1}")
