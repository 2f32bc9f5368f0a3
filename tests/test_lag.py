"""How old experience may be, in whole runs: bounded before it is made, and nobody is left out or waits for ever."""

from __future__ import annotations

from pathlib import Path

import pytest

import shoal
from shoal.runs import metrics
from tests.pace import long

COUNTING = {"environment": {"id": "Counting", "arguments": {"length": 5}}, "actors": 2, "envs": 2, "queue": 4}


@pytest.mark.parametrize("kind", ["padded", "nstep"])
@pytest.mark.parametrize("max_lag", [0, 1])
def test_items_that_come_one_by_one_fill_a_batch_that_actors_wait_for(kind: str, max_lag: int, tmp_path: Path) -> None:
    """Sequences that stop with their episodes: an actor that waited after each put would wait for ever."""
    algorithm = {"name": "tests.programs:Checker", "kind": kind, "batch": None, "max_lag": max_lag}
    settings = {"engine": "inline", "steps": 400, "evaluation": {"episodes": 1}, "limits": {"stall": 20}}
    run = shoal.train({**COUNTING, "algorithm": algorithm, **settings}, tmp_path / "run")
    assert run.summary["steps"] >= 400


def test_a_batch_may_take_several_rollouts_of_every_actor(tmp_path: Path) -> None:
    algorithm = {"name": "ppo", "unroll": 4, "batch": 12, "network": {"hidden": [8]}}
    settings = {"environment": {"id": "CartPole-v1"}, "actors": 2, "envs": 2, "steps": 600, "engine": "inline"}
    run = shoal.train({**settings, "algorithm": algorithm, "evaluation": {"episodes": 1}}, tmp_path / "run")
    rows = [row["metrics"] for row in metrics.read(run.directory) if row["kind"] == "train"]
    assert {row["lag"] for row in rows} == {0.0}


@pytest.mark.parametrize(("engine", "max_lag"), [("inline", 0), ("inline", 2), ("processes", 2), long("threads", 0)])
def test_no_batch_is_older_than_allowed_and_both_ages_are_reported(engine: str, max_lag: int, tmp_path: Path) -> None:
    algorithm = {"name": "ppo", "unroll": 4, "batch": 4, "max_lag": max_lag, "network": {"hidden": [8]}}
    settings = {"environment": {"id": "CartPole-v1"}, "actors": 3, "envs": 2, "steps": 1_500, "threads": 1}
    settings |= {"algorithm": algorithm, "engine": engine, "evaluation": {"episodes": 1}, "log_every": 0.01}
    run = shoal.train(settings, tmp_path / "run")
    rows = [row["metrics"] for row in metrics.read(run.directory) if row["kind"] == "train"]
    assert max(row["lag"] for row in rows) <= max_lag
    for row in rows:
        assert row["lag"] == pytest.approx(row["age_of_weights"] + row["age_of_data"])
