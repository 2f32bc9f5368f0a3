"""Images that are kept once, however many items show them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from shoal.core.errors import ShoalError
from shoal.core.types import Array

CHUNK = 4096  # frames that are put back at a time


class Full(Exception):
    """There is no room for another frame."""


class Frames:
    """A pool of frames of one size, counted by use; equal ones are found by their hash and compared byte by byte.

    A stack of the last four frames, and the same stack as another item's last observation, then cost four numbers
    instead of four images.
    """

    def __init__(self, capacity: int, size: int, compress: bool = False) -> None:
        """Hold at most `capacity` frames of `size` bytes."""
        self.size, self.capacity = size, capacity
        self.pool: Any = Compressed(size) if compress else np.zeros((capacity, size), np.uint8)
        self.uses = np.zeros(capacity, np.int32)
        self.hashes = np.zeros(capacity, np.uint64)
        self.free = np.arange(capacity - 1, -1, -1, dtype=np.int32)  # a stack; its top is at `left`
        self.left = capacity
        self.known: dict[int, int] = {}  # hash → place
        self.weights = np.random.default_rng(0).integers(0, 2**63, -(-size // 8), np.uint64) * 2 + 1

    def add(self, frames: Array) -> Array:
        """Keep frames [n, size] and return their places; raises Full, having kept none."""
        hashes = self._hash(frames)
        unique, first, inverse = np.unique(hashes, return_index=True, return_inverse=True)
        places = np.array([self.known.get(int(value), -1) for value in unique], np.int32)
        found = np.flatnonzero(places >= 0)
        if len(found) and not np.array_equal(self.pool[places[found]], frames[first[found]]):
            return self._add_each(frames, hashes)
        new = np.flatnonzero(places < 0)
        if len(new) > self.left:
            raise Full
        if len(unique) < len(frames) and not np.array_equal(frames[first[inverse]], frames):
            return self._add_each(frames, hashes)
        places[new] = self._store(frames[first[new]], unique[new])
        result = places[inverse]
        np.add.at(self.uses, result, 1)
        return result

    def drop(self, places: Array) -> None:
        """Take back one use for every mention of a place."""
        np.subtract.at(self.uses, places, 1)
        gone = np.unique(places[self.uses[places] == 0])
        for place, value in zip(gone.tolist(), self.hashes[gone].tolist(), strict=True):
            if self.known.get(value) == place:
                del self.known[value]
        if isinstance(self.pool, Compressed):
            self.pool.forget(gone)
        self.free[self.left : self.left + len(gone)] = gone
        self.left += len(gone)

    def get(self, places: Array) -> Array:
        """The frames at these places, [n, size]."""
        return self.pool[places]  # type: ignore[no-any-return]

    def nbytes(self) -> int:
        """Bytes of the frames in use."""
        held = self.capacity - self.left
        return self.pool.nbytes() if isinstance(self.pool, Compressed) else held * self.size

    def snapshot(self) -> dict[str, Array]:
        """The frames, without a copy: those in use stay as they are, others may change while this is written."""
        if isinstance(self.pool, Compressed):
            return {"room": np.array(self.capacity), **self.pool.packed()}
        highest = int(np.flatnonzero(self.uses).max(initial=-1))
        return {"room": np.array(self.capacity), "pool": self.pool[: highest + 1]}

    def restore(self, saved: Mapping[str, Array], mentioned: Array) -> None:
        """Put back what `snapshot` returned, as far as these places are mentioned."""
        places, uses = np.unique(mentioned, return_counts=True)
        self.uses[:] = 0
        self.uses[places] = uses
        free = np.flatnonzero(self.uses == 0)[::-1]
        self.left = len(free)
        self.free[: self.left] = free
        source = saved["pool"] if "pool" in saved else Compressed.unpacked(self.size, saved)
        for chunk in np.split(places, range(CHUNK, len(places), CHUNK)):  # a copy of all might not fit into memory
            frames = source[chunk]
            self.pool[chunk], self.hashes[chunk] = frames, self._hash(frames)
        self.known = dict(zip(self.hashes[places].tolist(), places.tolist(), strict=True))

    def _store(self, frames: Array, hashes: Array) -> Array:
        places = self.free[self.left - len(frames) : self.left][::-1].copy()
        self.left -= len(frames)
        self.pool[places] = frames
        self.hashes[places] = hashes
        self.known.update(zip(hashes.tolist(), places.tolist(), strict=True))
        return places

    def _add_each(self, frames: Array, hashes: Array) -> Array:
        """Keep every frame by itself: two different ones have the same hash, which is extremely rare."""
        if len(frames) > self.left:
            raise Full
        places = self._store(frames, hashes)
        self.uses[places] += 1
        return places

    def _hash(self, frames: Array) -> Array:
        """A 64-bit multilinear hash of each frame."""
        pad = -frames.shape[1] % 8
        whole = np.pad(frames, ((0, 0), (0, pad))) if pad else np.ascontiguousarray(frames)
        return (whole.view(np.uint64) * self.weights).sum(1, dtype=np.uint64)  # type: ignore[no-any-return]


class Compressed:
    """A pool of frames in LZ4; it looks like an array [capacity, size]."""

    def __init__(self, size: int) -> None:
        """Begin empty."""
        try:
            import lz4.block
        except ImportError:
            raise ShoalError(
                "compressed replay needs a package that is not installed: pip install 'shoal[lz4]'"
            ) from None
        self.size, self.held = size, dict[int, bytes]()
        self._compress, self._decompress = lz4.block.compress, lz4.block.decompress

    def __getitem__(self, places: Array) -> Array:
        """Unpack frames."""
        result = np.empty((len(places), self.size), np.uint8)
        for row, place in zip(result, places.tolist(), strict=True):
            row[:] = np.frombuffer(self._decompress(self.held[place], uncompressed_size=self.size), np.uint8)
        return result

    def __setitem__(self, places: Array, frames: Array) -> None:
        """Pack frames."""
        for place, frame in zip(places.tolist(), frames, strict=True):
            self.held[place] = self._compress(frame.tobytes(), store_size=False)

    def forget(self, places: Array) -> None:
        """Drop frames."""
        for place in places.tolist():
            del self.held[place]

    def packed(self) -> dict[str, Array]:
        """Everything as arrays: the places, and their frames as they are, one after the other, each up to its end."""
        ends = np.cumsum([len(frame) for frame in self.held.values()], dtype=np.int64)
        frames = np.frombuffer(b"".join(self.held.values()), np.uint8)
        return {"used": np.array([*self.held], np.int64), "ends": ends, "packed": frames}

    @classmethod
    def unpacked(cls, size: int, saved: Mapping[str, Array]) -> Compressed:
        """The pool that `packed` described."""
        pool = cls(size)
        parts = np.split(saved["packed"], saved["ends"][:-1])
        pool.held = {place: part.tobytes() for place, part in zip(saved["used"].tolist(), parts, strict=True)}
        return pool

    def nbytes(self) -> int:
        """Bytes held."""
        return sum(map(len, self.held.values()))
