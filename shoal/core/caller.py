"""Who is calling: what a service may ask while it answers, so that it can name whoever sent nonsense."""

from __future__ import annotations

from contextvars import ContextVar

_caller: ContextVar[str] = ContextVar("caller", default="")


def caller() -> str:
    """The worker whose call is being answered, in this thread; empty: nobody said."""
    return _caller.get()


def call_as(name: str) -> None:
    """Be this worker from now on, in this thread."""
    _caller.set(name)
