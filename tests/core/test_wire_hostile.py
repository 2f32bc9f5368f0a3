"""What may come in over the wire from anyone: a value, or a refusal, and never harm."""

from __future__ import annotations

import json
import math
import tracemalloc
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core import wire
from shoal.core.errors import WireError

LITTLE = 64 << 20  # bytes: far above what any message here needs, far below what the hostile ones claim


def packed(value: Any, *args: Any) -> bytes:
    """A value as one message."""
    return b"".join(wire.encode(value, *args))


def message(tree: Any, table: Any, body: bytes = b"") -> bytes:
    """A message with a header of one's own making."""
    return raw(json.dumps([tree, table]).encode(), body)


def raw(header: bytes, body: bytes = b"", **claims: int) -> bytes:
    """A message with any bytes for a header, and lengths that may lie."""
    prefix = (wire.MAGIC, claims.get("version", wire.VERSION), claims.get("flags", 0))
    lengths = (claims.get("header_size", len(header)), claims.get("body_size", len(body)))
    return wire.PREFIX.pack(*prefix, *lengths) + header + body


@contextmanager
def little_memory():
    """Check that what is done inside takes little memory."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < LITTLE
    finally:
        tracemalloc.stop()


def survives(data: bytes, block: bytes | None = None) -> None:
    """Decode, which must give a value made of the message alone, or a WireError and nothing else."""
    try:
        value = wire.decode(data, block)
    except WireError:
        return
    sources = [np.frombuffer(source, np.uint8) for source in (data, block) if source]
    for array in found_arrays(value):
        assert not array.size or any(np.shares_memory(array, source) for source in sources)


def found_arrays(value: Any) -> list[np.ndarray]:
    """Every array in a value."""
    if isinstance(value, np.ndarray):
        return [value]
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    return [array for item in inside for array in found_arrays(item)]


def test_limits_on_what_is_received():
    data = packed(np.zeros(100, np.uint8))
    assert wire.decode(data, limit=128).size == 100
    with pytest.raises(WireError, match=r"message too large: .* body 128 B, limits \d+ and 127"):
        wire.decode(data, limit=127)
    with pytest.raises(WireError, match="message too large"):
        wire.sizes(data[: wire.PREFIX.size], limit=127)
    for claims in (
        {"header_size": wire.HEADER_LIMIT + 1},
        {"body_size": wire.BODY_LIMIT + 1},
        {"body_size": 2**64 - 1},
    ):
        with pytest.raises(WireError, match="message too large"):
            wire.sizes(raw(b"[1, []]", **claims))


def test_the_prefix_tells_the_length_of_the_message():
    data = packed({"a": np.zeros(1000)})
    assert wire.PREFIX.size + sum(wire.sizes(data[: wire.PREFIX.size])) == len(data)
    assert wire.sizes(b"12345" + data, 5) == wire.sizes(data)
    with pytest.raises(WireError, match="message of 19 B is shorter than its prefix of 20 B"):
        wire.sizes(b"12345" + data[:19], 5)


def test_another_version_is_named():
    with pytest.raises(WireError, match="wire version 2, this side speaks 1"):
        wire.decode(raw(b"[1, []]", version=2))


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"", "shorter than its prefix"),
        (b"SHOL", "shorter than its prefix"),
        (b"GET / HTTP/1.1\r\nHost: shoal\r\n\r\n", "wrong magic"),
        (raw(b"[1, []]", flags=3), "unknown flags 0x3"),
        (raw(b"[1, []]", body_size=64), "announces"),
        (raw(b"[1, []]") + b"more", "announces"),
    ],
)
def test_a_bad_envelope_says_why(data, complaint):
    with pytest.raises(WireError, match=complaint):
        wire.decode(data)


BODY = bytes(range(64))
FLOAT, BYTE = "<f4", "|u1"
HOSTILE = {
    "no such type": message({"$": 0}, [["object", [1], 0]], BODY),
    "big-endian type": message({"$": 0}, [[">f4", [1], 0]], BODY),
    "type that is a list": message({"$": 0}, [[[FLOAT], [1], 0]], BODY),
    "type that is nothing": message({"$": 0}, [[None, [1], 0]], BODY),
    "huge side": message({"$": 0}, [[FLOAT, [2**62], 0]], BODY),
    "sides with a huge product": message({"$": 0}, [[FLOAT, [2**31] * 8, 0]], BODY),
    "product that wraps to a small number": message({"$": 0}, [[FLOAT, [2**32, 2**32], 0]], BODY),
    "sides of thousands of digits": message({"$": 0}, [[FLOAT, [10**4000] * 30, 0]], BODY),
    "huge side beside an empty one": message({"$": 0}, [[FLOAT, [2**62, 0], 0]], BODY),
    "enormous side beside an empty one": message({"$": 0}, [[FLOAT, [2**70, 0], 0]], BODY),
    "negative side": message({"$": 0}, [[BYTE, [-1], 0]], BODY),
    "negative sides with a positive product": message({"$": 0}, [[BYTE, [-2, -2], 0]], BODY),
    "side that is a float": message({"$": 0}, [[BYTE, [2.0], 0]], BODY),
    "side that is a truth": message({"$": 0}, [[BYTE, [True], 0]], BODY),
    "side that is text": message({"$": 0}, [[BYTE, ["2"], 0]], BODY),
    "shape that is a number": message({"$": 0}, [[BYTE, 2, 0]], BODY),
    "shape that is text": message({"$": 0}, [[BYTE, "22", 0]], BODY),
    "shape that is nothing": message({"$": 0}, [[BYTE, None, 0]], BODY),
    "shape that is a mapping": message({"$": 0}, [[BYTE, {"2": 2}, 0]], BODY),
    "too many sides": message({"$": 0}, [[BYTE, [1] * 65, 0]], BODY),
    "far too many sides": message({"$": 0}, [[BYTE, [9] * 100_000, 0]], BODY),
    "offset beyond the body": message({"$": 0}, [[BYTE, [1], 64]], BODY),
    "array that ends beyond the body": message({"$": 0}, [[FLOAT, [2], 60]], BODY),
    "empty array beyond the body": message({"$": 0}, [[BYTE, [0], 65]], BODY),
    "negative offset": message({"$": 0}, [[BYTE, [1], -1]], BODY),
    "offset that is a float": message({"$": 0}, [[BYTE, [1], 0.0]], BODY),
    "offset that is a truth": message({"$": 0}, [[BYTE, [1], False]], BODY),
    "offset that is huge": message({"$": 0}, [[BYTE, [1], 2**64]], BODY),
    "claim of 2**60 bytes": message({"$": 0}, [[BYTE, [2**60], 0]], BODY),
    "shared block that is not there": message({"$": 0}, [[BYTE, [1], 0, 1]], BODY),
    "one field too few": message({"$": 0}, [[BYTE, [1]]], BODY),
    "no fields": message({"$": 0}, [[]], BODY),
    "entry that is a number": message({"$": 0}, [1], BODY),
    "table that is a number": message({"$": 0}, 1, BODY),
    "table that is nothing": message({"$": 0}, None, BODY),
    "reference beyond the table": message({"$": 1}, [[BYTE, [1], 0]], BODY),
    "reference without a table": message({"$": 0}, []),
    "reference in disguise without a table": raw(b'[{"\\u0024": 0}, []]'),
    "bad array that nothing refers to": message(1, [["object", [1], 0]], BODY),
    "hidden reference without a table": message([{"a": [{"$": 0}]}], []),
    "negative reference": message({"$": -1}, [[BYTE, [1], 0]], BODY),
    "reference that is a float": message({"$": 0.0}, [[BYTE, [1], 0]], BODY),
    "reference that is a truth": message({"$": False}, [[BYTE, [1], 0]], BODY),
    "reference that is a list": message({"$": [0]}, [[BYTE, [1], 0]], BODY),
    "reference with company": message({"$": 0, "a": 1}, [[BYTE, [1], 0]], BODY),
    "array that lies over another": message([{"$": 0}, {"$": 1}], [[BYTE, [64], 0], [BYTE, [1], 63]], BODY),
    "array that lies before another": message([{"$": 0}, {"$": 1}], [[BYTE, [1], 32], [BYTE, [1], 0]], BODY),
    "two references to one array": message([{"$": 0}, {"$": 0}], [[BYTE, [64], 0]], BODY),
    "sides that an empty one hides": message({"$": 0}, [[BYTE, [10**9, 0], 0]], BODY),
    "many sides that an empty one hides": message({"$": 0}, [[BYTE, [1000, 0, 1000, 1000], 0]], BODY),
    "header of one part": raw(b"[1]"),
    "header of three parts": raw(b"[1, [], 2]"),
    "header that is a number": raw(b"1"),
    "header that is nothing": raw(b"null"),
    "empty header": raw(b""),
    "header of spaces": raw(b" " * 44),
    "header that is not text": raw(b"\xff\xfe\x00\xd8" * 8),
    "header that is not JSON": raw(b"[1, []"),
    "deep nesting": raw(b"[" * 200_000 + b"]" * 200_000),
    "deep nesting without end": raw(b"[" * (4 << 20)),
    "deep mappings": raw(b'{"a":' * 200_000),
    "number of a million digits": raw(b"[" + b"9" * 1_000_000 + b", []]"),
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_message_is_refused(data):
    with little_memory(), pytest.raises(WireError):
        wire.decode(data)


SMALL = 2 << 20  # bytes of the messages that claim to be more


BOMBS = {
    "references": lambda size: ([{"$": 0}] * 100_000, [[BYTE, [size], 0]]),
    "table": lambda size: ([{"$": index} for index in range(50_000)], [[BYTE, [size], 0]] * 50_000),
    "table that nothing refers to": lambda size: (None, [[BYTE, [size], 0]] * 50_000),
}


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("case", [*BOMBS])
def test_a_small_message_holds_no_more_than_its_bytes(case, shared):
    tree, table = BOMBS[case](SMALL)
    table = [[*entry, 1] for entry in table] if shared else table
    data, block = (message(tree, table), bytes(SMALL)) if shared else (message(tree, table, bytes(SMALL)), None)
    with pytest.raises(WireError, match=r"overlaps the one before it|referred to more than once"):
        wire.decode(data, block)


def test_arrays_one_after_the_other_are_read_wherever_they_begin():
    tree = [{"$": 1}, {"$": 0}, {"$": 2}]
    table = [[BYTE, [3], 5], [BYTE, [0, 7], 8], [BYTE, [2], 8], [BYTE, [2], 0, 1], [BYTE, [1], 2, 1]]
    empty, first, second = wire.decode(message(tree, table, BODY), bytes(64))
    assert (empty.shape, [*first], [*second]) == ((0, 7), [5, 6, 7], [8, 9])


@pytest.mark.parametrize("offset", [65, 2**60])
def test_an_array_beyond_the_shared_block_is_refused(offset):
    with pytest.raises(WireError, match="does not fit in 64 B"):
        wire.decode(message({"$": 0}, [[BYTE, [1], offset, 1]]), bytes(64))


@pytest.mark.parametrize("mark", [[0], [2], [None], [1, 1], [[1]]], ids=str)
def test_a_mark_other_than_that_of_the_shared_block_is_refused(mark):
    with pytest.raises(WireError, match="bad mark"):
        wire.decode(message({"$": 0}, [[BYTE, [1], 0, *mark]], BODY), BODY)


def test_numbers_that_are_none_are_only_numbers():
    assert math.isnan(wire.decode(raw(b"[NaN, []]")))
    assert wire.decode(raw(b"[1e999, []]")) == math.inf


VALID = {
    "call": packed(
        ["store", "put", [{"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": [None, True, 1.5, "é"]}]]
    ),
    "scalar": packed(3),
    "arrays": packed([np.arange(3), np.array(True), np.zeros((2, 0))]),
}


@pytest.mark.parametrize("data", VALID.values(), ids=VALID)
def test_a_message_cut_off_anywhere_is_refused(data):
    for size in range(len(data)):
        with pytest.raises(WireError):
            wire.decode(data[:size])


@pytest.mark.parametrize("data", VALID.values(), ids=VALID)
def test_any_one_bit_may_flip(data):
    for bit in range(8 * len(data)):
        spoilt = bytearray(data)
        spoilt[bit // 8] ^= 1 << bit % 8
        survives(spoilt)


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_may_come(data):
    survives(data)
    survives(raw(data))
    survives(raw(b"[" + data + b"]", data))


@settings(max_examples=500, deadline=None)
@given(
    st.sampled_from(list(VALID.values())),
    st.lists(
        st.tuples(st.integers(wire.PREFIX.size, 250), st.sampled_from(b'0123456789-.eE[]{}",:$ tn\xff')), max_size=6
    ),
)
def test_any_bytes_of_the_header_may_change(data, changes):
    spoilt = bytearray(data)
    for place, byte in changes:
        spoilt[place % len(spoilt)] = byte
    survives(spoilt, bytes(64))


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
odd = (
    scalars | st.sampled_from([2**31, 2**60, 2**64, -1, 10**30, 0.5, True]) | st.lists(st.integers(-2, 70), max_size=3)
)
entries = st.tuples(st.sampled_from([*wire.TYPES, ">f4", "O"]), st.lists(st.integers(-1, 5) | odd, max_size=4), odd)
tables = st.lists(
    st.lists(odd, max_size=5) | entries.map(list) | entries.map(lambda entry: [*entry, 1]) | odd, max_size=3
)
trees = st.recursive(
    odd | st.builds(lambda reference: {"$": reference}, st.integers(-1, 3) | odd),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2) | st.just("$"), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=500, deadline=None)
@given(trees, tables, st.sampled_from([None, bytes(range(128))]))
def test_any_header_may_come(tree, table, block):
    with little_memory():
        survives(message(tree, table, BODY), block)
