"""The engine of one thread: workers take turns in the order they were started, every run the same."""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from shoal.core.errors import Stalled
from shoal.core.randomness import Randomness, derive
from shoal.core.types import Array, Work
from shoal.engines.driving import Activity, Local, Patience, advance, granted, moves_of, stacks
from shoal.engines.memory import private
from shoal.engines.options import Options

log = logging.getLogger("shoal")
LOOK = 0.2  # seconds between looks of the watchdog
GRACE = 5.0  # seconds in which a thread that was interrupted has to end its work
WAKING: Any = getattr(signal, "SIGURG", None)  # the signal that means nothing to anyone else


class Inline:
    """Services are plain objects and workers are called round robin; always in lockstep."""

    def __init__(self, options: Options) -> None:
        """Begin with nothing running."""
        self.options = options
        self.patience = Patience(options.stall)
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
        self.patience.begin()
        with Watchdog(self.options.stall, lambda: self.patience.heed(self.report(), self._standstill)) as watchdog:
            while any(not self.activities[name].ended for name in names):
                for name, (work, randomness) in self.workers.items():
                    self._current = activity = self.activities[name]
                    try:
                        if not activity.ended:
                            with randomness.active():
                                advance(work, activity)
                        watchdog.check()
                    except Interruption:
                        if name in names or not self.patience.hurried:
                            raise
                        log.warning("%s\nthe run ends without it", watchdog.forgive())
                        activity.ended = True
                self._current = None
                moves = moves_of(self.activities, self.options.observers)
                if not self.patience.look(moves, False, self._standstill):
                    time.sleep(0.0005)

    def hurry(self) -> None:
        """Take that the run was asked to end, so that nothing stuck may delay it for long."""
        self.patience.hurry()

    def _standstill(self) -> str:
        return "\n".join([*(activity.describe() for activity in self.activities.values()), stacks({})])

    def report(self) -> Mapping[str, Any]:
        """What each worker has done with its time."""
        return {name: activity.as_dict() for name, activity in self.activities.items()}

    def close(self) -> None:
        """End the workers; each runs its own clean-up."""
        for work, _ in self.workers.values():
            work.close()
        self.workers.clear()


class Interruption(BaseException):
    """Raised into whatever does not end; no handler of ordinary errors takes it for one."""


class Watchdog:
    """Watches one thread from another, and gets it out of what does not end.

    A thread that executes Python or waits for the system is interrupted. One that is deep in a library is not: the
    process says where it stood and ends. Where a library does not even let other threads run, the interpreter's own
    timer does so.
    """

    def __init__(self, seconds: float, look: Callable[[], None]) -> None:
        """Let `look` raise Stalled when it is time; it should by itself after so many seconds."""
        self._seconds, self._look = seconds, look
        self._verdict: Stalled | None = None
        self._watched = threading.current_thread()
        self._over, self._escaped = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.pydev_do_not_trace = True  # type: ignore[attr-defined]  # a debugger must not stop it
        self._before: Any = None

    def __enter__(self) -> Watchdog:
        """Begin."""
        if self._signalled:
            self._before = signal.signal(WAKING, self._wake)
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """End; an interruption becomes what was found."""
        self._over.set()
        self._escaped.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()
        if self._signalled:
            signal.signal(WAKING, self._before or signal.SIG_DFL)
        if isinstance(error, Interruption) and self._verdict is not None:
            raise self._verdict from None

    def check(self) -> None:
        """Raise the interruption once more, where it was lost."""
        if self._verdict is not None:
            raise Interruption

    def forgive(self) -> Stalled | None:
        """Go on without what was stuck, and return what was found."""
        verdict, self._verdict = self._verdict, None
        self._escaped.set()
        return verdict

    @property
    def _signalled(self) -> bool:
        return WAKING is not None and self._watched is threading.main_thread()

    def _wake(self, number: int, frame: object) -> None:
        if self._verdict is not None and not self._over.is_set():
            raise Interruption

    def _watch(self) -> None:
        timed = sys.gettrace() is None and "pydevd" not in sys.modules  # a debugger stops the clock
        while not self._over.wait(LOOK):
            if timed:
                with suppress(OSError, ValueError, AttributeError):  # no standard error
                    faulthandler.dump_traceback_later(self._seconds + 2 * GRACE, exit=True, file=sys.__stderr__ or 2)
            try:
                self._look()
            except Stalled as verdict:
                if not debugged(self._watched):
                    self._interrupt(verdict)

    def _interrupt(self, verdict: Stalled) -> None:
        self._escaped.clear()
        self._verdict = verdict
        ident = self._watched.ident or 0
        if self._signalled:
            signal.pthread_kill(ident, WAKING)
        else:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(Interruption))
        if self._over.is_set() or self._escaped.wait(GRACE):
            return
        log.critical("%s\nit cannot be interrupted: the process ends", verdict)
        logging.shutdown()
        os._exit(1)


def debugged(thread: threading.Thread) -> bool:
    """Whether a thread stands in a debugger, where somebody takes their time."""
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] in ("bdb", "pdb", "ipdb", "pydevd", "_pydevd_bundle"):
            return True
        frame = frame.f_back
    return False
