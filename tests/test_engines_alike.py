"""The same experiment on any engine: the same bits under lockstep, and solved without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import shoal
from shoal.engines import ENGINES
from shoal.transport import LINKS
from tests.pace import long

CONFIGS = Path(__file__).parents[1] / "configs"
HERE = [name for name in ENGINES if name != "cluster"]
NAMES = [*HERE, *(f"cluster/{link}" for link in LINKS)]
SMALL = {"hidden": [16], "activation": "relu"}
PLAIN = {"hidden": [16], "critic_hidden": [16]}
KEPT = {"capacity": 300, "minimum": 40, "samples_per_insert": 4, "alpha": 0.6, "chunk": 4}
SEQUENCES = {"unroll": 6, "burn_in": 2, "overlap": 4, "batch": 4, "target_every": 10, "head": 8}
LOCKSTEP: dict[str, Any] = {
    "impala": {"batch": 4, "unroll": 10, "network": {**SMALL, "lstm": 8}},
    "impact": {
        "batch": 4,
        "unroll": 10,
        "circular": {"batches": 2, "times": 3},
        "network": {**SMALL, "lstm": 8, "normalise_observation": True},
    },
    "ppo": {"unroll": 16, "network": {**SMALL, "normalise_observation": True, "normalise_reward": True}},
    "a3c": {"network": {**SMALL, "normalise_observation": True}},
    "dqn": {"batch": 8, "n": 2, "target_every": 20, "replay": KEPT, "network": SMALL},
    "apex_dqn": {"batch": 8, "target_every": 20, "replay": KEPT, "network": SMALL},
    "r2d2": {**SEQUENCES, "n": 2, "replay": {**KEPT, "minimum": 10, "chunk": 2}, "network": {**SMALL, "lstm": 8}},
    "ngu": {
        **SEQUENCES,
        "arms": 4,
        "embedding": 4,
        "replay": {**KEPT, "minimum": 10, "chunk": 2},
        "network": {**SMALL, "lstm": 8},
    },
    "sac": {"batch": 8, "quantiles": 4, "drop": 1, "replay": KEPT, "network": PLAIN},
    "recurrent sac": {
        "name": "sac",
        "batch": 4,
        "n": 2,
        "sequences": {"unroll": 6, "burn_in": 2, "overlap": 4},
        "replay": {**KEPT, "minimum": 10, "chunk": 2},
        "network": {**PLAIN, "lstm": 8},
    },
    "td3": {"batch": 8, "replay": KEPT, "network": {**PLAIN, "torso": "simba", "normalise_observation": True}},
    "fasttd3": {"batch": 8, "replay": KEPT, "network": PLAIN},
    "d4pg": {"batch": 8, "replay": KEPT, "network": PLAIN},
    "apex_dpg": {"batch": 8, "target_every": 20, "replay": KEPT, "network": PLAIN},
}
CONTINUOUS = ("sac", "recurrent sac", "td3", "fasttd3", "d4pg", "apex_dpg")


@pytest.mark.parametrize(
    ("algorithm", "links"),
    # A3C's workers share memory, so on several machines it is federated: tests/workers/test_federation.py.
    [("impala", 1), *(long(name, 0 if name == "a3c" else len(LINKS)) for name in LOCKSTEP)],
)
def test_lockstep_gives_the_same_bits_on_every_engine_by_every_link(
    hosted: Any, algorithm: str, links: int, tmp_path: Path, record_property: Any
) -> None:
    settings = {
        "environment": {"id": "Pendulum-v1" if algorithm in CONTINUOUS else "CartPole-v1"},
        "algorithm": {"name": algorithm, **LOCKSTEP[algorithm]},
        "lockstep": True,
        "actors": 2,
        "envs": 2,
        "threads": 1,
        "steps": 250,
        "evaluation": {"episodes": 2, "every": 10**6},
    }
    runs = {
        name: shoal.train({**settings, **hosted(name, machines=2)}, tmp_path / name.replace("/", "-")).summary
        for name in NAMES[: len(HERE) + links]
    }
    lines = [f"{algorithm:20} {'steps':>6} {'updates':>8} {'episodes':>9}  weights (SHA-256)"]
    for name, run in runs.items():
        figures = f"{run['steps']:>6} {run['updates']:>8} {run['episodes']:>9}  {run['weights_sha256']}"
        lines.append(f"{name:20} {figures}")
    record_property("table", "\n".join(lines))
    facts = [[run[key] for key in ("weights_sha256", "steps", "updates", "episodes")] for run in runs.values()]
    assert all(fact == facts[0] for fact in facts)
    assert facts[0][2] > 5  # updates


@pytest.mark.long
@pytest.mark.parametrize("name", ["cluster/grpc", "cluster/torchrpc"])
def test_cartpole_is_solved_by_every_link(hosted: Any, name: str, tmp_path: Path) -> None:
    assert shoal.train(CONFIGS / "impala_cartpole.yaml", tmp_path / "run", **hosted(name), actors=1).solved
