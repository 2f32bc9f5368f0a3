"""Several actions at once, and actions that are not always allowed: learned, and never broken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

import shoal
from shoal.core.errors import Fatal, SettingsError, ShoalError
from shoal.envs import Environment, check, make, spec_of
from tests.pace import long
from tests.programs import Allowing, Named

PPO = {"name": "ppo", "lr": 3e-3, "unroll": 16, "epochs": 4, "minibatches": 4, "gamma": 0.5, "entropy_cost": 0.0}
RUN = {"engine": "inline", "actors": 1, "envs": 8, "threads": 1}
KEPT = {"capacity": 20_000, "minimum": 500, "samples_per_insert": 8, "chunk": 16}
Q = {"lr": 2e-3, "gamma": 0.1, "target_every": 50, "optimizer_epsilon": 1e-5}
ALGORITHMS: dict[str, Any] = {
    "ppo": PPO,
    "impala": {"name": "impala", "rule": "adam", "lr": 3e-3, "batch": 8, "unroll": 16, "gamma": 0.5,
               "optimizer_epsilon": 1e-5, "clip_norm": 0.5, "entropy_cost": 0.0},
    "impact": {"name": "impact", "lr": 3e-3, "batch": 8, "unroll": 16, "gamma": 0.5, "clip_norm": 0.5,
               "entropy_cost": 0.0},
    "a3c": {"name": "a3c", "rule": "adam", "lr": 3e-3, "gamma": 0.5, "entropy_cost": 0.0},
    "dqn": {"name": "dqn", "batch": 64, "replay": KEPT, **Q},
    "apex_dqn": {"name": "apex_dqn", "rule": "adam", "batch": 64, "head": 0, "replay": KEPT, **Q},
    "r2d2": {"name": "r2d2", "batch": 16, "unroll": 10, "burn_in": 0, "overlap": 0, "head": 0, **Q,
             "replay": {**KEPT, "capacity": 2_000, "minimum": 50, "chunk": 1},
             "network": {"hidden": [64], "activation": "relu", "lstm": 32}},
    "ngu": {"name": "ngu", "batch": 16, "unroll": 10, "burn_in": 0, "overlap": 0, "head": 0, "arms": 2,
            "lr": 2e-3, "target_every": 50, "optimizer_epsilon": 1e-5,
            "replay": {**KEPT, "capacity": 2_000, "minimum": 50, "chunk": 1},
            "network": {"hidden": [32], "activation": "relu", "lstm": 16}},
}  # fmt: skip


@pytest.mark.parametrize(("kind", "best"), [long("several", 10), long("bits", 10), ("hybrid", 20), long("pair", 20)])
def test_several_actions_at_once_are_learned(kind: str, best: float, tmp_path: Path) -> None:
    environment = {"id": "tests.programs:Named-v0", "arguments": {"kind": kind}}
    evaluation = {"every": 4_000, "episodes": 20, "target": 0.9 * best}
    run = shoal.train({**RUN, "environment": environment, "algorithm": PPO, "steps": 60_000, "evaluation": evaluation},
                      tmp_path / "run")  # fmt: skip
    assert run.solved, run.summary["evaluations"]
    policy, world = run.policy(), Named(kind)
    observation, _ = world.reset(seed=0)
    assert world.action_space.contains(policy.act(observation))


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("ppo", "observation"),
        ("dqn", "info"),
        *(long(name, "observation") for name in ALGORITHMS if name not in ("ppo", "ngu")),
        long("ppo", "info"),
    ],
)
def test_what_is_not_allowed_is_never_done(name: str, where: str, tmp_path: Path) -> None:
    environment = {"id": "tests.programs:Allowing-v0", "arguments": {"where": where}}
    environment |= {"mask": "allowed"} if where == "info" else {}
    before = Allowing.broken
    # The highest of three numbers is 0.75 on average, any of them 0.5.
    evaluation = {"every": 2_000, "episodes": 60, "target": 7.2}
    settings = {**RUN, "environment": environment, "algorithm": ALGORITHMS[name], "steps": 60_000}
    run = shoal.train({**settings, "evaluation": evaluation}, tmp_path / "run")
    assert run.solved, run.summary["evaluations"]
    assert Allowing.broken == before


@pytest.mark.parametrize("name", [*ALGORITHMS])
def test_nobody_ever_chooses_what_is_not_allowed(name: str, tmp_path: Path) -> None:
    before = Allowing.broken
    algorithm = {**ALGORITHMS[name], **({"epsilon": 1.0} if name in ("dqn", "apex_dqn", "r2d2", "ngu") else {})}
    shoal.train({**RUN, "environment": {"id": "tests.programs:Allowing-v0"}, "algorithm": algorithm, "steps": 800,
                 "evaluation": {"episodes": 5}}, tmp_path / "run")  # fmt: skip
    assert Allowing.broken == before


def test_an_action_that_is_not_allowed_ends_the_run() -> None:
    worlds = make(Environment(id="tests.programs:Allowing-v0"), 2, seed=0)
    step = worlds.reset()
    wrong = (step.observation["action_mask"] == 0).argmax(1)
    with pytest.raises(Fatal, match=r"action \d was chosen, but action_mask only allows \[\d \d \d\]"):
        worlds.step(wrong)
    worlds.close()


def test_a_mask_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ShoalError, match=r"info has no 'allowed', which environment\.mask asks for"):
        make(Environment(id="CartPole-v1", mask="allowed"), 1, seed=0).reset()


@pytest.mark.parametrize("name", ["dqn", "apex_dqn", "r2d2", "ngu"])
@pytest.mark.parametrize(("kind", "what"), [("several", "several choices at once"), ("hybrid", "continuous actions")])
def test_what_a_q_network_cannot_do_it_says(name: str, kind: str, what: str, tmp_path: Path) -> None:
    environment = {"id": "tests.programs:Named-v0", "arguments": {"kind": kind}}
    with pytest.raises(ShoalError, match=rf"does not support {what}.*choose ppo, impala or a3c"):
        shoal.train({**RUN, "environment": environment, "algorithm": ALGORITHMS[name]}, tmp_path / "run")


def test_wrappers_are_put_around_an_environment() -> None:
    settings = {"id": "CartPole-v1", "wrappers": [{"name": "TimeLimit", "arguments": {"max_episode_steps": 3}},
                                                  "tests.test_actions:Doubled"]}  # fmt: skip
    worlds = make(Environment.model_validate(settings), 1, seed=0)
    plain = make(Environment(id="CartPole-v1"), 1, seed=0)
    np.testing.assert_allclose(worlds.reset().observation, 2 * plain.reset().observation)
    for _ in range(3):
        worlds.step(np.array([0]))
    assert worlds.episodes()[0].length == 3
    for each in (worlds, plain):
        each.close()


def test_an_unknown_wrapper_is_refused_with_the_nearest() -> None:
    with pytest.raises(Fatal, match=r"unknown wrapper 'TimeLimits'.*did you mean 'TimeLimit'"):
        make(Environment.model_validate({"id": "CartPole-v1", "wrappers": ["TimeLimits"]}), 1, seed=0)
    with pytest.raises(SettingsError, match=r"environment\.wrappers"):
        shoal.configure({"environment": {"id": "CartPole-v1", "wrappers": [3]}, "algorithm": {"name": "ppo"}})


@pytest.mark.parametrize(("id", "kind"), [("ALE/Pong-v5", "a game"), ("Catch", "a toy")])
@pytest.mark.parametrize("setting", [{"wrappers": ["FlattenObservation"]}, {"mask": "allowed"}])
def test_what_only_gymnasiums_environments_take_is_refused_elsewhere(
    id: str, kind: str, setting: dict[str, Any]
) -> None:
    for use in (check, spec_of):
        with pytest.raises(Fatal, match=f"is for Gymnasium's environments, and {id} is {kind}"):
            use(Environment.model_validate({"id": id, **setting}))


class Doubled(gymnasium.ObservationWrapper):  # type: ignore[type-arg]
    """Shows twice what there is."""

    def observation(self, observation: Any) -> Any:
        return 2 * observation
