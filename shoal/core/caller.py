"""Who is calling: what a service may ask while it answers, so that it can name whoever sent nonsense."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_caller: ContextVar[str] = ContextVar("caller", default="")


def caller() -> str:
    """The worker whose call is being answered."""
    return _caller.get() or "someone"


@contextmanager
def called_by(name: str) -> Iterator[None]:
    """Answer a call of this worker."""
    token = _caller.set(name)
    try:
        yield
    finally:
        _caller.reset(token)
