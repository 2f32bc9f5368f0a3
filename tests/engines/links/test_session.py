"""Sessions over links that fail, and with many calls at once."""

from __future__ import annotations

import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from shoal.core.errors import DeadlineExceeded, ServiceLost
from shoal.engines.links.session import ANSWERING, Session


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


def test_answers_arrive_while_every_thread_waits_for_one() -> None:
    one, two = Straight(), Straight()
    one.other, two.other = two, one
    asked = threading.Barrier(2 * ANSWERING)

    def answer(session: Session, kind: str, args: list[Any]) -> Any:
        return session.call("leaf", *args, seconds=20.0) if kind == "nested" else [*args]

    sessions = [Session(one, Whole(), answer), Session(two, Whole(), answer)]

    def ask(number: int) -> Any:
        asked.wait(20)
        return sessions[0].call("nested", number, seconds=20.0)

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
        slow = [pool.submit(sessions[0].call, "slow", seconds=20.0) for _ in range(ANSWERING - 2)]
        for _ in range(100):
            assert sessions[0].call("quick", seconds=20.0) is True
        release.set()
        assert all(each.result() for each in slow)
    for session in sessions:
        session.close()
        session.join()
