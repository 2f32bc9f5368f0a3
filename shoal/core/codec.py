"""Codecs for weights that travel from one sender to many receivers.

Every version is encoded once, for all receivers: R[v] is what each that has version v holds, bit for bit. With W[v] for
the true weights and Q for what the kind of number keeps of them,

    delta:    R[v] = R[v-1] + Q(W[v] - R[v-1])
    without:  R[v] = Q(W[v] + e[v-1]),  e[v] = W[v] + e[v-1] - R[v]

so what one version lost goes along with the next. Arrays other than float32 travel as they are.

A message is `{version, base, kind, links, digest}`: with a base, the links lead from that version to this one, each
from the one before it; without, its one link holds everything. The digest is that of the weights it leads to.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import zlib
from collections import deque
from collections.abc import Mapping
from typing import Any, Final, Literal, get_args

import numpy as np
from pydantic import Field

from shoal.core.errors import Diverged, WireError
from shoal.core.settings import Settings
from shoal.core.tree import leaves, map_tree
from shoal.core.types import Array, Tree

Kind = Literal["float32", "float16", "int8"]

# Of a delta's root mean square, per channel. Measured on IMPALA's updates (CartPole's MLP; Pong's Nature CNN), as a
# fraction of float32's bytes: largest/127 takes 0.26 and 0.053, half takes 0.101 and 0.028 and is wrong by 0.14 and
# 0.12 of one update; the whole takes 0.08 and 0.023, wrong by 0.3. From twice on, errors pile up.
STEP: Final = 0.5
LEVELS: Final = 127  # of an int8, on either side of zero
LINKS: Final = 64  # most links in a message
# Deltas are small: without this, most would be float16's subnormal numbers, which are inexact and slow. Being a power
# of two, it changes nothing else.
MAGNIFIED: Final = np.float32(4096)
# Beyond these a version travels as it is: float16 has no larger number, and squares for int8 must fit into a float32.
LARGEST: Final[Mapping[str, float]] = {"float32": np.inf, "float16": 65504.0, "int8": 1e18}
TINY: Final = float(np.finfo(np.float32).tiny)


class Codec(Settings):
    """How weights travel to actors and evaluator."""

    kind: Kind = Field("float32", description="Numbers in which weights travel; int8 has a step per channel.")
    delta: bool = Field(False, description="Send what changed since the version that the receiver holds.")
    anchor: int = Field(200, ge=1, description="Published versions from one that is sent whole and exact to the next.")

    @property
    def plain(self) -> bool:
        """Whether there is nothing to encode."""
        return self.kind == "float32" and not self.delta


class Layout:
    """Where each array of weights lies in one vector of the float32 numbers, or in the bytes of all the others."""

    def __init__(self, weights: Tree) -> None:
        """Note types and shapes."""
        self.arrays = map_tree(lambda array: (array.dtype, array.shape), weights)
        self.text = json.dumps(map_tree(lambda array: [array.dtype.str, array.shape], weights)).encode()
        rows: list[int] = []  # numbers that share a step: of one output channel, or of a whole vector
        self.rest = 0  # bytes of arrays that are not float32
        for array in leaves(weights):
            if array.dtype != np.float32:
                self.rest += array.nbytes
            elif array.size:
                channels = len(array) if array.ndim > 1 else 1
                rows += [array.size // channels] * channels
        self.rows = np.array(rows, np.int64)
        self.count = int(self.rows.sum())
        self.starts = np.cumsum(self.rows) - self.rows

    def join(self, weights: Tree) -> tuple[Array, bytes]:
        """The float32 numbers as one new vector, and the bytes of the rest."""
        floats = [np.zeros(0, np.float32)]
        floats += [array.reshape(-1) for array in leaves(weights) if array.dtype == np.float32]
        return np.concatenate(floats), b"".join(a.tobytes() for a in leaves(weights) if a.dtype != np.float32)

    def split(self, floats: Array, rest: bytes) -> Tree:
        """The weights again; float32 arrays are views of the vector."""
        here = there = 0

        def one(array: tuple[np.dtype[Any], tuple[int, ...]]) -> Array:
            nonlocal here, there
            dtype, shape = array
            size = int(np.prod(shape, dtype=np.int64))
            if dtype == np.float32:
                here += size
                return floats[here - size : here].reshape(shape)
            there += size * dtype.itemsize
            return np.frombuffer(rest[there - size * dtype.itemsize : there], dtype).reshape(shape).copy()

        return map_tree(one, self.arrays)  # type: ignore[no-any-return]

    def digest(self, version: int, floats: Array, rest: bytes) -> str:
        """SHA-256 over a version and its weights with names, types and shapes."""
        digest = hashlib.sha256(b"%d " % version + self.text)
        digest.update(floats.view(np.uint8).data)
        digest.update(rest)
        return digest.hexdigest()


def compress(array: Array) -> bytes:
    """Deflate an array byte by byte of its numbers, since first bytes are like each other.

    Beside Huffman's code only runs are looked for: noise has no longer repetitions, and looking for them takes longer.
    """
    planes = array.view(np.uint8).reshape(-1, array.itemsize).T
    deflate = zlib.compressobj(1, strategy=zlib.Z_RLE)
    return deflate.compress(np.ascontiguousarray(planes).data) + deflate.flush()


def expand(data: memoryview, dtype: type, count: int) -> Array:
    """Read back what `compress` made, or refuse anything that is not `count` numbers."""
    size = count * np.dtype(dtype).itemsize
    inflate = zlib.decompressobj()
    try:
        content = inflate.decompress(data, size + 1)  # one more, which shows that there is too much
    except zlib.error as error:
        raise WireError(f"weights cannot be decompressed: {error}") from error
    if len(content) != size or not inflate.eof or inflate.unused_data:
        raise WireError(f"weights are not {count} × {np.dtype(dtype)}")
    planes = np.frombuffer(content, np.uint8).reshape(np.dtype(dtype).itemsize, count).T
    return np.ascontiguousarray(planes).reshape(-1).view(dtype)


def steps_of(layout: Layout, values: Array, delta: bool) -> Array:
    """The size of int8's steps, by row: as fine as the largest number allows, for deltas not finer than is useful.

    Each is the first half of a float32, rounded up so that the largest number still fits.
    """
    steps = np.maximum.reduceat(np.abs(values), layout.starts) / np.float32(LEVELS)
    if delta:
        squares = np.add.reduceat(np.square(values), layout.starts)
        steps = np.maximum(steps, np.float32(STEP) * np.sqrt(squares / layout.rows.astype(np.float32)))
    steps[steps < TINY] = 0.0  # whose inverse would be infinite; it waits until more has come together
    return ((steps.view(np.uint32) + 0xFFFF) >> 16).astype(np.uint16)


def widened(steps: Array) -> Array:
    """Steps as float32."""
    return (steps.astype(np.uint32) << 16).view(np.float32)


def encode(layout: Layout, kind: str, target: Array, base: Array | None) -> tuple[bytes, Array]:
    """Encode float32 numbers, whole or as the difference from a base; also returns what `decode` will make of it."""
    if kind == "float32":
        # A difference of numbers would be rounded; one of bits is exact, and its first bytes are mostly zero.
        return target.tobytes() if base is None else compress(target.view(np.uint32) ^ base.view(np.uint32)), target
    values = target if base is None else target - base
    if kind == "float16":
        halves = (values * MAGNIFIED if base is not None else values).astype(np.float16)
        return compress(halves), added(base, from_halves(halves, base is not None))
    short = steps_of(layout, values, base is not None)
    steps = widened(short)
    inverse = np.divide(1.0, steps, out=np.zeros_like(steps), where=steps > 0)
    counts = np.rint(values * np.repeat(inverse, layout.rows)).astype(np.int8)
    return short.tobytes() + compress(counts), added(base, counts * np.repeat(steps, layout.rows))


def from_halves(halves: Array, delta: bool) -> Array:
    """The float32 numbers that float16 numbers stand for."""
    values = halves.astype(np.float32)
    return values / MAGNIFIED if delta else values


def added(base: Array | None, values: Array) -> Array:
    """The values on top of the base, where there is one."""
    return values if base is None else base + values


def decode(layout: Layout, kind: str, data: memoryview, base: Array | None) -> Array:
    """Read back what `encode` made; numbers that a sender would not send give numbers that no digest fits."""
    if kind == "float32" and base is None:
        if len(data) != 4 * layout.count:
            raise WireError(f"weights of {len(data)} B instead of {4 * layout.count} B")
        return np.frombuffer(data, np.float32).copy()
    if kind == "float32" and base is not None:
        return (expand(data, np.uint32, layout.count) ^ base.view(np.uint32)).view(np.float32)
    with np.errstate(all="ignore"):
        if kind == "float16":
            values = from_halves(expand(data, np.float16, layout.count), base is not None)
        else:
            size = 2 * len(layout.rows)
            if len(data) < size:
                raise WireError(f"weights of {len(data)} B are shorter than their steps of {size} B")
            steps = widened(np.frombuffer(data[:size], np.uint16))
            values = expand(data[size:], np.int8, layout.count) * np.repeat(steps, layout.rows)
        return added(base, values)


class Sender:
    """Encodes each version of the weights once, and finds for every receiver the shortest way to the newest."""

    def __init__(self, codec: Codec) -> None:
        """Begin with no version."""
        self.codec = codec
        self.layout: Layout | None = None
        self.links: deque[tuple[int, Array]] = deque(maxlen=LINKS)  # each with the version that it builds on
        self.age = 0  # links since the last version that went whole

    def publish(self, version: int, weights: Tree, exact: bool = False) -> None:
        """Publish a new version; an exact one does not depend on earlier ones, nor does the first."""
        layout = Layout(weights)
        floats, rest = layout.join(weights)
        if exact or self.codec.plain or self.layout is None or layout.text != self.layout.text:
            self._anchor(layout, floats)
        elif self.codec.delta:
            self._link(layout, floats, rest)
        else:
            self._whole(layout, floats)
        self.layout, self.version, self.rest = layout, version, rest
        self.digest = layout.digest(version, self.floats, rest)

    def _anchor(self, layout: Layout, floats: Array) -> None:
        """Begin again with exact weights."""
        self.floats, self.residual = floats, np.zeros_like(floats)
        self.kind, self.body = "float32", b""  # the body would be a copy: it is made when asked for
        self.links.clear()
        self.age = 0

    def _link(self, layout: Layout, floats: Array, rest: bytes) -> None:
        """Add a link to the chain, and drop what has become longer than the whole."""
        kind = self.codec.kind
        if self.age + 1 >= self.codec.anchor or not fits(kind, floats, self.floats):
            self._anchor(layout, floats)
            return
        body, self.floats = encode(layout, kind, floats, self.floats)
        self.links.append((self.version, np.frombuffer(rest + body, np.uint8)))
        self.age += 1
        while sum(link.nbytes for _, link in self.links) > floats.nbytes + len(rest):
            self.links.popleft()

    def _whole(self, layout: Layout, floats: Array) -> None:
        """Encode the version by itself, with what the previous one lost."""
        target = floats + self.residual
        if not fits(self.codec.kind, target, None):
            self._anchor(layout, floats)
            return
        self.kind = self.codec.kind
        self.body, self.floats = encode(layout, self.kind, target, None)
        self.residual = target - self.floats

    def message(self, held: int = -1) -> dict[str, Any]:
        """What brings a receiver that holds a version, or none, to the newest one."""
        bases = [base for base, _ in self.links]
        message = {"version": self.version, "digest": self.digest}
        if held in bases:
            links = [link for _, link in self.links][bases.index(held) :]
            return {**message, "base": held, "kind": self.codec.kind, "links": links}
        body = self.body or self.floats.tobytes()
        return {**message, "base": None, "kind": self.kind, "links": [np.frombuffer(self.rest + body, np.uint8)]}

    def weights(self) -> Tree:
        """The newest weights as every receiver holds them."""
        assert self.layout is not None
        return self.layout.split(self.floats.copy(), self.rest)


def fits(kind: str, target: Array, base: Array | None) -> bool:
    """Whether a kind of number can hold all the numbers, or their differences from a base; NaN it cannot."""
    if kind == "float32":
        return True
    with np.errstate(all="ignore"):
        values = target if base is None else (target - base) * MAGNIFIED
        return bool(np.abs(values).max(initial=0.0) <= LARGEST[kind])


class Receiver:
    """Holds the newest weights that arrived."""

    def __init__(self, weights: Tree) -> None:
        """Expect weights of these types and shapes."""
        self.layout = Layout(weights)
        self.version = -1
        self.floats: Array | None = None

    def take(self, message: Any) -> Tree:
        """Decode a message into weights, to be read only; one that does not lead there changes nothing.

        Raises Diverged if the message builds on other weights than those held: a whole version fixes that.
        """
        version, base, kind, links, digest = parts(message)
        if base is not None and (self.floats is None or base != self.version):
            held = self.version if self.version >= 0 else "none"
            raise Diverged(f"weights build on version {base}, but the receiver holds {held}")
        floats = None if base is None else self.floats
        for link in links:
            data = np.ascontiguousarray(link).data
            if len(data) < self.layout.rest:
                raise WireError(f"weights of {len(data)} B are too short")
            rest, body = bytes(data[: self.layout.rest]), data[self.layout.rest :]
            floats = decode(self.layout, kind, body, floats)
        assert floats is not None
        if not hmac.compare_digest(self.layout.digest(version, floats, rest), digest):
            raise Diverged(f"version {version} of the weights does not match what was sent")
        self.version, self.floats = version, floats
        return self.layout.split(floats, rest)


def parts(message: Any) -> tuple[int, int | None, str, list[Array], str]:
    """Version, base, kind, links and digest of a message; refuses what is not one."""
    if not isinstance(message, Mapping):
        raise WireError(f"not a message of weights: a {type(message).__name__}")
    version, base, kind, links, digest = (message.get(key) for key in ("version", "base", "kind", "links", "digest"))
    for number in (version, 0 if base is None else base):
        if type(number) is not int or not 0 <= number < 1 << 63:
            raise WireError("weights have no proper version")
    if not isinstance(kind, str) or kind not in get_args(Kind):
        raise WireError(f"weights are of no known kind; known: {', '.join(get_args(Kind))}")
    if not isinstance(links, list) or not 1 <= len(links) <= (1 if base is None else LINKS):
        raise WireError("weights have no proper list of links")
    for link in links:
        if not isinstance(link, np.ndarray) or link.dtype != np.uint8 or link.ndim != 1:
            raise WireError("weights have a link that is no vector of bytes")
    if not isinstance(digest, str) or not digest.isascii():
        raise WireError("weights have no proper digest")
    return version, base, kind, links, digest  # type: ignore[return-value]  # what each is was checked above
