"""Links: how frames travel between machines, and how the two sides come to trust each other.

A link is a module with `dial(address, terms)`, which returns a wire, and `Listener(address, terms, certificates,
handle, refused)`, which hands wires over. A wire carries whole frames: `send`, `receive`, `trust`, `refuse`, `close`;
`guarded` says whether they are sealed.
"""

from __future__ import annotations

import importlib
from typing import Any

from shoal.core.errors import SettingsError, nearest

LINKS = {
    "websocket": "frames over a websocket, with or without TLS",
    "grpc": "frames over a stream of gRPC, with or without TLS (shoal[grpc])",
    "torchrpc": "frames by torch RPC between machines that are counted beforehand; neither TLS nor a token",
}


def find(name: str) -> Any:
    """The module of a link."""
    if name not in LINKS:
        raise SettingsError(f"there is no link {name!r}: choose one of {', '.join(LINKS)}{nearest(name, LINKS)}")
    return importlib.import_module(f"shoal.transport.{name}")
