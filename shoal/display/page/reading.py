"""Reading a run's folder, which somebody else may have made: nothing outside it, bounded, and only what is new."""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

CHUNK = 1 << 20  # bytes read at once
LONGEST = 1 << 20  # bytes of a line that is still read
POINTS = 400  # of a curve; even
NAMES = 100  # curves of one run
LETTERS = 100  # of a name


def opened(folder: Path, name: str) -> int | None:
    """A descriptor of a file in a folder; None where there is none, or where it is a link, a pipe or a device."""
    try:
        descriptor = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    return None


def ending(folder: Path, name: str, size: int) -> bytes:
    """The last bytes of a file, at most this many; none where it cannot be read."""
    descriptor = opened(folder, name)
    if descriptor is None:
        return b""
    try:
        return os.pread(descriptor, size, max(os.fstat(descriptor).st_size - size, 0))
    except OSError:
        return b""
    finally:
        os.close(descriptor)


def number(value: Any) -> float | None:
    """A finite number as it is; None: it is none."""
    with suppress(OverflowError):  # an integer that no float can hold
        if type(value) in (int, float) and math.isfinite(value):
            return value  # type: ignore[no-any-return]
    return None


def text(value: Any, letters: int = LETTERS) -> str:
    """Text of a bounded length without control characters; empty where it is none."""
    return "".join(letter if letter.isprintable() else " " for letter in value[:letters]) if type(value) is str else ""


def mapping(value: Any) -> Mapping[str, Any]:
    """A mapping as it is; empty where it is none."""
    return value if isinstance(value, Mapping) else {}


class Lines:
    """The lines of a file that grows: each is read once, and from the beginning when another file takes its place."""

    def __init__(self, folder: Path, name: str) -> None:
        """Read nothing yet."""
        self.folder, self.name = folder, name
        self._descriptor: int | None = None  # kept open, so that no other file gets its number
        self._offset, self._rest, self._skipping = 0, b"", False

    def changed(self) -> bool:
        """Whether another file stands there, or the same with less in it; then reading begins again."""
        try:
            there = os.stat(self.folder / self.name, follow_symlinks=False)
            mine = os.fstat(self._descriptor) if self._descriptor is not None else None
        except OSError:
            there, mine = None, None
        same = there is not None and mine is not None and (there.st_ino, there.st_dev) == (mine.st_ino, mine.st_dev)
        if same and mine is not None and mine.st_size >= self._offset:
            return False
        began = self._descriptor is not None
        self.close()
        self._descriptor = opened(self.folder, self.name)
        return began or self._descriptor is not None

    def read(self) -> list[bytes]:
        """More lines, those of one chunk; an unfinished one comes when it is whole, one that is too long never."""
        if self._descriptor is None:
            return []
        chunk = os.pread(self._descriptor, CHUNK, self._offset)
        self._offset += len(chunk)
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if self._skipping and lines:
            lines, self._skipping = lines[1:], False
        if self._skipping or len(self._rest) > LONGEST:
            self._rest, self._skipping = b"", True
        return lines

    def at_end(self) -> bool:
        """Whether everything that is there was read."""
        return self._descriptor is None or os.fstat(self._descriptor).st_size <= self._offset

    def close(self) -> None:
        """Let go of the file."""
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor, self._offset, self._rest, self._skipping = None, 0, b"", False


class Thinned:
    """Numbers by name over time, in at most `POINTS` points.

    When there is no room for another point, each two neighbours become one, so a point is the mean of 1, 2, 4, … rows.
    """

    def __init__(self) -> None:
        """Begin with none."""
        self.points: list[dict[str, tuple[float, int]]] = []  # the sum and the count of each number
        self.names: dict[str, None] = {}
        self.each, self._filled = 1, 0  # rows in a point, and in the last

    def add(self, numbers: Mapping[str, Any]) -> None:
        """Take the numbers of one row; those that are not finite are left out."""
        if not self.points or self._filled == self.each:
            if len(self.points) == POINTS:
                self.points = [merged(*pair) for pair in zip(self.points[::2], self.points[1::2], strict=True)]
                self.each *= 2
            self.points.append({})
            self._filled = 0
        self._filled += 1
        point = self.points[-1]
        for name, value in numbers.items():
            if (known := number(value)) is not None and (name in self.names or len(self.names) < NAMES):
                self.names[name] = None
                total, count = point.get(name, (0.0, 0))
                point[name] = total + known, count + 1

    def columns(self) -> dict[str, list[float | None]]:
        """The means by name, None where a point has none."""
        return {text(name): [mean(point.get(name)) for point in self.points] for name in self.names}


def merged(
    one: Mapping[str, tuple[float, int]], other: Mapping[str, tuple[float, int]]
) -> dict[str, tuple[float, int]]:
    """The sums and counts of both."""
    both = dict(one)
    for name, (total, count) in other.items():
        before, times = both.get(name, (0.0, 0))
        both[name] = before + total, times + count
    return both


def mean(entry: tuple[float, int] | None) -> float | None:
    """The mean of a sum and a count, with the digits that can be seen."""
    value = None if entry is None else number(entry[0] / entry[1])
    return None if value is None else float(f"{value:.6g}")


class Curves:
    """The metrics of a run over time, read as they are written."""

    def __init__(self, folder: Path) -> None:
        """Follow a run's metrics."""
        self.lines = Lines(folder, "metrics.jsonl")
        self.kinds: dict[str, Thinned] = {}
        self.rows = self.unreadable = self.serial = 0
        self.best: float | None = None
        self.last: float | None = None
        self._clear()

    def _clear(self) -> None:
        self.kinds = {"train": Thinned(), "evaluation": Thinned()}
        self.rows, self.unreadable, self.best, self.last = 0, 0, None, None

    def refresh(self) -> None:
        """Read what is new."""
        if self.lines.changed():
            self._clear()
            self.serial += 1
        while not self.lines.at_end():
            for line in self.lines.read():
                self._take(line)
                self.serial += 1

    def _take(self, line: bytes) -> None:
        from shoal.runs.loggers import scalars

        try:
            row = json.loads(line)
            steps, kind = number(row["steps"]), self.kinds[row["kind"]]
            numbers = {"steps": steps, "seconds": row.get("seconds"), **dict(scalars(row))}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            self.unreadable += 1
            return
        if steps is None:
            self.unreadable += 1
            return
        self.rows += 1
        kind.add(numbers)
        if (score := number(numbers.get("evaluation/return"))) is not None:
            self.last, self.best = score, score if self.best is None else max(score, self.best)

    def as_dict(self) -> dict[str, Any]:
        """The points, by kind and name, and the number of rows in each."""
        return {kind: {"each": rows.each, "columns": rows.columns()} for kind, rows in self.kinds.items()}
