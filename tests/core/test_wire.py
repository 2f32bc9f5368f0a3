"""The wire format: what goes in comes out, and reading copies nothing."""

from __future__ import annotations

import math
from collections import OrderedDict
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from shoal.core import wire
from shoal.core.errors import WireError


def laid_out(array: np.ndarray, how: str) -> np.ndarray:
    """The same kind of array, with other strides."""
    if how == "transposed":
        return array.T
    if array.ndim and how in ("sliced", "reversed"):
        return array[:: 2 if how == "sliced" else -1]
    return array


types = st.sampled_from(list(wire.TYPES.values()))
shapes = arrays_of.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)
layouts = st.sampled_from(["plain", "transposed", "sliced", "reversed"])
arrays = st.builds(laid_out, arrays_of.arrays(types, shapes), layouts)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
keys = st.text().filter(lambda key: key != "$")
values = st.recursive(
    scalars | arrays,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=12,
)


def same(sent: Any, received: Any) -> bool:
    """Whether two values are equal in type, shape and every bit; tuples come back as lists."""
    if isinstance(sent, np.ndarray):
        return (
            isinstance(received, np.ndarray)
            and (sent.dtype, sent.shape) == (received.dtype, received.shape)
            and sent.tobytes() == received.tobytes()
        )
    if isinstance(sent, dict):
        return (
            type(received) is dict
            and list(sent) == list(received)
            and all(same(sent[key], received[key]) for key in sent)
        )
    if isinstance(sent, list | tuple):
        return type(received) is list and len(sent) == len(received) and all(map(same, sent, received))
    if isinstance(sent, float) and math.isnan(sent):
        return isinstance(received, float) and math.isnan(received)
    return type(sent) is type(received) and sent == received


def packed(value: Any, *args: Any) -> bytes:
    """A value as one message."""
    return b"".join(wire.encode(value, *args))


def found_arrays(value: Any) -> list[np.ndarray]:
    """Every array in a value."""
    if isinstance(value, np.ndarray):
        return [value]
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    return [array for item in inside for array in found_arrays(item)]


# Round trips.


@settings(max_examples=300, deadline=None)
@given(values)
def test_a_value_comes_back_as_it_went(value):
    assert same(value, wire.decode(packed(value)))


@settings(max_examples=300, deadline=None)
@given(values, st.sampled_from([0, 1, 8, 64, 1000]))
def test_a_value_comes_back_through_a_shared_block(value, threshold):
    block = bytearray(b"\xaa" * wire.shared_size(value, threshold))
    data = packed(value, memoryview(block), threshold)
    received = wire.decode(data, block)
    assert same(value, received)
    for array in found_arrays(received):
        if array.size:
            source = block if array.nbytes >= threshold else data
            assert np.shares_memory(array, np.frombuffer(source, np.uint8))


@pytest.mark.parametrize("kind", wire.TYPES.values(), ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (7,), (2, 3, 4)], ids=str)
def test_every_type_and_shape(kind, shape):
    array = np.arange(math.prod(shape)).reshape(shape).astype(kind)
    assert same({"a": [array, array]}, wire.decode(packed({"a": [array, array]})))


def test_what_resembles_a_plain_value_is_sent_as_one():
    sent = {
        "a": (1, 2),
        "b": OrderedDict(c=MappingProxyType({"d": np.zeros(2)})),
        "e": np.float32(0.5),
        "f": np.int8(-3),
    }
    received = wire.decode(packed(sent))
    assert same({"a": [1, 2], "b": {"c": {"d": np.zeros(2)}}, "e": 0.5, "f": -3}, received)


def test_as_many_axes_as_an_array_may_have():
    array = np.arange(2).reshape([1] * 31 + [2])
    assert same(array, wire.decode(packed(array)))


@pytest.mark.skipif(int(np.__version__.split(".")[0]) < 2, reason="32 axes are the most there")
def test_even_64_axes():
    array = np.arange(2).reshape([1] * 63 + [2])
    assert same(array, wire.decode(packed(array)))


# Memory.


def test_reading_copies_nothing_from_the_message():
    value = {"a": np.arange(10), "b": [np.ones((3, 3), np.float32), np.array(7, np.uint8)]}
    data = bytearray(packed(value))
    received = wire.decode(data)
    assert same(value, received)
    assert all(np.shares_memory(array, np.frombuffer(data, np.uint8)) for array in found_arrays(received))
    received["a"][0] = 99
    assert wire.decode(data)["a"][0] == 99


def test_reading_copies_nothing_from_the_shared_block():
    value = {"large": np.arange(100), "small": np.arange(3)}
    block = bytearray(wire.shared_size(value, threshold=100))
    data = packed(value, memoryview(block), 100)
    received = wire.decode(data, block)
    assert np.shares_memory(received["large"], np.frombuffer(block, np.uint8))
    assert np.shares_memory(received["small"], np.frombuffer(data, np.uint8))
    assert len(data) < value["large"].nbytes


def test_writing_copies_no_contiguous_array():
    array = np.arange(1000)
    assert any(np.shares_memory(array, np.frombuffer(buffer, np.uint8)) for buffer in wire.encode({"a": array}))


def test_every_array_is_aligned_within_the_message():
    data = packed([np.ones(n, np.uint8) for n in (1, 63, 64, 65)])
    start = np.frombuffer(data, np.uint8).ctypes.data
    assert all((array.ctypes.data - start) % wire.ALIGN == 0 for array in wire.decode(data))


@pytest.mark.parametrize(("threshold", "room"), [(0, 192), (1, 192), (2, 128), (65, 128), (66, 0)])
def test_room_in_a_shared_block(threshold, room):
    value = {"a": np.zeros(65, np.uint8), "b": [np.zeros(1, np.uint8), (np.zeros(0), 5, "text")]}
    assert wire.shared_size(value, threshold) == room


# What cannot be sent.


@pytest.mark.parametrize(
    "value",
    [
        b"bytes",
        {1, 2},
        1j,
        object(),
        torch.zeros(2),
        np.array(["text"]),
        np.array([object()]),
        np.zeros(2, "M8[s]"),
        np.zeros(2, ">f4"),
        np.zeros(2, ">i8"),
        np.zeros(2, complex),
        np.zeros(2, [("a", "i4")]),
        np.complex64(1j),
        np.longdouble(1),
        np.datetime64("2020-01-01"),
        {(1, 2): 3},
        {"$": 0},
        {"a": np.zeros(2), "b": {"$": 0}},
        {"a": 1, "$": np.zeros(2)},
        10**5000,
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_sent_says_so(value):
    with pytest.raises(WireError, match="cannot send"):
        wire.encode([value])


def test_the_message_names_what_cannot_be_sent_and_what_can():
    with pytest.raises(WireError, match="cannot send a Tensor: only arrays, numbers, text, lists and mappings"):
        wire.encode({"a": torch.zeros(2)})
    with pytest.raises(WireError, match=r"array of type >f4; allowed: .*<f4"):
        wire.encode(np.zeros(2, ">f4"))


def test_keys_and_text_that_resemble_a_reference_are_only_text():
    value = {'x"$': 1, "$$": '{"$": 0}', "a": ['"$": ', np.zeros(3)], ', "$': ', "$": 0'}
    assert same(value, wire.decode(packed(value)))


def test_what_has_no_end_cannot_be_sent():
    endless: list[Any] = []
    endless.append(endless)
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for value in (endless, deep):
        with pytest.raises(WireError, match="cannot send"):
            wire.encode(value)


def test_limits_on_what_is_sent(monkeypatch):
    with pytest.raises(WireError, match="message too large: header"):
        wire.encode("x" * wire.HEADER_LIMIT)
    with pytest.raises(WireError, match="message too large: header"):
        wire.encode(["x" * wire.HEADER_LIMIT, np.zeros(1)])
    monkeypatch.setattr(wire, "BODY_LIMIT", 128)
    wire.encode(np.zeros(128, np.uint8))
    with pytest.raises(WireError, match=r"message too large: .* body 192 B"):
        wire.encode(np.zeros(129, np.uint8))
