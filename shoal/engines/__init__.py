"""Engines: where workers and services live."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from shoal.core.errors import ShoalError
from shoal.core.recipe import find
from shoal.core.types import Engine
from shoal.engines.options import Options

ENGINES = {
    "inline": "shoal.engines.inline:Inline",
    "threads": "shoal.engines.threads:Threads",
    "processes": "shoal.engines.processes:Processes",
    "ray": "shoal.engines.ray:Ray",
    "cluster": "shoal.engines.cluster:Cluster",
}


if TYPE_CHECKING:  # mypy checks that each of them is an engine
    from shoal.engines.cluster import Cluster
    from shoal.engines.inline import Inline
    from shoal.engines.processes import Processes
    from shoal.engines.ray import Ray
    from shoal.engines.threads import Threads

    _engines: tuple[Callable[..., Engine], ...] = (Inline, Threads, Processes, Ray, Cluster)


def prepare(name: Any, modules: tuple[str, ...]) -> Any:
    """Begin what an engine can begin before its options are known; None: nothing, or no such engine."""
    with suppress(ShoalError):
        begin = getattr(find(ENGINES.get(name, name)), "prepare", None)
        return begin and begin(modules)
    return None


def make(name: str, options: Options, prepared: Any = None) -> Engine:
    """Make an engine by its name in the table, or by a user's import path."""
    engine: Callable[..., Engine] = find(ENGINES.get(name, name))
    return engine(options) if prepared is None else engine(options, prepared)
