"""A worker as the head sees it, and how what lives in its process is described."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from shoal.core.recipe import describe, path_of
from shoal.engines.pipe import Pipe


def recipe_of(make: Callable[..., Any], args: tuple[Any, ...], seed: int) -> dict[str, Any]:
    """How to make a service in another process."""
    return {"make": path_of(make), "args": [describe(arg) for arg in args], "seed": seed}


@dataclass
class Worker:
    """A worker as the head sees it."""

    name: str
    work: str
    args: list[Any]
    pid: int = 0
    control: Pipe | None = None
    activity: dict[str, Any] = field(default_factory=dict)
    line: str = "has not started"
    heard: float = 0.0
    started: float = 0.0
    restarts: int = 0
    again_at: float = 0.0
    ready: bool = False
    ended: bool = False
    failure: str = ""
    fatal: bool = False
    answer: Any = None
