"""The engine of one process: every worker has a thread, services are plain objects behind a lock."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from shoal.core.errors import Stalled
from shoal.core.randomness import Randomness, derive, seed_everything
from shoal.core.types import Array, Work
from shoal.engines.driving import Activity, Bell, Local, Patience, advance, drive, granted, moves_of, stacks
from shoal.engines.memory import private
from shoal.engines.options import Options

log = logging.getLogger("shoal")
LOOK = 0.2  # seconds between looks at a worker that has its turn
GRACE = 10.0  # seconds in which threads have to end


class Threads:
    """Workers run side by side; under lockstep their threads take turns."""

    def __init__(self, options: Options) -> None:
        """Begin with nothing running."""
        self.options = options
        self.patience = Patience(options.stall)
        self.activities: dict[str, Activity] = {}
        self.threads: dict[str, threading.Thread] = {}
        self.failure: BaseException | None = None
        self._bell = Bell()
        self._stopped = threading.Event()
        self._here = threading.local()
        self._turns: dict[str, tuple[threading.Semaphore, threading.Semaphore]] = {}
        self._turn_result: bool | None = None
        if not options.lockstep:  # side by side, the process-wide generators serve everyone
            seed_everything(derive(options.seed))

    def serve(self, name: str, make: Callable[..., Any], *args: Any) -> Any:
        """Make a service."""
        with Randomness(derive(self.options.seed, name)).active():
            return Local(name, make(*args), lambda: getattr(self._here, "activity", None))

    def share(self, name: str, tree: Mapping[str, Array]) -> Any:
        """Copy arrays into memory that every worker sees."""
        return private(tree)

    def run(self, name: str, work: Callable[..., Work], *args: Any) -> None:
        """Start a worker in a thread of its own."""
        self.activities[name] = activity = Activity(name)
        target = self._take_turns if self.options.lockstep else self._run_free
        self._turns[name] = threading.Semaphore(0), threading.Semaphore(0)
        made = work(*granted(name, work, args))
        thread = threading.Thread(target=target, args=(made, activity), name=name, daemon=True)
        self.threads[name] = thread
        thread.start()

    def _run_free(self, work: Work, activity: Activity) -> None:
        self._here.activity = activity
        try:
            drive(work, activity, self._bell, self._stopped.is_set)
        except BaseException as error:
            self.failure = self.failure or error
        finally:
            work.close()
            self._bell.ring()

    def _take_turns(self, work: Work, activity: Activity) -> None:
        self._here.activity = activity
        randomness = Randomness(derive(self.options.seed, activity.name))
        mine, done = self._turns[activity.name]
        try:
            while not activity.ended:
                mine.acquire()
                if self._stopped.is_set():
                    break
                with randomness.active():
                    advance(work, activity)
                done.release()
        except BaseException as error:
            self.failure = error
        finally:
            work.close()
            done.release()

    def _give_turns(self) -> None:
        """Let every worker take one turn, in order."""
        for name, (mine, done) in self._turns.items():
            if not self.activities[name].ended and not self.failure:
                mine.release()
                while not done.acquire(timeout=LOOK):
                    self.patience.heed(self.report(), self._standstill)

    def wait(self, *names: str) -> None:
        """Return when the named workers have ended; raise what any worker raised."""
        self.patience.begin()
        try:
            while any(not self.activities[name].ended for name in names):
                if self.options.lockstep:
                    self._give_turns()
                else:
                    self._bell.wait(0.05)
                if self.failure:
                    raise self.failure
                self.patience.heed(self.report(), self._standstill)
                moves = moves_of(self.activities, self.options.observers)
                if not self.patience.look(moves, False, self._standstill) and self.options.lockstep:
                    time.sleep(0.0005)
        except Stalled as error:
            self.failure = error  # which names those that will not end
            raise

    def hurry(self) -> None:
        """Take that the run was asked to end, so that nothing stuck may delay it for long."""
        self.patience.hurry()

    def _standstill(self) -> str:
        names = {thread.ident or 0: name for name, thread in self.threads.items()}
        return "\n".join([*(activity.describe() for activity in self.activities.values()), stacks(names)])

    def report(self) -> Mapping[str, Any]:
        """What each worker has done with its time."""
        return {name: activity.as_dict() for name, activity in self.activities.items()}

    def close(self) -> None:
        """Ask every thread to end after its unit of work, and wait for it."""
        self._stopped.set()
        self._bell.ring()
        for mine, _ in self._turns.values():
            mine.release()
        limit = time.monotonic() + GRACE
        for thread in self.threads.values():
            thread.join(timeout=max(limit - time.monotonic(), 0.01))
        left = [thread.name for thread in self.threads.values() if thread.is_alive()]
        self.threads = {name: thread for name, thread in self.threads.items() if thread.is_alive()}
        if left and not self.failure:
            problem = f"threads that do not end: {', '.join(left)}\n{stacks({})}"
            if not self.patience.hurried:
                raise Stalled(problem)
            log.warning("%s\nthe run ends without them", problem)
