"""Ids and spaces of Gymnasium."""

from __future__ import annotations

import subprocess
import sys
from typing import ClassVar

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from shoal.core.errors import Fatal
from shoal.core.tree import map_tree
from shoal.core.types import ActionSpec, ArraySpec
from shoal.envs import Environment, check, make, spec_of
from shoal.envs.spaces import actions, observations


def written(space, value):
    """Row 1 of arrays for two, after the value was written there over old numbers; row 0 must stay."""
    spec, write = observations(space)
    arrays = map_tree(lambda leaf: np.full((2, *leaf.shape), 7, leaf.dtype), spec)
    write(arrays, 1, value)
    map_tree(lambda array: np.testing.assert_array_equal(array[0], 7), arrays)
    return spec, map_tree(lambda array: array[1], arrays)


def test_boxes():
    spec, array = written(spaces.Box(-1, 1, (2,), np.float64), np.array([0.1, 0.2]))
    assert spec == ArraySpec((2,), "float32")
    np.testing.assert_array_equal(array, np.array([0.1, 0.2], np.float32))
    assert written(spaces.Box(0, 9, (2,), np.int64), np.array([3, 4]))[0] == ArraySpec((2,), "float32")
    assert written(spaces.Box(0, 255, (2,), np.uint8), np.array([3, 4]))[0] == ArraySpec((2,), "float32")


def test_bytes_are_scaled_by_the_bounds_of_their_space():
    flags = spaces.Box(0, 1, (3,), np.uint8)
    assert written(flags, np.array([0, 1, 1], np.uint8))[1].tolist() == [0, 1, 1]
    mixed = spaces.Box(np.zeros(3, np.uint8), np.array([1, 10, 200], np.uint8), dtype=np.uint8)
    np.testing.assert_allclose(written(mixed, np.array([1, 5, 50], np.uint8))[1], [1, 0.5, 0.25])
    assert written(spaces.Box(0, 0, (1,), np.uint8), np.array([0], np.uint8))[1].tolist() == [0]
    grid = spaces.Box(0, 10, (7, 7, 3), np.uint8)
    np.testing.assert_allclose(written(grid, np.full((7, 7, 3), 5, np.uint8))[1], 0.5)
    picture, array = written(spaces.Box(0, 15, (40, 40, 1), np.uint8), np.full((40, 40, 1), 15, np.uint8))
    assert picture == ArraySpec((1, 40, 40), "uint8", largest=15)
    assert (array == 15).all()


def test_whatever_looks_like_a_picture_becomes_one():
    flat = np.random.default_rng(0).integers(0, 255, (40, 50), np.uint8)
    spec, array = written(spaces.Box(0, 255, (40, 50), np.uint8), flat)
    assert spec == ArraySpec((1, 40, 50), "uint8")
    np.testing.assert_array_equal(array[0], flat)
    stack = np.random.default_rng(0).integers(0, 255, (4, 40, 50, 3), np.uint8)
    spec, array = written(spaces.Box(0, 255, (4, 40, 50, 3), np.uint8), stack)
    assert spec == ArraySpec((12, 40, 50), "uint8")
    np.testing.assert_array_equal(array[5], stack[1, :, :, 2])
    spec, array = written(spaces.Box(0, 255, (40, 50, 3), np.float32), stack[0].astype(np.float32))
    assert spec == ArraySpec((3, 40, 50), "float32")
    np.testing.assert_allclose(array, stack[0].transpose(2, 0, 1) / 255, rtol=1e-6)
    unbounded = spaces.Box(-np.inf, np.inf, (40, 50, 3), np.float32)
    np.testing.assert_allclose(written(unbounded, stack[0].astype(np.float32))[1], stack[0].transpose(2, 0, 1))
    assert written(spaces.Box(-1, 1, (2,)), [0.5, 1])[1].tolist() == [0.5, 1]


def test_images_get_channels_first():
    image = np.arange(5 * 6 * 3, dtype=np.uint8).reshape(5, 6, 3)
    spec, array = written(spaces.Box(0, 255, (5, 6, 3), np.uint8), image)
    assert spec == ArraySpec((3, 5, 6), "float32")
    np.testing.assert_allclose(array, image.transpose(2, 0, 1) / 255, rtol=1e-6)
    assert observations(spaces.Box(0, 1, (5, 6, 4)))[0] == ArraySpec((4, 5, 6), "float32")
    assert observations(spaces.Box(0, 255, (4, 84, 84), np.uint8))[0] == ArraySpec((4, 84, 84), "uint8")
    for shape in ((4, 6, 3), (6, 6, 5), (4, 35, 84)):
        assert observations(spaces.Box(0, 255, shape, np.uint8))[0] == ArraySpec(shape, "float32")


def test_a_wrong_shape_is_refused():
    with pytest.raises(ValueError, match=r"shape \(1,\), but its space has \(2,\)"):
        written(spaces.Box(-1, 1, (2,)), np.zeros(1, np.float32))


def test_categories_become_one_hot():
    assert written(spaces.Discrete(3), 1)[1].tolist() == [0, 1, 0]
    assert written(spaces.Discrete(3, start=5), np.int64(7))[1].tolist() == [0, 0, 1]
    spec, array = written(spaces.MultiDiscrete([2, 3]), np.array([1, 2]))
    assert spec == ArraySpec((5,), "float32")
    assert array.tolist() == [0, 1, 0, 0, 1]
    assert written(spaces.MultiDiscrete([[2], [3]], start=[[1], [1]]), np.array([[1], [3]]))[1].tolist() == [
        *(1, 0),
        *(0, 0, 1),
    ]
    spec, array = written(spaces.MultiBinary((2, 2)), np.array([[1, 0], [0, 1]], np.int8))
    assert spec == ArraySpec((2, 2), "float32")
    assert array.tolist() == [[1, 0], [0, 1]]
    for outside in (3, -1):
        with pytest.raises(ValueError, match="outside its space"):
            written(spaces.Discrete(3), outside)


def test_dicts_and_tuples_become_mappings():
    space = spaces.Dict(
        {
            "eye": spaces.Box(0, 255, (5, 6, 1), np.uint8),
            "rest": spaces.Tuple([spaces.Discrete(2), spaces.Box(0, 1, (1,))]),
        }
    )
    value = {"eye": np.ones((5, 6, 1), np.uint8), "rest": (1, np.array([0.5], np.float32))}
    spec, tree = written(space, value)
    assert spec == {
        "eye": ArraySpec((1, 5, 6), "float32"),
        "rest": {"0": ArraySpec((2,), "float32"), "1": ArraySpec((1,), "float32")},
    }
    np.testing.assert_allclose(tree["eye"], 1 / 255)
    assert tree["rest"]["0"].tolist() == [0, 1]
    assert tree["rest"]["1"].tolist() == [0.5]


def test_other_observation_spaces_are_refused():
    with pytest.raises(Fatal, match="allowed are Box, Discrete, MultiDiscrete, MultiBinary, and Dict or Tuple"):
        observations(spaces.Text(5))


def test_discrete_actions():
    spec, decode = actions(spaces.Discrete(3, start=-1))
    assert spec == ActionSpec(3)
    assert spec.discrete
    space = spaces.Discrete(3, start=-1)
    assert all(value in space for value in decode(np.array([0, 1, 2])))
    assert list(decode(np.array([0, 1, 2]))) == [-1, 0, 1]
    for outside in (3, -1):
        with pytest.raises(Fatal, match="between 0 and 2"):
            decode(np.array([0, outside]))


def test_continuous_actions():
    low, high = np.array([[-1, -2]]), np.array([[1, 2]])
    space = spaces.Box(low, high, dtype=np.float64)
    spec, decode = actions(space)
    assert spec == ActionSpec(2, (-1.0, -2.0), (1.0, 2.0))
    values = decode(np.array([[0.5, 1.5], [-3, 3]], np.float32))
    assert values.tolist() == [[[0.5, 1.5]], [[-1, 2]]]
    assert all(value in space for value in values)
    with pytest.raises(Fatal, match="not finite"):
        decode(np.array([[np.nan, 0]], np.float32))


def test_other_action_spaces_are_refused():
    for space in (spaces.Text(5), spaces.Box(0, 5, (2,), np.int64), spaces.Tuple([spaces.Text(5)])):
        with pytest.raises(Fatal, match="allowed are Discrete, MultiDiscrete, MultiBinary, Box of floats"):
            actions(space)
    with pytest.raises(Fatal, match="infinite bounds"):
        actions(spaces.Box(-np.inf, np.inf, (2,)))


def test_several_actions_at_once():
    spec, decode = actions(spaces.MultiDiscrete([[2, 3]], start=[[10, 20]]))
    assert spec == ActionSpec(2, parts=(ActionSpec(2), ActionSpec(3)))
    assert (spec.choices, spec.discrete) == ((2, 3), False)
    assert decode(np.array([[1, 0], [0, 2]])).tolist() == [[[11, 20]], [[10, 22]]]
    for wrong in ([[2, 0]], [[0, -1]]):
        with pytest.raises(Fatal, match=r"must lie between 0 and \[1, 2\]"):
            decode(np.array(wrong))
    assert actions(spaces.MultiBinary(2))[1](np.array([[1, 0]])).tolist() == [[1, 0]]
    space = spaces.Dict({"b": spaces.Discrete(3, start=1), "a": spaces.Tuple([spaces.Box(-2.0, 2.0, (2,)), spaces.MultiBinary(1)])})  # fmt: skip  # noqa: E501
    spec, decode = actions(space)
    assert spec.choices == (0, 0, 2, 3)
    (chosen,) = decode(np.array([[0.5, 9.0, 1.0, 2.0]], np.float32))
    assert space.contains(chosen)
    assert chosen["b"] == 3
    assert chosen["a"][0].tolist() == [0.5, 2.0]


def test_continuous_actions_reach_the_environment():
    worlds = make(Environment(id="Pendulum-v1"), 2, seed=0)
    assert worlds.spec.observation == ArraySpec((3,), "float32")
    assert worlds.spec.action == ActionSpec(1, (-2.0,), (2.0,))
    worlds.reset()
    before = [environment.unwrapped.state.copy() for environment in worlds.environments]
    step = worlds.step(np.array([[2.0], [-9.0]], np.float32))
    for environment, (angle, speed), torque in zip(worlds.environments, before, (2.0, -2.0), strict=True):
        expected = speed + (15 * np.sin(angle) + 3 * torque) * 0.05  # Pendulum-v1's equation of motion
        assert environment.unwrapped.state[1] == pytest.approx(np.clip(expected, -8, 8))
    assert step.reward.shape == (2,)
    worlds.close()


def test_a_time_limit_truncates():
    worlds = make(Environment(id="Pendulum-v1", arguments={"max_episode_steps": 2}), 1, seed=0)
    worlds.reset()
    steps = [worlds.step(np.zeros((1, 1), np.float32)) for _ in range(3)]
    assert [step.discount.item() for step in steps] == [1, 1, 1]
    assert [step.first.item() for step in steps] == [False, False, True]
    assert worlds.episodes()[0].length == 2
    worlds.close()


def test_a_module_of_the_users_own(tmp_path, monkeypatch):
    (tmp_path / "pond.py").write_text(
        "import gymnasium\n"
        "from shoal.envs.toy import Counting\n"
        "class Pond(Counting, gymnasium.Env):\n"
        "    pass\n"
        "gymnasium.register('Pond-v0', entry_point=Pond)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    worlds = make(Environment(id="pond:Pond-v0", arguments={"length": 2}), 1, seed=0)
    worlds.reset()
    for _ in range(2):
        worlds.step(np.array([0]))
    assert worlds.episodes()[0].score == 3.0
    worlds.close()
    gymnasium.registry.pop("Pond-v0")
    sys.modules.pop("pond")


@pytest.mark.parametrize(
    ("id", "near"),
    [
        ("CartPol-v1", "CartPole-v1"),
        ("CartPole-v9", "CartPole-v1"),
        ("Catchy", "Catch"),
        ("Pong-v5", "ALE/Pong-v5"),
        ("NoSuchSpace/Pong-v5", "ALE/Pong-v5"),
    ],
)
def test_unknown_ids_name_the_nearest(id, near):
    with pytest.raises(Fatal, match=f"unknown environment '{id}'.*Nearest known: .*{near}"):
        make(Environment(id=id), 1, seed=0)


def test_an_unlike_id_names_the_toys():
    with pytest.raises(Fatal, match="Toy environments: Catch, Identity"):
        make(Environment(id="qqqqqqqqqqqqqqqq"), 1, seed=0)


def test_a_missing_module():
    with pytest.raises(Fatal, match="'no_such_module:Pond-v0' could not be imported"):
        make(Environment(id="no_such_module:Pond-v0"), 1, seed=0)


@pytest.mark.parametrize(
    ("id", "extra"),
    [
        ("minigrid:MiniGrid-Empty-5x5-v0", "minigrid"),
        ("pybullet_envs_gymnasium:AntBulletEnv-v0", "pybullet"),
        ("shimmy:dm_control/cartpole-swingup-v0", "dm-control"),
    ],
)
def test_a_missing_module_of_an_extra(monkeypatch, id, extra):
    monkeypatch.setitem(sys.modules, id.partition(":")[0], None)  # as if it were not installed
    for use in (check, spec_of):
        with pytest.raises(Fatal, match=rf"{id} needs .*: pip install 'shoal\[{extra}\]'"):
            use(Environment(id=id))


def test_a_module_may_offer_to_register_its_environments(tmp_path, monkeypatch):
    (tmp_path / "pond.py").write_text(
        "import gymnasium\n"
        "def register_envs():\n"
        "    gymnasium.register('Pond-v0', entry_point='gymnasium.envs.classic_control:CartPoleEnv')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    try:
        check(Environment(id="pond:Pond-v0"))
        assert spec_of(Environment(id="pond:Pond-v0")).action.size == 2
    finally:
        gymnasium.registry.pop("Pond-v0", None)


def test_a_part_of_an_observation_is_hidden():
    """The cosine and sine of a pendulum's angle stay, and its velocity is hidden."""
    around = {"name": "shoal.envs.wrappers:Partial", "arguments": {"keep": [1, 0]}}
    settings = Environment.model_validate({"id": "Pendulum-v1", "wrappers": [around]})
    whole = make(Environment(id="Pendulum-v1"), 2, seed=3)
    part = make(settings, 2, seed=3)
    assert part.spec.observation.shape == (2,)
    for _ in range(3):
        seen, shown = (envs.step(np.ones((2, 1), np.float32)).observation for envs in (whole, part))
        np.testing.assert_array_equal(shown, seen[:, [1, 0]])
    for places in ([], [0, 3], [-1], [True], ["a"]):
        wrong = {**around, "arguments": {"keep": places}}
        with pytest.raises(Fatal, match=r"Partial: keep must have places from 0 to 2, got"):
            make(Environment.model_validate({"id": "Pendulum-v1", "wrappers": [wrong]}), 1, seed=0)
    with pytest.raises(Fatal, match="observations that are a row of numbers, not Discrete"):
        make(Environment.model_validate({"id": "FrozenLake-v1", "wrappers": [around]}), 1, seed=0)


def test_a_text_is_left_out_by_a_wrapper():
    """MiniGrid shows a picture, a direction, and its mission in words."""
    id = "minigrid:MiniGrid-DoorKey-5x5-v0"
    with pytest.raises(Fatal, match=r"MissionSpace.*is not supported.*minigrid\.wrappers:ImgObsWrapper"):
        spec_of(Environment(id=id))
    found = spec_of(Environment.model_validate({"id": id, "wrappers": ["minigrid.wrappers:ImgObsWrapper"]}))
    assert found.observation.shape == (3, 7, 7)


def test_wrong_arguments():
    with pytest.raises(Fatal, match=r"cannot create CartPole-v1: TypeError.*'wheels'"):
        make(Environment(id="CartPole-v1", arguments={"wheels": 3}), 1, seed=0)
    with pytest.raises(Fatal, match=r"cannot create Catch: TypeError.*'wheels'"):
        make(Environment(id="Catch", arguments={"wheels": 3}), 1, seed=0)


@pytest.mark.parametrize(("words", "extra"), [("Box2D is not installed", "box2d"), ("MuJoCo is missing", "mujoco")])
def test_missing_packages_name_the_extra(words, extra, monkeypatch):
    def refuse(*arguments, **keywords):
        raise gymnasium.error.DependencyNotInstalled(words)

    monkeypatch.setattr(gymnasium, "make", refuse)
    with pytest.raises(Fatal, match=rf"pip install 'shoal\[{extra}\]'"):
        make(Environment(id="LunarLander-v3"), 1, seed=0)


class Drawing(gymnasium.Env):
    """Shows what it is told to."""

    metadata: ClassVar = {"render_modes": ["rgb_array"]}
    observation_space = spaces.Discrete(2)
    action_space = spaces.Discrete(2)
    closed = 0

    def __init__(self, shows=None, render_mode=None):
        self.shows, self.render_mode = shows, render_mode

    def reset(self, *, seed=None, options=None):
        return 0, {}

    def render(self):
        if isinstance(self.shows, Exception):
            raise self.shows
        return self.shows

    def close(self):
        Drawing.closed += 1


class Hidden(Drawing):
    metadata: ClassVar = {"render_modes": ["human", "ansi"]}


class Blind(Drawing):
    def __init__(self):
        super().__init__()


@pytest.fixture
def drawings():
    """Registers the environments above under their own names."""
    for kind in (Drawing, Hidden, Blind):
        gymnasium.register(f"{kind.__name__}-v0", entry_point=kind)
    Drawing.closed = 0
    yield
    for kind in (Drawing, Hidden, Blind):
        gymnasium.registry.pop(f"{kind.__name__}-v0")


def test_pictures_show_environment_0_at_this_moment():
    worlds = make(Environment(id="CartPole-v1"), 2, seed=0, render=True)
    assert worlds.fps == 50
    worlds.reset()
    before = worlds.render()
    assert (before.dtype, before.shape) == (np.uint8, (400, 600, 3))
    copy = before.copy()
    for _ in range(8):
        worlds.step(np.array([1, 0]))
    after = worlds.render()
    np.testing.assert_array_equal(before, copy)
    assert not np.array_equal(before, after)
    np.testing.assert_array_equal(after, worlds.environments[0].render())
    assert not np.array_equal(after, worlds.environments[1].render())
    worlds.close()


def test_pictures_change_nothing():
    def stream(render):
        worlds = make(Environment(id="CartPole-v1"), 2, seed=1, render=render)
        observations = [worlds.reset().observation]
        for _ in range(40):
            observations.append(worlds.step(np.array([0, 1])).observation)
            if render:
                worlds.render()
        worlds.close()
        return observations

    np.testing.assert_array_equal(stream(True), stream(False))


def test_no_picture_without_asking_or_before_a_reset():
    envs = make(Environment(id="CartPole-v1"), 1, seed=0)
    envs.reset()
    with pytest.raises(Fatal, match="CartPole-v1 cannot be rendered: it was created without `render=True`"):
        envs.render()
    envs.close()
    envs = make(Environment(id="CartPole-v1"), 1, seed=0, render=True)
    with pytest.raises(Fatal, match=r"cannot be rendered before reset\(\)"):
        envs.render()
    envs.close()


def test_environments_that_draw_nothing_are_refused(drawings):
    with pytest.raises(Fatal, match=r"Hidden-v0 cannot be rendered: its render modes are \['human', 'ansi'\]"):
        make(Environment(id="Hidden-v0"), 1, seed=0, render=True)
    assert Drawing.closed == 1
    with pytest.raises(Fatal, match="Blind-v0 cannot be rendered: it takes no `render_mode`"):
        make(Environment(id="Blind-v0"), 1, seed=0, render=True)
    for id in ("Hidden-v0", "Blind-v0"):
        make(Environment(id=id), 1, seed=0).close()


@pytest.mark.parametrize(
    ("shows", "words"),
    [
        (None, r"returns NoneType, not uint8 \[H, W, 3\]"),
        (np.zeros((4, 5, 4), np.uint8), r"returns uint8 \[4, 5, 4\]"),
        (np.zeros((4, 5, 3)), r"returns float64 \[4, 5, 3\]"),
        (np.zeros((4, 5), np.uint8), r"returns uint8 \[4, 5\]"),
        (RuntimeError("no light"), "cannot be rendered: RuntimeError: no light"),
        (ModuleNotFoundError("No module named 'pygame'"), r"not installed: pip install 'shoal\[video\]'"),
        (ModuleNotFoundError("No module named 'easel'"), "not installed: No module named 'easel'"),
    ],
)
def test_what_is_no_picture_is_refused(shows, words, drawings):
    worlds = make(Environment(id="Drawing-v0", arguments={"shows": shows}), 1, seed=0, render=True)
    assert worlds.fps == 30
    worlds.reset()
    with pytest.raises(Fatal, match=f"Drawing-v0.*{words}"):
        worlds.render()
    worlds.close()


def test_pictures_are_the_callers_to_keep(drawings):
    paper = np.zeros((4, 5, 3), np.uint8)
    worlds = make(Environment(id="Drawing-v0", arguments={"shows": paper}), 1, seed=0, render=True)
    worlds.reset()
    picture = worlds.render()
    paper[:] = 9
    assert not picture.any()
    assert worlds.render().all()
    worlds.close()


def test_missing_pygame_names_the_extra(monkeypatch):
    worlds = make(Environment(id="CartPole-v1"), 1, seed=0, render=True)
    worlds.reset()
    monkeypatch.setitem(sys.modules, "pygame", None)
    with pytest.raises(Fatal, match=r"CartPole-v1 needs packages .*pip install 'shoal\[video\]'"):
        worlds.render()
    worlds.close()


def test_pictures_print_nothing():
    code = (
        "from shoal.envs import *; worlds = make(Environment(id='CartPole-v1'), 1, seed=0, render=True);"
        "worlds.reset(); worlds.render(); worlds.close()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout + done.stderr == ""
