"""Environments that a script gives: ids, classes, functions and objects."""

from __future__ import annotations

from typing import Any

import gymnasium
import pytest
from gymnasium.envs.classic_control import CartPoleEnv

import shoal
from shoal.core.errors import SettingsError
from shoal.envs import given

SMALL: dict[str, Any] = {
    "algorithm": {"name": "ppo", "unroll": 8, "epochs": 1, "minibatches": 1},
    "actors": 1,
    "envs": 2,
    "steps": 64,
    "evaluation": {"episodes": 1},
}


def make_one() -> Any:
    return gymnasium.make("CartPole-v1")


class Uncopied(CartPoleEnv):  # type: ignore[misc]
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("has a socket")


def test_what_is_importable_works_everywhere() -> None:
    assert given.settings_of("Catch") == {"id": "Catch"}
    assert given.settings_of(make_one) == {"id": "tests.envs.test_given:make_one"}
    assert given.settings_of(CartPoleEnv) == {"id": "gymnasium.envs.classic_control.cartpole:CartPoleEnv"}
    plain = given.settings_of(gymnasium.make("CartPole-v1", sutton_barto_reward=True, render_mode="rgb_array"))
    assert plain == {"id": "CartPole-v1", "arguments": {"sutton_barto_reward": True}}


@pytest.mark.parametrize("kind", ["class", "object", "wrapped", "lambda"])
def test_what_is_not_trains_in_this_process(kind: str, tmp_path: Any) -> None:
    class Mine(CartPoleEnv):  # type: ignore[misc]
        pass

    env = {
        "class": Mine,
        "object": Mine(),
        "wrapped": gymnasium.wrappers.TimeLimit(gymnasium.make("CartPole-v1"), 3),
        "lambda": lambda: gymnasium.make("CartPole-v1"),
    }[kind]
    run = shoal.train(run_dir=tmp_path / "run", env=env, **SMALL)
    assert run.experiment.engine == "inline"
    assert run.experiment.environment.id.startswith("local/")
    score = run.evaluate(2)
    assert (kind == "wrapped") == (score.scores == [3.0, 3.0])


def test_a_class_by_its_path_is_made_in_workers(tmp_path: Any) -> None:
    changes = {**SMALL, "engine": "processes", "environment.arguments": {"sutton_barto_reward": True}}
    run = shoal.train(run_dir=tmp_path / "run", env=CartPoleEnv, **changes)
    assert run.summary["steps"] >= 64
    assert run.evaluate(1).scores[0] == -1.0


@pytest.mark.parametrize("env", ["CartPole-v1", CartPoleEnv, lambda: make_one()])
def test_arguments_of_a_configs_own_environment_are_dropped(env: Any, tmp_path: Any) -> None:
    config = {**SMALL, "engine": "inline", "environment": {"id": "Catch", "arguments": {"rows": 7}}}
    run = shoal.train(config, tmp_path / "run", env=env, **{"environment.max_faults": 9})
    assert run.experiment.environment.arguments == {}
    assert run.experiment.environment.max_faults == 9


@pytest.mark.parametrize(
    ("env", "more", "complaint"),
    [
        (3, {}, "env: a int is no environment; give a Gymnasium id"),
        (lambda: None, {"engine": "processes"}, r"other processes, which cannot make lambda(-\d+)?: it is an object"),
        (Uncopied(), {}, r"the Uncopied cannot be copied \(TypeError: has a socket\)"),
    ],
)
def test_mistakes_are_refused_in_words(env: Any, more: dict[str, Any], complaint: str, tmp_path: Any) -> None:
    with pytest.raises(SettingsError, match=complaint):
        shoal.train(run_dir=tmp_path / "run", env=env, **SMALL, **more)


def test_a_vector_is_refused(tmp_path: Any) -> None:
    with pytest.raises(SettingsError, match="a vector of environments; give one"):
        shoal.train(run_dir=tmp_path / "run", env=gymnasium.make_vec("CartPole-v1", 2), **SMALL)


def test_a_run_of_an_object_is_explained_to_other_processes(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = shoal.train(run_dir=tmp_path / "run", env=lambda: gymnasium.make("CartPole-v1"), **SMALL)
    monkeypatch.setattr(given, "ENVS", {})
    with pytest.raises(SettingsError, match="was part of the script that trained, and no other process can make it"):
        shoal.load(run.directory)


def test_nothing_given_is_refused() -> None:
    with pytest.raises(SettingsError, match="give a config"):
        shoal.train()
