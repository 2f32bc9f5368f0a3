"""A session: two machines that call each other over one link, many calls at a time; and how it comes about.

One thread at a time reads the link. Whoever waits for an answer reads until it has come, if nobody else does, and
passes on what is not its own: so an answer goes through no other thread. A few threads answer the other side's calls;
one of them reads when nobody here calls, and answers what it reads itself. Where calls of many bytes are unanswered and
nobody here waits for an answer, nothing more is read: the other side then has to wait before it can send.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeAlias

from shoal import transport
from shoal.core import wire
from shoal.core.errors import DeadlineExceeded, Refused, ServiceFailed, ServiceLost, ShoalError, WireError
from shoal.transport import LIMIT, Report, Wire
from shoal.transport.strangers import THREADLESS, RefusalLog
from shoal.transport.trust import Facts, Terms, handshake, refusal

log = logging.getLogger("shoal")
ANSWERING = 8  # threads that answer the other side's calls
WAITING = 1024  # calls of the other side that may wait for one of them
FULL = 64 << 20  # bytes of unanswered calls above which nothing more is read
MOST = 1 << 30  # bytes of unanswered calls above which even an answer is not waited for
PAUSE = 300.0  # seconds for which nothing may be read
RATE = 20_000.0  # frames per second that the other side may send, on average
BURST = 5.0  # seconds' worth of them at once
LENGTH = 500  # letters of the reason why a session ended, part of which may come from the other side
LOOK = 0.5  # seconds between checks for silence
LINGER = 0.002  # seconds for which the link is left to whoever calls next
SLOW = 0.0005  # seconds from which another thread reads while a call is answered
BACK_OFF = (0.25, 10.0)  # seconds before connecting again: at first, and at most
GREETING = 20.0  # seconds for the handshake
READ = object()  # put where an answer is waited for: read the link yourself
try:
    INSTALLED = version("shoal")
except PackageNotFoundError:  # it runs from source
    INSTALLED = "not installed"
FACTS: Facts = {"wire": wire.VERSION, "shoal": INSTALLED}
Call: TypeAlias = tuple[list[Any], int]  # a message, and the bytes of its frame


class Session:
    """Calls in both directions: `["call", number, kind, arguments]` and `["answer", number, success, value]`."""

    def __init__(self, link: Wire, answer: Answer) -> None:
        """Begin to take frames; `answer` is called from several threads at once."""
        self.link, self._answer = link, answer
        self.heard = time.monotonic()
        self.silence = 30.0  # seconds without a frame after which the link counts as lost
        self.lost = ""  # why it ended
        self.refused = ""  # why the other side does not want this machine
        self.closed = threading.Event()
        self._numbers = itertools.count()
        self._waiting: dict[int, queue.SimpleQueue[Any]] = {}  # for an answer, by the number of the call
        self._reading = threading.Lock()  # held by the thread that reads the link
        self._left, self._unread = time.monotonic(), threading.Event()  # when it was released, and whether it was
        self._calls: deque[Call] = deque()  # that nobody has begun to answer
        self._held = 0  # bytes of all unanswered calls
        self._busy = 0  # threads that answer; one is always left to read
        self._change = threading.Condition(threading.Lock())  # of these three
        self._slow = False  # whether the last answer took long
        self._paused = False  # whether nothing is read for the moment
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
        """Call the other side, and wait for its answer."""
        deadline = time.monotonic() + seconds
        number, answer = next(self._numbers), queue.SimpleQueue[Any]()
        self._waiting[number] = answer
        if self._paused:
            self._wake()
        try:
            self._send(["call", number, kind, args])
            if self.closed.is_set():
                raise ServiceLost(f"the link was lost: {self.lost}")
            success, value = self._wait(answer, deadline)
        except queue.Empty:
            raise DeadlineExceeded(f"{kind}: no answer within {seconds:g} s") from None
        finally:
            self._waiting.pop(number, None)
        if success is None:
            raise ServiceLost(f"the link was lost: {self.lost}")
        if not success:
            raise ServiceFailed(value)
        return value

    def tell(self, kind: str, *args: Any) -> None:
        """Send the other side a message that has no answer."""
        self._send(["tell", -1, kind, args])

    def _send(self, message: list[Any]) -> None:
        buffers = wire.encode(message)
        if (size := sum(map(len, buffers))) > LIMIT:
            raise WireError(f"message too large: {size} B, the limit is {LIMIT} B")
        try:
            self.link.send(*buffers)
        except ServiceLost as error:
            self.close(str(error))
            raise

    def _wait(self, answer: queue.SimpleQueue[Any], deadline: float) -> Any:
        """Wait for an answer: by reading the link, where nobody else does."""
        while (left := deadline - time.monotonic()) > 0 or not answer.empty():
            if answer.empty() and self._may_read():
                self._read(answer, deadline)
            elif (found := answer.get(timeout=max(left, 0.0))) is not READ:
                return found
        raise queue.Empty

    def _may_read(self) -> bool:
        """Whether nobody reads, and this thread does so from now on; where it cannot give up in time, another does."""
        if self.link.resumable:
            return self._reading.acquire(blocking=False)
        if not self._reading.locked():
            self._offer(None, True)
        return False

    def _serve(self) -> None:
        """Answer calls until the link ends."""
        while (found := self._next()) is not None:
            call, size = found
            begin = time.monotonic()
            self._reply(*call)
            self._slow = time.monotonic() - begin > SLOW
            with self._change:
                self._held, self._busy = self._held - size, self._busy - 1
            if self._paused:
                self._wake()
            del found, call  # its arrays are not kept while waiting for the next

    def _reply(self, what: str, number: int, kind: str, args: list[Any]) -> None:
        try:
            value, success = self._answer(self, kind, args), True
        except ShoalError as error:
            value, success = str(error), False
        except (Exception, SystemExit):  # nothing that is asked for ends this thread
            value, success = traceback.format_exc(), False
        if what == "tell":
            return
        with suppress(ServiceLost):
            try:
                self._send(["answer", number, success, value])
            except WireError as error:
                self._send(["answer", number, False, str(error)])

    def _next(self) -> Call | None:
        """A call that was read already, or else one that this thread reads; None: the link has ended."""
        aside = False  # whether reading is left to those who call
        while not self.closed.is_set():
            with self._change:
                if self._calls and self._busy < ANSWERING - 1:
                    self._busy += 1
                    return self._calls.popleft()
                if aside or not self._reading.acquire(blocking=False):
                    self._change.wait()
                    aside = False
                    continue
            if (found := self._read()) is not None:
                return found
            aside = True
        return None

    def _read(self, answer: queue.SimpleQueue[Any] | None = None, deadline: float | None = None) -> Call | None:
        """Read, as the only thread that does: until an answer is there or, without one to wait for, a call."""
        found = None
        try:
            while found is None and not self.closed.is_set() and (answer is None or answer.empty()):
                if answer is None:
                    self._make_room()
                call = self._receive(None if deadline is None else deadline - time.monotonic())
                if call is not None:
                    found = self._keep(call, answer is None)
                elif answer is None and self.link.resumable:
                    break  # the thread that got this answer may read the next one itself
        except DeadlineExceeded:
            pass
        except ShoalError as error:
            self.close(str(error))
        except Exception as error:
            self.close(f"{type(error).__name__}: {error}")
        finally:
            self._left = time.monotonic()
            self._reading.release()
            self._offer(answer, found is not None and self._slow)
            if not self._unread.is_set():
                self._unread.set()
        return found

    def _offer(self, but: queue.SimpleQueue[Any] | None, idle: bool) -> None:
        """Have the link read by a thread that waits for another answer, or else by an idle one."""
        for waiting in [*self._waiting.values()] if self.link.resumable else ():
            if waiting is not but and waiting.empty():
                waiting.put(READ)
                return
        if idle:
            with self._change:
                self._change.notify()

    def _receive(self, seconds: float | None) -> Call | None:
        """Read one frame: a call, or an answer, which goes to the thread that waits for it."""
        frame = self.link.receive(seconds)
        self.heard = now = time.monotonic()
        self._allowance = min(self._allowance + (now - self._before) * RATE, RATE * BURST) - 1
        self._before = now
        if self._allowance < 0:
            raise WireError(f"more than {RATE:g} frames per second")
        message = wire.decode(frame)
        match message:
            case ["answer", int(number), bool(success), value]:
                if (waiting := self._waiting.get(number)) is not None:
                    waiting.put((success, value))
                return None
            case ["call" | "tell", int(), str(), list()]:
                pass
            case _:
                raise WireError("a message that is neither call nor answer")
        with self._change:
            if self._held > MOST:
                raise WireError(f"unanswered calls of more than {MOST} B")
            self._held += len(frame)
        return message, len(frame)

    def _keep(self, call: Call, mine: bool) -> Call | None:
        """Return a call that this thread may answer itself; queue any other."""
        with self._change:
            if mine and self._busy < ANSWERING - 1:
                self._busy += 1
                return call
            if len(self._calls) >= WAITING:
                raise WireError(f"more than {WAITING} calls at once")
            self._calls.append(call)
            self._change.notify()
        return None

    def _make_room(self) -> None:
        """Read nothing while too much is unanswered, unless somebody here waits for an answer, which must be read."""
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
        """Have the link read if it was left for long enough; end the session if the other side is silent too long."""
        while not self.closed.is_set():
            if self._unread.wait(LOOK):
                while (left := self._left + LINGER - time.monotonic()) > 0:
                    time.sleep(left)
                self._unread.clear()
                if not self._reading.locked():
                    self._offer(None, True)
                    self._left = time.monotonic()
                    self._unread.set()  # see whether it is read now
            if time.monotonic() - self.heard > self.silence and not self._paused:
                self.close(f"no sign of life for {self.silence:g} s")

    def close(self, reason: str = "") -> None:
        """End the session; calls that wait for an answer fail."""
        if self.closed.is_set():
            return
        self.lost = reason[:LENGTH] or "it was closed"
        self.closed.set()
        for waiting in [*self._waiting.values()]:
            waiting.put((None, None))
        with self._change:
            self._calls.clear()  # nobody waits for these answers
            self._change.notify_all()
        self._unread.set()
        self.link.close()

    def join(self) -> None:
        """Wait for its threads to end."""
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=5)


Answer: TypeAlias = Callable[[Session, str, list[Any]], Any]


def meet(address: str, terms: Terms, answer: Answer) -> tuple[str, Session]:
    """Connect to a machine that listens; return its name and the session."""
    terms.check(address)
    token = terms.secret()
    link = transport.find(terms.link).dial(address, terms)
    try:
        name = _greet(link, handshake("joiner", terms.name, token, FACTS, link.binding))
        return name, Session(link, answer)
    except ShoalError as error:
        link.close()
        kind = ServiceLost if isinstance(error, DeadlineExceeded) else Refused
        raise kind(f"{address}: {error}") from error


def keep_meeting(
    address: str, terms: Terms, answer: Answer, stay: Callable[[str, Session], None], stopped: threading.Event
) -> None:
    """Connect, stay while the link lasts, and connect again, less and less often while that fails."""
    wait, reported = BACK_OFF[0], ""
    while not stopped.is_set():
        try:
            stay(*meet(address, terms, answer))
        except ShoalError as error:  # nobody answers, or this machine is not wanted
            if str(error) != reported:
                log.warning("%s; trying again", error)
            reported = str(error)
            stopped.wait(wait)
            wait = min(2 * wait, BACK_OFF[1])
        else:
            wait, reported = BACK_OFF[0], ""
            stopped.wait(wait)


class Gate:
    """Listens, and passes on those who prove who they are; the others are refused and forgotten."""

    def __init__(
        self,
        address: str,
        terms: Terms,
        answer: Callable[[str], Answer],
        welcome: Callable[[str, Session], None],
        refused: Report,
        certificates: bool,
    ) -> None:
        """Begin to listen; `welcome` keeps a connection's thread until its session ends.

        Without `certificates`, joiners need none of the authority: they pin ours and prove the token.
        """
        replace(terms, pin="").check(address)  # a pin is of the other's certificate, and encrypts nothing here
        terms.secret()  # report a missing or short one at once; it is read again for each connection
        self.terms, self._answer, self._welcome, self._refused = terms, answer, welcome, RefusalLog(refused)
        self.listener = transport.find(terms.link).listen(address, terms, certificates, self._take, self._refused)
        self.address = self.listener.address

    def _take(self, link: Wire) -> None:
        try:
            name = _greet(link, handshake("listener", self.terms.name, self.terms.secret(), FACTS, link.binding))
            session = Session(link, self._answer(name))
        except ShoalError as error:
            self._refused(link.peer, str(error))
            link.refuse(str(error))
            return
        self._welcome(name, session)

    def close(self) -> None:
        """Accept no more connections."""
        self.listener.close()
        self._refused.flush()


def _greet(link: Wire, steps: Generator[bytes | None, bytes, str]) -> str:
    """Carry a handshake over a link, and return the other's name; say why where it is refused."""
    limit = time.monotonic() + GREETING
    try:
        message = next(steps)
        while True:
            if message is not None:
                link.send(message)
                message = next(steps)
            else:
                message = steps.send(bytes(link.receive(max(limit - time.monotonic(), 0.001))))
    except StopIteration as end:
        link.trust()
        return str(end.value)
    except Refused as error:
        with suppress(ServiceLost):
            link.send(refusal(str(error)))
        raise
