"""The bandit against a slow transcription of arXiv:2003.13350's sliding-window UCB."""

from __future__ import annotations

import math

import numpy as np
import pytest

from shoal.core.bandit import Bandit


def slow_choice(arms: int, window: int, bonus: float, past: list[tuple[int, float]]) -> int:
    """The arm to pull after these pulls, without random ones."""
    if len(past) < arms:
        return len(past)
    bounds = []
    for arm in range(arms):
        values = [value for pulled, value in past[-window:] if pulled == arm]
        bounds.append(sum(values) / len(values) + bonus * math.sqrt(1 / len(values)) if values else math.inf)
    return bounds.index(max(bounds))


@pytest.mark.parametrize(("arms", "window"), [(1, 1), (1, 5), (3, 1), (3, 2), (4, 7), (5, 90), (8, 20)])
@pytest.mark.parametrize("bonus", [0.0, 1.0, 5.0])
def test_it_pulls_what_the_paper_would(arms, window, bonus):
    random = np.random.default_rng(0)
    bandit, past = Bandit(arms, window, epsilon=0.0, bonus=bonus), []
    for _ in range(200):
        arm = bandit.choose()
        assert arm == slow_choice(arms, window, bonus, past)
        value = float(random.normal(arm % 3, 2.0))
        bandit.reward(arm, value)
        past.append((arm, value))


def test_every_arm_has_its_turn_first_whatever_the_chance_of_random_pulls():
    bandit = Bandit(6, 100, epsilon=1.0, bonus=1.0)
    assert [bandit.choose() for _ in range(6)] == [0, 1, 2, 3, 4, 5]


def test_random_pulls_are_as_frequent_as_said():
    np.random.seed(0)
    bandit = Bandit(4, 1000, epsilon=0.4, bonus=0.0)
    for arm in range(4):
        bandit.reward(bandit.choose(), float(arm == 2))
    pulled = np.bincount([bandit.choose() for _ in range(4000)], minlength=4) / 4000
    np.testing.assert_allclose(pulled, [0.1, 0.1, 0.7, 0.1], atol=0.03)  # 4 standard deviations


def test_what_the_window_has_left_behind_is_forgotten():
    bandit = Bandit(2, window=6, epsilon=0.0, bonus=0.1)
    best, chosen = 0, []
    for episode in range(60):
        best = 0 if episode < 30 else 1
        arm = bandit.choose()
        bandit.reward(arm, float(arm == best))
        chosen.append(arm)
    assert np.mean(chosen[20:30]) < 0.3
    assert np.mean(chosen[-10:]) > 0.7
    assert len(bandit.history) == 6


def test_an_arm_that_is_not_in_the_window_comes_first():
    bandit = Bandit(3, window=2, epsilon=0.0, bonus=1.0)
    for value in (100.0, 1.0, 2.0):
        bandit.reward(bandit.choose(), value)
    assert bandit.choose() == 0
    assert bandit.scores().tolist() == [math.inf, 2.0, 3.0]
