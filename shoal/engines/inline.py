"""The engine of one thread: workers take turns in the order they were started, every run the same."""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from shoal.core.errors import ShoalError, Stalled
from shoal.core.randomness import Randomness
from shoal.core.types import Array
from shoal.engines.host import Host, stacks
from shoal.engines.memory import private
from shoal.engines.options import Options
from shoal.engines.supervisor import Launcher, Worker

log = logging.getLogger("shoal")
LOOK = 0.2  # seconds between looks of the watchdog
GRACE = 5.0  # seconds in which a thread that was interrupted has to end its work
WAKING: Any = getattr(signal, "SIGURG", None)  # the signal that means nothing to anyone else


class Inline(Launcher):
    """One thread: workers take turns in a fixed order; always in lockstep."""

    shared = in_turns = True

    def __init__(self, options: Options) -> None:
        """Begin with nothing running."""
        self.stall = options.stall
        self.randomness: dict[str, Randomness] = {}
        self._watchdog: Watchdog | None = None

    def open(self, head: Host) -> None:
        """Take the head, where all services live."""
        self.head = head

    def share(self, name: str, tree: Mapping[str, Array]) -> Mapping[str, Array]:
        """Copy arrays into memory that every worker sees."""
        return private(tree)

    def start(self, worker: Worker, start: Mapping[str, Any]) -> None:
        """Make a worker; it does nothing before its first turn."""
        worker.host = worker.seat = self.head.member(
            worker.name, worker.work, worker.args, start["rights"], start["spans"]
        )
        self.randomness[worker.name] = Randomness(start["seed"])

    def turn(self, worker: Worker) -> bool:
        """Advance a worker; one that does not come back is interrupted."""
        host = worker.seat
        try:
            with self.randomness[worker.name].active():
                moved = host.advance()
            if self._watchdog is not None:
                self._watchdog.check()
        except Interruption:
            if self._watchdog is None or (verdict := self._watchdog.forgive()) is None:
                raise
            raise verdict from None
        worker.ended = host.activity.ended
        return bool(moved)

    def guard(self, check: Callable[[], None]) -> Watchdog:
        """Watch the thread from another."""
        self._watchdog = Watchdog(self.stall, check)
        return self._watchdog

    def stacks(self, worker: Worker) -> str:
        """Where the threads of this process are."""
        return stacks({})

    def poll(self, seconds: float) -> tuple[()]:
        """Nothing is reported where everything is at hand."""
        return ()

    def call(self, service: str, method: str, args: Sequence[Any]) -> Any:
        """Every service is in the head."""
        raise ShoalError(f"there is no service {service!r}")

    def stop(self, worker: Worker) -> None:
        """A worker ends when it is closed."""

    def end(self, worker: Worker, seconds: float) -> str:
        """Close a worker, which runs its own clean-up."""
        if worker.seat is not None:
            worker.seat.work.close()
        worker.seat = None
        return "was closed"

    def close(self) -> None:
        """Nothing else was started."""


class Interruption(BaseException):
    """Raised into whatever does not end; no handler of ordinary errors takes it for one."""


class Watchdog:
    """Watches one thread from another, and gets it out of what does not end.

    A thread that executes Python or waits for the system is interrupted. One that is deep in a library is not: the
    process says where it stood and ends. Where a library does not even let other threads run, the interpreter's own
    timer does so.
    """

    def __init__(self, seconds: float, look: Callable[[], None]) -> None:
        """Let `look` raise Stalled when it is time; it should within `seconds` by itself."""
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
