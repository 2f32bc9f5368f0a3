"""Recipes: calls described as data, so that another process can make them without unpickling anything.

A function or class is named by import path; its arguments are wire values, settings models and stand-ins of
services.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FunctionType, MethodType
from typing import Any, Protocol, runtime_checkable

import numpy as np
from pydantic import BaseModel

from shoal.core.errors import Fatal, ShoalError, nearest

# What stands under each kind of a description.
KINDS: dict[str, Any] = {"settings": str, "name": str, "mapping": dict, "list": list, "service": str, "value": object}
FURTHER = {"settings": ["fields"]}
_allowed: tuple[str, ...] | None = None  # packages that paths may name; None: any


def allow(packages: Iterable[str] | None) -> None:
    """From now on, let paths name nothing outside these packages; None: anything. It can be restricted only once."""
    global _allowed
    if _allowed is not None:  # or a path to this function would open everything
        raise Fatal("which packages may be used on this machine is already decided")
    _allowed = None if packages is None else tuple(packages)


def permit(module: str, packages: Iterable[str] | None = None) -> None:
    """Refuse a module outside the packages; by default those allowed on this machine."""
    packages = _allowed if packages is None else packages
    if packages is not None and not any(f"{module}.".startswith(f"{package}.") for package in packages):
        raise Fatal(
            f"{module} may not be used on this machine, which allows {', '.join(packages)}: "
            f"if you trust it, start the node with --allow {module.partition('.')[0]}"
        )


@runtime_checkable
class Standin(Protocol):
    """Something that looks like a service and knows its name."""

    _service: str


def path_of(target: Any) -> str:
    """Name a module-level function or class as `module:name`."""
    path = f"{target.__module__}:{target.__qualname__}"
    if "<" in path or target.__module__ == "__main__" or isinstance(target, MethodType):  # whose object would be lost
        raise ShoalError(f"{path} cannot run in another process: define it at the top of an importable module")
    return path


def find(path: str) -> Any:
    """Import what `module:name` names."""
    module, _, name = path.partition(":")
    if not (module and name):
        raise ShoalError(f"cannot find {path!r}: write package.module:name")
    permit(module)
    try:
        target: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        # Only a wrong path is the user's mistake; a module missing inside it is a different error.
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise ShoalError(f"cannot find {path!r}: there is no module {error.name!r}") from None
    for part in name.split("."):
        if not hasattr(target, part):
            raise ShoalError(f"cannot find {path!r}: {module} has no {part!r}{nearest(part, dir(target))}")
        target = getattr(target, part)
        if _allowed is not None:  # what a permitted module imported from elsewhere is not its own
            if not isinstance(target, type | FunctionType):
                raise Fatal(f"{path} may not be used on this machine: {part!r} in it is neither class nor function")
            permit(target.__module__)
    return target


def inspect(description: Any, packages: Iterable[str]) -> None:
    """Refuse a description that names anything outside the packages, before anything is imported."""
    if not isinstance(description, dict) or not description:
        raise ShoalError(f"a {type(description).__name__} that is no recipe")
    (kind, value), *rest = description.items()
    if kind not in KINDS or not isinstance(value, KINDS[kind]) or [key for key, _ in rest] != FURTHER.get(kind, []):
        raise ShoalError(f"a recipe of no known form: one of {', '.join(KINDS)} is expected, and its value")
    if kind in ("settings", "name"):
        permit(value.partition(":")[0], packages)
    elif kind in ("mapping", "list"):
        for item in value.values() if kind == "mapping" else value:
            inspect(item, packages)


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


def services_in(description: Any) -> Iterator[str]:
    """The names of the stand-ins in a wire value."""
    kind, value = next(iter(description.items()))
    if kind == "service":
        yield value
    elif kind in ("mapping", "list"):
        for item in value.values() if kind == "mapping" else value:
            yield from services_in(item)
