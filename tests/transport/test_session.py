"""Sessions over links that fail, and with many calls at once."""

from __future__ import annotations

import queue
import threading
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

    def __init__(self) -> None:
        self.closed = threading.Event()

    def send(self, frame: bytes) -> None:
        self.closed.wait()
        raise ServiceLost("the link is closed")

    def receive(self, seconds: float | None = None) -> bytes:
        if self.closed.wait(seconds):
            raise ServiceLost("the link was closed")
        raise DeadlineExceeded("nothing came in time")

    def close(self) -> None:
        self.closed.set()


class Plain:
    """A guard that guards nothing."""

    def seal(self, frame: bytes) -> bytes:
        return frame


def test_silence_ends_a_session_under_those_who_wait_to_send() -> None:
    session = Session(Stuck(), Plain(), lambda *_: None)
    session.silence = 0.1
    with pytest.raises(ServiceLost):
        session.tell("beat")
    assert session.lost == "no sign of life for 0.1 s"
    session.join()


class Straight:
    """One end of a link within this process."""

    def __init__(self) -> None:
        self.other: Straight = self
        self.frames: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    def send(self, frame: bytes) -> None:
        self.other.frames.put(frame)

    def receive(self, seconds: float | None = None) -> bytes:
        try:
            frame = self.frames.get(timeout=seconds)
        except queue.Empty:
            raise DeadlineExceeded("nothing came in time") from None
        if frame is None:
            raise ServiceLost("the link was closed")
        return frame

    def close(self) -> None:
        for end in (self, self.other):
            end.frames.put(None)


class Whole:
    """A guard that only puts the parts of a frame together."""

    def seal(self, *parts: bytes) -> bytes:
        return b"".join(parts)

    def open(self, frame: bytes) -> bytes:
        return frame


@pytest.mark.parametrize("room", [session_module.FULL, 100])
def test_answers_arrive_while_every_thread_waits_for_one(monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    monkeypatch.setattr(session_module, "FULL", room)
    one, two = Straight(), Straight()
    one.other, two.other = two, one
    asked = threading.Barrier(2 * ANSWERING)

    def answer(session: Session, kind: str, args: list[Any]) -> Any:
        return session.call("leaf", *args, seconds=seconds(20)) if kind == "nested" else [*args]

    sessions = [Session(one, Whole(), answer), Session(two, Whole(), answer)]

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


def test_a_slow_call_holds_up_no_other() -> None:
    one, two = Straight(), Straight()
    one.other, two.other = two, one
    release = threading.Event()
    sessions = [
        Session(end, Whole(), lambda _, kind, args: release.wait(20) if kind == "slow" else True) for end in (one, two)
    ]
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

    def send(self, frame: bytes) -> None:
        self.sent.put(frame)


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
    session = Session(link, Whole(), lambda *_: release.wait(seconds(20)))
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
    session = Session(link, Whole(), lambda *_: release.wait(seconds(20)))
    assert settled(link) == 3
    with pytest.raises(ServiceLost, match="calls of more than 10000 B at once"):  # it is read on, for the answer
        session.call("describe", seconds=seconds(20))
    assert link.taken < 12
    release.set()
    session.join()


def test_calls_that_are_never_answered_end_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "FULL", 2500)
    monkeypatch.setattr(session_module, "PAUSE", 0.2)
    release = threading.Event()
    session = Session(Fed(40, 1000), Whole(), lambda *_: release.wait(seconds(20)))
    assert session.closed.wait(seconds(20))
    assert "were not answered within 0.2 s" in session.lost
    release.set()
    session.join()
