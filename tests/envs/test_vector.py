"""Stepping environments together: time, seeds, scores and faults."""

from __future__ import annotations

import subprocess
import sys
from typing import ClassVar

import numpy as np
import pytest
from gymnasium import spaces

from shoal.core.errors import Fatal
from shoal.envs import Environment, make
from shoal.envs.toy import Counting
from shoal.envs.vector import HEALTHY_STEPS, Vector


def stream(envs, steps, action=0):
    """Every step of a run, stacked along time."""
    out = [envs.reset()]
    for _ in range(steps):
        out.append(envs.step(np.full(envs.size, action)))
    envs.close()
    return out


class Faulty:
    """Counts like Counting with episodes of ten, but misbehaves at chosen steps of its life."""

    alive = 0
    seeds: ClassVar[list[int | None]] = []

    def __init__(self, at=(), how="raise", length=10):
        self.observation_space = spaces.Dict({"count": spaces.Box(-9, 9, (1,)), "time": spaces.Discrete(20)})
        self.action_space = spaces.Discrete(2)
        self.at, self.how, self.length = at, how, length
        self.life = 0
        Faulty.alive += 1

    def show(self):
        return {"count": np.array([self.count], np.float32), "time": self.count}

    def reset(self, *, seed=None, options=None):
        Faulty.seeds.append(seed)
        self.count = 0
        if "reset" in self.at:
            raise RuntimeError("no reset")
        return self.show(), {}

    def step(self, action):
        self.life += 1
        self.count += 1
        ended, reward, shown = self.count == self.length, 1.0, self.show()
        if self.life in self.at:
            if self.how == "raise":
                raise RuntimeError(f"broke at {self.life}")
            if self.how == "observation":
                shown["count"][0] = np.nan
            if self.how == "reward":
                reward = np.inf
            ended = True  # a fault outranks an ending
        return shown, reward, ended, False, {}

    def close(self):
        Faulty.alive -= 1


@pytest.fixture(autouse=True)
def fresh():
    Faulty.alive, Faulty.seeds = 0, []


def faulty(scripts, max_faults=5, size=1, **arguments):
    """Worlds whose environments follow the scripts in the order of their making; the last repeats."""
    made = []

    def create():
        made.append(None)
        return Faulty(scripts[min(len(made), len(scripts)) - 1], **arguments)

    return Vector("Faulty", create, size, 7, max_faults, {})


@pytest.mark.parametrize(("ending", "last"), [("termination", 0), ("truncation", 1)])
def test_time_is_aligned(ending, last):
    envs = make(Environment(id="Counting", arguments={"length": 3, "ending": ending}), 2, seed=1)
    steps = stream(envs, 8, action=2)
    for environment in range(2):
        rows = [
            [*step.observation[environment, [0, 1, 3]], step.reward[environment], step.discount[environment]]
            for step in steps
        ]
        # count, episode, last action, reward, discount
        assert rows == [
            [0, 0, -1, 0, 1],
            [1, 0, 2, 1, 1],
            [2, 0, 2, 2, 1],
            [3, 0, 2, 3, last],
            [0, 1, -1, 0, 1],
            [1, 1, 2, 1, 1],
            [2, 1, 2, 2, 1],
            [3, 1, 2, 3, last],
            [0, 2, -1, 0, 1],
        ]
        assert [bool(step.first[environment]) for step in steps] == [step % 4 == 0 for step in range(9)]
    assert [(episode.score, episode.length) for episode in envs.episodes()] == [(6.0, 3)] * 4
    assert envs.episodes() == []


def test_types_and_fresh_arrays():
    envs = make(Environment(id="Counting"), 3, seed=1)
    steps = stream(envs, 12)
    assert {step.observation.dtype for step in steps} == {np.dtype("float32")}
    assert {step.reward.dtype for step in steps} == {np.dtype("float32")}
    assert {step.discount.dtype for step in steps} == {np.dtype("float32")}
    assert {step.first.dtype for step in steps} == {np.dtype("bool")}
    again = stream(make(Environment(id="Counting"), 3, seed=1), 12)
    np.testing.assert_array_equal([step.observation for step in steps], [step.observation for step in again])
    assert [step.observation[0, 0] for step in steps[:6]] == [0, 1, 2, 3, 4, 5]  # none was overwritten


def test_environments_of_different_lengths_end_apart():
    lengths = iter([2, 3])
    envs = Vector("Counting", lambda: Counting(next(lengths)), 2, 0, 5, {})
    steps = stream(envs, 6)
    np.testing.assert_array_equal(
        [step.first for step in steps], [[1, 1], [0, 0], [0, 0], [1, 0], [0, 1], [0, 0], [1, 0]]
    )
    np.testing.assert_array_equal(
        [step.discount for step in steps], [[1, 1], [1, 1], [0, 1], [1, 0], [1, 1], [0, 1], [1, 1]]
    )


def test_reset_leaves_episodes_under_way():
    envs = make(Environment(id="Counting", arguments={"length": 3}), 1, seed=1)
    envs.reset()
    envs.step(np.array([0]))
    step = envs.reset()
    assert step.first.tolist() == [True]
    assert step.observation[0, :2].tolist() == [0, 1]
    for _ in range(3):
        envs.step(np.array([0]))
    assert [episode.length for episode in envs.episodes()] == [3]
    envs.close()


@pytest.mark.parametrize("id", ["CartPole-v1", "Catch", "Identity"])
def test_seeds(id):
    def observations(seed):
        return np.array([step.observation for step in stream(make(Environment(id=id), 4, seed), 60)])

    one = observations(1)
    np.testing.assert_array_equal(one, observations(1))
    assert not np.array_equal(one, observations(2))
    assert len(np.unique(one.reshape(61, 4, -1)[:, :, :].transpose(1, 0, 2).reshape(4, -1), axis=0)) == 4


def test_only_the_first_reset_passes_a_seed():
    envs = faulty([()], size=2)
    stream(envs, 25)
    assert None not in Faulty.seeds[:2]
    assert Faulty.seeds[0] != Faulty.seeds[1]
    assert Faulty.seeds[2:] == [None] * 4


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raise", "RuntimeError: broke at 3"),
        ("observation", "observation.count holds nan"),
        ("reward", "reward holds inf"),
    ],
)
def test_a_fault_cuts_the_episode(how, words):
    envs = faulty([(3,), ()], how=how)
    steps = stream(envs, 15)
    # The step that failed opens the next episode, and so does not count as one of the last.
    assert [int(step.observation["count"][0, 0]) for step in steps[:7]] == [0, 1, 2, 0, 1, 2, 3]
    assert [float(step.reward[0]) for step in steps[:7]] == [0, 1, 1, 0, 1, 1, 1]
    assert [float(step.discount[0]) for step in steps[:7]] == [1] * 7
    assert [bool(step.first[0]) for step in steps[:7]] == [True, False, False, True, False, False, False]
    assert [(episode.score, episode.length) for episode in envs.episodes()] == [(10.0, 10)]
    (report,) = envs.faults()
    line = report.splitlines()[0]
    for part in (
        "environment 0 of 1",
        "Faulty",
        f"seed {Faulty.seeds[0]}",
        "step 3 of its episode",
        "step 3 in all",
    ):
        assert part in line
    assert line.endswith(words)
    if how == "raise":
        assert "Traceback" in report
    assert envs.faults() == []
    assert Faulty.seeds[1] not in (None, Faulty.seeds[0])
    assert Faulty.alive == 0


def test_a_fault_leaves_the_other_environments_alone():
    envs = faulty([(), (3,), ()], size=2)
    steps = stream(envs, 6)
    counts = np.array([step.observation["count"][:, 0] for step in steps])
    np.testing.assert_array_equal(counts[:, 0], [0, 1, 2, 3, 4, 5, 6])
    np.testing.assert_array_equal(counts[:, 1], [0, 1, 2, 0, 1, 2, 3])


def test_a_reset_that_fails_later_opens_the_next_episode_all_the_same():
    class Once(Faulty):
        def reset(self, *, seed=None, options=None):
            if seed is None:
                raise RuntimeError("cannot go on")
            return super().reset(seed=seed)

    envs = Vector("Once", lambda: Once(length=2), 1, 7, 5, {})
    steps = stream(envs, 7)
    assert [int(step.observation["count"][0, 0]) for step in steps] == [0, 1, 2, 0, 1, 2, 0, 1]
    assert [bool(step.first[0]) for step in steps] == [True, False, False, True, False, False, True, False]
    assert len(envs.episodes()) == 2
    assert len(envs.faults()) == 2
    assert Faulty.alive == 0


def test_too_many_faults_in_a_row_end_the_run():
    envs = faulty([(2,)], max_faults=2)
    with pytest.raises(Fatal) as caught:
        stream(envs, 100)
    envs.close()
    message = str(caught.value)
    assert "3 faults in a row, 2 allowed" in message
    assert f"seed {Faulty.seeds[-1]}" in message
    assert "step 2 of its episode, step 6 in all" in message
    assert "Traceback" in message
    assert "broke at 2" in message
    assert len(envs.faults()) == 2
    assert Faulty.alive == 0


def test_a_finished_episode_begins_a_new_row():
    envs = faulty([(12,)], max_faults=1)
    stream(envs, 100)
    assert len(envs.faults()) > 5


@pytest.mark.parametrize(("healthy", "ends"), [(HEALTHY_STEPS + 1, False), (HEALTHY_STEPS, True)])
def test_enough_healthy_steps_begin_a_new_row(healthy, ends, monkeypatch):
    monkeypatch.setattr(Faulty, "show", lambda self: {"count": np.zeros(1, np.float32), "time": 0})
    envs = faulty([(healthy,)], max_faults=1, length=10**9)  # the last of them fails
    if ends:
        with pytest.raises(Fatal, match="2 faults in a row"):
            stream(envs, 5 * HEALTHY_STEPS)
        envs.close()
    else:
        stream(envs, 5 * HEALTHY_STEPS)
        assert len(envs.faults()) > 3


def test_a_first_reset_that_fails_ends_the_run_at_once():
    envs = faulty([("reset",)])
    with pytest.raises(Fatal, match=r"step 0 of its episode, step 0 in all: RuntimeError: no reset"):
        envs.reset()
    envs.close()
    assert Faulty.alive == 0


def test_a_first_observation_that_is_not_finite_ends_the_run_at_once():
    class Blank(Faulty):
        def show(self):
            return {"count": np.array([np.nan], np.float32), "time": 0}

    envs = Vector("Blank", Blank, 1, 7, 5, {})
    with pytest.raises(Fatal, match=r"no episode could be opened: .*observation.count holds nan"):
        envs.reset()
    envs.close()


def test_an_environment_that_cannot_be_made_closes_those_that_were():
    made = iter([Faulty, Faulty])
    with pytest.raises(Fatal, match="cannot create Faulty: StopIteration"):
        Vector("Faulty", lambda: next(made)(), 3, 7, 5, {})
    assert Faulty.alive == 0


def test_metrics_come_out_of_info():
    class Talking(Counting):
        def step(self, action):
            *step, _ = super().step(action)
            height = self._count**2
            return *step, {"gold": 1, "height": height, "speed": np.float64(height), "name": "unused"}

    envs = Vector("Talking", lambda: Talking(3), 1, 7, 5, {"gold": "sum", "height": "last", "speed": "average"})
    stream(envs, 7)
    assert [episode.metrics for episode in envs.episodes()] == [{"gold": 3, "height": 9, "speed": 14 / 3}] * 2


def test_a_metric_that_is_no_number_is_reported():
    class Talking(Counting):
        def step(self, action):
            *step, _ = super().step(action)
            return *step, {"gold": "none"}

    envs = Vector("Talking", Talking, 1, 7, 5, {"gold": "sum"})
    envs.reset()
    envs.step(np.array([0]))
    assert "metric 'gold' needs a number, but info holds 'none'" in envs.faults()[0]
    envs.close()


class Sketch(Faulty):
    """Draws its count."""

    def render(self):
        return np.full((2, 2, 3), self.count, np.uint8)


def test_after_a_fault_the_next_episode_is_pictured():
    envs = Vector("Sketch", lambda: Sketch((3,)), 1, 7, 5, {}, render=True)
    envs.reset()
    shown = [int(envs.render()[0, 0, 0])]
    for _ in range(5):
        envs.step(np.array([0]))
        shown.append(int(envs.render()[0, 0, 0]))
    assert shown == [0, 1, 2, 0, 1, 2]
    assert len(envs.faults()) == 1
    assert envs.fps == 30  # nobody said
    envs.close()


@pytest.mark.parametrize("limit", [3, 10, 11])
def test_a_limit_cuts_episodes_that_do_not_end(limit):
    envs = Vector("Faulty", lambda: Faulty(length=10), 1, 7, 5, {}, limit=limit)
    steps = stream(envs, 22)
    length, cut = min(limit, 10), limit < 10
    assert {(episode.score, episode.length, episode.cut) for episode in envs.episodes()} == {(length, length, cut)}
    firsts = [instant for instant, step in enumerate(steps) if step.first[0]]
    assert firsts == [*range(0, 23, length + 1)]
    last = steps[length]
    assert int(last.observation["count"][0, 0]) == length  # its true last observation
    assert float(last.discount[0]) == (1.0 if cut else 0.0)


def test_import_is_light():
    code = "import sys, shoal.envs; print({'gymnasium', 'ale_py', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
