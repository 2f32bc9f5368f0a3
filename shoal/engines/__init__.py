"""Engines: where workers and services live."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from shoal.core.errors import ShoalError
from shoal.core.recipe import find
from shoal.engines.options import Options
from shoal.engines.supervisor import Launcher, Supervisor

ENGINES = {
    "inline": "shoal.engines.inline:Inline",
    "threads": "shoal.engines.threads:Threads",
    "processes": "shoal.engines.processes:Processes",
    "ray": "shoal.engines.ray:Ray",
    "cluster": "shoal.engines.cluster:Cluster",
}


if TYPE_CHECKING:  # mypy checks that each of them is a launcher
    from shoal.engines.cluster import Cluster
    from shoal.engines.inline import Inline
    from shoal.engines.processes import Processes
    from shoal.engines.ray import Ray
    from shoal.engines.threads import Threads

    _launchers: tuple[Callable[..., Launcher], ...] = (Inline, Threads, Processes, Ray, Cluster)


def prepare(name: Any, modules: tuple[str, ...]) -> Any:
    """Begin what an engine can begin before its options are known; None: nothing, or no such engine."""
    with suppress(ShoalError):
        begin = getattr(find(ENGINES.get(name, name)), "prepare", None)
        return begin and begin(modules)
    return None


def make(name: str, options: Options, prepared: Any = None) -> Supervisor:
    """Make an engine of the launcher that a name in the table, or a user's import path, stands for."""
    launcher: Callable[..., Launcher] = find(ENGINES.get(name, name))
    return Supervisor(options, launcher(options) if prepared is None else launcher(options, prepared))
