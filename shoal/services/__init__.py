"""Services: they answer at once and call nobody."""

from __future__ import annotations

from typing import TYPE_CHECKING

STORES = {
    "circular": "shoal.services.circular:Circular",
    "mixture": "shoal.services.mixture:Mixture",
    "queue": "shoal.services.queue:Queue",
    "replay": "shoal.services.replay:Replay",
}

if TYPE_CHECKING:  # mypy checks that each of them is a store
    from shoal.core.types import Store
    from shoal.services.circular import Circular
    from shoal.services.mixture import Mixture
    from shoal.services.queue import Queue
    from shoal.services.replay import Replay

    _stores: tuple[type[Store], ...] = (Circular, Mixture, Queue, Replay)
