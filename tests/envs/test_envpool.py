"""EnvPool's environments under Shoal's time convention, with a stand-in for the package, which is large."""

from __future__ import annotations

import importlib.util
import sys
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
from gymnasium import spaces

from shoal.core.errors import Fatal
from shoal.envs import Environment, check, chosen, make
from shoal.envs.envpool import Pool
from shoal.experiment import validate
from shoal.sizing import sized

USUAL = 6  # steps after which an episode is cut off


class CountingPool:
    """Counts steps as EnvPool's environments would: the step after an episode's last opens the next."""

    ends: ClassVar[dict[int, int]] = {}  # environment → steps after which its own rules end an episode
    broken: ClassVar[dict[int, float]] = {}  # environment → what its observation holds at the third step of an episode

    def __init__(self, id, env_type, num_envs, num_threads, seed, max_episode_steps):
        assert env_type == "gymnasium"
        assert len({*seed}) == num_envs
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)
        self.action_space = spaces.Box(-1.0, 1.0, (1,), np.float64)
        self.size, self.limit = num_envs, max_episode_steps
        self.count = np.zeros(num_envs, np.int64)
        self.over = np.zeros(num_envs, bool)
        self.closed = False

    def shown(self):
        return np.stack([np.arange(self.size), self.count], 1).astype(np.float64)

    def reset(self, which=None):
        which = np.arange(self.size) if which is None else which
        self.count[which], self.over[which] = 0, False
        return self.shown()[which], {}

    def step(self, action):
        assert action.shape == (self.size, 1)
        self.count = np.where(self.over, 0, self.count + 1)
        reward = np.where(self.over, 0, self.count).astype(np.float32)
        terminated = np.array([self.count[index] == self.ends.get(index, -1) for index in range(self.size)])
        truncated = (self.count >= self.limit) & ~terminated
        self.over = terminated | truncated
        seen = self.shown()
        for index, value in self.broken.items():
            if self.count[index] == 3:
                seen[index, 1] = value
        return seen, reward, terminated, truncated, {"speed": self.count * 2.0}

    def close(self):
        self.closed = True


@pytest.fixture
def pooled(monkeypatch):
    """EnvPool as far as Shoal uses it."""
    monkeypatch.setattr(CountingPool, "ends", {})
    monkeypatch.setattr(CountingPool, "broken", {})
    module = SimpleNamespace(
        list_all_envs=lambda: ["Hopper-v5", "HalfCheetah-v5", "Pong-v5"],
        make_spec=lambda id: SimpleNamespace(config=SimpleNamespace(max_episode_steps=USUAL)),
        make=CountingPool,
        __spec__=importlib.util.find_spec("gymnasium"),  # so that it counts as installed
    )
    monkeypatch.setitem(sys.modules, "envpool", module)
    return CountingPool


def played(pool, steps):
    """Every step of a run."""
    return [pool.reset(), *(pool.step(np.zeros((pool.size, 1), np.float32)) for _ in range(steps))]


def test_time_runs_as_everywhere(pooled):
    pooled.ends = {0: 2}
    pool = Pool("Hopper-v5", 2, 0, 5, {"speed": "last"})
    steps = played(pool, 8)
    counts = np.stack([step.observation[:, 1] for step in steps])
    assert counts[:, 0].tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 2]
    assert counts[:, 1].tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 1]
    assert np.stack([step.first for step in steps])[:, 0].tolist() == [True, *[False, False, True] * 2, False, False]
    assert np.stack([step.first for step in steps])[:, 1].tolist() == [True, *[False] * 6, True, False]
    # Its own rules end the first one's episodes; the second one's are cut off, so that their values go on.
    assert np.stack([step.discount for step in steps])[:, 0].tolist() == [1, 1, 0, 1, 1, 0, 1, 1, 0]
    assert np.stack([step.discount for step in steps])[:, 1].tolist() == [1] * 9
    assert np.stack([step.reward for step in steps])[:, 0].tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 2]
    found = pool.episodes()
    assert [(one.env, one.score, one.length, one.cut) for one in found] == [
        (0, 3.0, 2, False),
        (0, 3.0, 2, False),
        (1, 21.0, 6, False),
        (0, 3.0, 2, False),
    ]
    assert found[0].metrics == {"speed": 4.0}
    assert steps[0].observation.dtype == np.float32


def test_rewards_are_clipped_for_learning_and_not_in_scores(pooled):
    pool = Pool("Hopper-v5", 1, 0, 5, {}, clip="soft_asymmetric")
    pool.reset()
    step = pool.step(np.zeros((1, pool.spec.action.size), np.float32))
    assert pool.points[0] > 0
    np.testing.assert_allclose(step.reward, 5 * np.tanh(pool.points), rtol=1e-6)


def test_a_limit_cuts_episodes_and_says_so(pooled):
    pool = Pool("Hopper-v5", 1, 0, 5, {}, limit=4)
    played(pool, 4)
    assert [(one.length, one.cut) for one in pool.episodes()] == [(4, True)]
    pool.close()
    pool.close()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_an_observation_that_is_no_number_ends_its_episode_uncounted(pooled, value):
    pooled.broken = {1: value}
    pool = Pool("Hopper-v5", 2, 0, 5, {})
    steps = played(pool, 3)
    assert steps[3].first.tolist() == [False, True]
    assert steps[3].observation[1].tolist() == [1, 0]
    assert (steps[3].reward[1], steps[3].discount[1]) == (0, 1)
    assert [report.partition(":")[0] for report in pool.faults()] == [
        "environment 1 of 2 (Hopper-v5, EnvPool) failed at step 3 of its episode"
    ]
    assert pool.episodes() == []
    assert pool.step(np.zeros((2, 1), np.float32)).observation[1].tolist() == [1, 1]


def test_too_many_faults_in_a_row_end_the_run(pooled):
    pooled.broken = {0: np.nan}
    pool = Pool("Hopper-v5", 1, 0, 2, {})
    with pytest.raises(Fatal, match="3 faults in a row, 2 allowed"):
        played(pool, 20)


def test_auto_takes_it_for_what_both_have(pooled):
    assert chosen(Environment(id="Hopper-v5")) == "envpool"
    assert chosen(Environment(id="Walker2d-v5")) == "gymnasium"  # not in the stand-in's list
    assert chosen(Environment(id="CartPole-v1")) == "gymnasium"
    assert chosen(Environment(id="Hopper-v5", backend="gymnasium")) == "gymnasium"
    assert chosen(Environment(id="Hopper-v5", arguments={"frame_skip": 2})) == "gymnasium"
    assert isinstance(make(Environment(id="Hopper-v5"), 2, seed=0), Pool)
    assert not isinstance(make(Environment(id="Pendulum-v1"), 2, seed=0), Pool)


@pytest.mark.parametrize("there", [True, False])
def test_a_run_names_its_backend_and_keeps_it(pooled, monkeypatch, there):
    monkeypatch.setattr("shoal.envs.envpool.installed", lambda: there)
    tree = {"environment": {"id": "Hopper-v5"}, "algorithm": {"name": "td3"}, "actors": 1, "envs": 1}
    begun = sized(validate(tree))
    assert begun.environment.backend == ("envpool" if there else "gymnasium")
    monkeypatch.setattr("shoal.envs.envpool.installed", lambda: not there)
    assert sized(begun).environment.backend == begun.environment.backend
    assert sized(validate(tree | {"environment": {"id": "Pendulum-v1"}})).environment.backend == "auto"


def test_without_the_package_auto_does_without(monkeypatch):
    monkeypatch.setattr("shoal.envs.envpool.installed", lambda: False)
    assert chosen(Environment(id="Hopper-v5")) == "gymnasium"


def test_what_it_cannot_do_is_refused_in_words(pooled, monkeypatch):
    with pytest.raises(Fatal, match=r"'Hoper-v5' is no MuJoCo environment that it has.*Hopper-v5"):
        check(Environment(id="Hoper-v5", backend="envpool"))
    with pytest.raises(Fatal, match=r"environment.wrappers needs Gymnasium's own environments"):
        check(Environment(id="Hopper-v5", backend="envpool", wrappers=["RescaleAction"]))
    monkeypatch.setitem(sys.modules, "envpool", None)  # as if it were not installed
    with pytest.raises(Fatal, match=r"pip install 'shoal\[envpool\]'"):
        check(Environment(id="Hopper-v5", backend="envpool"))
