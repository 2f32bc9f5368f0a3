"""A session: two machines that call each other over one connection, many calls at a time.

Its threads take turns at reading: whoever reads a call lets the next one read, and answers it, so that no call is
handed from one thread to another. Where all the others are busy, the one that reads goes on reading, since somebody
among them may be waiting for an answer; calls then wait for whoever is done first. Where calls of many bytes are not
answered yet and nobody here waits for an answer, nothing more is read: the other side then waits to send.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from shoal.core import wire
from shoal.core.errors import DeadlineExceeded, ServiceFailed, ServiceLost, ShoalError, WireError
from shoal.transport.strangers import THREADLESS

ANSWERING = 8  # threads that answer the other side's calls
WAITING = 1024  # calls of the other side that may wait for one of them
FULL = 64 << 20  # bytes of calls that are not answered, from which on nothing more is read
MOST = 1 << 30  # bytes of calls that are not answered, from which on even an answer is not waited for
PAUSE = 300.0  # seconds for which nothing may be read
RATE = 20_000.0  # frames a second that the other side may send, on average
BURST = 5.0  # seconds' worth of them at once
LENGTH = 500  # letters of the reason why a session ended, in which the other side may have its say
LOOK = 0.5  # seconds between looks at how long the other side has been silent


class Session:
    """Calls in both directions; a call is [id, kind, arguments], its answer [id, whether it went well, value]."""

    def __init__(self, link: Any, guard: Any, answer: Callable[[Session, str, list[Any]], Any]) -> None:
        """Begin to take frames; `answer` is asked from several threads at once."""
        self.link, self._guard, self._answer = link, guard, answer
        self.heard = time.monotonic()
        self.silence = 30.0  # seconds without a frame after which the link counts as lost
        self.lost = ""  # why it ended
        self.refused = ""  # why the other side does not want this machine
        self.closed = threading.Event()
        self._sending = threading.Lock()
        self._numbers = itertools.count()
        self._waiting: dict[int, queue.SimpleQueue[Any]] = {}
        self._calls: deque[tuple[list[Any], int]] = deque()  # that nobody has begun to answer, with their bytes
        self._held = 0  # bytes of all calls that are not answered
        self._idle = 0  # threads that wait for their turn to read
        self._change = threading.Condition(threading.Lock())  # of these three
        self._paused = False  # whether nothing is read for the moment
        self._reading = threading.Lock()
        self._allowance, self._before = RATE * BURST, time.monotonic()
        self._threads = [threading.Thread(target=self._watch, name="silence", daemon=True)]
        self._threads += [threading.Thread(target=self._serve, name="answers", daemon=True) for _ in range(ANSWERING)]
        try:
            for thread in self._threads:
                thread.start()
        except RuntimeError as error:
            self._threads = [thread for thread in self._threads if thread.ident is not None]
            self.close(THREADLESS)
            raise ServiceLost(self.lost) from error

    def call(self, kind: str, *args: Any, seconds: float) -> Any:
        """Ask the other side, and wait for its answer."""
        number, answer = next(self._numbers), queue.SimpleQueue[Any]()
        self._waiting[number] = answer
        if self._paused:
            self._wake()
        try:
            self._send(["call", number, kind, args])
            if self.closed.is_set():
                raise ServiceLost(f"the link was lost: {self.lost}")
            went_well, value = answer.get(timeout=seconds)
        except queue.Empty:
            raise DeadlineExceeded(f"{kind}: no answer within {seconds:g} s") from None
        finally:
            self._waiting.pop(number, None)
        if went_well is None:
            raise ServiceLost(f"the link was lost: {self.lost}")
        if not went_well:
            raise ServiceFailed(value)
        return value

    def tell(self, kind: str, *args: Any) -> None:
        """Tell the other side, and wait for nothing."""
        self._send(["tell", -1, kind, args])

    def _send(self, message: list[Any]) -> None:
        buffers = wire.encode(message)
        with self._sending:  # frames are numbered in the order in which they leave
            try:
                self.link.send(self._guard.seal(*buffers))
            except ServiceLost as error:
                self.close(str(error))
                raise

    def _serve(self) -> None:
        """Answer calls until the link ends; anything on it that is not in order ends it."""
        while (found := self._next()) is not None:
            call, size = found
            self._reply(*call)
            with self._change:
                self._held -= size
            if self._paused:
                self._wake()
            del found, call  # its arrays are not kept while the next is waited for

    def _reply(self, what: str, number: int, kind: str, args: list[Any]) -> None:
        try:
            value, went_well = self._answer(self, kind, args), True
        except ShoalError as error:
            value, went_well = str(error), False
        except (Exception, SystemExit):  # nothing that is asked for ends this thread
            value, went_well = traceback.format_exc(), False
        if what == "tell":
            return
        with suppress(ServiceLost):
            try:
                self._send(["answer", number, went_well, value])
            except WireError as error:
                self._send(["answer", number, False, str(error)])

    def _next(self) -> tuple[list[Any], int] | None:
        """A call that waits, or else the next that comes."""
        with self._change:
            if self._calls:
                return self._calls.popleft()
            self._idle += 1
        with self._reading:
            with self._change:
                self._idle -= 1
            try:
                while not self.closed.is_set():
                    self._make_room()
                    if (found := self._take(self._frame())) is not None:
                        return found
            except ShoalError as error:
                self.close(str(error))
            except Exception as error:
                self.close(f"{type(error).__name__}: {error}")
        return None

    def _make_room(self) -> None:
        """Read nothing while too much is not answered, unless somebody here waits for an answer, which must be read."""
        if self._held <= FULL or self._waiting:
            return
        with self._change:
            self._paused = True  # before looking, so that whoever changes something now wakes this thread
            done = self._change.wait_for(
                lambda: self._held <= FULL or self._waiting or self.closed.is_set(), timeout=PAUSE
            )
            self.heard, self._paused = time.monotonic(), False  # it was not the other side that was silent
        if not done:
            raise WireError(f"calls of {self._held} B were not answered within {PAUSE:g} s")

    def _wake(self) -> None:
        with self._change:
            self._change.notify_all()

    def _watch(self) -> None:
        """End the session when the other side has been silent for too long."""
        while not self.closed.wait(LOOK):
            if time.monotonic() - self.heard > self.silence and not self._paused:
                self.close(f"no sign of life for {self.silence:g} s")

    def _frame(self) -> Any:
        """Wait for a frame, and see that the other side is not too eager."""
        frame = self.link.receive()
        self.heard = now = time.monotonic()
        self._allowance = min(self._allowance + (now - self._before) * RATE, RATE * BURST) - 1
        self._before = now
        if self._allowance < 0:
            raise WireError(f"more than {RATE:g} frames a second")
        return frame

    def _take(self, frame: Any) -> tuple[list[Any], int] | None:
        """Give an answer to who waits for it, or return a call if somebody else is there to read on."""
        message = wire.decode(self._guard.open(frame))
        if not isinstance(message, list) or [type(part) for part in message[:2]] != [str, int] or len(message) != 4:
            raise WireError("a message that is neither call nor answer")
        what, number, *rest = message
        if what == "answer" and isinstance(rest[0], bool):
            if (waiting := self._waiting.get(number)) is not None:
                waiting.put(rest)
            return None
        if what not in ("call", "tell") or not isinstance(rest[0], str) or not isinstance(rest[1], list):
            raise WireError("a message that is neither call nor answer")
        with self._change:
            if self._held > MOST:
                raise WireError(f"calls of more than {MOST} B at once")
            self._held += len(frame)
            if self._idle:
                return message, len(frame)
            if len(self._calls) >= WAITING:
                raise WireError(f"more than {WAITING} calls at once")
            self._calls.append((message, len(frame)))
        return None

    def close(self, reason: str = "") -> None:
        """End the session; whoever waits for an answer is told that none will come."""
        if self.closed.is_set():
            return
        self.lost = reason[:LENGTH] or "it was closed"
        self.closed.set()
        for waiting in [*self._waiting.values()]:
            waiting.put((None, None))
        with self._change:
            self._calls.clear()  # nobody waits for these answers
            self._change.notify_all()
        self.link.close()

    def join(self) -> None:
        """Wait for its threads to end."""
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=5)
