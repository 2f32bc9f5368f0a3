"""The built-in algorithms by name, and how to find a user's own."""

from __future__ import annotations

from typing import Any

from shoal.core import recipe
from shoal.core.errors import ShoalError, nearest

ALGORITHMS: dict[str, str] = {
    "a3c": "shoal.algorithms.a3c:A3c",
    "apex_dqn": "shoal.algorithms.apex_dqn:ApexDqn",
    "dqn": "shoal.algorithms.dqn:Dqn",
    "impala": "shoal.algorithms.impala:Impala",
    "ngu": "shoal.algorithms.ngu:Ngu",
    "ppo": "shoal.algorithms.ppo:Ppo",
    "r2d2": "shoal.algorithms.r2d2:R2d2",
}


def find(name: str) -> type[Any]:
    """Return the algorithm's class for a name of the table or an import path `package.module:Class`."""
    path = ALGORITHMS.get(name, name)
    if ":" not in path:
        raise ShoalError(
            f"unknown algorithm {name!r}: expected one of {', '.join(ALGORITHMS)}, or your own as"
            f" package.module:Class{nearest(name, ALGORITHMS)}"
        )
    found = recipe.find(path)
    if not isinstance(found, type):
        raise ShoalError(f"{name!r} is not a class")
    return found
