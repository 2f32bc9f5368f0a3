"""Environments that a script gives as they are: classes, functions that make one, or an environment itself."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from shoal.core.errors import SettingsError, ShoalError
from shoal.core.recipe import find, path_of

LOCAL = "local/"  # how ids of environments begin that only this process knows
ENVS: dict[str, Callable[..., Any]] = {}  # what makes them, by id


def settings_of(env: Any) -> dict[str, Any]:
    """The settings that stand for an environment, given as an id, a class, a function or an object."""
    import gymnasium

    if isinstance(env, str):
        return {"id": env}
    if isinstance(env, Mapping):
        return dict(env)
    if isinstance(env, gymnasium.vector.VectorEnv):
        raise SettingsError("env: this is a vector of environments; give one of them, and how many as `envs`")
    if isinstance(env, gymnasium.Env):
        return _plain(env) or {"id": keep(type(env.unwrapped).__name__, partial(_copied, env))}
    if not callable(env):
        raise SettingsError(
            f"env: a {type(env).__name__} is no environment; give a Gymnasium id, a class or a function that makes "
            "one, or an environment"
        )
    try:
        path = path_of(env)
        if find(path) is env:
            return {"id": path}
    except (ShoalError, AttributeError):  # of the script itself, or without a name of its own
        pass
    return {"id": keep(getattr(env, "__name__", type(env).__name__), env)}


def keep(name: str, make: Callable[..., Any]) -> str:
    """Let this process make an environment by an id, which is returned."""
    name = name.strip("<>")
    number = 1
    while (id := f"{LOCAL}{name}" + (f"-{number}" if number > 1 else "")) in ENVS and ENVS[id] is not make:
        number += 1
    ENVS[id] = make
    return id


def is_local(id: str) -> bool:
    """Whether an environment is known to one process only."""
    return id.startswith(LOCAL)


def maker(id: str) -> Callable[..., Any]:
    """What makes an environment that this process was given."""
    if id not in ENVS:
        raise SettingsError(
            f"environment {id!r} was part of the script that trained, and no other process can make it: define it in a "
            "module, and train with its path as text, `module:Class`"
        )
    return ENVS[id]


def check_engine(id: str, engine: str) -> None:
    """Refuse engines whose workers are other processes, for an environment that only this one can make."""
    if is_local(id) and engine not in ("inline", "threads"):
        raise SettingsError(
            f"engine {engine}: its workers are other processes, which cannot make {id.removeprefix(LOCAL)}: it is an "
            "object, or defined in the script itself. Define it in a module and give the class, or its path as text, "
            "`module:Class`; or set engine to inline"
        )


def _plain(env: Any) -> dict[str, Any] | None:
    """The settings of an environment that Gymnasium can make again from its id; None: it was changed since."""
    import gymnasium

    spec = env.spec
    known = spec and gymnasium.registry.get(spec.id)
    if not known or spec.additional_wrappers or spec.max_episode_steps != known.max_episode_steps:
        return None
    arguments = {key: value for key, value in spec.kwargs.items() if key != "render_mode"}
    try:
        json.dumps(arguments)
    except (TypeError, ValueError):
        return None
    return {"id": spec.id, "arguments": arguments}


def _copied(env: Any) -> Any:
    """A copy: actors and the evaluator need one each."""
    try:
        return copy.deepcopy(env)
    except Exception as error:
        raise SettingsError(
            f"env: the {type(env.unwrapped).__name__} cannot be copied ({type(error).__name__}: {error}), and every "
            "actor needs one of its own: give a function that makes it"
        ) from None
