"""The configuration: loaded, overridden, checked, written down."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from shoal import configs
from shoal.algorithms import ALGORITHMS
from shoal.algorithms.impala import Impala
from shoal.algorithms.ppo import Ppo
from shoal.configs import parse_overrides
from shoal.core.errors import SettingsError
from shoal.core.settings import Schedule
from shoal.engines import ENGINES
from shoal.experiment import load

ROOT = Path(__file__).parents[1]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
IMPALA = {
    "environment": {"id": "CartPole-v1", "arguments": {"sutton_barto_reward": True}},
    "algorithm": {"name": "impala", "lr": {"start": 1e-3, "end": 0}, "rule": "adam", "network": {"hidden": [32]}},
    "actors": 2,
    "evaluation": {"target": 475},
}


@pytest.fixture
def file(tmp_path):
    """An experiment in a file."""
    path = tmp_path / "cartpole.yaml"
    path.write_text(yaml.safe_dump(IMPALA))
    return path


# Loading.


def test_a_file_and_a_mapping_give_the_same(file):
    experiment = load(file)
    assert experiment == load(str(file)) == load(IMPALA)
    assert isinstance(experiment.algorithm, Impala)
    assert experiment.algorithm.lr == Schedule(start=1e-3, end=0)
    assert experiment.algorithm.network.hidden == (32,)
    assert experiment.environment.arguments == {"sutton_barto_reward": True}
    assert (experiment.evaluation.target, experiment.evaluation.episodes) == (475, 20)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_loads(path):
    assert load(path).steps > 0


def test_an_algorithm_may_be_given_as_it_is():
    algorithm = Ppo(unroll=7)
    assert load({"environment": {"id": "Catch"}, "algorithm": algorithm}).algorithm is algorithm


def test_what_follows_from_the_settings():
    experiment = load(IMPALA, {"envs": 5, "steps": 1000})
    assert (experiment.actor_count, experiment.batch_size, experiment.evaluation_interval) == (2, 32, 50)
    assert experiment.learner_threads == 1
    experiment = load(IMPALA, {"algorithm": {"name": "ppo"}, "envs": 5, "threads": 3, "evaluation.every": 7})
    assert (experiment.batch_size, experiment.learner_threads, experiment.evaluation_interval) == (10, 3, 7)
    assert load(IMPALA, {"actors": None}).actor_count >= 1


# Overrides.


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("steps=500", 500),
        ("steps=1_000", 1000),
        ("evaluation.every=70", 70),
        ("evaluation.target=null", None),
        ("evaluation.target=", None),
        ("actors=~", "auto"),
        ("algorithm.network.hidden=[64, 32]", (64, 32)),
        ("algorithm.network.hidden=[]", ()),
        ("algorithm.gamma=1e-1", 0.1),
        ("algorithm.lr=1e-4", Schedule(start=1e-4, shape="constant")),
        ("algorithm.lr.start=1", Schedule(start=1, end=0)),
        ("algorithm.lr={end: 1e-5}", Schedule(start=1e-3, end=1e-5)),
        ("algorithm.rho_bar=2", 2),
        ("environment.id=a=b", "a=b"),
        ("environment.atari.sticky=0.25", 0.25),
        ("environment.metrics.lives=sum", "sum"),
        ("environment.arguments.render_mode=rgb_array", "rgb_array"),
        ("limits={stall: 5}", None),
    ],
)
def test_dotted_keys_override(word, expected):
    experiment = load(IMPALA, parse_overrides([word]))
    value: Any = experiment
    for part in word.partition("=")[0].split("."):
        if part == "start":
            break
        value = value[part] if isinstance(value, dict) else getattr(value, part)
    if part == "limits":
        value, expected = value.stall, 5
    assert value == expected
    assert experiment.environment.arguments["sutton_barto_reward"] is True


def test_overrides_leave_the_mapping_alone():
    before = json.dumps(IMPALA)
    load(IMPALA, {"algorithm.network.hidden": [1], "environment.arguments.x": 2})
    assert json.dumps(IMPALA) == before


def test_an_empty_experiment_can_be_built_from_overrides():
    words = ["environment.id=Catch", "algorithm.name=ppo", "algorithm.lr=1e-3", "evaluation.target=1"]
    experiment = load({}, parse_overrides(words))
    assert (experiment.environment.id, experiment.algorithm.lr.now) == ("Catch", 1e-3)


SWITCHES = [
    ["algorithm.name=ppo", "algorithm.unroll=5"],
    ["algorithm.unroll=5", "algorithm.name=ppo"],
    ["algorithm={name: ppo}", "algorithm.unroll=5"],
    ["algorithm.unroll=5", "algorithm={name: ppo}"],
    ["algorithm={name: ppo, unroll: 5}"],
]


@pytest.mark.parametrize("words", SWITCHES, ids=" ".join)
def test_another_algorithm_drops_the_settings_of_the_one_before(words):
    assert load(IMPALA, parse_overrides(words)).algorithm == Ppo(unroll=5)


@pytest.mark.parametrize("words", [["algorithm.name=impala"], ["algorithm={name: impala}"], ["algorithm={rule: adam}"]])
def test_the_same_algorithm_keeps_its_settings(words):
    assert load(IMPALA, parse_overrides(words)) == load(IMPALA)


def test_a_name_joins_settings_that_had_none():
    unnamed = IMPALA | {"algorithm": {"unroll": 5}}
    assert load(unnamed, {"algorithm.name": "ppo"}).algorithm == Ppo(unroll=5)


# Mistakes.

BOTH = ", ".join(ALGORITHMS)
MISTAKES = {
    "unknown key": (
        ["step=5"],
        r"^step: unknown setting; allowed: env.*, steps, .*; did you mean 'steps'\?$",
    ),
    "unknown key, nothing near": (["qqqq=5"], r"^qqqq: unknown setting; allowed: environment, [^;]*$"),
    "unknown nested key": (
        ["evaluation.evry=5"],
        r"^evaluation\.evry: unknown setting; allowed: every, episodes, max_steps, target; did you mean 'every'\?$",
    ),
    "unknown key, two deep": (
        ["environment.atari.stick=5"],
        r"^environment\.atari\.stick: unk.*'sticky'\?$",
    ),
    "unknown key of the algorithm": (
        ["algorithm.entrpy_cost=5"],
        r"^algorithm\.entrpy_cost: unknown setting; allowed: lr, .*, name; did you mean 'entropy_cost'\?$",
    ),
    "unknown key of its network": (
        ["algorithm.network.hiden=5"],
        r"^algorithm\.network\.hiden: .*'hidden'\?$",
    ),
    "unknown key of a schedule": (
        ["algorithm.lr.ends=5"],
        r"^algorithm\.lr\.ends: unknown setting; allowed: start, end, shape, power, until, warmup; did you mean 'end'",
    ),
    "wrong type": (["steps=many"], r"^steps: .*valid integer.*, got 'many'$"),
    "wrong type, nested": (["evaluation.episodes=[1]"], r"^evaluation\.episodes: .*valid integer, got \[1\]$"),
    "wrong type in the algorithm": (["algorithm.gamma=high"], r"^algorithm\.gamma: .*valid number.*, got 'high'$"),
    "wrong type in a schedule": (["algorithm.lr=fast"], r"^algorithm\.lr\.start: .*valid number.*, got 'fast'$"),
    "wrong type in a list": (
        ["algorithm.network.hidden=[a]"],
        r"^algorithm\.network\.hidden\.0: .*, got 'a'$",
    ),
    "value where settings belong": (["evaluation=5"], r"^evaluation: .*, got 5$"),
    "nothing where a number belongs": (["steps=null"], r"^steps: .*valid integer, got None$"),
    "out of range": (["queue=0"], r"^queue: .*greater than or equal to 1, got 0$"),
    "out of range in the algorithm": (
        ["algorithm.gamma=1.5"],
        r"^algorithm\.gamma: .*less than .* 1, got 1\.5$",
    ),
    "not one of the choices": (
        ["device=cud"],
        r"^device: Input should be 'auto', 'cpu' or 'cuda', got 'cud'; did you mean 'cuda'\?$",
    ),
    "not one of the choices in a mapping": (["environment.metrics.a=sun"], r"^environment\.metrics\.a: .*'sum'\?$"),
    "unknown algorithm": (
        ["algorithm.name=impla"],
        rf"^algorithm: unknown .*'impla': .*{BOTH}.*'impala'\?$",
    ),
    "algorithm without a module": (["algorithm.name=nowhere:Mine"], r"^algorithm: .*no module 'nowhere'$"),
    "algorithm that is none": (
        ["algorithm.name=pathlib:Path"],
        r"^algorithm: pathlib:Path is not an algorithm",
    ),
    "settings that are no algorithm": (
        ["algorithm={name: 'shoal.core.settings:Schedule', start: 1}"],
        r"^algorithm: Schedule is not an algorithm: it has no lr, .*, loss$",
    ),
    "algorithm without a name": (["algorithm={name: null}"], rf"^algorithm: needs a name: {BOTH}, or your own"),
    "algorithm with a number for a name": (["algorithm.name=3"], rf"^algorithm: needs a name: {BOTH}, or your own"),
    "algorithm that is only a wrong word": (["algorithm=pop"], r"^algorithm: unknown algorithm 'pop': .*'ppo'\?$"),
    "algorithm that is nothing": (["algorithm=null"], rf"^algorithm: needs a name: {BOTH}, or your own"),
    "algorithm at odds with itself": (
        ["algorithm.network.lstm=8", "algorithm.network.separate=true"],
        r"^algorithm\.network: separate torsos cannot share an LSTM",
    ),
    "unknown engine": (
        ["engine=procesess"],
        rf"^engine: unknown engine 'procesess': {', '.join(ENGINES)}, or your own .*; did you mean 'processes'\?$",
    ),
    "batch of broken rollouts": (
        ["algorithm={name: ppo, batch: 17}", "envs=8"],
        r"algorithm\.batch 17: with max_lag 0 a batch consists of whole rollouts, so it must be a multiple of "
        r"envs 8$",
    ),
    "rollouts of several batches": (
        ["algorithm={name: ppo, batch: 8, max_lag: 1}", "envs=24"],
        r"algorithm\.batch 8: the 24 items of one actor fill several batches, the last more than max_lag",
    ),
    "more than the queue can hold": (
        ["envs=100", "algorithm.batch=16"],
        r"the 100 items of one actor do not fit next to .* = 32: raise queue or algorithm\.batch, or lower envs$",
    ),
    "unfinished batch that blocks the queue": (
        ["envs=30", "algorithm.batch=16"],
        r"30 items .* do not fit",
    ),
    "a setting of a part": (["lr=1"], r"^lr: unknown setting; .*; did you mean 'algorithm\.lr'\?$"),
    "nearly a setting of a part": (["gama=1"], r"^gama: unknown setting; .*; did you mean 'algorithm\.gamma'\?$"),
    "a setting of a part's part": (
        ["algorithm.hidden=[3]"],
        r"^algorithm\.hidden: unknown setting; .*; did you mean 'algorithm\.network\.hidden'\?$",
    ),
    "another word": (["device=gpu"], r"^device: Input should be .*, got 'gpu'; did you mean 'cuda'\?$"),
    "malformed override": (["steps"], r"^'steps' is not a setting: write key=value, such as algorithm\.lr=1e-3$"),
    "override without a key": (["=5"], r"^'=5' is not a setting: write key=value"),
    "override that is not YAML": (["steps=[1"], r"^steps: '\[1' is not a YAML value$"),
    "override that is an impossible date": (["steps=2020-99-99"], r"^steps: '2020-99-99' is not a YAML value$"),
}


@pytest.mark.parametrize(("words", "complaint"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_named_with_what_would_be_right(words, complaint):
    with pytest.raises(SettingsError, match=complaint):
        load(IMPALA, parse_overrides(words))


def test_what_is_missing_is_named_and_described():
    with pytest.raises(
        SettingsError,
        match=r"^environment: missing; The environment: `id` and its settings\.\nalgorithm: missing; The algo",
    ):
        load({})
    with pytest.raises(SettingsError, match=r"^environment\.id: missing; A Gymnasium id"):
        load(IMPALA | {"environment": {}})
    with pytest.raises(SettingsError, match=r"^algorithm: needs a name"):
        load(IMPALA | {"algorithm": {"lr": 1}})


def test_every_mistake_is_told_at_once():
    with pytest.raises(SettingsError) as caught:
        load(IMPALA, {"algorithm.lrr": 1, "algorithm.gamma": 2, "stepps": 3, "envs": "x"})
    places = [line.partition(":")[0] for line in str(caught.value).splitlines()]
    assert sorted(places) == ["algorithm.gamma", "algorithm.lrr", "envs", "stepps"]


def test_an_experiment_that_comes_with_shoal_is_found_by_name(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for path in CONFIGS:
        assert load(path.stem) == load(path)
    (tmp_path / "ppo_cartpole").write_text((CONFIGS[0].parent / "dqn_cartpole.yaml").read_text())
    assert load("ppo_cartpole").algorithm_name == "dqn"  # one's own file comes first
    with pytest.raises(SettingsError, match=r"no experiment 'impala_cartpol' comes .*did you mean 'impala_cartpole'\?"):
        load("impala_cartpol")
    with pytest.raises(SettingsError, match=r"cannot read impala_cartpol\.yaml: .*; did you mean 'impala_cartpole'\?"):
        load("impala_cartpol.yaml")
    with pytest.raises(SettingsError, match=r"cannot read .*: No such file or directory$"):
        load("nowhere/impala_cartpole")


def test_a_word_may_stand_for_an_environment_or_an_algorithm(file):
    short = load({"environment": "Catch", "algorithm": "ppo"})
    assert short == load({"environment": {"id": "Catch"}, "algorithm": {"name": "ppo"}})
    before = load(file, {"environment.arguments": {"height": 3}, "algorithm.gamma": 0.5})
    changed = load(before.model_dump(mode="json"), {"environment": "Catch", "algorithm": "dqn"})
    assert (changed.environment.id, changed.environment.arguments) == ("Catch", {})
    assert (changed.algorithm_name, changed.algorithm.gamma) == ("dqn", 0.99)


def test_configs_say_what_they_need():
    assert configs.needs("ppo_lunarlander") == "needs shoal[box2d]"
    assert configs.needs("ppo_doorkey") == "needs shoal[minigrid]"
    assert configs.needs("sac_swingup") == "needs shoal[dm-control]"
    assert configs.needs("ppo_cartpole") == ""
    for path in CONFIGS:  # an id of another package is one of an extra
        assert (":" in load(path).environment.id) <= bool(configs.needs(path.stem))


def test_a_missing_file_names_the_nearest(file):
    with pytest.raises(SettingsError, match=r"cartpol\.yaml: No such file .*; did you mean 'cartpole\.yaml'\?"):
        load(file.with_name("cartpol.yaml"))
    with pytest.raises(SettingsError, match=r"cannot read .*: No such file or directory$"):
        load(file.parent / "nowhere" / "cartpole.yaml")
    with pytest.raises(SettingsError, match=r"cannot read .*: Is a directory"):
        load(file.parent)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"steps: [1", "is not YAML"),
        (b"steps: 1\nseed: 2\nsteps: 3", "is not YAML: steps is set twice\n.*line 3"),
        (b"algorithm: {name: ppo, lr: 1, lr: 2}", "is not YAML: lr is set twice"),
        (b"\xff\xfe\x00\x01", "is not YAML"),
        (b"when: 2020-99-99", "is not YAML"),
        (b"!!python/object/apply:os.getcwd []", "is not YAML"),
        (b"", "must contain a mapping of settings"),
        (b"- steps", "must contain a mapping of settings"),
        (b"steps", "must contain a mapping of settings"),
    ],
)
def test_a_file_that_is_no_experiment_says_so(tmp_path, content, complaint):
    (tmp_path / "broken.yaml").write_bytes(content)
    with pytest.raises(SettingsError, match=rf"broken\.yaml {complaint}"):
        load(tmp_path / "broken.yaml")


def may_stall(queue: int, batch: int, envs: int) -> bool:
    """Whether some order of whole puts and gets leads to where neither is possible."""
    reached, ahead = {0}, [0]
    while ahead:
        waiting = ahead.pop()
        after = {waiting + envs} if waiting + envs <= queue * batch else set()
        after |= {waiting - batch} if waiting >= batch else set()
        if not after:
            return True
        ahead += after - reached
        reached |= after
    return False


def test_settings_are_refused_exactly_where_actors_and_learner_could_wait_for_each_other():
    for queue, batch, envs in itertools.product([1, 2, 3], range(1, 9), range(1, 20)):
        overrides = {"queue": queue, "algorithm.batch": batch, "envs": envs, "algorithm.max_lag": None}
        if may_stall(queue, batch, envs):
            with pytest.raises(SettingsError, match="do not fit next to"):
                load(IMPALA, overrides)
        else:
            load(IMPALA, overrides)
