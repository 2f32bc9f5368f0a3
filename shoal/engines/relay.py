"""Weights for the workers of one node: fetched from the head once, whoever asks."""

from __future__ import annotations

import threading
import time
from typing import Any

from shoal.core.types import immutable

FRESH = 0.05  # seconds for which the newest weights here are taken for the newest there are


class Relay:
    """The newest weights on this node."""

    def __init__(self) -> None:
        """Begin with none."""
        self.newest: Any = None
        self.looked = -FRESH
        self.turn = threading.Lock()


class Relayed:
    """Stands for a service of weights elsewhere, for one caller: who asks first fetches for the others."""

    def __init__(self, relay: Relay, source: Any) -> None:
        """Fetch by a stand-in of the caller's own."""
        self._relay, self._source = relay, source

    def __getattr__(self, method: str) -> Any:
        """Everything but fetching is the service's own."""
        return getattr(self._source, method)

    @immutable
    def fetch(self, newer_than: int) -> Any:
        """The weights, unless the caller holds them; those of a codec depend on that, and are its own."""
        relay = self._relay
        with relay.turn:
            if time.monotonic() - relay.looked >= FRESH:
                found = self._source.fetch(newer_than if relay.newest is None else relay.newest["version"])
                if found is not None and "message" in found:
                    return found
                relay.newest, relay.looked = found or relay.newest, time.monotonic()
            newest = relay.newest
        return None if newest is None or newest["version"] == newer_than else newest
