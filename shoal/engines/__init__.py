"""Engines: where workers and services live."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from shoal.core.errors import ShoalError
from shoal.core.recipe import find
from shoal.engines.options import Options

ENGINES = {
    "inline": "shoal.engines.inline:Inline",
    "threads": "shoal.engines.threads:Threads",
    "processes": "shoal.engines.processes:Processes",
    "ray": "shoal.engines.ray:Ray",
    "cluster": "shoal.engines.cluster:Cluster",
}


def prepare(name: Any, modules: tuple[str, ...]) -> Any:
    """Begin what an engine can begin before its options are known; None: nothing, or no such engine."""
    with suppress(ShoalError):
        begin = getattr(find(ENGINES.get(name, name)), "prepare", None)
        return begin and begin(modules)
    return None


def make(name: str, options: Options, prepared: Any = None) -> Any:
    """Make an engine by its name in the table, or by a user's import path."""
    engine = find(ENGINES.get(name, name))
    return engine(options) if prepared is None else engine(options, prepared)
