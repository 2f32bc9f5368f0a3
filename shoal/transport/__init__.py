"""Transport: bytes between processes and machines, and how machines come to trust each other.

Between machines, a link is a module with `dial` and `listen`, which make wires; a wire carries whole frames.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeAlias

from shoal.core.errors import SettingsError, nearest

if TYPE_CHECKING:
    from shoal.core.wire import Buffer
    from shoal.transport.trust import Terms

LINKS = {
    "websocket": "frames over a websocket, with or without TLS",
    "grpc": "frames over a stream of gRPC, with or without TLS (shoal[grpc])",
    "torchrpc": "frames by torch RPC between a fixed number of machines; neither TLS nor a token",
}
LIMIT = 1 << 30  # bytes of a frame


class Wire(Protocol):
    """One connection to another machine; several threads may send while one receives."""

    peer: str  # address of the other side
    binding: str  # fingerprint of the listener's TLS certificate; empty without TLS
    resumable: bool  # whether `receive` can be called again after it has timed out

    def send(self, *buffers: Buffer) -> None:
        """Send buffers as one frame."""

    def receive(self, seconds: float | None = None) -> Buffer:
        """Wait for a frame."""

    def trust(self) -> None:
        """Lift the limits for strangers: the other side has proved who it is."""

    def refuse(self, reason: str) -> None:
        """End the connection, and tell the other side why."""

    def close(self) -> None:
        """End the connection at once, also under threads that wait for it."""


Handle: TypeAlias = Callable[[Wire], None]
Report: TypeAlias = Callable[[str, str], None]  # of who was refused, and why


class Listener(Protocol):
    """Accepts connections, and hands each to a handler in a thread of its own."""

    address: str

    def close(self) -> None:
        """Accept no more connections."""


class Link(Protocol):
    """A module that connects machines."""

    def dial(self, address: str, terms: Terms) -> Wire:
        """Connect to a listener."""

    def listen(self, address: str, terms: Terms, certificates: bool, handle: Handle, refused: Report) -> Listener:
        """Listen, on a free port for 0; `refused` is given who did not get as far as the handler, and why.

        With `certificates`, those who connect must show one of the authority.
        """


def find(name: str) -> Link:
    """The module of a link."""
    if name == "websocket":
        from shoal.transport import websocket

        return websocket
    if name == "grpc":
        from shoal.transport import grpc

        return grpc
    if name == "torchrpc":
        from shoal.transport import torchrpc

        return torchrpc
    raise SettingsError(f"there is no link {name!r}: choose one of {', '.join(LINKS)}{nearest(name, LINKS)}")
