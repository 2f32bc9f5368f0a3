"""The gRPC link: who is let in, what both sides are told, and that frames arrive whole."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.core.errors import Refused, ServiceLost, ShoalError, WireError
from shoal.transport import grpc, strangers
from shoal.transport.session import Gate, Session, meet
from shoal.transport.trust import Terms, fingerprint, read_token
from tests.pace import seconds
from tests.transport.test_refusals import last_of

Open = Callable[..., Gate]


@pytest.fixture
def refusals() -> list[str]:
    """What the listening side says of those whom it refused."""
    return []


@pytest.fixture
def gate(refusals: list[str]) -> Iterator[Open]:
    """Listen by gRPC, and answer every call with its arguments."""
    with ExitStack() as stack:

        def stay(name: str, session: Session) -> None:
            session.closed.wait()
            session.join()

        def open_(certificates: bool = True, **terms: Any) -> Gate:
            made = Gate(
                "127.0.0.1:0",
                Terms("node", link="grpc", **terms),
                lambda _: lambda session, kind, args: args,
                stay,
                lambda peer, reason: refusals.append(reason),
                certificates,
            )
            stack.callback(made.close)
            return made

        yield open_


def call(gate: Gate, *args: Any, **terms: Any) -> Any:
    """Meet, call once, and part."""
    name, session = meet(gate.address, Terms("head", link="grpc", **terms), lambda *_: None)
    try:
        assert name == "node"
        return session.call("same", *args, seconds=seconds(20))
    finally:
        session.close()
        session.join()


@pytest.mark.parametrize("secure", [False, True])
def test_frames_of_every_length_arrive_whole(gate: Open, folders: Path, secure: bool) -> None:
    here, there = ({"trust": str(folders / name)} if secure else {} for name in ("here", "there"))
    opened = gate(**here)
    for size in (0, 1, grpc.PIECE - 300, grpc.PIECE, 3 * grpc.PIECE + 7):
        sent = np.random.default_rng(size).integers(0, 256, size, np.uint8)
        (came,) = call(opened, sent, **there)
        np.testing.assert_array_equal(came, sent)


def test_without_a_certificate_the_pinned_one_and_the_token_do(gate: Open, folders: Path) -> None:
    opened = gate(certificates=False, trust=str(folders / "here"))
    pin, token = fingerprint(folders / "here" / "node.pem"), read_token(folders / "here")
    assert call(opened, 1, pin=pin, token=token) == [1]
    with pytest.raises(Refused, match="is not the pinned one"):
        call(opened, 1, pin=fingerprint(folders / "there" / "node.pem"), token=token)
    with pytest.raises(Refused, match="token is not the same"):
        call(opened, 1, pin=pin, token="x" * 32)
    assert call(opened, 1, pin=pin, token=token) == [1]


STRANGERS = {
    "token": ({"trust": "there", "token": "x" * 32}, "token is not the same", True),
    "authority": ({"trust": "stranger"}, "not issued by the authority", False),
    "plain text": ({"token": "y" * 32}, "does not answer|closed", False),
}


@pytest.mark.parametrize("case", [*STRANGERS])
def test_strangers_are_refused(
    gate: Open, folders: Path, refusals: list[str], case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    terms, told, logged = STRANGERS[case]
    if "trust" in terms:
        terms = {**terms, "trust": str(folders / terms["trust"])}
    opened = gate(trust=str(folders / "here"))
    with monkeypatch.context() as patch:
        if case == "plain text":  # which nobody answers
            patch.setattr(grpc, "OPENING", 1.0)
        with pytest.raises(ShoalError, match=told):
            call(opened, 1, **terms)
    assert bool(refusals) == logged  # of whom TLS refuses, gRPC says nothing
    assert call(opened, 1, trust=str(folders / "there")) == [1]


def test_a_head_whose_certificate_has_expired_does_not_knock(gate: Open, folders: Path) -> None:
    opened = gate(trust=str(folders / "here"))
    with pytest.raises(ShoalError, match="expired"):
        call(opened, 1, trust=str(folders / "expired"))


def test_who_says_too_much_before_he_is_known_is_refused(gate: Open, refusals: list[str]) -> None:
    wire = grpc.dial(gate().address, Terms("head", link="grpc"))
    wire.send(bytes(strangers.LIMIT + 1))
    with pytest.raises(ServiceLost):
        last_of(wire)
    assert "before the other side has identified itself" in refusals[0]


def test_a_listener_that_ends_is_noticed(gate: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = gate()
    _, session = meet(opened.address, Terms("head", link="grpc"), lambda *_: None)
    opened.close()
    assert session.closed.wait(20)
    session.join()
    monkeypatch.setattr(grpc, "OPENING", 1.0)
    with pytest.raises(ServiceLost, match="does not answer"):
        meet(opened.address, Terms("head", link="grpc"), lambda *_: None)


def test_a_taken_address_is_told(gate: Open) -> None:
    with pytest.raises(ShoalError, match="cannot listen on"):
        grpc.listen(gate().address, Terms("node", link="grpc"), True, lambda wire: None, lambda *_: None)


def test_a_sender_waits_for_a_receiver_who_takes_nothing() -> None:
    wire = grpc.GrpcWire("nobody")

    def send() -> None:
        with pytest.raises(ServiceLost):
            wire.send(bytes(20 * grpc.PIECE))

    sender = threading.Thread(target=send)
    sender.start()
    while wire._outgoing.qsize() < grpc.AHEAD:
        assert sender.is_alive()
    wire.close()
    sender.join(20)
    assert wire._outgoing.qsize() <= grpc.AHEAD + 1  # with the sign that it is over


def test_what_is_no_piece_of_a_frame_is_refused() -> None:
    wire = grpc.GrpcWire("nobody")
    wire.trust()
    with pytest.raises(WireError, match="not a piece of a frame"):
        wire.take(b"1234567")
    assert wire.take(b"ab" + grpc.LEFT.pack(3)) is None
    for odd in (
        b"c" + grpc.LEFT.pack(1),
        b"cdef" + grpc.LEFT.pack(0),
        grpc.LEFT.pack(3),
        b"cd" + grpc.LEFT.pack(2**64 - 1),
    ):
        with pytest.raises(WireError, match="not a piece of a frame"):
            wire.take(odd)
    assert wire.take(b"cde" + grpc.LEFT.pack(0)) == b"abcde"


@pytest.mark.parametrize("lengths", [[0], [1, 0, 2], [grpc.PIECE], [grpc.PIECE - 1, 1, 1], [7, 3 * grpc.PIECE, 9]])
def test_pieces_are_put_together_again(lengths: list[int]) -> None:
    wire = grpc.GrpcWire("nobody")
    wire.trust()
    buffers = [np.random.default_rng(length).bytes(length) for length in lengths]
    *first, last = grpc.cut(*buffers)
    assert len(first) == max(sum(lengths) - 1, 0) // grpc.PIECE
    assert all(wire.take(piece) is None for piece in first)
    assert wire.take(last) == b"".join(buffers)


def test_no_room_is_made_for_what_a_stranger_announces() -> None:
    for left in (strangers.LIMIT, 2**30):
        with pytest.raises(WireError, match="before the other side has identified itself"):
            grpc.GrpcWire("nobody").take(b"1" + grpc.LEFT.pack(left))


def test_a_frame_that_is_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc, "LIMIT", 10)
    wire = grpc.GrpcWire("nobody")
    wire.trust()
    assert wire.take(b"12345" + grpc.LEFT.pack(0)) == b"12345"
    with pytest.raises(WireError, match="a frame of more than 10 B"):
        wire.take(b"12345" + grpc.LEFT.pack(6))
