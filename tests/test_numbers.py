"""Numbers that are none: no engine learns from one, saves one, or hides one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import shoal
from shoal.core.errors import ShoalError
from shoal.core.tree import not_finite
from shoal.runs import checkpoint, metrics
from shoal.services.checkpoints import Checkpoints
from tests.pace import long
from tests.programs import QUICK, small

CONFIGS = Path(__file__).parents[1] / "configs"
BROKEN = "tests.programs:Broken"


def checkpoints_of(run: Path) -> list[dict[str, Any]]:
    """Every checkpoint of a run, the best among them."""
    found = [*checkpoint.paths(run), *(run / "checkpoints").glob("best")]
    return [checkpoint.read(path) for path in found]


def all_finite(run: Path) -> bool:
    """Whether every checkpoint holds proper numbers, of which there is at least one."""
    found = checkpoints_of(run)
    return bool(found) and not any(not_finite(each[name]) for each in found for name in ("weights", "optimizer"))


@pytest.mark.parametrize("engine", [*QUICK, long("ray"), long("cluster/grpc")])
def test_a_loss_that_is_no_number_ends_the_run_in_words_with_a_checkpoint_that_resumes(
    engine: str, tmp_path: Path, hosted: Any
) -> None:
    settings = small({"name": BROKEN, "unroll": 2, "batch": 2, "network": {"hidden": [8]}}, steps=10_000)
    run = tmp_path / "run"
    with pytest.raises(ShoalError) as caught:
        shoal.train(settings | hosted(engine), run)
    said = str(caught.value)
    assert re.search(r"update 1\d\d: loss or gradient is not finite, 10 times in a row: ", said)
    assert "gradient.torso." in said
    assert f"its batch is in {run / 'failed_batch.safetensors'}" in said
    newest = checkpoint.paths(run)[-1].name
    assert f"the last good checkpoint is {newest}" in said
    assert "shoal resume" in said
    assert {"reward", "observation", "action", "version"} <= {*load_file(run / "failed_batch.safetensors")}
    assert all_finite(run)
    healthy = shoal.resume(run, **{"algorithm.after": 10**9, "steps": int(newest.removeprefix("step_")) + 200})
    assert healthy.summary["steps"] > 0
    assert all_finite(run)


@pytest.mark.parametrize("topology", ["gradient_workers", "federated"])
def test_workers_that_share_a_network_end_likewise(topology: str, tmp_path: Path) -> None:
    algorithm = {"name": BROKEN, "unroll": 2, "batch": 2, "network": {"hidden": [8]}}
    federation = {"groups": 2, "round": 50}
    settings = small(algorithm, engine="inline", topology=topology, federation=federation, steps=10_000)
    with pytest.raises(ShoalError, match="times in a row: gradient"):
        shoal.train(settings, tmp_path / "run")
    assert all_finite(tmp_path / "run")


def test_a_single_one_is_skipped_and_counted(tmp_path: Path) -> None:
    algorithm = {"name": BROKEN, "unroll": 2, "batch": 4, "after": 20, "times": 3, "network": {"hidden": [8]}}
    run = shoal.train(small(algorithm, engine="inline", steps=800), tmp_path / "run")
    assert run.summary["metrics"]["skipped"] >= 1
    assert all_finite(run.directory)
    log = (run.directory / "log.txt").read_text()
    assert "loss or gradient is not finite; it was skipped (1 so far)" in log
    assert metrics.read(run.directory)[-1]["steps"] >= 800


def test_statistics_are_put_back_where_a_batch_makes_no_sense(tmp_path: Path) -> None:
    network = {"hidden": [8], "normalise_observation": True, "normalise_reward": True}
    algorithm = {"name": BROKEN, "unroll": 2, "batch": 4, "after": 20, "times": 3, "spoil": True, "network": network}
    run = shoal.train(small(algorithm, engine="inline", steps=800), tmp_path / "run")
    assert run.summary["metrics"]["skipped"] >= 1
    assert all_finite(run.directory)


def test_groups_that_normalise_observations_merge_their_moments(tmp_path: Path) -> None:
    overrides = {"algorithm.network.normalise_observation": True, "algorithm.network.normalise_reward": True}
    settings = {"engine": "inline", "steps": 12_000, "federation.round": 500, "envs": 4, "algorithm.unroll": 10}
    run = shoal.train(CONFIGS / "a4c_cartpole.yaml", tmp_path / "run", **overrides, **settings)
    assert all_finite(run.directory)
    weights = checkpoints_of(run.directory)[0]["weights"]
    assert weights["moments.parts.0.var"].min() >= 0
    newest = checkpoint.read(checkpoint.find(run.directory, "newest"))
    seen = newest["weights"]["moments.parts.0.count"]
    assert abs(seen - newest["state"]["steps"]) < 0.02 * seen  # every step of every group, once


def test_no_checkpoint_holds_a_number_that_is_none(tmp_path: Path) -> None:
    service = Checkpoints(str(tmp_path), 3)
    good = {"weights": {"w": np.ones(2)}, "optimizer": {}, "state": {"steps": 1, "scheduled": True, "mean": 1.0}}
    assert service.save(good) == service.save_best(good) == ""
    bad = {**good, "weights": {"w": np.array([1.0, np.nan])}, "state": {"steps": 2, "scheduled": True, "mean": 2.0}}
    assert service.save(bad) == "checkpoint step_2 was not saved: weights.w holds nan; the previous one is kept"
    assert "not saved" in service.save_best(bad)
    assert "not saved" in service.save(
        {**bad, "weights": good["weights"], "optimizer": {"0.square": np.full(1, np.inf)}}
    )
    assert "not saved" in service.save_best({**good, "state": {"steps": 3, "mean": float("nan")}})
    assert [path.name for path in checkpoint.paths(tmp_path)] == ["step_1"]
    assert checkpoint.read_state(tmp_path / "checkpoints" / "best")["mean"] == 1.0


@pytest.mark.parametrize("config", ["impala_cartpole", "a3c_cartpole", "a4c_cartpole", "dqn_cartpole"])
def test_there_is_a_checkpoint_as_soon_as_there_are_weights(config: str, tmp_path: Path) -> None:
    run = shoal.train(CONFIGS / f"{config}.yaml", tmp_path / "run", engine="inline", steps=50, actors=1)
    assert checkpoint.paths(run.directory)[0].name == "step_0"
