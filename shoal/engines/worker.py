"""A worker as the head sees it, and how what lives in its process is described."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from shoal.core.errors import WorkerFailed
from shoal.core.randomness import derive
from shoal.core.recipe import describe, path_of
from shoal.core.rights import Named
from shoal.engines.options import Options
from shoal.transport.pipe import Pipe

log = logging.getLogger("shoal")
HEALTH = 60.0  # seconds of life after which earlier restarts no longer count


def recipe_of(make: Callable[..., Any], args: tuple[Any, ...], seed: int) -> dict[str, Any]:
    """How to make a service in another process."""
    return {"make": path_of(make), "args": [describe(arg) for arg in args], "seed": seed}


@dataclass
class Worker:
    """A worker as the head sees it."""

    name: str
    work: str
    args: list[Any]
    rights: Named = field(default_factory=dict)
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


def seed_of(options: Options, name: str, lives: int) -> int:
    """The seed of a worker after so many lives; another for each, so that none repeats what the one before did."""
    return derive(options.seed, name, lives) if lives else derive(options.seed, name)


def plan_restart(worker: Worker, options: Options, died: bool, now: float) -> None:
    """Set the time of a failed worker's next start, later each time, or raise what it failed of."""
    if now - worker.started > HEALTH:
        worker.restarts = 0
    allowed = worker.name in options.restartable or (died and worker.name in options.revivable)
    if not allowed or worker.fatal or worker.restarts >= options.restarts:
        raise WorkerFailed(f"{worker.name} {worker.failure}")
    worker.restarts += 1
    delay = min(0.25 * 2**worker.restarts, 30.0)
    worker.again_at = now + delay
    log.warning("%s %s\nstarting it again in %.1f s (%d of %d)", worker.name, worker.failure, delay,
                worker.restarts, options.restarts)  # fmt: skip
