"""Whole runs with central inference: equal to local ones in lockstep, on every engine, and revived after kills."""

from __future__ import annotations

import shutil
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shoal
from shoal.core.errors import SettingsError
from shoal.envs import make
from shoal.experiment import load
from shoal.runs import checkpoint
from shoal.topology import room
from shoal.workers.rollout import Stream
from tests.kills import killed
from tests.pace import long
from tests.test_engines_alike import CONFIGS, CONTINUOUS, LOCKSTEP

ALGORITHMS = [name for name in LOCKSTEP if name != "a3c"]


def settings(algorithm: str) -> dict[str, Any]:
    own = {"name": algorithm, **LOCKSTEP[algorithm]}
    if "replay" in own:
        own["replay"] = {**own["replay"], "refresh": 1}
    return {
        "environment": {"id": "Pendulum-v1" if algorithm in CONTINUOUS else "CartPole-v1"},
        "algorithm": own,
        "lockstep": True,
        "actors": 2,
        "envs": 2,
        "threads": 1,
        "steps": 250,
        "evaluation": {"episodes": 2, "every": 10**6},
    }


def outcome(run: Any) -> list[Any]:
    return [run.summary[key] for key in ("weights_sha256", "steps", "updates", "episodes")]


@pytest.mark.parametrize(
    ("algorithm", "workers"), [("impala", 1), ("apex_dqn", 2), ("r2d2", 1), *(long(name, 2) for name in ALGORITHMS)]
)
def test_in_lockstep_central_equals_local(algorithm: str, workers: int, tmp_path: Path) -> None:
    made = {**settings(algorithm), "engine": "inline"}
    local = shoal.train(made, tmp_path / "local")
    central = shoal.train(made, tmp_path / "central", inference="central", inference_workers=workers)
    assert outcome(local) == outcome(central)
    assert local.summary["updates"] > 5


def test_a_run_whose_bandits_know_earlier_pulls_is_resumed_exactly(tmp_path: Path) -> None:
    made = {**settings("ngu"), "engine": "inline", "inference": "central", "checkpoints": {"every": 100, "keep": 9}}
    whole = shoal.train(made, tmp_path / "whole")
    part = tmp_path / "part"
    shutil.copytree(whole.directory, part)
    for path in checkpoint.paths(part)[2:]:  # all but the beginning and the first with anything learned
        shutil.rmtree(path)
    assert outcome(shoal.resume(part)) == outcome(whole)


@pytest.mark.parametrize("engine", ["processes", *map(long, ["threads", "ray", "cluster/websocket", "cluster/grpc"])])
@pytest.mark.parametrize("algorithm", ["impala", long("apex_dqn")])
def test_in_lockstep_central_is_alike_on_every_engine(hosted: Any, engine: str, algorithm: str, tmp_path: Path) -> None:
    made = {**settings(algorithm), "inference": "central"}
    runs = [shoal.train({**made, **hosted(name)}, tmp_path / name.replace("/", "-")) for name in ("inline", engine)]
    assert outcome(runs[0]) == outcome(runs[1])


@pytest.mark.parametrize("engine", ["threads", *map(long, ["inline", "processes", "ray", "cluster/grpc"])])
def test_cartpole_is_solved(hosted: Any, engine: str, tmp_path: Path) -> None:
    changes = {"actors": 2, "inference": "central", "inference_workers": 2}
    assert shoal.train(CONFIGS / "impala_cartpole.yaml", tmp_path / "run", **hosted(engine), **changes).solved


@pytest.mark.long  # tests/services/test_requests.py has what it stands on
@pytest.mark.parametrize("victim", ["inference-0", "actor-0"])
def test_who_is_killed_begins_again_and_nobody_else_does(command: Any, victim: str, tmp_path: Path) -> None:
    changes = ("actors=2", "inference=central", "steps=20000", "evaluation.target=null", "evaluation.every=20000",
               "evaluation.episodes=2", "log_every=0.1", "algorithm.network.lstm=16",
               "algorithm.network.separate=false")  # fmt: skip
    process = command("train", CONFIGS / "impala_cartpole.yaml", "--run-dir", tmp_path / "run", *changes)
    summary, restarts, _ = killed(process, victim, tmp_path / "run")
    assert summary["steps"] >= 20_000
    assert restarts.pop(victim) == 1
    assert not any(restarts.values())


def test_groups_of_environments_share_the_places_of_exploration_evenly() -> None:
    made = load({"environment": {"id": "Catch"}, "algorithm": {"name": "dqn"}, "actors": 3, "envs": 4})
    places = []
    for index, part in product(range(3), range(2)):
        envs = make(made.environment, 2, seed=0)
        places += [*Stream(made, index, envs, part, 2).rank]
        envs.close()
    assert places == pytest.approx((np.arange(12) + 0.5) / 12)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"algorithm": {"name": "a3c"}}, "inference central: workers of topology"),
        ({"actors": 2, "inference_workers": 3}, "inference_workers 3: there are only 2 actors"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes: dict[str, Any], words: str) -> None:
    made = {"environment": {"id": "CartPole-v1"}, "algorithm": {"name": "impala"}, "inference": "central", **changes}
    with pytest.raises(SettingsError, match=words):
        shoal.train(made)


@pytest.mark.parametrize(
    ("changes", "gpus", "missing"),
    [
        ({"inference": "central"}, {"evaluator": 0.1}, "inference"),
        ({"inference": "central"}, {"inference": 0.5, "evaluator": 0.1}, ""),
        ({}, {"evaluator": 0.1}, "actor"),
        ({}, {"actor": 0.1}, "evaluator"),
        ({"topology": "gradient_workers"}, {"evaluator": 0.1}, ""),  # whose networks are on the CPU
    ],
)
def test_on_ray_whoever_chooses_on_a_gpu_asks_for_a_share_of_one(
    changes: dict[str, Any], gpus: dict[str, float], missing: str
) -> None:
    settings = {"environment": {"id": "CartPole-v1"}, "algorithm": {"name": "impala"}, "engine": "ray", "actors": 2}
    made = load({**settings, "actor_device": "cuda", "ray": {"gpus": gpus}, **changes})
    if not missing:
        assert room(made).gpus.items() >= gpus.items()
        return
    with pytest.raises(SettingsError, match=f"ray.gpus: an {missing} on actor_device cuda needs a share of a GPU"):
        room(made)
