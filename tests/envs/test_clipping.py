"""Clipped rewards: by every formula, in every kind of environment, and for a policy alike."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

import shoal
from shoal.envs import Environment, make
from shoal.envs.clipping import clipped

REWARDS = (-1e30, -3.0, -0.5, 0.0, 0.5, 3.0, 1e30)
SLOW = {
    None: lambda r: r,
    "sign": lambda r: float(r > 0) - float(r < 0),
    "clamp": lambda r: max(-1, min(1, r)),
    "soft_asymmetric": lambda r: 0.3 * min(math.tanh(r), 0) + 5.0 * max(math.tanh(r), 0),
}


@pytest.mark.parametrize("clip", [*SLOW])
def test_each_way_is_its_formula(clip):
    found = clipped(np.array(REWARDS), clip)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, [SLOW[clip](reward) for reward in REWARDS], rtol=1e-6)


@pytest.mark.parametrize("evaluation", [False, True])
@pytest.mark.parametrize("clip", [*SLOW])
@pytest.mark.parametrize("id", ["Pendulum-v1", "Target"])
def test_steps_hold_clipped_rewards_and_scores_true_ones(id, clip, evaluation):
    envs = make(Environment(id=id, clip_reward=clip), 2, seed=0, evaluation=evaluation, limit=10)
    envs.reset()
    total, rewards = np.zeros(2), []
    for _ in range(10):
        step = envs.step(np.zeros((2, envs.spec.action.size), np.float32))
        total += envs.points
        np.testing.assert_allclose(step.reward, [SLOW[clip](point) for point in envs.points], rtol=1e-6)
        rewards += step.reward.tolist()
    assert min(rewards) < 0
    assert envs.episodes()[0].score == pytest.approx(total[0])
    envs.close()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [-1, 0.5, 1]),
        ({"atari": {"clip_rewards": False}}, [-7, 0.5, 30]),
        ({"clip_reward": "sign"}, [-1, 1, 1]),
        ({"clip_reward": "soft_asymmetric", "atari": {"clip_rewards": False}}, [-0.3, 5 * math.tanh(0.5), 5]),
    ],
)
def test_atari_clamps_unless_told_otherwise(settings, expected):
    games = make(Environment(id="ALE/Pong-v5", **settings), 1, seed=0)
    np.testing.assert_allclose(games.clipped(np.array([-7.0, 0.5, 30.0])), expected, rtol=1e-5)
    games.close()


def test_a_policy_sees_rewards_as_in_training(tmp_path: Path):
    algorithm = {"name": "impala", "batch": 2, "unroll": 4, "network": {"hidden": [8], "lstm": 4, "previous": True}}
    run = shoal.train(
        {"environment": {"id": "Catch", "clip_reward": "soft_asymmetric"}, "algorithm": algorithm, "steps": 1,
         "engine": "inline", "actors": 1, "envs": 2, "threads": 1, "evaluation": {"episodes": 1}}, tmp_path / "run",
    )  # fmt: skip
    policy = run.policy("newest")
    observation = np.zeros(policy.spec.observation.shape, np.float32)
    policy.act(observation)
    core = policy._carry["core"]
    values = []
    for reward in (-40.0, -50.0, 40.0, 0.0):
        policy._carry = {**policy._carry, "core": core}
        policy.act(observation, reward)
        values.append(policy._carry["core"].sum().item())
    assert values[0] == values[1]  # both are -0.3
    assert len({*values}) == 3


def test_an_unknown_way_is_refused():
    with pytest.raises(ValidationError, match="'sign', 'clamp' or 'soft_asymmetric'"):
        Environment(id="Catch", clip_reward="soft")
