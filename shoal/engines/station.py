"""A node as the head sees it, and stand-ins for what lives there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from shoal.core.errors import Refused
from shoal.core.types import Array
from shoal.engines import reports
from shoal.transport.session import Session

if TYPE_CHECKING:
    from shoal.engines.cluster import Cluster

log = logging.getLogger("shoal")


class About(TypedDict):
    """What a node says of itself."""

    slots: Annotated[int, Field(strict=True, ge=0, le=65536)]
    life: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]  # another for each start of a node, and told to heads only
    busy: Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]  # seconds left to a head that is away


ABOUT = TypeAdapter(About)


def read_about(told: Any) -> About:
    """What a node says of itself, if it makes sense."""
    try:
        return ABOUT.validate_python(told)
    except ValidationError as error:
        raise Refused(f"a node that does not say in order what it is: {error.errors()[0]['msg'].lower()}") from None


@dataclass
class Station:
    """A node as the head sees it."""

    name: str
    life: str = ""
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
    refused: int = 0  # reports that made no sense
    row: int = 0  # how many of them came one after the other

    def hear(self, args: list[Any], run: str, workers: Collection[str], places: Mapping[str, str]) -> None:
        """Take a report about workers of a run, or refuse it, which is told ever more rarely."""
        try:
            told = reports.read(args)
            if told.run != run:  # of a run before this one
                return
            if strangers := told.names() - {*workers}:
                raise Refused(f"{min(strangers)} is no worker of this run")
        except Refused as error:
            self.refused, self.row = self.refused + 1, self.row + 1
            if self.refused.bit_count() == 1:  # the first, the second, the fourth, …
                log.warning("refused a report of node %s, number %d of them: %s", self.name, self.refused, error)
            raise
        self.row = 0
        mine = {*(self.told or ()), *(name for name, node in places.items() if node == self.name)}
        self.report, self.lines, self.starting = dict(told.workers), told.lines, told.starting
        self.failures = {name: text for name, text in told.failures.items() if name in mine}
        self.ended = mine & {*told.ended}  # of others it cannot know


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
