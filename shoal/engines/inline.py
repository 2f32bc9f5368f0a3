"""The engine of one thread: workers take turns in the order they were started, every run the same."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from shoal.core.randomness import Randomness, derive
from shoal.core.types import Array, Work
from shoal.engines.block import private
from shoal.engines.driving import Activity, Local, Patience, advance, granted, moves_of
from shoal.engines.options import Options


class Inline:
    """Services are plain objects and workers are called round robin; always in lockstep."""

    def __init__(self, options: Options) -> None:
        """Begin with nothing running."""
        self.options = options
        self.workers: dict[str, tuple[Work, Randomness]] = {}
        self.activities: dict[str, Activity] = {}
        self._current: Activity | None = None

    def serve(self, name: str, make: Callable[..., Any], *args: Any) -> Any:
        """Make a service."""
        with Randomness(derive(self.options.seed, name)).active():
            return Local(name, make(*args), lambda: self._current)

    def share(self, name: str, tree: Mapping[str, Array]) -> Any:
        """Copy arrays into memory that every worker sees."""
        return private(tree)

    def run(self, name: str, work: Callable[..., Work], *args: Any) -> None:
        """Make a worker."""
        self.workers[name] = (work(*granted(name, work, args)), Randomness(derive(self.options.seed, name)))
        self.activities[name] = Activity(name)

    def wait(self, *names: str) -> None:
        """Let the workers take turns until the named ones have ended."""
        patience = Patience(self.options.stall)
        while any(not self.activities[name].ended for name in names):
            for name, (work, randomness) in self.workers.items():
                self._current = activity = self.activities[name]
                if not activity.ended:
                    with randomness.active():
                        advance(work, activity)
            self._current = None
            if not patience.look(moves_of(self.activities, self.options.observers), False, self._standstill):
                time.sleep(0.0005)

    def _standstill(self) -> str:
        lines = [activity.describe() for activity in self.activities.values()]
        return f"no worker moved for {self.options.stall:g} s\n" + "\n".join(lines)

    def report(self) -> Mapping[str, Any]:
        """What each worker has done with its time."""
        return {name: activity.as_dict() for name, activity in self.activities.items()}

    def close(self) -> None:
        """End the workers; each runs its own clean-up."""
        for work, _ in self.workers.values():
            work.close()
        self.workers.clear()
