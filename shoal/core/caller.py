"""Which worker is calling, so that a service can name the sender of invalid data."""

from __future__ import annotations

from contextvars import ContextVar

_caller: ContextVar[str] = ContextVar("caller", default="")


def caller() -> str:
    """The worker whose call this thread is answering; empty: unknown."""
    return _caller.get()


def call_as(name: str) -> None:
    """Let calls from this thread count as this worker's from now on."""
    _caller.set(name)
