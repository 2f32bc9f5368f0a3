"""The guard over frames: whatever a stranger does to them, only what was sent comes out, once and in order."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core import wire
from shoal.core.errors import Refused, WireError
from shoal.transport import guard
from shoal.transport.guard import GREATEST, TRAILER, Guard, Unguarded

ONE, TWO = b"1" * 32, b"2" * 32


def pair(limit: int = 1 << 20) -> tuple[Guard, Guard]:
    """Both ends of a session."""
    return Guard(ONE, TWO, limit), Guard(TWO, ONE, limit)


@given(st.lists(st.tuples(st.booleans(), st.binary(max_size=200)), max_size=20))
def test_what_is_sealed_here_opens_there_in_both_directions(payloads: list[tuple[bool, bytes]]) -> None:
    here, there = pair()
    for forth, payload in payloads:
        sender, receiver = (here, there) if forth else (there, here)
        assert receiver.open(sender.seal(payload)) == payload


def test_parts_become_one_payload_and_arrays_in_it_are_aligned() -> None:
    here, there = pair()
    value = {"a": np.arange(1000, dtype=np.float32), "b": [np.ones((3, 5))]}
    payload = there.open(here.seal(*wire.encode(value)))
    found = wire.decode(payload)
    np.testing.assert_array_equal(found["a"], value["a"])
    address = np.frombuffer(payload, np.uint8).ctypes.data
    assert (found["a"].ctypes.data - address) % wire.ALIGN == 0
    assert found["a"].flags.writeable  # the frame was not copied into bytes


def test_the_payload_is_no_copy() -> None:
    here, there = pair()
    frame = here.seal(b"payload")
    assert there.open(frame).obj is frame


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_buffer_is_opened(kind: type) -> None:
    here, there = pair()
    assert there.open(kind(here.seal(b"payload"))) == b"payload"


def test_a_frame_opens_once() -> None:
    here, there = pair()
    frame = bytes(here.seal(b"payload"))
    there.open(frame)
    with pytest.raises(Refused, match="frame 0 came again: 1 was due"):
        there.open(frame)


def test_every_other_order_is_refused() -> None:
    for order in itertools.permutations(range(3)):
        here, there = pair()
        frames = [here.seal(bytes([number])) for number in range(3)]
        if order == (0, 1, 2):
            assert [bytes(there.open(frames[number])) for number in order] == [b"\0", b"\1", b"\2"]
        else:
            with pytest.raises(Refused, match="came too early"):
                [there.open(frames[number]) for number in order]


def test_a_dropped_frame_is_noticed() -> None:
    here, there = pair()
    here.seal(b"lost")
    with pytest.raises(Refused, match="frame 1 came too early: 0 was due"):
        there.open(here.seal(b"next"))


def test_every_bit_is_guarded() -> None:
    frame = bytes(pair()[0].seal(b"payload"))
    for bit in range(8 * len(frame)):
        altered = bytearray(frame)
        altered[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Refused, match="altered"):
            pair()[1].open(altered)


def test_every_truncation_and_extension_is_refused() -> None:
    frame = bytes(pair()[0].seal(b"payload"))
    for length in range(len(frame)):
        for piece in (frame[:length], frame[len(frame) - length :]):
            with pytest.raises(Refused, match="altered" if length >= TRAILER else "shorter than its trailer"):
                pair()[1].open(piece)
    for longer in (frame + b"\0", b"\0" + frame, frame + frame):
        with pytest.raises(Refused, match="altered"):
            pair()[1].open(longer)


@given(st.binary(max_size=100))
def test_garbage_is_refused(frame: bytes) -> None:
    with pytest.raises(Refused):
        pair()[1].open(frame)


def test_a_frame_cannot_be_sent_back_or_into_another_session() -> None:
    here, there = pair()
    frame = bytes(here.seal(b"payload"))
    with pytest.raises(Refused, match="not of this session"):
        here.open(frame)
    with pytest.raises(Refused, match="not of this session"):
        Guard(TWO, b"3" * 32).open(frame)
    assert there.open(frame) == b"payload"


def test_a_counter_cannot_be_changed_to_the_one_that_is_due() -> None:
    here, there = pair()
    frame = here.seal(b"payload")
    there.open(bytes(frame))
    frame[-TRAILER] += 1
    with pytest.raises(Refused, match="altered"):
        there.open(frame)


def test_nothing_is_opened_after_a_refusal() -> None:
    here, there = pair()
    first = here.seal(b"first")
    with pytest.raises(Refused):
        there.open(b"garbage" * 10)
    with pytest.raises(Refused, match="the session ended"):
        there.open(first)


def test_sizes_are_limited_on_both_sides() -> None:
    here, there = pair(limit=10)
    assert there.open(here.seal(b"0123456789")) == b"0123456789"
    with pytest.raises(WireError, match="11 B, the limit is 10 B"):
        here.seal(b"01234", b"567890")
    assert there.open(here.seal(b"goes on")) == b"goes on"  # what was too large was never sent
    large = Guard(ONE, TWO).seal(b"0" * 11)
    with pytest.raises(Refused, match="frame too large: 11 B"):
        pair(limit=10)[1].open(large)


@pytest.mark.parametrize("limit", [0, -1, GREATEST + 1])
def test_limits_have_limits(limit: int) -> None:
    with pytest.raises(ValueError, match="limit"):
        Guard(ONE, TWO, limit)


def test_directions_have_keys_of_their_own() -> None:
    with pytest.raises(ValueError, match="key of its own"):
        Guard(ONE, ONE)


def test_frames_tampered_at_random_never_open() -> None:
    chance = random.Random(0)
    here, _ = pair()
    frames = [bytes(here.seal(chance.randbytes(chance.randrange(60)))) for _ in range(50)]
    for _ in range(5000):
        frame = bytearray(chance.choice(frames[1:]))
        start = chance.randrange(len(frame))
        frame[start : start + chance.randrange(4)] = chance.randbytes(chance.randrange(4))
        with pytest.raises(Refused):
            pair()[1].open(frame)


def test_without_a_guard_frames_are_what_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bytes(Unguarded().open(Unguarded().seal(b"ab", memoryview(b"c")))) == b"abc"
    monkeypatch.setattr(guard, "LIMIT", 2)
    with pytest.raises(WireError, match="message too large: 3 B, the limit is 2 B"):
        Unguarded().seal(b"ab", b"c")
