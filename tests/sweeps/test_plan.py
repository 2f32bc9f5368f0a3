"""A sweep's file: what it means, and that every mistake in it is refused in words before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from shoal.core.errors import SettingsError
from shoal.experiment import load
from shoal.sweeps import plan as plans
from shoal.sweeps.plan import Choice, Range, cores_of, read_plan

LR = {"low": 1e-4, "high": 1e-2, "log": True}
GOOD: dict[str, Any] = {"config": "ppo_cartpole", "search": {"algorithm.lr": LR}}


def written(tmp_path: Path, **changes: Any) -> Path:
    """A sweep's file; None leaves a key out."""
    tree = {key: value for key, value in {**GOOD, **changes}.items() if value is not None}
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(tree))
    return tmp_path / "sweep.yaml"


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"config": None}, "config: missing"),
    ({"config": "ppo_cartpol"}, "did you mean 'ppo_cartpole'"),
    ({"config": 3}, "config"),
    ({"trails": 3}, "trails: unknown; allowed: config, .*did you mean 'trials'"),
    ({"steps": 300}, "steps: unknown; .*a setting of the experiment goes below overrides"),
    ({"trials": 0}, "trials"),
    ({"trials": "many"}, "trials"),
    ({"seeds": 0}, "one seed at least"),
    ({"seeds": [1, 1]}, "different"),
    ({"seeds": [-1]}, "whole number"),
    ({"seeds": "three"}, "a number of seeds, or a list"),
    ({"at_once": 0}, "auto"),
    ({"score": "mean"}, "'best' or 'last'"),
    ({"prune": "medain"}, "median"),
    ({"prune_from": float("nan")}, "prune_from"),
    ({"direction": "maximise"}, "did you mean 'maximize'"),
    ({"overrides": {"stesp": 3}}, "stesp: unknown setting; .*did you mean 'steps'"),
    ({"overrides": {"environment.id": "CartPole-v11"}}, "CartPole-v1"),
    ({"search": None}, "nothing to search"),
    ({"search": {}}, "nothing to search"),
    ({"search": {"algorithm.lrr": LR}}, "search.algorithm.lrr.*unknown setting.*did you mean 'lr'"),
    ({"search": {"algorithm.lr": 3}}, "give bounds such as"),
    ({"search": {"algorithm.lr": [1e-3]}}, "two choices"),
    ({"search": {"algorithm.unroll": [8, 8]}}, "two choices"),
    ({"search": {"algorithm.lr": {"low": 1e-3}}}, "lr.high: missing"),
    ({"search": {"algorithm.lr": {"low": 1e-3, "hihg": 1e-2}}}, "did you mean 'high'"),
    ({"search": {"algorithm": {"lr": LR}}}, "written with dots"),
    ({"search": {"algorithm.lr": {"low": 1e-2, "high": 1e-3}}}, "low 0.01 must be below high 0.001"),
    ({"search": {"algorithm.lr": {"low": "x", "high": 1e-3}}}, "low: must be a finite number"),
    ({"search": {"algorithm.lr": {"low": float("nan"), "high": 1e-3}}}, "low: must be a finite number"),
    ({"search": {"algorithm.lr": {"low": 0, "high": float("inf")}}}, "high: must be a finite number"),
    ({"search": {"algorithm.unroll": {"low": 1, "high": 10**40}}}, "bounds must lie between"),
    ({"search": {"algorithm.lr": {"low": 0, "high": 1e-3, "log": True}}}, "above 0 with log"),
    ({"search": {"algorithm.lr": {"low": 1e-3, "high": 1, "log": 3}}}, "log must be true or false"),
    ({"search": {"algorithm.lr": {**LR, "step": 1e-3}}}, "step or log"),
    ({"search": {"algorithm.lr": {"low": 0, "high": 1, "step": -1}}}, "step -1 must be above 0"),
    ({"search": {"algorithm.lr": {"low": 0, "high": 1, "step": 2}}}, "at most high - low"),
    ({"search": {"algorithm.gamma": {"low": 0.9, "high": 1.5}}}, "search.algorithm.gamma, at 1.5"),
    ({"search": {"algorithm.unroll": {"low": 0.5, "high": 8}}}, "search.algorithm.unroll, at 0.5"),
    ({"search": {"engine": ["inline", "thread"]}}, "at 'thread': .*did you mean 'threads'"),
    ({"search": {"algorithm.lr": LR, "algorithm.lr.start": LR}}, "is a part of"),
    ({"search": {"seed": [0, 1]}}, "decides how a trial is scored"),
    ({"search": {"evaluation.episodes": [5, 10]}}, "decides how a trial is scored"),
    ({"prune": "median", "overrides": {"evaluation.every": 90_000}}, "no evaluation before its last"),
]


@pytest.mark.parametrize(("changes", "words"), MISTAKES, ids=[str(changes) for changes, _ in MISTAKES])
def test_mistakes_are_refused_in_words(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=f"(?s){words}"):
        read_plan(written(tmp_path, **changes))


def test_a_file_says_what_is_searched(tmp_path: Path) -> None:
    search = {
        "algorithm.lr.start": LR,
        "algorithm.unroll": {"low": 16, "high": 64, "step": 16},
        "algorithm.gamma": {"low": 0, "high": 1},  # whole bounds of a setting that is not whole
        "algorithm.network.hidden": [[64], [64, 64]],
    }
    plan = read_plan(written(tmp_path, search=search, seeds=3, overrides={"steps": 500, "algorithm.epochs": 2}))
    assert plan.space == {
        "algorithm.lr.start": Range(1e-4, 1e-2, True),
        "algorithm.unroll": Range(16, 64, False, 16, True),
        "algorithm.gamma": Range(0, 1),
        "algorithm.network.hidden": Choice(([64], [64, 64])),
    }
    assert plan.seeds == (0, 1, 2)
    assert (plan.experiment.steps, plan.experiment.algorithm.epochs) == (500, 2)  # type: ignore[attr-defined]
    assert plan.experiment.evaluation.target is None  # the config's would end the better trials early
    assert plan.experiment.evaluation.every == 4_000  # and the rest of it stays
    kept = read_plan(written(tmp_path, overrides={"evaluation": {"target": 400}}))
    assert kept.experiment.evaluation.target == 400  # but one that is asked for counts


def test_none_of_the_trials_is_pruned_where_the_file_says_none(tmp_path: Path) -> None:
    file = written(tmp_path)
    file.write_text(file.read_text() + "prune: none\n")
    assert read_plan(file).prune is None


def test_a_config_beside_the_file_is_found(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("environment: {id: Catch}\nalgorithm: {name: ppo}\n")
    assert read_plan(written(tmp_path, config="mine.yaml")).experiment.environment.id == "Catch"


def test_as_many_runs_at_once_as_fit_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "cores", lambda: 9)
    assert read_plan(written(tmp_path)).number_at_once == 9  # inline, one thread
    assert read_plan(written(tmp_path, at_once=2)).number_at_once == 2
    several = {"engine": "processes", "actors": 3, "threads": 1, "envs": 8}
    assert cores_of(load("impala_cartpole", several)) == 4
    assert cores_of(load("ppo_cartpole", several)) == 3  # its actors wait for the learner
    assert cores_of(load("a3c_cartpole", {"actors": 5, "engine": "processes"})) == 5
    assert cores_of(load("impala_cartpole", {"engine": "ray"})) == 9
