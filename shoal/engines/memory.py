"""Named arrays over one block of memory, which several processes may map."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from shoal.core.types import Array
from shoal.core.wire import aligned
from shoal.transport.pipe import anonymous_file

Layout = list[list[Any]]  # name, type, shape and offset of each array


def lay_out(tree: Mapping[str, Array]) -> tuple[Layout, int]:
    """Where each array lies, at multiples of 64 bytes, and the bytes of the whole."""
    layout, size = [], 0
    for name, array in tree.items():
        layout.append([name, array.dtype.str, list(array.shape), size])
        size += aligned(array.nbytes)
    return layout, max(size, 1)


def views(memory: mmap.mmap, layout: Layout) -> dict[str, Array]:
    """The arrays; the memory goes when the last of them goes."""
    return {name: np.ndarray(shape, kind, memory, offset) for name, kind, shape, offset in layout}


def opened(descriptor: int, layout: Layout) -> dict[str, Array]:
    """The arrays of a block in another process, whose descriptor is taken over."""
    try:
        return views(mmap.mmap(descriptor, os.fstat(descriptor).st_size), layout)
    finally:
        os.close(descriptor)


def private(tree: Mapping[str, Array]) -> dict[str, Array]:
    """The same arrays for the threads of one process; laid out alike, since some kernels round by alignment."""
    layout, size = lay_out(tree)
    return filled(views(mmap.mmap(-1, size), layout), tree)


def filled(arrays: dict[str, Array], tree: Mapping[str, Array]) -> dict[str, Array]:
    """Copy initial values in."""
    for name, array in tree.items():
        arrays[name][...] = array
    return arrays


class Block:
    """The head's stand-in: arrays over nameless memory, whose descriptor is handed to whoever is to map it too."""

    def __init__(self, name: str, tree: Mapping[str, Array]) -> None:
        """Make the memory and fill it."""
        self._service = name
        self.layout, size = lay_out(tree)
        self.descriptor = anonymous_file(size, f"shoal {name}")
        self._arrays = filled(views(mmap.mmap(self.descriptor, size), self.layout), tree)

    def __getitem__(self, name: str) -> Array:
        """One of the arrays."""
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        """Their names, one by one."""
        return iter(self._arrays)

    def keys(self) -> Iterable[str]:
        """Their names."""
        return self._arrays.keys()

    def close(self) -> None:
        """Let go of the memory."""
        os.close(self.descriptor)
        self._arrays.clear()
