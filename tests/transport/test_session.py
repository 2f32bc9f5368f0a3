"""Sessions over links that fail, and with many calls at once."""

from __future__ import annotations

import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from shoal.core import wire
from shoal.core.errors import DeadlineExceeded, ServiceLost
from shoal.transport import session as session_module
from shoal.transport.session import ANSWERING, Session
from tests.pace import seconds


class Stuck:
    """A link that takes nothing and gives nothing, as one does that was cut while its buffers were full."""

    resumable = True

    def __init__(self) -> None:
        self.closed = threading.Event()

    def send(self, *buffers: bytes) -> None:
        self.closed.wait()
        raise ServiceLost("the link is closed")

    def receive(self, seconds: float | None = None) -> bytes:
        if self.closed.wait(seconds):
            raise ServiceLost("the link was closed")
        raise DeadlineExceeded("nothing came in time")

    def close(self) -> None:
        self.closed.set()


def test_silence_ends_a_session_under_those_who_wait_to_send() -> None:
    session = Session(Stuck(), lambda *_: None)
    session.silence = 0.1
    with pytest.raises(ServiceLost):
        session.tell("beat")
    assert session.lost == "no sign of life for 0.1 s"
    session.join()


class Straight:
    """One end of a link within this process."""

    def __init__(self, resumable: bool = True) -> None:
        self.resumable = resumable
        self.other: Straight = self
        self.frames: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    def send(self, *buffers: bytes) -> None:
        self.other.frames.put(b"".join(buffers))

    def receive(self, seconds: float | None = None) -> bytes:
        try:
            frame = self.frames.get(timeout=None if seconds is None else max(seconds, 0))
        except queue.Empty:
            raise DeadlineExceeded("nothing came in time") from None
        if frame is None:
            raise ServiceLost("the link was closed")
        return frame

    def close(self) -> None:
        for end in (self, self.other):
            end.frames.put(None)


def pair(resumable: bool) -> tuple[Straight, Straight]:
    """Both ends of a link."""
    one, two = Straight(resumable), Straight(resumable)
    one.other, two.other = two, one
    return one, two


BOTH_KINDS = pytest.mark.parametrize("resumable", [True, False])


@BOTH_KINDS
@pytest.mark.parametrize("room", [session_module.FULL, 100])
def test_answers_arrive_while_every_thread_waits_for_one(
    monkeypatch: pytest.MonkeyPatch, room: int, resumable: bool
) -> None:
    monkeypatch.setattr(session_module, "FULL", room)
    one, two = pair(resumable)
    asked = threading.Barrier(2 * ANSWERING)

    def answer(session: Session, kind: str, args: list[Any]) -> Any:
        return session.call("leaf", *args, seconds=seconds(20)) if kind == "nested" else [*args]

    sessions = [Session(one, answer), Session(two, answer)]

    def ask(number: int) -> Any:
        asked.wait(20)
        return sessions[0].call("nested", number, seconds=seconds(20))

    with ThreadPoolExecutor(2 * ANSWERING) as pool:
        assert [*pool.map(ask, range(2 * ANSWERING))] == [[number] for number in range(2 * ANSWERING)]
    for session in sessions:
        session.close()
    for session in sessions:
        session.join()
        assert not any(thread.is_alive() for thread in session._threads)


@BOTH_KINDS
def test_a_slow_call_holds_up_no_other(resumable: bool) -> None:
    one, two = pair(resumable)
    release = threading.Event()
    sessions = [Session(end, lambda _, kind, args: release.wait(20) if kind == "slow" else True) for end in (one, two)]
    with ThreadPoolExecutor(ANSWERING) as pool:
        slow = [pool.submit(sessions[0].call, "slow", seconds=seconds(20)) for _ in range(ANSWERING - 2)]
        for _ in range(100):
            assert sessions[0].call("quick", seconds=seconds(20)) is True
        release.set()
        assert all(each.result() for each in slow)
    for session in sessions:
        session.close()
        session.join()


class Fed(Straight):
    """A link over which calls of one size come, and what is sent is kept."""

    def __init__(self, calls: int, size: int) -> None:
        super().__init__()
        self.taken, self.sent = 0, queue.SimpleQueue[bytes]()
        for number in range(calls):
            self.frames.put(b"".join(wire.encode(["call", number, "work", ["x" * size]])))  # type: ignore[arg-type]

    def receive(self, seconds: float | None = None) -> bytes:
        frame = super().receive(seconds)
        self.taken += 1
        return frame

    def send(self, *buffers: bytes) -> None:
        self.sent.put(b"".join(buffers))


def settled(link: Fed) -> int:
    """How many frames a session takes before it takes no more for a while."""
    seen = -1
    while seen != link.taken:
        seen = link.taken
        threading.Event().wait(seconds(0.2))
    return seen


def test_no_more_is_read_while_calls_of_many_bytes_are_not_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "FULL", 2500)
    link, release = Fed(40, 1000), threading.Event()
    session = Session(link, lambda *_: release.wait(seconds(20)))
    session.silence = 0.1  # which is not the other side's, while nothing is read
    assert settled(link) == 3
    release.set()
    assert sorted(wire.decode(link.sent.get(timeout=seconds(20)))[1] for _ in range(40)) == [*range(40)]
    session.close()
    session.join()


def test_calls_of_too_many_bytes_end_a_session_where_an_answer_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "FULL", 2500)
    monkeypatch.setattr(session_module, "MOST", 10_000)
    link, release = Fed(40, 1000), threading.Event()
    session = Session(link, lambda *_: release.wait(seconds(20)))
    assert settled(link) == 3
    with pytest.raises(ServiceLost, match="unanswered calls of more than 10000 B"):  # it is read on, for the answer
        session.call("describe", seconds=seconds(20))
    assert link.taken < 12
    release.set()
    session.join()


def test_calls_that_are_never_answered_end_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "FULL", 2500)
    monkeypatch.setattr(session_module, "PAUSE", 0.2)
    release = threading.Event()
    session = Session(Fed(40, 1000), lambda *_: release.wait(seconds(20)))
    assert session.closed.wait(seconds(20))
    assert "were not answered within 0.2 s" in session.lost
    release.set()
    session.join()


def test_a_caller_reads_its_own_answer_and_passes_on_what_is_not_its_own() -> None:
    one, two = pair(True)
    readers: list[str] = []
    receive = one.receive

    def noted(seconds: float | None = None) -> bytes:
        frame = receive(seconds)
        readers.append(threading.current_thread().name)
        return frame

    one.receive = noted  # type: ignore[method-assign]
    release = threading.Event()
    sessions = [Session(end, lambda _, kind, args: release.wait(20) if kind == "slow" else args) for end in (one, two)]
    for number in range(300):
        assert sessions[0].call("same", number, seconds=seconds(20)) == [number]
    assert readers.count(threading.current_thread().name) > 100  # no other thread stood between
    with ThreadPoolExecutor(4) as pool:
        slow = [pool.submit(sessions[0].call, "slow", seconds=seconds(20)) for _ in range(4)]
        for number in range(100):
            assert sessions[0].call("same", number, seconds=seconds(20)) == [number]
            assert sessions[1].call("same", number, seconds=seconds(20)) == [number]  # read by whoever waits there
        release.set()
        assert all(each.result() for each in slow)
    for session in sessions:
        session.close()
    for session in sessions:
        session.join()


@BOTH_KINDS
def test_a_deadline_holds_for_who_reads_and_for_who_does_not(resumable: bool) -> None:
    one, two = pair(resumable)
    release = threading.Event()
    sessions = [Session(end, lambda _, kind, args: release.wait(20) if kind == "slow" else args) for end in (one, two)]

    def late(number: int) -> str:
        with pytest.raises(DeadlineExceeded) as caught:
            sessions[0].call("slow", number, seconds=0.2)
        return str(caught.value)

    with ThreadPoolExecutor(4) as pool:
        assert {*pool.map(late, range(4))} == {"slow: no answer within 0.2 s"}
    assert sessions[0].call("same", 1, seconds=seconds(20)) == [1]
    assert sessions[1].call("same", 2, seconds=seconds(20)) == [2]
    release.set()
    for session in sessions:
        session.close()
    for session in sessions:
        session.join()


@BOTH_KINDS
def test_a_call_is_answered_promptly_after_this_side_has_called(resumable: bool) -> None:
    one, two = pair(resumable)
    sessions = [Session(end, lambda _, kind, args: args) for end in (one, two)]
    for number in range(50):
        assert sessions[number % 2].call("same", number, seconds=seconds(20)) == [number]
    began = time.monotonic()
    for number in range(20):  # between calls nobody reads for a moment
        assert sessions[number % 2].call("same", number, seconds=seconds(20)) == [number]
        time.sleep(session_module.LINGER)
    assert time.monotonic() - began < seconds(2)
    for session in sessions:
        session.close()
    for session in sessions:
        session.join()
