"""Recipes: calls described as data, so that another process can make them without unpickling anything.

A function or class is named by import path; its arguments are wire values, settings models and stand-ins of
services.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
from pydantic import BaseModel

from shoal.core.errors import ShoalError, nearest


@runtime_checkable
class Standin(Protocol):
    """Something that looks like a service and knows its name."""

    _service: str


def path_of(target: Any) -> str:
    """Name a module-level function or class as `module:name`."""
    path = f"{target.__module__}:{target.__qualname__}"
    if "<" in path or target.__module__ == "__main__" or inspect.ismethod(target):  # whose object would be lost
        raise ShoalError(f"{path} cannot run in another process: define it at the top of an importable module")
    return path


def find(path: str) -> Any:
    """Import what `module:name` names."""
    module, _, name = path.partition(":")
    if not (module and name):
        raise ShoalError(f"cannot find {path!r}: write package.module:name")
    try:
        target: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        # Only the path itself is the user's slip here: a module missing inside it speaks for itself.
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise ShoalError(f"cannot find {path!r}: there is no module {error.name!r}") from None
    for part in name.split("."):
        if not hasattr(target, part):
            raise ShoalError(f"cannot find {path!r}: {module} has no {part!r}{nearest(part, dir(target))}")
        target = getattr(target, part)
    return target


def describe(value: Any) -> Any:
    """Turn an argument into a wire value."""
    if isinstance(value, BaseModel):
        return {"settings": path_of(type(value)), "fields": value.model_dump(mode="json")}
    if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
        return {"name": path_of(value)}
    if value is None or isinstance(value, bool | int | float | str | np.ndarray):
        return {"value": value}
    if isinstance(value, Mapping):
        return {"mapping": {key: describe(item) for key, item in value.items()}}
    if isinstance(value, list | tuple):
        return {"list": [describe(item) for item in value]}
    if isinstance(value, Standin):
        return {"service": value._service}
    raise ShoalError(f"a {type(value).__name__} cannot be passed to a worker: use settings, numbers, text or arrays")


def rebuild(description: Any, service: Callable[[str], Any]) -> Any:
    """Turn a wire value back into the argument; `service` finds stand-ins by name."""
    ((kind, value), *rest) = description.items()
    if kind == "settings":
        return find(value).model_validate(dict(rest)["fields"])
    if kind == "name":
        return find(value)
    if kind == "mapping":
        return {key: rebuild(item, service) for key, item in value.items()}
    if kind == "list":
        return [rebuild(item, service) for item in value]
    if kind == "service":
        return service(value)
    return value
