"""Frames in pieces, for links that carry messages of limited length."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.core.errors import WireError
from shoal.core.wire import Buffer
from shoal.transport.guard import LIMIT, TRAILER

PIECE = 1 << 20  # bytes that travel at once: the other side takes one in while the next is made
GREATEST = LIMIT + TRAILER  # bytes of a frame
STRANGER = 64 << 10  # bytes that somebody may send who has not shown who he is
LAST, MORE = b"\0", b"\1"


def cut(frame: Buffer) -> Iterator[bytes]:
    """The pieces of a frame, each before a byte that says whether more follow: so arrays in them stay aligned."""
    view = memoryview(frame)
    for start in range(0, max(len(view), 1), PIECE):
        yield b"".join((view[start : start + PIECE], MORE if start + PIECE < len(view) else LAST))


class Pieces:
    """Puts frames together again, and bounds what is kept."""

    def __init__(self) -> None:
        """Begin with a stranger."""
        self.trusted = False
        self._parts: list[memoryview] = []
        self._size = self._all = 0

    def take(self, piece: Buffer) -> Buffer | None:
        """Take in a piece; returns the frame that it completes."""
        view = memoryview(piece)
        self._all += len(view)
        if self._all > STRANGER and not self.trusted:
            raise WireError(f"more than {STRANGER} B before anything is known of the other side")
        if not len(view) or view[-1:] not in (LAST, MORE):
            raise WireError("a piece of no frame")
        self._parts.append(view[:-1])
        self._size += len(view) - 1
        if self._size > GREATEST:
            raise WireError(f"a frame of more than {GREATEST} B")
        if view[-1:] == MORE:
            return None
        parts, self._parts, self._size = self._parts, [], 0
        return parts[0] if len(parts) == 1 else bytearray().join(parts)
