"""Engines: where workers and services live."""

from __future__ import annotations

from typing import Any

from shoal.core.recipe import find
from shoal.engines.options import Options

ENGINES = {
    "inline": "shoal.engines.inline:Inline",
    "threads": "shoal.engines.threads:Threads",
    "processes": "shoal.engines.processes:Processes",
}


def make(name: str, options: Options) -> Any:
    """Make an engine by its name in the table, or by a user's import path."""
    return find(ENGINES.get(name, name))(options)
