"""What an engine is told: where things live, and how long is too long."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Options:
    """Placement and limits of an engine."""

    seed: int = 0
    lockstep: bool = False
    homes: Mapping[str, str] = field(default_factory=dict)  # service → worker in whose process it lives; else the head
    observers: frozenset[str] = frozenset()  # workers that stay in the head and do not count as movement
    restartable: frozenset[str] = frozenset()  # workers that are started again when they die
    revivable: frozenset[str] = frozenset()  # likewise, but not when they raised: that would only repeat
    restarts: int = 5  # how often, without a minute of health in between
    deadline: float = 60.0  # seconds for one call to a service
    stall: float = 120.0  # seconds without any movement before the run is given up
    silence: float = 30.0  # seconds without a heartbeat before a worker counts as dead
