"""What an engine is given: where things live, and timeouts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from shoal.core.settings import Settings


@dataclass(frozen=True)
class Options:
    """Placement and limits of an engine."""

    seed: int = 0
    lockstep: bool = False
    homes: Mapping[str, str] = field(default_factory=dict)  # service → worker in whose process it lives; else the head
    observers: frozenset[str] = frozenset()  # workers that stay in the head and do not count as movement
    restartable: frozenset[str] = frozenset()  # workers that are started again when they die
    revivable: frozenset[str] = frozenset()  # likewise, but not when they raised: that would only repeat
    expendable: frozenset[str] = frozenset()  # workers that call nobody, and whose services others can do without
    restarts: int = 5  # how often, without a minute of health in between
    deadline: float = 60.0  # seconds for one call to a service
    stall: float = 120.0  # seconds without any movement before the run is given up
    silence: float = 30.0  # seconds without a heartbeat before a worker counts as dead
    allow: tuple[str, ...] | None = None  # packages from which workers may be made; none: any
    relays: frozenset[str] = frozenset()  # services of weights, which a node fetches once for all its workers
    spans: Annotated[int, Field(ge=0, le=1_000_000)] = 0  # of its time that each worker keeps for a trace
    machines: Machines | None = None  # for engines that span several
    room: Room | None = None  # for the engine `ray`


class Network(Settings):
    """How the machines of the engine `cluster` find and trust each other."""

    listen: str = Field("", description="Address HOST:PORT at which nodes may join; empty: none may.")
    trust: str = Field("", description="Folder of certificates and token; empty: none, which loopback only allows.")
    insecure: bool = Field(False, description="Whether to send plain text off loopback.")
    link: Literal["websocket", "grpc", "torchrpc"] = Field("websocket", description="How frames travel.")
    world: int = Field(0, ge=0, description="Machines in all, the head included; for the link torchrpc only.")
    here: int = Field(0, ge=0, description="Workers that the head takes itself beside the learner.")
    away: float = Field(20.0, gt=0, description="Seconds without its node after which a worker moves to another.")


class Room(Settings):
    """What the engine `ray` asks of its cluster; a role is the name of a worker without its number."""

    address: str = Field(
        "", description="Address HOST:PORT of a running Ray cluster, or auto; empty: start Ray on this machine."
    )
    cpus: dict[str, float] = Field(default_factory=dict, description="CPUs per worker of a role; others ask for 1.")
    gpus: dict[str, float] = Field(default_factory=dict, description="GPUs per worker of a role; others ask for none.")
    custom: dict[str, dict[str, float]] = Field(
        default_factory=dict, description="Resources of your own naming per worker of a role."
    )
    placement: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = Field(
        "PACK", description="How Ray places the workers that are free to live anywhere."
    )
    roam: bool = Field(
        False,
        description="Whether workers that hold services may leave this machine, which needs a shared folder of runs.",
    )


@dataclass(frozen=True)
class Machines:
    """The machines of an engine that spans several, and what may live there."""

    nodes: tuple[str, ...] = ()  # addresses that the head connects to
    network: Network = field(default_factory=Network)
    remote: frozenset[str] | None = None  # workers that may live on nodes; none: all
    check: tuple[str, list[object], Mapping[str, str]] | None = None  # what both sides must compute alike
