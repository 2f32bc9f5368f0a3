"""The rules of the toy environments."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from shoal.envs import TOYS, Environment, make
from shoal.envs.toy import (
    BLOCK,
    LEVELS,
    Catch,
    Chain,
    Counting,
    Cues,
    DeepSea,
    Identity,
    Memory,
    Still,
    Target,
    bars,
    blocks,
)


def play(id, choose, steps=200, **arguments):
    """Scores of the episodes that a rule on observations [B, ...] gets."""
    envs = make(Environment(id=id, arguments=arguments), 4, seed=3)
    step = envs.reset()
    for _ in range(steps):
        step = envs.step(choose(step.observation))
    envs.close()
    return [episode.score for episode in envs.episodes()]


def test_table():
    assert list(TOYS) == ["Catch", "Identity", "Target", "Counting", "Memory", "DeepSea", "Chain", "Cues", "Still"]
    assert TOYS["Catch"] == "Move a paddle under a falling ball: +1 for catching it, -1 for missing it."


def test_catch_is_won_by_following_the_ball():
    def follow(observation):
        board = observation.reshape(-1, 10, 5)
        ball = board[:, :9].sum(1).argmax(-1)
        return np.sign(ball - board[:, 9].argmax(-1)) + 1

    scores = play("Catch", follow)
    assert len(scores) == 80
    assert set(scores) == {1.0}
    assert -1.0 in play("Catch", lambda observation: np.ones(len(observation), np.int64))


def test_catch_by_hand():
    env = Catch(rows=3, columns=3)
    board, _ = env.reset(seed=0)
    column = int(board[:3].argmax())
    assert board.tolist() == [*np.eye(3)[column], 0, 0, 0, 0, 1, 0]
    board, reward, terminated, truncated, _ = env.step(0)
    assert board.tolist() == [0, 0, 0, *np.eye(3)[column], 1, 0, 0]
    assert (reward, terminated, truncated) == (0.0, False, False)
    board, reward, terminated, truncated, _ = env.step(0)  # the wall holds the paddle
    assert (reward, terminated, truncated) == (1.0 if column == 0 else -1.0, True, False)


def test_identity():
    assert set(play("Identity", lambda observation: observation.argmax(-1), states=3, length=6)) == {6.0}
    assert set(play("Identity", lambda observation: (observation.argmax(-1) + 1) % 3, states=3)) == {0.0}
    env = Identity(states=3)
    state, _ = env.reset(seed=0)
    assert env.step(int(state))[1] == 1.0


def test_target():
    scores = play("Target", lambda observation: observation, size=2)
    np.testing.assert_array_equal(scores, 0.0)
    env = Target()
    target, _ = env.reset(seed=0)
    assert env.step(target + 0.5)[1] == pytest.approx(-0.25)


def test_memory_needs_its_first_observation():
    env = Memory(cues=3, length=2)
    observation, _ = env.reset(seed=0)
    cue = int(observation[:3].argmax())
    assert observation.tolist() == [*np.eye(3)[cue], 0.0]
    for passed in (0.5, 1.0):
        observation, reward, terminated, truncated, _ = env.step(cue)
        assert observation.tolist() == [0, 0, 0, passed]
        assert (reward, terminated, truncated) == (0.0, False, False)
    observation, reward, terminated, truncated, _ = env.step(cue)
    assert observation[:3].tolist() == [0, 0, 0]
    assert (reward, terminated, truncated) == (1.0, True, False)


def test_memory_judges_the_last_action():
    cues = np.zeros(4, np.int64)

    def recall(observation):
        shown = observation[:, :-1].any(-1)
        cues[shown] = observation[shown, :-1].argmax(-1)
        return cues

    assert set(play("Memory", recall)) == {1.0}
    assert set(play("Memory", lambda observation: 1 - recall(observation))) == {-1.0}


def test_counting_refuses_an_unknown_ending():
    with pytest.raises(ValueError, match="'termination' or 'truncation', not 'never'"):
        Counting(ending="never")


def cells(id, *actions, **arguments):
    """The brightness in the middle of every cell of the picture after some actions, between 0 and 1."""
    envs = make(Environment(id=id, arguments=arguments), 1, seed=0, render=True)
    assert envs.fps == 5
    step = envs.reset()
    for action in actions:
        step = envs.step(np.array([action]))
    picture = envs.render()
    envs.close()
    assert picture.dtype == np.uint8
    assert (picture[..., :1] == picture).all()  # grey
    middle = picture[BLOCK // 2 :: BLOCK, BLOCK // 2 :: BLOCK, 0] / 255
    assert picture.shape == (middle.shape[0] * BLOCK, middle.shape[1] * BLOCK, 3)
    return (middle - 0.15) / 0.85, step.observation[0]


def heights(shown):
    """How full each bar is."""
    return shown.sum(axis=0) / LEVELS


def test_the_picture_of_catch():
    shown, observation = cells("Catch", 0, 0, 2, rows=6, columns=4)
    board = observation.reshape(6, 4)
    board[5, 1] = 0.6  # the paddle: two left and one right of the middle, column 2
    np.testing.assert_allclose(shown, board, atol=0.01)


def test_the_pictures_of_observations():
    shown, observation = cells("Identity", states=5)
    np.testing.assert_allclose(heights(shown), observation, atol=0.01)
    shown, observation = cells("Target", [0.0, 0.0, 0.0], size=3)
    np.testing.assert_allclose(heights(shown), (observation + 1) / 2, atol=0.01)
    shown, observation = cells("Counting", 3, 1, length=5)
    np.testing.assert_allclose(heights(shown), [0.4, 0.0, observation[2] / 2**24, 0.5], atol=0.01)
    for actions in ((), (0, 0)):
        shown, observation = cells("Memory", *actions)
        np.testing.assert_allclose(heights(shown), observation, atol=0.01)
    assert observation.tolist() == [0, 0, 0.25]


def test_a_bar_fills_from_below():
    expected = np.array([[0, 0, 1]] * 7 + [[0, 0.5, 1]] + [[0, 1, 1]] * 2)
    np.testing.assert_array_equal(bars(np.array([0.0, 0.25, 1.0])), blocks(expected))


@pytest.mark.parametrize("id", TOYS)
def test_every_toy_can_be_pictured_to_the_end_and_beyond(id):
    envs = make(Environment(id=id), 2, seed=0, render=True)
    envs.reset()
    shape = envs.render().shape
    for _ in range(25):
        envs.step(np.zeros((2, 1) if id == "Target" else 2, np.int64))
        assert envs.render().shape == shape
    envs.close()


def test_deep_sea_rewards_the_one_way_down_and_charges_for_each_step_to_the_right():
    env = DeepSea(size=4, layout=3)
    observation, _ = env.reset()
    total, path = 0.0, []
    for _ in range(4):
        row, column = divmod(int(observation.argmax()), 4)
        path.append((row, column))
        observation, reward, ended, truncated, _ = env.step(int(env._right[row, column]))
        total += reward
    assert path == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert total == pytest.approx(1 - 0.01)
    assert (ended, truncated) == (True, False)
    assert not observation.any()


def test_deep_sea_forgives_no_step_to_the_left():
    env = DeepSea(size=5)
    for wrong in range(5):
        observation, _ = env.reset()
        total = 0.0
        for step in range(5):
            row, column = divmod(int(observation.argmax()), 5)
            right = int(env._right[row, column])
            observation, reward, _, _, _ = env.step(1 - right if step == wrong else right)
            total += reward
        assert total == pytest.approx(-0.01 * 4 / 5)
    assert DeepSea(size=5, layout=1)._right.tolist() != env._right.tolist()


def test_chain_pays_a_little_at_the_near_end_and_much_at_the_far_end():
    env = Chain(size=5, layout=2)
    observation, _ = env.reset()
    total, cells = 0.0, []
    ended = False
    while not ended:
        cell = int(observation.argmax())
        cells.append(cell)
        observation, reward, ended, _, _ = env.step(int(env._onward[cell]))
        total += reward
    assert cells == [1, 2, 3, *[4] * 11]  # size + 9 steps
    assert total == 12.0
    observation, _ = env.reset()
    env.step(int(env._onward[1]))
    observation, reward, _, _, _ = env.step(1 - int(env._onward[2]))
    assert (int(observation.argmax()), reward) == (0, 0.001)  # all the way back


def test_catch_can_be_a_picture():
    env, plain = Catch(pixels=84), Catch()
    picture, _ = env.reset(seed=0)
    board, _ = plain.reset(seed=0)
    for _ in range(5):
        assert picture.shape == (1, 84, 84)
        assert picture.dtype == np.uint8
        middle = picture[0, 4::8, 8::16][:10, :5]  # a cell has 8.4 rows of pixels and 16.8 columns
        np.testing.assert_array_equal(middle / 255, board.reshape(10, 5))
        picture, board = env.step(0)[0], plain.step(0)[0]


def test_cues_are_answered_by_task() -> None:
    def played(env: Cues, answer: Callable[[int], int]) -> dict[int, float]:
        seen, over, rewards = env.reset()[0], False, {}
        while not over:
            cue, task = int(seen[2:].argmax()), seen[:2].tolist()
            assert task == [1.0 - env._task, float(env._task)]
            seen, rewards[cue], over, _, _ = env.step(answer(cue))
        return rewards

    keys = []
    for task in (0, 1):
        env = Cues(tasks=2, cues=4, actions=3, task=task, layout=1)
        env.reset(seed=0)
        tried = [played(env, lambda cue, action=action: action) for action in range(3)]
        key = {cue: next(action for action in range(3) if tried[action][cue]) for cue in range(4)}
        assert sum(played(env, key.__getitem__).values()) == pytest.approx(1.0)
        assert [sum(rewards[cue] > 0 for rewards in tried) for cue in range(4)] == [1] * 4
        keys.append(key)
    assert keys[0] != keys[1]


@pytest.mark.parametrize("shape", [(), (2, 3, 4)])
def test_still_shows_the_same_until_its_episode_is_cut_off(shape: tuple[int, ...]) -> None:
    env = Still(shape, length=3)
    first, _ = env.reset()
    assert first.shape == (shape or (4,))
    for step in range(3):
        seen, reward, terminated, truncated, _ = env.step(1)
        assert seen is first
        assert (reward, terminated, truncated) == (0.0, False, step == 2)
    assert env.reset()[0] is first
