"""The built-in algorithms by name, and how to find a user's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shoal.core import recipe
from shoal.core.errors import ShoalError, nearest

ALGORITHMS: dict[str, str] = {
    "a3c": "shoal.algorithms.a3c:A3c",
    "apex_dpg": "shoal.algorithms.deterministic:ApexDpg",
    "apex_dqn": "shoal.algorithms.apex_dqn:ApexDqn",
    "d4pg": "shoal.algorithms.deterministic:D4pg",
    "dqn": "shoal.algorithms.dqn:Dqn",
    "fasttd3": "shoal.algorithms.deterministic:FastTd3",
    "impact": "shoal.algorithms.impact:Impact",
    "impala": "shoal.algorithms.impala:Impala",
    "ngu": "shoal.algorithms.ngu:Ngu",
    "ppo": "shoal.algorithms.ppo:Ppo",
    "r2d2": "shoal.algorithms.r2d2:R2d2",
    "sac": "shoal.algorithms.sac:Sac",
    "td3": "shoal.algorithms.deterministic:Td3",
}


if TYPE_CHECKING:  # mypy checks that each is an algorithm, and which hooks it has
    from shoal.algorithms.a3c import A3c
    from shoal.algorithms.apex_dqn import ApexDqn
    from shoal.algorithms.deterministic import ApexDpg, D4pg, FastTd3, Td3
    from shoal.algorithms.dqn import Dqn
    from shoal.algorithms.impact import Impact
    from shoal.algorithms.impala import Impala
    from shoal.algorithms.ngu import Ngu
    from shoal.algorithms.ppo import Ppo
    from shoal.algorithms.r2d2 import R2d2
    from shoal.algorithms.sac import Sac
    from shoal.core import algorithm

    _all: tuple[type[algorithm.Algorithm[Any]], ...] = (
        A3c,
        ApexDpg,
        ApexDqn,
        D4pg,
        Dqn,
        FastTd3,
        Impact,
        Impala,
        Ngu,
        Ppo,
        R2d2,
        Sac,
        Td3,
    )
    _epochs: tuple[type[algorithm.HasEpochs], ...] = (Impala, Ppo)
    _minibatches: tuple[type[algorithm.HasMinibatches], ...] = (Impala, Ppo)
    _target_kl: tuple[type[algorithm.HasTargetKl], ...] = (Ppo,)
    _max_lag: tuple[type[algorithm.HasMaxLag], ...] = (A3c, Impala, Ppo)
    _target: tuple[type[algorithm.HasTarget], ...] = (ApexDqn, Dqn, Impact, Ngu, R2d2, Sac, Td3)
    _tau: tuple[type[algorithm.HasTau], ...] = (Sac, Td3)
    _circular: tuple[type[algorithm.HasCircular], ...] = (Impact,)
    _replay: tuple[type[algorithm.HasReplay], ...] = (A3c, ApexDqn, Dqn, Ngu, R2d2, Sac, Td3)
    _mixture: tuple[type[algorithm.HasMixture], ...] = (Impala,)
    _features: tuple[type[algorithm.HasFeatures], ...] = (Impala,)
    _replay_ratio: tuple[type[algorithm.HasReplayRatio], ...] = (A3c,)
    _actor_priorities: tuple[type[algorithm.HasActorPriorities], ...] = (ApexDqn, Dqn, Ngu, R2d2, Sac, Td3)
    _capture: tuple[type[algorithm.HasCapture], ...] = (ApexDqn, Dqn, Impact, Impala, Ppo, Sac, Td3)
    _phase: tuple[type[algorithm.HasPhase], ...] = (Sac, Td3)
    _reward: tuple[type[algorithm.HasRewardInput], ...] = (A3c, Impact, Impala, Ngu, Ppo, R2d2, Sac, Td3)
    _topology: tuple[type[algorithm.HasTopology], ...] = (A3c,)
    _values: tuple[type[algorithm.HasValues], ...] = (Sac, Td3)
    _parts: tuple[type[algorithm.HasParts], ...] = (Ngu,)
    _choices: tuple[type[algorithm.HasChoices], ...] = (Ngu,)


def find(name: str) -> type[Any]:
    """Return the algorithm's class for a name of the table or an import path `package.module:Class`."""
    path = ALGORITHMS.get(name, name)
    if ":" not in path:
        raise ShoalError(
            f"unknown algorithm {name!r}: expected one of {', '.join(ALGORITHMS)}, or your own as"
            f" package.module:Class{nearest(name, ALGORITHMS)}"
        )
    found = recipe.find(path)
    if not isinstance(found, type):
        raise ShoalError(f"{name!r} is not a class")
    return found
