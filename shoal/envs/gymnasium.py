"""Gymnasium: single environments by id, and their spaces as arrays."""

from __future__ import annotations

import difflib
import importlib
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np

from shoal.core.errors import Fatal
from shoal.core.recipe import permit
from shoal.core.types import ActionSpec, Array, ArraySpec

Write: TypeAlias = Callable[[Any, int, Any], None]  # (arrays [B, ...], row, value of the space)
Decode: TypeAlias = Callable[[Array], Any]  # actions [B] or [B, A] → one value of the space per environment

EXTRAS = {"pygame": "video", "box2d": "box2d", "mujoco": "mujoco"}  # what an error names → who brings it
# Pictures need neither a screen nor a loudspeaker, and the libraries that draw them should print nothing.
QUIET = {"PYGAME_HIDE_SUPPORT_PROMPT": "1", "SDL_VIDEODRIVER": "dummy", "SDL_AUDIODRIVER": "dummy"}


def create(id: str, arguments: Mapping[str, Any], render: bool = False) -> Any:
    """Make a single environment; what is wrong with an id is said with what would be right."""
    import gymnasium

    if module := id.rpartition(":")[0]:
        permit(module)  # since making it imports it
    with explained(id):
        if render:
            return _create_drawn(id, arguments)
        return gymnasium.make(id, disable_env_checker=True, **arguments)


def check(id: str) -> None:
    """Refuse an id that nobody registered, without making the environment."""
    import gymnasium

    module, _, name = id.rpartition(":")
    with explained(id):
        if module:
            permit(module)
            importlib.import_module(module)
        gymnasium.spec(name)


@contextmanager
def explained(id: str) -> Iterator[None]:
    """Say what is wrong with an id, and what would be right."""
    import gymnasium

    try:
        yield
    except gymnasium.error.DependencyNotInstalled as error:
        raise Fatal(_missing(id, error)) from error
    except gymnasium.error.Error as error:
        raise Fatal(f"unknown environment {id!r}: {error} {_nearest(id)}") from error
    except ModuleNotFoundError as error:
        raise Fatal(f"environment {id!r} could not be imported: {error}") from error


def _create_drawn(id: str, arguments: Mapping[str, Any]) -> Any:
    """Make an environment that draws pictures of itself."""
    import gymnasium

    for variable, value in QUIET.items():
        os.environ.setdefault(variable, value)
    try:
        with warnings.catch_warnings():  # an error below says the same
            warnings.filterwarnings("ignore", message=".*initialised with render_mode")
            environment = gymnasium.make(id, disable_env_checker=True, **{**arguments, "render_mode": "rgb_array"})
    except TypeError as error:
        if "'render_mode'" in str(error):
            raise Fatal(f"{id} cannot be rendered: it takes no `render_mode`") from error
        raise
    modes = list(environment.metadata.get("render_modes") or ())
    if "rgb_array" not in modes:
        environment.close()
        raise Fatal(f"{id} cannot be rendered: its render modes are {modes}, and 'rgb_array' is not among them")
    return environment


def picture(name: str, environment: Any) -> Array:
    """Draw an environment as it stands: uint8 [H, W, 3]."""
    import gymnasium

    try:
        drawn = environment.render()
    except (gymnasium.error.DependencyNotInstalled, ModuleNotFoundError) as error:
        raise Fatal(_missing(name, error)) from error
    except Exception as error:
        raise Fatal(f"{name} cannot be rendered: {type(error).__name__}: {error}") from error
    if not isinstance(drawn, np.ndarray) or drawn.dtype != np.uint8 or drawn.ndim != 3 or drawn.shape[2] != 3:
        found = f"{drawn.dtype} {list(drawn.shape)}" if isinstance(drawn, np.ndarray) else type(drawn).__name__
        raise Fatal(f"{name} cannot be rendered: its render() returns {found}, not uint8 [H, W, 3]")
    return drawn.copy()  # some draw into the same memory again


def _missing(name: str, error: Exception) -> str:
    extra = next((extra for word, extra in EXTRAS.items() if word in str(error).lower()), None)
    remedy = f"pip install 'shoal[{extra}]'" if extra else str(error)
    return f"{name} needs packages that are not installed: {remedy}"


def _nearest(id: str) -> str:
    import gymnasium

    from shoal.envs import atari, toy

    known = [*gymnasium.registry, *toy.ENVS, *atari.ids()]
    near = difflib.get_close_matches(id, dict.fromkeys(known), n=3, cutoff=0.5)
    return f"Nearest known: {', '.join(near)}." if near else f"Toy environments: {', '.join(toy.ENVS)}."


def observations(space: Any) -> tuple[Any, Write]:
    """Return the array specs of a space, and a function that writes a value of it into arrays [B, ...].

    Bytes stay bytes, every other number becomes float32, and categories become one-hot float32. A three
    dimensional box [H, W, C] with C ≤ 4 < H is turned into [C, H, W], as convolutions want it.
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
        "allowed are Box, Discrete, MultiDiscrete, MultiBinary, and Dict or Tuple of these"
    )


def _box(space: Any) -> tuple[ArraySpec, Write]:
    shape = tuple(space.shape)
    dtype = "uint8" if space.dtype == np.uint8 else "float32"
    if len(shape) != 3 or shape[2] > 4 or shape[0] <= 4:
        return ArraySpec(shape, dtype), _write_array(shape)
    write_image = _write_array(shape)

    def write(arrays: Any, row: int, value: Any) -> None:
        write_image(arrays.transpose(0, 2, 3, 1), row, value)

    return ArraySpec((shape[2], *shape[:2]), dtype), write


def _write_array(shape: tuple[int, ...]) -> Write:
    def write(arrays: Any, row: int, value: Any) -> None:
        if getattr(value, "shape", None) != shape and np.shape(value) != shape:  # NumPy would stretch it
            raise ValueError(f"observation of shape {np.shape(value)}, but its space has {shape}")
        arrays[row] = value

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
    a policy needs to know the scale on which to explore.
    """
    from gymnasium import spaces

    if isinstance(space, spaces.Discrete):
        return ActionSpec(int(space.n)), _decode_discrete(int(space.n), space.start)
    if not isinstance(space, spaces.Box) or not np.issubdtype(space.dtype, np.floating):
        raise Fatal(f"action space {space} is not supported; allowed are Discrete, and Box of floats")
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


def _decode_discrete(size: int, start: np.integer[Any]) -> Decode:
    def decode(action: Array) -> Array:
        check_actions(action, size)
        # In the type of the space, which checks such a number faster than a Python one.
        shifted: Array = action.astype(start.dtype) + start
        return shifted

    return decode


def check_actions(action: Array, size: int) -> None:
    """Refuse an action that does not exist: some environments hang on one, others take the last instead."""
    chosen = action.tolist()  # a short list is searched faster than a short array
    if min(chosen) < 0 or max(chosen) >= size:
        raise Fatal(f"actions {chosen} must lie between 0 and {size - 1}")
