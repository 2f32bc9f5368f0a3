"""Super Mario Bros. as a Gymnasium environment, and under Shoal's time convention."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from pydantic import ValidationError

from shoal.core.errors import Fatal
from shoal.core.types import ActionSpec, ArraySpec
from shoal.envs import Environment, Mario, check, make
from shoal.envs.console import SuperMarioBros, console, shrink
from shoal.envs.mario import ids
from tests.pace import seconds

STAGE = "SuperMarioBros-1-1-v0"
emulated = pytest.mark.skipif(find_spec("nes_py") is None, reason="needs shoal[mario]")


@pytest.fixture
def game():
    made = []

    def create(id=STAGE, **settings):
        made.append(SuperMarioBros(id, Mario(**settings), "rgb_array"))
        return made[-1]

    yield create
    for one in made:
        one.close()
        one.close()  # a second time does nothing


@emulated
def test_gymnasium_accepts_it(game):
    check_env(game(), skip_render_check=True)  # that one needs an id of Gymnasium's own


@emulated
def test_an_episode_ends_where_mario_dies(game):
    env = game()
    opening, info = env.reset(seed=0)
    assert (info["x_pos"], info["score"], info["flag_get"]) == (40, 0, False)
    total, steps, done = 0.0, 0, False
    while not done:  # straight into the first enemy
        seen, reward, done, cut, info = env.step(0)
        total, steps = total + reward, steps + 1
        assert not cut
        assert steps < 100
    assert 250 < info["x_pos"] <= info["x_max"] < 350
    assert info["x_pos"] - 40 - 40 < total < info["x_pos"] - 40  # what was gained, less time and the death
    assert not np.array_equal(seen, opening)
    again, info = env.reset()
    np.testing.assert_array_equal(again, opening)  # nothing is left of the last screen
    assert info["x_max"] == 40


@emulated
def test_numbers_larger_than_a_byte_are_read(game):
    env = game()
    env.reset(seed=0)
    console = env._console
    console.ram[0x6D], console.ram[0x86] = 12, 200
    assert console._get_info()["x_pos"] == 12 * 256 + 200
    console.ram[0x03B8], console.ram[0x00B5] = 10, 0
    assert console._get_info()["y_pos"] == 255 + 245


@emulated
def test_frames_are_repeated_and_stacked(game):
    four, one = game(stack=2), game(frameskip=1, stack=1)
    (opening, _), _ = four.reset(), one.reset()
    seen, reward, *_, info = four.step(1)
    singles = [one.step(1) for _ in range(4)]
    assert reward == sum(step[1] for step in singles)
    assert info == singles[-1][4]
    np.testing.assert_array_equal(seen, [opening[1], singles[-1][0][0]])


@emulated
def test_actions_stick_for_a_while_by_chance(game):
    always, never = game(sticky=1.0), game(sticky=0.0)
    for env in (always, never):
        env.reset(seed=0)
    for _ in range(10):
        still, moved = always.step(0)[4]["x_pos"], never.step(0)[4]["x_pos"]
    assert (still, moved > 60) == (40, True)  # nothing was pressed before, so nothing is repeated


@emulated
def test_sets_of_actions(game):
    assert [game(actions=name).action_space.n for name in ("right", "right_only", "simple", "complex")] == [2, 5, 7, 12]


@emulated
def test_buttons_are_those_of_the_package():
    from gym_super_mario_bros import actions
    from nes_py.wrappers import JoypadSpace

    from shoal.envs.mario import ACTIONS

    theirs = {"right_only": actions.RIGHT_ONLY, "simple": actions.SIMPLE_MOVEMENT, "complex": actions.COMPLEX_MOVEMENT}
    for name, pressed in theirs.items():
        bits = tuple(sum(JoypadSpace._button_map[button] for button in buttons) for buttons in pressed)
        assert ACTIONS[name] == bits


@emulated
def test_random_stages_are_drawn_by_the_seed(game):
    env = game("SuperMarioBrosRandomStages-v0", stages=("1-1", "3-2"))

    def drawn(seed):
        found = [env.reset(seed=seed)[1], *(env.reset()[1] for _ in range(9))]
        return [(one["world"], one["stage"]) for one in found]

    assert drawn(1) == drawn(1)
    assert set(drawn(1)) == {(1, 1), (3, 2)}


@emulated
def test_ids():
    assert len(ids()) == 4 * 34 + 2
    with pytest.raises(
        Fatal, match=r"unknown Super Mario Bros\. game 'SuperMarioBros-1-5-v0'; did you mean 'SuperMario"
    ):
        check(Environment(id="SuperMarioBros-1-5-v0"))
    with pytest.raises(Fatal, match=r"SuperMarioBrosRandomStages-v0, and SuperMarioBros-1-1-v0 draws none"):
        check(Environment(id=STAGE, mario=Mario(stages=("1-2",))))
    with pytest.raises(ValidationError, match="allowed are 1-1 to 8-4"):
        Mario(stages=("9-1",))
    with pytest.raises(Fatal, match=r"its settings are in `mario`.*frameskip"):
        make(Environment(id=STAGE, arguments={"frameskip": 1}), 1, seed=0)
    with pytest.raises(Fatal, match=r"`environment.wrappers` is for .* is a game: see `mario`"):
        check(Environment(id=STAGE, wrappers=("FlattenObservation",)))


@emulated
def test_under_the_time_convention():
    environment = Environment(id=STAGE, metrics={"x_max": "last", "flag_get": "last", "score": "last"})
    envs = make(environment, 2, seed=0, render=True)
    assert envs.spec.observation == ArraySpec((4, 84, 84), "uint8", stack=4)
    assert (envs.spec.action, envs.fps) == (ActionSpec(2), 15)
    envs.reset()
    steps = [envs.step(np.array([0, 0])) for _ in range(50)]
    first, second = envs.episodes()
    assert first.metrics == second.metrics
    assert first.metrics["flag_get"] == 0
    assert 250 < first.metrics["x_max"] < 350
    assert steps[first.length - 1].discount.tolist() == [0, 0]
    assert steps[first.length].first.tolist() == [True, True]
    drawn = envs.render()
    assert (drawn.shape, drawn.dtype) == ((240, 256, 3), np.uint8)
    assert np.ptp(drawn) > 100
    envs.close()


def test_scaling_down_keeps_the_mean():
    random = np.random.default_rng(0)
    picture = random.random((240, 256), np.float32)
    small = shrink(picture, 84, 84)
    assert small.shape == (84, 84)
    assert small.mean() == pytest.approx(picture.mean(), abs=1e-4)
    np.testing.assert_allclose(shrink(picture, 120, 64), picture.reshape(120, 2, 64, 4).mean((1, 3)), rtol=1e-5)


@emulated
def test_nothing_is_printed_by_old_gym():
    code = "from shoal.envs.console import console; console()"
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds(60), check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_error_without_the_emulator_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "gym_notices.notices", None)  # as if it were not installed
    console.cache_clear()
    with pytest.raises(Fatal, match=r"needs packages that are not installed: pip install 'shoal\[mario\]'"):
        check(Environment(id=STAGE))
