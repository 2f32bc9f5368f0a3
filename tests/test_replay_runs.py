"""Whole runs of the replay family: learning to a threshold, the same bits everywhere, exact resume, memory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shoal
from shoal.core.errors import SettingsError
from shoal.runs import checkpoint
from tests.kills import killed
from tests.pace import long
from tests.programs import LOCAL, outcome, small

CONFIGS = Path(__file__).parents[1] / "configs"


@pytest.mark.parametrize(
    ("config", "quantiles", "target"),
    [long("dqn", 1, 475), long("apex_dqn", 16, 195), ("dqn", 1, 60)],  # a random policy has about 20
)
def test_cartpole_is_learned(config: str, quantiles: int, target: int, tmp_path: Path) -> None:
    changes = {"algorithm.quantiles": quantiles, "evaluation.target": target}
    assert shoal.train(CONFIGS / f"{config}_cartpole.yaml", tmp_path / "run", **changes).solved


@pytest.mark.long
@pytest.mark.parametrize("engine", ["inline", "processes"])
@pytest.mark.parametrize(
    ("config", "changes"),
    [
        ("sac", {}),
        ("td3", {}),
        ("fasttd3", {}),
        ("apex_dpg", {}),
        ("d4pg", {}),
        ("d4pg", {"atoms": None, "quantiles": 25}),
    ],
    ids=["sac", "td3", "fasttd3", "apex_dpg", "d4pg-atoms", "d4pg-quantiles"],
)
def test_pendulum_is_learned(config: str, changes: dict[str, Any], engine: str, tmp_path: Path) -> None:
    settings = {f"algorithm.{name}": value for name, value in changes.items()}
    # A random policy has about -1200. On `processes`, Ape-X DPG sometimes takes more than its 20 k steps.
    target = {"evaluation.target": -200, "engine": engine, "actors": 2, "steps": 40_000}
    assert shoal.train(CONFIGS / f"{config}_pendulum.yaml", tmp_path / "run", **settings, **target).solved


def test_pendulum_is_learned_in_the_short_form(tmp_path: Path) -> None:
    few = {"batch": 64, "replay": {"minimum": 500, "samples_per_insert": 64}}
    changes = {"algorithm": few, "evaluation": {"target": -800, "every": 500, "episodes": 10}, "steps": 6_000}
    assert shoal.train(CONFIGS / "sac_pendulum.yaml", tmp_path / "run", **changes).solved


@pytest.mark.long
def test_memory_is_for_r2d2_and_not_for_dqn(tmp_path: Path) -> None:
    assert shoal.train(CONFIGS / "r2d2_memory.yaml", tmp_path / "r2d2").solved
    changes = {"algorithm": {"name": "dqn", "lr": 1e-3, "replay": {"minimum": 200, "samples_per_insert": 8}}}
    dqn = shoal.train(CONFIGS / "r2d2_memory.yaml", tmp_path / "dqn", **changes, steps=14_000)
    assert dqn.summary["best_evaluation"] < 0.6  # guessing gives 0 ± 0.16 over 40 episodes


@pytest.mark.long
def test_a_hidden_velocity_is_for_a_memory(tmp_path: Path) -> None:
    assert shoal.train(CONFIGS / "sac_memory_pendulum.yaml", tmp_path / "lstm").solved
    plain = {"batch": 128, "replay": {"minimum": 1_000, "capacity": 100_000, "samples_per_insert": 128}}
    changes = {"algorithm": {**plain, "network": {"lstm": 0}}, "steps": 12_000}
    without = shoal.train(CONFIGS / "sac_memory_pendulum.yaml", tmp_path / "plain", **changes)
    assert without.summary["best_evaluation"] < -500  # a random policy has about -1200


@pytest.mark.long
def test_ngu_reaches_the_far_end_and_r2d2_does_not(tmp_path: Path) -> None:
    ngu = shoal.train(CONFIGS / "ngu_chain.yaml", tmp_path / "ngu")
    assert ngu.solved
    same = {key: value for key, value in ngu.experiment.algorithm.model_dump(mode="json").items()
            if key in ("lr", "batch", "gamma", "n", "unroll", "burn_in", "overlap", "target_every", "optimizer_epsilon",
                       "replay", "head", "network", "epsilon_spread")}  # fmt: skip
    changes = {"algorithm": {"name": "r2d2", **same}, "steps": 25_000}
    r2d2 = shoal.train(CONFIGS / "ngu_chain.yaml", tmp_path / "r2d2", **changes)
    assert r2d2.summary["best_evaluation"] < 0.1  # it stays at the near end, which pays 0.001 a step


@pytest.mark.long
def test_ngu_keeps_the_goal_that_it_found_behind_three_doors(tmp_path: Path) -> None:
    """The reward ends the episode: if the intrinsic return ended with it, the bold arms would learn to avoid it."""
    rooms = {"minNumRooms": 4, "maxNumRooms": 4, "maxRoomSize": 5}
    changes = {"environment.arguments": rooms, "seed": 1, "steps": 160_000}
    run = shoal.train(CONFIGS / "ngu_multiroom.yaml", tmp_path / "run", **changes)
    assert np.mean([each["mean"] for each in run.summary["evaluations"][-5:]]) > 0.25


@pytest.mark.long
@pytest.mark.parametrize("config", ["r2d2_memory", "ngu_chain"])
def test_actors_that_do_not_wait_fill_a_recurrent_replay(config: str, tmp_path: Path) -> None:
    assert shoal.train(CONFIGS / f"{config}.yaml", tmp_path / "run", engine="processes", actors=2, envs=4).solved


SMALL = {"hidden": [16], "activation": "relu"}
KEPT = {"capacity": 300, "minimum": 40, "samples_per_insert": 4, "alpha": 0.6, "chunk": 4}
ALGORITHMS: dict[str, Any] = {
    "dqn": {"name": "dqn", "batch": 8, "n": 2, "target_every": 20, "replay": KEPT, "network": SMALL},
    "apex_dqn": {
        "name": "apex_dqn",
        "batch": 8,
        "target_every": 20,
        "quantiles": 4,
        "replay": {**KEPT, "refresh": 2, "publish": 2},
        "head": 8,
        "network": {**SMALL, "normalise_observation": True},
    },
    "r2d2": {
        "name": "r2d2",
        "batch": 4,
        "unroll": 6,
        "burn_in": 3,
        "overlap": 4,
        "target_every": 20,
        "replay": {**KEPT, "minimum": 10},
        "head": 8,
        "network": {**SMALL, "lstm": 8},
    },
}
ALGORITHMS["shards"] = {
    **ALGORITHMS["dqn"],
    "replay": {**KEPT, "shards": 2},
}
ALGORITHMS["ngu"] = {**ALGORITHMS["r2d2"], "name": "ngu", "arms": 3}
PLAIN = {"hidden": [16], "critic_hidden": [16], "normalise_observation": True}
CONTINUOUS: dict[str, Any] = {
    name: {"name": name, "batch": 8, "n": 2, "replay": {**KEPT, "samples_per_insert": 8}, "network": PLAIN}
    for name in ("sac", "td3", "fasttd3", "d4pg", "apex_dpg")
}
SEQUENCES = {"unroll": 6, "burn_in": 3, "overlap": 4}
CONTINUOUS["recurrent sac"] = {
    **CONTINUOUS["sac"],
    "sequences": SEQUENCES,
    "replay": {**KEPT, "minimum": 10},
    "network": {**PLAIN, "lstm": 8},
}
CONTINUOUS["recurrent td3"] = {**CONTINUOUS["recurrent sac"], "name": "td3", "actor_priorities": True}
ALGORITHMS |= CONTINUOUS
SHORT = ("apex_dqn", "shards")  # the others are alike on fewer engines


def settings(algorithm: str, **more: Any) -> dict[str, Any]:
    """A small run in lockstep."""
    world = {"environment": {"id": "Pendulum-v1"}} if algorithm in CONTINUOUS else {}
    return small(ALGORITHMS[algorithm], lockstep=True, **{**world, **more})


@pytest.mark.parametrize("algorithm", [*SHORT, *(long(name) for name in ALGORITHMS if name not in SHORT)])
def test_lockstep_gives_the_same_bits_on_every_engine_and_after_a_resume(
    hosted: Any, algorithm: str, tmp_path: Path
) -> None:
    # Engines know no algorithm.
    some = {"apex_dqn": LOCAL, "shards": ("inline",)}.get(algorithm, ("inline", "processes"))
    runs = {
        engine: shoal.train(settings(algorithm, **hosted(engine, machines=2)), tmp_path / engine) for engine in some
    }
    whole = outcome(runs["inline"])
    assert whole[0][2] > 20  # updates
    assert all(outcome(run) == whole for run in runs.values())
    other = shoal.train(settings(algorithm, engine="inline", seed=1), tmp_path / "other")
    assert outcome(other) != whole
    part = tmp_path / "part"
    shutil.copytree(runs["inline"].directory, part)
    for path in checkpoint.paths(part)[2:]:  # all but the beginning and the first with anything learned
        shutil.rmtree(path)
    assert outcome(shoal.resume(part)) == whole  # the replay came back with the checkpoint


@pytest.mark.long
@pytest.mark.parametrize("engine", ["threads", "processes", "cluster", "ray"])
def test_shards_give_the_same_bits_on_the_other_engines(hosted: Any, engine: str, tmp_path: Path) -> None:
    runs = [shoal.train(settings("shards", **hosted(name)), tmp_path / name) for name in ("inline", engine)]
    assert outcome(runs[0]) == outcome(runs[1])


@pytest.mark.long  # tests/workers/test_sharding.py and tests/engines/test_conformance.py have its two halves
def test_a_killed_shard_begins_again_empty_and_nobody_else_does(command: Any, tmp_path: Path) -> None:
    changes = ("engine=processes", "actors=2", "envs=4", "algorithm.replay.shards=2", "algorithm.batch=32",
               "steps=12000", "evaluation.target=null", "evaluation.every=12000", "evaluation.episodes=2",
               "algorithm.replay.samples_per_insert=4", "algorithm.replay.alpha=0.6", "log_every=0.1")  # fmt: skip
    process = command("train", CONFIGS / "dqn_cartpole.yaml", "--run-dir", tmp_path / "run", *changes)
    summary, restarts, log = killed(process, "shard-1", tmp_path / "run")
    assert "shard-1 of the replay has died with" in log
    assert summary["steps"] >= 12_000
    assert restarts.pop("shard-1") == 1
    assert not any(restarts.values())


def test_frames_are_kept_once_on_every_engine_alike(tmp_path: Path) -> None:
    pong = settings(
        "dqn",
        environment={"id": "ALE/Pong-v5", "atari": {"max_frames": 400}},
        steps=120,
        evaluation={"episodes": 1, "every": 10**6},
        checkpoints={"every": 10**6},
    )
    hashes = {
        (engine, compress): shoal.train(
            {**pong, "engine": engine}, tmp_path / f"{engine}{compress}", **{"algorithm.replay.compress": compress}
        ).summary["weights_sha256"]
        for engine, compress in (("inline", False), ("processes", True))
    }
    assert len(set(hashes.values())) == 1


def test_a_replay_that_cannot_fit_is_refused_with_the_sum(tmp_path: Path) -> None:
    with pytest.raises(
        SettingsError, match=r"replay\.capacity: 100,000,000,000 items × .* = .* GB, but .* items would"
    ):
        shoal.train(settings("dqn"), tmp_path / "run", **{"algorithm.replay.capacity": 10**11})
    assert not (tmp_path / "run").exists()


def test_a_minimum_that_is_never_reached_is_refused() -> None:
    with pytest.raises(SettingsError, match="minimum 400 is never reached"):
        shoal.configure(settings("dqn"), **{"algorithm.replay.minimum": 400})


def test_overlap_must_cover_the_burn_in() -> None:
    with pytest.raises(SettingsError, match="overlap 2 must be at least burn_in 3"):
        shoal.configure(settings("r2d2"), **{"algorithm.overlap": 2})


def test_recordings_hold_actions_rewards_and_values(tmp_path: Path) -> None:
    run = shoal.train(settings("ngu", engine="inline", environment={"id": "Catch"}, steps=300), tmp_path / "run")
    written = run.record(tmp_path / "rollouts", episodes=2)
    assert [path.name for path in written] == ["episode_1.mp4", "episode_1.json", "episode_2.mp4", "episode_2.json"]
    for path in written[1::2]:
        episode = json.loads(path.read_text())
        assert len(episode["steps"]) == episode["length"] == 9
        assert sum(step["reward"] for step in episode["steps"]) == episode["score"]
        for step in episode["steps"]:
            assert {*step} == {"action", "reward", "novelty", "arm", "q_extrinsic", "q_intrinsic"}
            assert len(step["q_extrinsic"]) == 3
