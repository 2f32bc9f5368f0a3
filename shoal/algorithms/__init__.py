"""The built-in algorithms by name, and how to find a user's own."""

from __future__ import annotations

import difflib
import importlib
from typing import Any

from shoal.core.errors import ShoalError

ALGORITHMS: dict[str, str] = {
    "impala": "shoal.algorithms.impala:Impala",
    "ppo": "shoal.algorithms.ppo:Ppo",
}


def find(name: str) -> type[Any]:
    """Return the algorithm's class for a name of the table or an import path `package.module:Class`."""
    path = ALGORITHMS.get(name, name)
    module_name, colon, attribute = path.partition(":")
    if not colon:
        raise ShoalError(
            f"unknown algorithm {name!r}: expected one of {', '.join(ALGORITHMS)}, or your own as"
            f" package.module:Class{_nearest(name, ALGORITHMS)}"
        )
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # Only the path itself is the user's slip here: a module missing inside it speaks for itself.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ShoalError(f"cannot import algorithm {name!r}: there is no module {error.name!r}") from error
    found = getattr(module, attribute, None)
    if not isinstance(found, type):
        classes = [key for key, value in vars(module).items() if isinstance(value, type)]
        raise ShoalError(f"module {module_name} has no class {attribute!r}{_nearest(attribute, classes)}")
    return found


def _nearest(name: str, known: Any) -> str:
    """Return a question after the nearest known name, or nothing."""
    matches = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {matches[0]!r}?" if matches else ""
