"""A policy outside training sees what it saw in training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shoal
from shoal.core.errors import SettingsError
from shoal.policy import Policy

SMALL = {"hidden": [8], "activation": "relu", "lstm": 6}
SEQUENCES = {"unroll": 4, "burn_in": 0, "overlap": 0, "batch": 2, "head": 4, "network": SMALL}
KEPT = {"capacity": 100, "minimum": 4}
RUN = {"engine": "inline", "actors": 1, "envs": 2, "steps": 60, "evaluation": {"episodes": 1}}


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of R2D2 that hardly learned anything."""
    folder = tmp_path_factory.mktemp("r2d2") / "run"
    algorithm = {"name": "r2d2", "replay": KEPT, **SEQUENCES}
    shoal.train({**RUN, "environment": {"id": "Catch"}, "algorithm": algorithm}, folder)
    return folder


def seen_by(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The rewards that the algorithm is shown from now on."""
    shown: list[Any] = []
    algorithm = type(policy.experiment.algorithm)
    real = algorithm.act

    def act(self: Any, net: Any, step: Any, carry: Any, rank: Any) -> Any:
        shown.append(step.reward.tolist())
        return real(self, net, step, carry, rank)

    monkeypatch.setattr(algorithm, "act", act)
    return shown


def test_the_reward_of_the_last_action_is_passed_on(recurrent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = shoal.load(recurrent)
    shown, observation = seen_by(policy, monkeypatch), np.zeros(policy.spec.observation.shape, np.float32)
    policy.act(observation, 7.0)  # an episode opens: there was no action before
    policy.act(observation, 0.5)
    policy.act(observation, reward=-2.0, explore=True)
    policy.reset()
    policy.act(observation)
    assert shown == [[0.0], [0.5], [-2.0], [0.0]]


def test_who_forgets_the_reward_is_told(recurrent: Path) -> None:
    policy = shoal.load(recurrent)
    observation = np.zeros(policy.spec.observation.shape, np.float32)
    policy.act(observation)
    with pytest.raises(SettingsError, match=r"r2d2 also sees the reward of the last action: call act\(observation, re"):
        policy.act(observation)


def test_rewards_are_clipped_as_in_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = {"name": "r2d2", "replay": KEPT, **SEQUENCES}
    run = shoal.train({**RUN, "environment": {"id": "ALE/Pong-v5"}, "algorithm": algorithm, "steps": 20,
                       "evaluation": {"episodes": 1, "max_steps": 20}}, tmp_path / "run")  # fmt: skip
    policy = run.policy("newest")
    shown = seen_by(policy, monkeypatch)
    for reward in (None, 30.0, -5.0, 0.5):
        policy.act(np.zeros((4, 84, 84), np.uint8), reward)
    assert shown == [[0.0], [1.0], [-1.0], [0.5]]


@pytest.mark.parametrize("name", ["impala", "ppo", "a3c"])
def test_an_evaluation_may_draw_from_the_policy(name: str, tmp_path: Path) -> None:
    experiment = {**RUN, "environment": {"id": "Catch"}, "algorithm": {"name": name}, "steps": 1}
    if name == "impala":
        experiment["algorithm"] |= {"batch": 2, "unroll": 4}
    taken = {}
    for way in ("mode", "sample"):
        settings = {**experiment, "algorithm": {**experiment["algorithm"], "evaluation_policy": way}}
        policy = shoal.train(settings, tmp_path / way).policy("newest")
        torch.manual_seed(0)
        observation = np.zeros(policy.spec.observation.shape, np.float32)
        taken[way] = {int(policy.act(observation)) for _ in range(60)}
    assert len(taken["mode"]) == 1
    assert len(taken["sample"]) == 3
