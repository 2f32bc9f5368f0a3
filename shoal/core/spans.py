"""What a worker did and when: spans of time, kept until somebody collects them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import MutableSequence
from typing import Any, TypeAlias

import numpy as np

Chunk: TypeAlias = dict[str, Any]  # some spans, as they travel: see `drain`
LONGEST = 20_000  # spans of a chunk
CHUNKS = 100  # of a worker that wait for whoever writes the trace
BRIEF = 20e-6  # seconds: a call inside a process that takes less is left out, as nobody would see it


class Spans:
    """The spans of one worker by the machine's monotonic clock: the first ones up to a limit, the others counted."""

    def __init__(self, limit: int) -> None:
        """Begin with none."""
        self._room, self._left_out, self._reported = limit, 0, 0
        self._spans: deque[tuple[str, float, float]] = deque()  # the worker appends without the lock of those who take
        self._draining = threading.Lock()

    def add(self, name: str, start: float, end: float) -> None:
        """Add what was done from one instant to another."""
        if self._room:
            self._room -= 1
            self._spans.append((name, start, end))
        else:
            self._left_out += 1

    def drain(self) -> Chunk | None:
        """Hand over spans that were not handed over yet, as arrays, and how many more were left out; None: nothing."""
        with self._draining:
            taken = [self._spans.popleft() for _ in range(min(len(self._spans), LONGEST))]
            before, self._reported = self._reported, self._left_out
            more = self._reported - before
        if not taken and not more:
            return None
        numbers: dict[str, int] = {}
        which = [numbers.setdefault(name, len(numbers)) for name, _, _ in taken]
        return {
            "names": [*numbers],
            "which": np.array(which, np.uint16),
            "start": np.array([start for _, start, _ in taken], np.float64),
            "end": np.array([end for _, _, end in taken], np.float64),
            "left_out": more,
        }


def later(chunk: Chunk, seconds: float) -> Chunk:
    """The same spans by a clock that is this much ahead."""
    return {**chunk, "start": chunk["start"] + seconds, "end": chunk["end"] + seconds}


def without(chunk: Chunk) -> Chunk:
    """The same chunk with its spans left out, and counted."""
    none = {key: chunk[key][:0] for key in ("which", "start", "end")}
    return {**chunk, **none, "left_out": len(chunk["which"]) + chunk["left_out"]}


def keep(waiting: MutableSequence[Chunk], chunk: Chunk) -> None:
    """Add a chunk to those that nobody has taken yet; where too many wait, its spans are left out, and counted."""
    if len(waiting) < CHUNKS:
        waiting.append(chunk)
    else:
        waiting[-1]["left_out"] += len(chunk["which"]) + chunk["left_out"]
