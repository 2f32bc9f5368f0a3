"""The wire format: values of arrays and scalars as a list of buffers, read back without a copy.

A message is a fixed prefix, a JSON header, and the bytes of the arrays, each starting at a multiple of 64:

    magic 4s | version u16 | flags u16 | header length u32 | body length u64

The header is `[tree, arrays]`: in `tree`, `{"$": i}` stands for `arrays[i] = [dtype, shape, where]`, and `where`
is an offset in the body, or in a shared block when `shared` is 1 (`[dtype, shape, where, 1]`). Arrays lie one after the
other in the order of the table, and each is referred to at most once: so a message holds no more than the bytes it has.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from typing import Any, Final, TypeAlias

import numpy as np

from shoal.core.errors import WireError
from shoal.core.types import Array

Buffer: TypeAlias = bytes | bytearray | memoryview

MAGIC: Final = b"SHOL"
VERSION: Final = 1
PREFIX: Final = struct.Struct("<4sHHIQ")
ALIGN: Final = 64  # a cache line, and what vector units like best
HEADER_LIMIT: Final = 4 << 20
BODY_LIMIT: Final = 4 << 30
AXES_LIMIT: Final = 64  # of NumPy itself
EMPTY_LIMIT: Final = 1 << 24  # product of an empty array's other sides, which take no bytes: a loop over them must end
THRESHOLD: Final = 16 << 10  # below this, a copy through the socket is cheaper than a place in shared memory
FLOATS: Final = ("float16", "float32", "float64")
TYPES: Final = {
    np.dtype(name).str: np.dtype(name)
    for name in ("bool", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)), *FLOATS)
}


def aligned(size: int) -> int:
    """Round up to the next multiple of the alignment."""
    return -(-size // ALIGN) * ALIGN


def as_bytes(array: Array) -> memoryview:
    """View a contiguous array as bytes."""
    return memoryview(array.reshape(-1).view(np.uint8))  # type: ignore[arg-type]


def plain(value: Any) -> bytes | None:
    """The message for a value without arrays; None: it holds something that is not text or a number."""
    try:
        tree = json.dumps(value)
    except TypeError:
        return None
    except (ValueError, RecursionError) as error:
        raise WireError(f"cannot send this value: {error}") from error
    _check_keys(tree, 0)
    header = f"[{tree},[]]".encode()
    if len(header) > HEADER_LIMIT:
        raise WireError(f"message too large: header {len(header)} B")
    return PREFIX.pack(MAGIC, VERSION, 0, len(header), 0) + header


def encode(value: Any, block: memoryview | None = None, threshold: int = THRESHOLD) -> list[Buffer]:
    """Turn a value into buffers; arrays of at least `threshold` bytes go into the shared block if one is given.

    The block must have room (see `shared_size`); mapping keys must be strings other than `$`.
    """
    if (message := plain(value)) is not None:
        return [message]
    arrays: list[Array] = []

    def stand_in(item: Any) -> Any:
        if isinstance(item, np.ndarray):
            if item.dtype.str not in TYPES:
                raise WireError(f"cannot send an array of type {item.dtype}; allowed: {', '.join(TYPES)}")
            arrays.append(item if item.flags.c_contiguous else np.ascontiguousarray(item))
            return {"$": len(arrays) - 1}
        if isinstance(item, np.generic):
            return item.item()
        if isinstance(item, Mapping):
            return dict(item)
        raise WireError(f"cannot send a {type(item).__name__}: only arrays, numbers, text, lists and mappings")

    try:
        tree = json.dumps(value, default=stand_in)
    except (TypeError, ValueError, RecursionError) as error:
        raise WireError(f"cannot send this value: {error}") from error
    _check_keys(tree, len(arrays))
    table: list[list[Any]] = []
    inline: list[Buffer] = []
    here = there = 0
    for array in arrays:
        entry: list[Any] = [array.dtype.str, array.shape]
        if block is not None and array.nbytes >= threshold:
            block[there : there + array.nbytes] = as_bytes(array)
            entry += [there, 1]
            there += aligned(array.nbytes)
        else:
            entry.append(here)
            inline.append(as_bytes(array))
            if gap := aligned(array.nbytes) - array.nbytes:
                inline.append(bytes(gap))
            here += aligned(array.nbytes)
        table.append(entry)
    header = f"[{tree},{json.dumps(table)}]".encode()
    # Pad with spaces so that the body, and every array in it, is aligned within the message.
    header += b" " * (aligned(PREFIX.size + len(header)) - PREFIX.size - len(header))
    if len(header) > HEADER_LIMIT or here > BODY_LIMIT:
        raise WireError(f"message too large: header {len(header)} B, body {here} B")
    return [PREFIX.pack(MAGIC, VERSION, 0, len(header), here) + header, *inline]


def _check_keys(tree: str, references: int) -> None:
    """Refuse mappings that use the key of a reference for something else."""
    # Inside text a quote is escaped, so what is counted can only be keys.
    if tree.count('{"$": ') != references or ', "$": ' in tree:
        raise WireError("cannot send a mapping with the key '$', which marks a reference to an array")


def shared_size(value: Any, threshold: int = THRESHOLD) -> int:
    """Room that the arrays of a value would take in a shared block."""
    if isinstance(value, np.ndarray):
        return aligned(value.nbytes) if value.nbytes >= threshold else 0
    if value is None or isinstance(value, int | float | str):  # most answers, at once
        return 0
    if isinstance(value, Mapping):
        return sum(shared_size(item, threshold) for item in value.values())
    if isinstance(value, list | tuple):
        return sum(shared_size(item, threshold) for item in value)
    return 0


def sizes(data: Buffer, offset: int = 0, limit: int = BODY_LIMIT) -> tuple[int, int]:
    """Bytes of the header and of the body of the message that starts at the offset."""
    if len(data) < offset + PREFIX.size:
        raise WireError(f"message of {len(data) - offset} B is shorter than its prefix of {PREFIX.size} B")
    magic, version, flags, header, body = PREFIX.unpack_from(data, offset)
    if magic != MAGIC:
        raise WireError("not a Shoal message: wrong magic")
    if version != VERSION:
        raise WireError(f"wire version {version}, this side speaks {VERSION}")
    if flags:
        raise WireError(f"unknown flags {flags:#x}")
    if header > HEADER_LIMIT or body > limit:
        raise WireError(f"message too large: header {header} B, body {body} B, limits {HEADER_LIMIT} and {limit}")
    return header, body


def decode(data: Buffer, block: Buffer | None = None, limit: int = BODY_LIMIT) -> Any:
    """Read a value back; its arrays are views into `data` or into the shared block."""
    view = memoryview(data)
    header, body = sizes(view, 0, limit)
    if (total := PREFIX.size + header + body) != len(view):
        raise WireError(f"message of {len(view)} B announces {total} B")
    return parse(view, header, block)


def parse(view: memoryview, header: int, block: Buffer | None = None) -> Any:
    """Read the value of a whole message whose header has `header` bytes."""
    end = PREFIX.size + header
    try:
        text = str(view[PREFIX.size : end], "utf-8")
        tree, table = json.loads(text)
        if not table and '"$"' not in text and "\\" not in text:  # nothing refers to an array
            return tree
        return _fill(tree, _arrays(table, view[end:], block))
    except WireError:
        raise
    except (ValueError, TypeError, KeyError, IndexError, RecursionError, OverflowError) as error:
        raise WireError(f"malformed message: {type(error).__name__}: {error}") from error


def _arrays(table: Any, body: memoryview, block: Buffer | None) -> list[Array | None]:
    """The arrays of a table, as views; none begins before the end of the previous one."""
    arrays: list[Array | None] = []
    ends = [0, 0]  # of what was read in the body and in the shared block
    sources = body, None if block is None else memoryview(block)
    for name, shape, where, *shared in table:
        if name not in TYPES:
            raise WireError(f"array type {name!r} is not allowed")
        if not all(type(side) is int and side >= 0 for side in [*shape, where]) or len(shape) > AXES_LIMIT:
            raise WireError(f"bad shape {shape} or offset {where}")
        if shared not in ([], [1]):
            raise WireError(f"bad mark of a shared block {shared}")
        if (source := sources[len(shared)]) is None:
            raise WireError("message refers to a shared block and there is none")
        kind, count = TYPES[name], math.prod(shape)
        if where < ends[len(shared)]:
            raise WireError(f"array at {where} overlaps the one before it, which ends at {ends[len(shared)]}")
        ends[len(shared)] = end = where + count * kind.itemsize
        if end > len(source):
            raise WireError(f"array of {count} × {kind} at {where} does not fit in {len(source)} B")
        if count:
            arrays.append(np.frombuffer(source, kind, count, where).reshape(shape))
        elif math.prod(side for side in shape if side) > EMPTY_LIMIT:
            raise WireError(f"empty array of shape {shape}, whose other sides are larger than {EMPTY_LIMIT} together")
        else:
            arrays.append(np.empty(shape, kind))
    return arrays


def _fill(node: Any, arrays: list[Array | None]) -> Any:
    if isinstance(node, dict):
        if "$" in node:
            index = node["$"]
            if type(index) is not int or not 0 <= index < len(arrays) or len(node) != 1:
                raise WireError(f"reference to array {index!r} of {len(arrays)}")
            array, arrays[index] = arrays[index], None
            if array is None:
                raise WireError(f"array {index} is referred to more than once")
            return array
        return {key: _fill(value, arrays) for key, value in node.items()}
    return [_fill(value, arrays) for value in node] if isinstance(node, list) else node


def sendable(value: Any) -> Any:
    """The value as every wire would carry it: lists, mappings, arrays, numbers and text; anything else is refused."""
    kind = type(value)
    if kind in (str, int, float, bool) or value is None:
        return value
    if isinstance(value, np.ndarray):
        if value.dtype.str not in TYPES:
            raise WireError(f"cannot send an array of type {value.dtype}; allowed: {', '.join(TYPES)}")
        return value
    if isinstance(value, Mapping):
        return {key: sendable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [sendable(item) for item in value]
    if isinstance(value, np.generic):
        return value.item()
    raise WireError(f"cannot send a {kind.__name__}: only arrays, numbers, text, lists and mappings")
