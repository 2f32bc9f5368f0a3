"""The errors that Shoal raises on purpose."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ShoalError(Exception):
    """Something that a user can understand and fix."""


class SettingsError(ShoalError):
    """Settings that cannot be used; the message says which, what is allowed and what is nearest."""


class WireError(ShoalError):
    """A message that is malformed, truncated or too large."""


class Diverged(ShoalError):
    """A weight update that does not apply to the weights held; fetching all of them fixes that."""


class Fatal(ShoalError):
    """A failure that restarting a worker would only repeat."""


class DeadlineExceeded(ShoalError):
    """A call to a service was not answered in time."""


class ServiceLost(ShoalError):
    """The process that held a service is gone."""


class ServiceFailed(ShoalError):
    """A service in another process raised; carries its traceback."""


class WorkerFailed(ShoalError):
    """A worker ended by an exception or died; carries its traceback."""


class Refused(ShoalError):
    """Another machine is not trusted, or does not fit; the message is one line that may be sent to it."""


class Stalled(ShoalError):
    """No worker made progress for too long; the message says who waits for whom."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A suggestion of the nearest known name, or nothing."""
    matches = difflib.get_close_matches(name, [*known], n=1, cutoff=0.5)
    return f"; did you mean {matches[0]!r}?" if matches else ""
