"""Atari games under Shoal's time convention."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import numpy as np
import pytest

from shoal.core.errors import Fatal
from shoal.core.types import ActionSpec, ArraySpec
from shoal.envs import Atari, Environment, make
from shoal.envs.atari import ids, is_atari, rom
from tests.pace import seconds


def play(game, steps, size=2, seed=0, evaluation=False, metrics=None, actions=None, **settings):
    """The worlds, closed, and every step, stacked along time, of random play."""
    environment = Environment(id=f"ALE/{game}-v5", atari=Atari(**settings), metrics=metrics or {})
    worlds = make(environment, size, seed, evaluation)
    random = np.random.default_rng(0)
    out = [worlds.reset()]
    for _ in range(steps):
        chosen = random.integers(worlds.spec.action.size, size=size) if actions is None else np.full(size, actions)
        out.append(worlds.step(chosen))
    worlds.close()
    return worlds, out


def column(steps, name, environment=0):
    return np.array([getattr(step, name)[environment] for step in steps])


def test_ids():
    assert is_atari("ALE/Pong-v5")
    assert is_atari("PongNoFrameskip-v4")
    assert not is_atari("CartPole-v1")
    assert rom("ALE/Pong-v5") == rom("PongNoFrameskip-v4") == "pong"
    assert rom("ALE/SpaceInvaders-v5") == "space_invaders"
    assert rom("ALE/UpNDown-v5") == "up_n_down"
    assert all(is_atari(id) and rom(id) for id in ids())
    with pytest.raises(Fatal, match=r"unknown Atari game 'ALE/SpaceInvader-v5'; nearest known: ALE/SpaceInvaders-v5"):
        make(Environment(id="ALE/SpaceInvader-v5"), 1, seed=0)


def test_arguments_are_refused():
    with pytest.raises(Fatal, match=r"its settings are in `atari`.*frameskip"):
        make(Environment(id="ALE/Pong-v5", arguments={"frameskip": 1}), 1, seed=0)


def test_spec_and_types():
    worlds, steps = play("Pong", 2)
    assert worlds.spec.observation == ArraySpec((4, 84, 84), "uint8", stack=4)
    assert worlds.spec.action == ActionSpec(6)
    for step in steps:
        assert step.observation.shape == (2, 4, 84, 84)
        assert [part.dtype.name for part in step] == ["uint8", "float32", "float32", "bool"]
    assert play("Pong", 0, full_action_space=True)[0].spec.action == ActionSpec(18)
    small, steps = play("Pong", 1, grayscale=False, stack=2, height=40, width=30)
    assert small.spec.observation == ArraySpec((6, 40, 30), "uint8", stack=2)
    assert steps[1].observation.shape == (2, 6, 40, 30)


def test_colours_are_channels():
    _, colour = play("Breakout", 6, grayscale=False, noop_max=0)
    _, gray = play("Breakout", 6, noop_max=0)
    frames = colour[-1].observation.reshape(2, 4, 3, 84, 84).astype(float)
    brightness = np.tensordot(frames, [0.299, 0.587, 0.114], axes=([2], [0]))  # ITU-R BT.601
    assert np.abs(brightness - gray[-1].observation).mean() < 2


def test_seeds():
    def observations(seed):
        _, steps = play("Pong", 30, seed=seed, sticky=0.25, actions=2)
        return np.array([step.observation for step in steps])

    one = observations(1)
    np.testing.assert_array_equal(one, observations(1))
    assert not np.array_equal(one, observations(2))
    assert not np.array_equal(one[:, 0], one[:, 1])


@pytest.mark.parametrize("sticky", [0.0, 1.0])
def test_actions_that_always_stick_never_change(sticky):
    up, down = (play("Pong", 10, noop_max=0, sticky=sticky, actions=actions)[1] for actions in (2, 3))
    assert np.array_equal(up[-1].observation, down[-1].observation) == bool(sticky)


def test_pooling_shows_the_brighter_of_two_frames():
    def observations(maxpool):
        _, steps = play("SpaceInvaders", 60, size=1, noop_max=0, maxpool=maxpool)
        return np.array([step.observation for step in steps])

    pooled, plain = observations(True), observations(False)
    assert (pooled >= plain).all()
    assert (pooled > plain).any()


def test_actions_outside_are_refused():
    worlds = make(Environment(id="ALE/Pong-v5"), 1, seed=0)
    worlds.reset()
    worlds.step(np.array([5], np.uint8))  # any whole number will do
    with pytest.raises(Fatal, match="between 0 and 5"):
        worlds.step(np.array([6]))
    worlds.close()


def test_a_cut_game_truncates():
    worlds, steps = play("Pong", 30, max_frames=40, noop_max=0)
    expected = [step % 11 == 0 for step in range(31)]  # an opening and ten actions of four frames
    for environment in range(2):
        assert column(steps, "first", environment).tolist() == expected
    assert (column(steps, "discount") == 1).all()
    assert (column(steps, "reward")[expected] == 0).all()
    assert [episode.length for episode in worlds.episodes()] == [10] * 4
    opening, last, again = steps[0].observation[0], steps[10].observation[0], steps[11].observation[0]
    np.testing.assert_array_equal(opening, again)  # without idle frames every game begins alike
    np.testing.assert_array_equal(last[:3], steps[9].observation[0][1:])  # the true last: one frame further


def test_a_lost_game_terminates():
    worlds, steps = play("Breakout", 400)
    episodes = worlds.episodes()
    assert len(episodes) >= 3
    for environment in range(2):
        first, discount = column(steps, "first", environment), column(steps, "discount", environment)
        np.testing.assert_array_equal(np.flatnonzero(discount == 0)[: first[1:].sum()] + 1, np.flatnonzero(first)[1:])
        assert (column(steps, "reward", environment)[first] == 0).all()
    scores = sum(column(steps, "reward", environment).sum() for environment in range(2))
    assert 0 < sum(episode.score for episode in episodes) <= scores
    assert worlds.faults() == []


def test_steps_are_not_overwritten():
    environment = Environment(id="ALE/Pong-v5")
    worlds = make(environment, 1, seed=0)
    kept = [worlds.reset(), *(worlds.step(np.array([2])) for _ in range(5))]
    copies = [step.observation.copy() for step in kept]
    for _ in range(20):
        worlds.step(np.array([3]))
    np.testing.assert_array_equal([step.observation for step in kept], copies)
    worlds.close()


def test_scores_are_true_where_rewards_are_clipped():
    settings = {"size": 1, "max_frames": 2000, "noop_max": 0}
    worlds, clipped = play("SpaceInvaders", 600, **settings)
    _, real = play("SpaceInvaders", 600, clip_rewards=False, **settings)
    assert column(clipped, "reward").max() == 1
    assert column(real, "reward").max() >= 5
    np.testing.assert_array_equal(column(clipped, "reward"), np.clip(column(real, "reward"), -1, 1))
    np.testing.assert_array_equal(column(clipped, "reward"), np.sign(column(real, "reward")))
    end = np.flatnonzero(column(real, "first"))[1]
    assert worlds.episodes()[0].score == column(real, "reward")[:end].sum()


def test_an_evaluation_sees_the_rewards_that_training_saw():
    settings = {"size": 1, "max_frames": 2000, "noop_max": 0}
    worlds, steps = play("SpaceInvaders", 600, evaluation=True, **settings)
    assert column(steps, "reward").max() == 1
    assert worlds.episodes()[0].score >= 5
    worlds = make(Environment(id="ALE/SpaceInvaders-v5"), 1, seed=0, evaluation=True)
    assert worlds.clipped(np.array([30.0])).tolist() == [1.0]
    worlds.reset()
    points = []
    for _ in range(200):
        step = worlds.step(np.array([1]))
        points.append(worlds.points[0])
        assert np.clip(points[-1], -1, 1) == step.reward[0]
    assert max(points) >= 5
    worlds.close()


def test_without_clipping():
    _, steps = play("SpaceInvaders", 300, clip_rewards=False)
    assert max(column(steps, "reward", environment).max() for environment in range(2)) >= 5


def test_a_lost_life_ends_an_episode_but_not_the_game():
    settings = {"size": 1, "noop_max": 0, "metrics": {"lives": "last", "episode_frame_number": "last"}}
    worlds, steps = play("Breakout", 500, episodic_life=True, **settings)
    games = worlds.episodes()
    ends, first = np.flatnonzero(column(steps, "discount") == 0), np.flatnonzero(column(steps, "first"))
    np.testing.assert_array_equal(ends[: len(first) - 1] + 1, first[1:])
    assert len(games) >= 2
    assert len(ends) // 5 == len(games)  # a game has five lives
    reward = column(steps, "reward")
    assert (reward[first] == 0).all()
    for game in games:
        assert game.metrics["lives"] == 0
        assert abs(game.metrics["episode_frame_number"] - 4 * game.length) < 10  # the length of the whole game
    opening = steps[0].observation[0]
    assert not np.array_equal(steps[first[1]].observation[0], opening)  # the game went on
    whole, real = play("Breakout", 500, episodic_life=True, evaluation=True, **settings)
    assert column(real, "first").sum() == len(whole.episodes()) + 1


def test_fire_opens_the_next_life():
    # Without fire Breakout would wait for ever, so lives are lost under idle play only if fire is pressed.
    settings = {"size": 1, "noop_max": 0, "actions": 0, "episodic_life": True}
    assert (column(play("Breakout", 300, **settings)[1], "discount") == 0).sum() >= 5
    assert (column(play("Breakout", 300, fire_reset=False, **settings)[1], "discount") == 0).sum() == 0


@pytest.mark.parametrize("render", [False, True])
def test_close_ends_the_threads(render):
    def threads():
        return len(os.listdir("/proc/self/task"))

    before = threads()
    worlds = make(Environment(id="ALE/Pong-v5", atari=Atari(threads=3)), 3, seed=0, render=render)
    worlds.reset()
    assert threads() > before
    worlds.close()
    worlds.close()
    deadline = time.monotonic() + seconds(10)
    while threads() > before and time.monotonic() < deadline:
        pass  # the system lists a thread for a moment after it ended
    assert threads() == before


def test_no_banner():
    code = "from shoal.envs import *; make(Environment(id='ALE/Pong-v5'), 1, seed=0).close()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout + done.stderr == ""


class Script:
    """Stands in for ALE: one game that says what is written, and keeps the actions it was given."""

    def __init__(self, *lines):
        self.lines, self.actions = list(lines), []

    def step(self, action):
        self.actions.append(int(action[0]))
        points, terminated, truncated, lives = self.lines.pop(0)
        frames = np.zeros((1, 4, 84, 84), np.uint8)
        return (
            frames,
            np.array([points], np.int32),
            np.array([terminated]),
            np.array([truncated]),
            {"lives": np.array([lives], np.int32)},
        )


def read(*lines, metrics=None):
    """Reward, discount and first of each step; the episodes; the actions that reached the game."""
    atari = Atari(episodic_life=True)
    worlds = make(Environment(id="ALE/Breakout-v5", atari=atari, metrics=metrics or {}), 1, seed=0)
    worlds.reset()
    script = worlds._games = Script(*lines)
    steps = [worlds.step(np.array([3])) for _ in lines]
    worlds.close()
    told = [(step.reward.item(), step.discount.item(), step.first.item()) for step in steps]
    return told, worlds.episodes(), script.actions


def test_points_of_an_opening_step_count_in_the_score_only():
    told, _, actions = read((2, False, False, 5), (0, False, False, 4), (7, False, False, 4), (1, False, False, 4))
    assert told == [(1, 1, False), (0, 0, False), (0, 1, True), (1, 1, False)]
    assert actions == [3, 3, 1, 3]
    _, episodes, _ = read((2, False, False, 4), (7, False, False, 4), (1, True, False, 0))
    assert [(episode.score, episode.length) for episode in episodes] == [(10, 3)]


def test_an_opening_step_that_ends_something_is_followed_by_another():
    told, _, actions = read((0, False, False, 4), (0, False, False, 3), (0, False, False, 3), (0, False, False, 3))
    assert told == [(0, 0, False), (0, 1, True), (0, 1, True), (0, 1, False)]
    assert actions == [3, 1, 1, 3]
    told, episodes, _ = read((0, False, False, 1), (0, True, False, 0), (0, False, False, 5), (0, False, False, 5))
    assert told == [(0, 0, False), (0, 1, True), (0, 1, True), (0, 1, False)]
    assert [episode.length for episode in episodes] == [2]


def test_a_life_lost_as_the_game_is_cut_is_lost():
    told, _, _ = read((0, False, True, 4), (0, False, False, 5), (0, False, False, 5))
    assert told == [(0, 0, False), (0, 1, True), (0, 1, False)]


def test_metrics_leave_out_the_opening_of_a_game():
    lines = (0, False, False, 5), (0, True, False, 0), (0, False, False, 5), (0, True, False, 3)
    _, episodes, _ = read(*lines, metrics={"lives": "sum"})
    assert [episode.metrics for episode in episodes] == [{"lives": 5}, {"lives": 3}]


def test_a_new_game_with_fewer_lives_has_lost_none():
    told, _, actions = read((0, False, False, 6), (0, False, True, 6), (0, False, False, 5), (0, False, False, 5))
    assert told == [(0, 1, False), (0, 1, False), (0, 1, True), (0, 1, False)]
    assert actions == [3, 3, 3, 3]


class Spy:
    """Passes everything on to ALE's games and keeps what game 0 answered."""

    def __init__(self, games):
        self.games, self.told = games, []

    def reset(self, seed):
        frames, info = self.games.reset(seed=seed)
        self.told.append((0, False, False, int(info["lives"][0])))
        return frames, info

    def step(self, action):
        frames, points, terminated, truncated, info = self.games.step(action)
        self.told.append((int(points[0]), bool(terminated[0]), bool(truncated[0]), int(info["lives"][0])))
        return frames, points, terminated, truncated, info


@pytest.mark.parametrize("game", ["Breakout", "SpaceInvaders"])
def test_pictures_show_the_game_that_is_played(game):
    # Observations as large as the pictures, so that both can be compared point by point.
    atari = Atari(sticky=0.25, episodic_life=True, height=210, width=160, max_frames=900, threads=2)
    assert (atari.noop_max, atari.fire_reset) == (30, True)
    worlds = make(Environment(id=f"ALE/{game}-v5", atari=atari), 3, seed=4, render=True)
    games, twin = worlds._games, worlds._twin = Spy(worlds._games), Spy(worlds._twin)
    random = np.random.default_rng(0)
    step = worlds.reset()
    for instant in range(900):
        if instant % 50 == 0 or step.first[0]:
            picture = worlds.render()
            assert (picture.dtype, picture.shape) == (np.uint8, (210, 160, 3))
            brightness = picture @ [0.299, 0.587, 0.114]  # ITU-R BT.601
            assert np.abs(brightness - step.observation[0, -1]).max() < 2
        step = worlds.step(random.integers(worlds.spec.action.size, size=3)) if instant != 300 else worlds.reset()
    worlds.close()
    assert games.told == twin.told
    points, terminated, truncated, _ = np.array(games.told).T
    assert np.count_nonzero(points) > 3
    assert (terminated | truncated).sum() >= 3


def test_pictures_change_nothing():
    def stream(render):
        worlds = make(Environment(id="ALE/Pong-v5"), 2, seed=1, render=render)
        steps = [worlds.reset(), *(worlds.step(np.array([2, 3])) for _ in range(30))]
        worlds.close()
        return steps

    for one, other in zip(stream(True), stream(False), strict=True):
        for mine, its in zip(one, other, strict=True):
            np.testing.assert_array_equal(mine, its)


def test_pictures_are_the_callers_to_keep():
    worlds = make(Environment(id="ALE/Breakout-v5"), 1, seed=1, render=True)
    worlds.reset()
    kept = worlds.render()
    copy = kept.copy()
    for _ in range(20):
        worlds.step(np.array([2]))
    np.testing.assert_array_equal(kept, copy)
    shown = worlds.render()
    assert not np.array_equal(shown, copy)
    shown[:] = 0
    assert worlds.render().any()
    worlds.close()


def test_no_picture_without_asking_or_before_a_reset():
    envs = make(Environment(id="ALE/Pong-v5"), 1, seed=0)
    envs.reset()
    with pytest.raises(Fatal, match="created without `render=True`"):
        envs.render()
    envs.close()
    envs = make(Environment(id="ALE/Pong-v5"), 1, seed=0, render=True)
    with pytest.raises(Fatal, match=r"cannot be rendered before reset\(\)"):
        envs.render()
    envs.close()


@pytest.mark.parametrize(("frameskip", "fps"), [(4, 15), (1, 60)])
def test_a_second_of_watching_is_a_second_of_play(frameskip, fps):
    worlds = make(Environment(id="ALE/Pong-v5", atari=Atari(frameskip=frameskip)), 1, seed=0)
    assert worlds.fps == fps
    worlds.close()
