"""Gymnasium: single environments by id, with wrappers around them, and pictures of them."""

from __future__ import annotations

import difflib
import importlib
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from shoal.core.errors import Fatal, nearest
from shoal.core.recipe import find, permit
from shoal.core.types import MASK, Array
from shoal.envs.spaces import actions

# What an error names → the extra that brings it.
EXTRAS = {
    "pygame": "video",
    "box2d": "box2d",
    "mujoco": "mujoco",
    "minigrid": "minigrid",
    "minatar": "minatar",
    "pybullet_envs_gymnasium": "pybullet",
    "shimmy": "dm-control",
    "dm_control": "dm-control",
}
# Pictures need neither a screen nor a loudspeaker, and the libraries that draw them should print nothing.
QUIET = {"PYGAME_HIDE_SUPPORT_PROMPT": "1", "SDL_VIDEODRIVER": "dummy", "SDL_AUDIODRIVER": "dummy"}


def create(
    id: str,
    arguments: Mapping[str, Any],
    render: bool = False,
    wrappers: Sequence[tuple[str, Mapping[str, Any]]] = (),
    mask: str | None = None,
) -> Any:
    """Make a single environment; what is wrong with an id is said with what would be right.

    `wrappers` are put around it one after another; `mask` is the key of `info` under which it says what is allowed.
    """
    import gymnasium

    with explained(id):
        register(id)
        make = own(id) or partial(gymnasium.make, id, disable_env_checker=True)
        environment = _create_drawn(id, make, arguments) if render else make(**arguments)
    for name, options in wrappers:
        environment = wrapper(name)(environment, **options)
    return environment if mask is None else _with_mask(environment, mask)


def wrapper(name: str) -> Any:
    """A wrapper by its import path, or one of Gymnasium's own by its name."""
    import gymnasium

    if ":" in name:
        return find(name)
    if not hasattr(gymnasium.wrappers, name):
        raise Fatal(
            f"unknown wrapper {name!r}: give one of Gymnasium's own, or your own as package.module:Class"
            f"{nearest(name, gymnasium.wrappers.__all__)}"
        )
    return getattr(gymnasium.wrappers, name)


def _with_mask(environment: Any, key: str) -> Any:
    """The environment with the mask that its info holds as a part of the observation."""
    import gymnasium

    size = sum(actions(environment.action_space)[0].choices)

    class Masked(gymnasium.Wrapper):
        def reset(self, **options: Any) -> Any:
            seen, info = self.env.reset(**options)
            return self._seen(seen, info), info

        def step(self, action: Any) -> Any:
            seen, *rest, info = self.env.step(action)
            return self._seen(seen, info), *rest, info

        def _seen(self, seen: Any, info: Mapping[str, Any]) -> Any:
            if key not in info:
                raise ValueError(f"info has no {key!r}, which environment.mask asks for; it has {[*info]}")
            return {"observation": seen, MASK: np.ravel(info[key])}

    wrapped = Masked(environment)
    wrapped.observation_space = gymnasium.spaces.Dict(
        {"observation": environment.observation_space, MASK: gymnasium.spaces.MultiBinary(size)}
    )
    return wrapped


def check(id: str) -> None:
    """Refuse an id that nobody registered, without making the environment."""
    import gymnasium

    with explained(id):
        register(id)
        if own(id) is None:
            gymnasium.spec(id.rpartition(":")[2])


def own(id: str) -> Callable[..., Any] | None:
    """The class or function that an id names by its path, or that this process was given; None: it is Gymnasium's."""
    import gymnasium

    from shoal.envs import given

    if given.is_local(id):
        return given.maker(id)
    module, _, name = id.rpartition(":")
    if not module or name in gymnasium.registry or not name.isidentifier():
        return None
    return find(id) if hasattr(importlib.import_module(module), name) else None


def register(id: str) -> None:
    """Import the module of an id, which registers its environments then, or offers a function that does."""
    import gymnasium

    module, _, name = id.rpartition(":")
    if module:
        permit(module)
        found = importlib.import_module(module)
        if name not in gymnasium.registry and hasattr(found, "register_envs"):
            found.register_envs()


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
        if error.name in EXTRAS:
            raise Fatal(_missing(id, error)) from error
        raise Fatal(f"environment {id!r} could not be imported: {error}") from error


def _create_drawn(id: str, make: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Make an environment that draws pictures of itself."""
    for variable, value in QUIET.items():
        os.environ.setdefault(variable, value)
    try:
        with warnings.catch_warnings():  # an error below says the same
            warnings.filterwarnings("ignore", message=".*initialised with render_mode")
            environment = make(**{**arguments, "render_mode": "rgb_array"})
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
