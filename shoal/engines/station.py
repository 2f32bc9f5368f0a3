"""A node as the head sees it, and stand-ins for what lives there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shoal.core.types import Array
from shoal.engines.links.session import Session

if TYPE_CHECKING:
    from shoal.engines.cluster import Cluster


@dataclass
class Station:
    """A node as the head sees it."""

    name: str
    slots: int = 0
    session: Session | None = None
    left: float = 0.0  # when its link was lost
    told: list[str] | None = None  # the workers it was last told to hold; none: it has to be told again
    report: dict[str, Any] = field(default_factory=dict)
    lines: dict[str, str] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)
    failures: dict[str, str] = field(default_factory=dict)
    starting: bool = False
    renewed: bool = True  # whether its workers have begun since the services they call did
    telling: bool = False  # whether a thread is telling it what to hold


class Away:
    """A stand-in for a service that lives on a node."""

    def __init__(self, cluster: Cluster, service: str, home: str) -> None:
        """Find it where its worker is at the time of the call."""
        self._cluster, self._service, self._home = cluster, service, home

    def __getattr__(self, method: str) -> Callable[..., Any]:
        """Find a method of the service."""
        if method.startswith("_"):
            raise AttributeError(method)
        return lambda *args: self._cluster.reach(self._home, "service", self._service, method, list(args))


@dataclass(frozen=True)
class Shared:
    """A stand-in for memory that workers of one machine share, with what it holds at first."""

    _service: str
    tree: Mapping[str, Array]
