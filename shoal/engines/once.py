"""Calls over a link that may break and come back: asked twice, done once."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

CHANNELS = 4096  # callers whose last answer is remembered


class Once(OrderedDict[str, tuple[int, "Future[Any]"]]):
    """The newest call of every caller, by number: whoever asks for it again gets the same answer."""

    def __init__(self) -> None:
        """Begin with no calls."""
        super().__init__()
        self._turn = threading.Lock()

    def ask(self, caller: str, number: int, do: Callable[[], Any]) -> Any:
        """Do what is asked, unless it was asked before."""
        with self._turn:
            known = self.get(caller)
            new = known is None or known[0] != number
            if known is None or new:
                known = self[caller] = number, Future()
                self.move_to_end(caller)
                if len(self) > CHANNELS:
                    self.popitem(last=False)
        if new:
            try:
                known[1].set_result(do())
            except BaseException as error:
                known[1].set_exception(error)
        return known[1].result()
