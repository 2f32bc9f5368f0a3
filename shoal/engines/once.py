"""Calls over a link that may break and come back: asked twice, done once."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from shoal.core.errors import Refused
from shoal.core.wire import shared_size

CALLERS = 4096  # whose last call is remembered, and lives that are remembered to have ended
KEPT = 256 << 20  # bytes of answers that are kept for those who may ask again


@dataclass
class Last:
    """The newest call of a caller."""

    life: str
    number: int
    size: int = 0  # bytes of its answer
    answer: Future[Any] = field(default_factory=Future)


class Once:
    """The newest call of every caller, by number: asked for again it has the same answer, and none is done again."""

    def __init__(self) -> None:
        """Begin with no calls."""
        self._last: OrderedDict[str, Last] = OrderedDict()
        self._over: OrderedDict[tuple[str, str], None] = OrderedDict()  # lives that have ended
        self._size = 0
        self._turn = threading.Lock()

    def ask(self, caller: str, life: str, number: int, do: Callable[[], Any]) -> Any:
        """Do what a caller asks in one of its lives, unless it was asked before; what is older is refused."""
        with self._turn:
            last = self._last.get(caller)
            if (caller, life) in self._over:
                raise Refused(f"this life of {caller} is over")
            if last is not None and last.life == life and number < last.number:
                raise Refused(f"call {number} of {caller} came after its call {last.number}: it is not done again")
            new = last is None or (last.life, last.number) != (life, number)
            if last is None or new:
                if last is not None and last.life != life:
                    self._end(caller, last.life)
                self._drop(caller)
                last = self._last[caller] = Last(life, number)
                if len(self._last) > CALLERS:
                    self._drop(next(iter(self._last)))
            answer = last.answer  # which another may take the place of, where there are too many
        if new:
            try:
                value = do()
            except BaseException as error:
                answer.set_exception(error)
            else:
                self._keep(caller, last, value)
        return answer.result()

    def _keep(self, caller: str, last: Last, value: Any) -> None:
        """Keep an answer; where all of them take too much room, those that were asked for first lose theirs."""
        with self._turn:
            last.answer.set_result(value)
            if self._last.get(caller) is last:
                last.size = shared_size(value, 0)
                self._size += last.size
            for other, each in [*self._last.items()] if self._size > KEPT else ():
                if self._size > KEPT and each.size and each is not last:
                    self._size -= each.size
                    gone: Future[Any] = Future()
                    gone.set_exception(Refused(f"the answer to call {each.number} of {other} is not kept any more"))
                    each.size, each.answer = 0, gone

    def forget(self, caller: str) -> None:
        """Drop what a caller asked for whose life has ended; whatever it still asks is refused."""
        with self._turn:
            if (last := self._last.get(caller)) is not None:
                self._end(caller, last.life)
                self._drop(caller)

    def _end(self, caller: str, life: str) -> None:
        self._over[caller, life] = None
        if len(self._over) > CALLERS:
            self._over.popitem(last=False)

    def _drop(self, caller: str) -> None:
        if (last := self._last.pop(caller, None)) is not None:
            self._size -= last.size

    def clear(self) -> None:
        """Forget everything."""
        with self._turn:
            self._last.clear()
            self._over.clear()
            self._size = 0

    def __len__(self) -> int:
        """How many callers are remembered."""
        return len(self._last)

    def size(self) -> int:
        """Bytes of answers that are kept."""
        return self._size
