"""The configuration as others see it: YAML, a schema, a recipe, a user's own algorithm, and the command."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from shoal.algorithms import ALGORITHMS, find
from shoal.cli.main import main
from shoal.core import wire
from shoal.core.errors import SettingsError, ShoalError
from shoal.core.recipe import describe, rebuild
from shoal.core.settings import Schedule
from shoal.experiment import Experiment, load
from shoal.writing import as_yaml, schema

ROOT = Path(__file__).parents[1]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
SMALL = {"environment": {"id": "Catch"}, "algorithm": {"name": "ppo"}}


def read_back(experiment: Experiment) -> Experiment:
    """What comes of an experiment that is written down and loaded."""
    return load(yaml.safe_load(as_yaml(experiment)))


def fields(model: type[BaseModel]) -> list[tuple[str, str]]:
    """The name and sentence of every setting, at every depth but inside schedules."""
    found = []
    for name, field in model.model_fields.items():
        found.append((name, field.description or ""))
        if hasattr(field.annotation, "model_fields") and field.annotation is not Schedule:
            found += fields(field.annotation)
    return found


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_is_read_back_as_it_was(path):
    assert read_back(load(path)) == load(path)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_setting_is_written_with_its_sentence(name):
    text = as_yaml(load(SMALL | {"algorithm": {"name": name}}))
    lines = [line.strip() for line in text.splitlines()]
    expected = fields(Experiment) + fields(find(name)) + [("name", "The algorithm.")]
    assert all(sentence for _, sentence in expected)
    for key, sentence in expected:
        assert any(line.startswith(f"{key}:") and line.endswith(f"# {sentence}") for line in lines), key
    assert len(lines) == len(expected)


hard = ["null", "1e-3", "# no", "a: b", "on", "two\nlines", "'", '"', " ", "é", "{", "-", "\t", "2020-01-01"]
words = (st.text() | st.sampled_from(hard)).filter(lambda word: word != "$")
numbers = st.floats(1e-12, 1e12)
schedules = numbers | st.builds(
    lambda start, end, shape, power: {"start": start, "end": end, "shape": shape, "power": power},
    numbers,
    st.none() | numbers,
    st.sampled_from(["constant", "linear", "polynomial"]),
    numbers,
)
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=5,
)


@example("", {"a": math.inf, "b": [-math.inf]}, 1.0, math.inf, [])
@settings(max_examples=100, deadline=None)
@given(
    words,
    st.dictionaries(words, plain, max_size=3),
    schedules,
    st.none() | st.floats(allow_nan=False),
    st.lists(st.integers()),
)
def test_whatever_was_set_is_read_back(id_, arguments, lr, target, hidden):
    experiment = load(
        {
            "environment": {"id": id_, "arguments": arguments, "metrics": dict.fromkeys(arguments, "sum")},
            "algorithm": {"name": "impala", "lr": lr, "network": {"hidden": hidden}},
            "evaluation": {"target": target},
        }
    )
    assert read_back(experiment) == experiment
    description = wire.decode(b"".join(wire.encode(describe(experiment))))
    assert rebuild(description, lambda name: name) == experiment


def test_the_schema_is_json_that_knows_every_setting():
    document = json.loads(json.dumps(schema(), allow_nan=False))
    assert set(document["properties"]) == set(Experiment.model_fields)
    assert document["required"] == ["environment", "algorithm"]
    *known, own = document["properties"]["algorithm"]["oneOf"]
    assert [choice["properties"]["name"]["const"] for choice in known] == list(ALGORITHMS)
    for choice in known:
        model = find(choice["properties"]["name"]["const"])
        assert set(choice["properties"]) == {"name", *model.model_fields}
        assert "name" in choice["required"]
        for name, field in model.model_fields.items():
            assert choice["properties"][name]["description"] == field.description
    assert own["properties"]["name"]["pattern"] == ":"


def test_every_reference_of_the_schema_leads_somewhere():
    document = schema()

    def references(node: Any) -> list[str]:
        if isinstance(node, dict):
            own = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
            return own + [found for item in node.values() for found in references(item)]
        return [found for item in node for found in references(item)] if isinstance(node, list) else []

    found = set(references(document))
    assert "#/$defs/Schedule" in found
    assert found <= {f"#/$defs/{name}" for name in document["$defs"]}


OWN = '''
from pydantic import Field
from shoal.algorithms.ppo import Ppo

class Mine(Ppo):
    """PPO with a number more."""
    bonus: float = Field(0.5, ge=0, description="A number more.")
'''


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A user's own algorithm, by import path."""
    name = f"my_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    return f"{name}:Mine"


def test_a_users_own_algorithm(own):
    experiment = load(SMALL | {"algorithm": {"name": own, "bonus": 2, "unroll": 5}})
    assert (experiment.algorithm.bonus, experiment.algorithm.unroll) == (2, 5)
    assert read_back(experiment) == experiment
    assert "bonus: 2.0  # A number more." in as_yaml(experiment)
    assert rebuild(describe(experiment), lambda name: name) == experiment
    with pytest.raises(SettingsError, match=r"^algorithm\.bonnus: unknown setting; allowed: lr, .*'bonus'\?$"):
        load(SMALL, {"algorithm": {"name": own, "bonnus": 2}})
    with pytest.raises(SettingsError, match=r"^algorithm: .* has no 'Mime'; did you mean 'Mine'\?$"):
        load(SMALL, {"algorithm.name": own.replace("Mine", "Mime")})


def test_an_algorithm_that_cannot_be_named_cannot_be_written_down():
    class Inside(find("ppo")):
        """Only exists in this call."""

    with pytest.raises(ShoalError, match="Inside cannot run in another process: define it at the top"):
        as_yaml(load(SMALL | {"algorithm": Inside()}))


def shoal(monkeypatch, capsys, *words: str) -> tuple[int, str, str]:
    """Run the command here: its exit status, what it said and what it complained of."""
    monkeypatch.setattr(sys, "argv", ["shoal", *words])
    with pytest.raises(SystemExit) as caught:
        main()
    return (int(caught.value.code or 0), *capsys.readouterr())


def test_the_command_prints_the_whole_configuration(monkeypatch, capsys, tmp_path):
    path = str(ROOT / "configs" / "ppo_cartpole.yaml")
    code, out, _ = shoal(monkeypatch, capsys, "config", path, "algorithm.lr=1e-4", "evaluation.target=null")
    assert code == 0
    (tmp_path / "printed.yaml").write_text(out)
    assert load(tmp_path / "printed.yaml") == load(path, {"algorithm.lr": 1e-4, "evaluation.target": None})


def test_the_command_prints_the_schema(monkeypatch, capsys):
    code, out, _ = shoal(monkeypatch, capsys, "config", "--schema")
    assert code == 0
    assert json.loads(out) == json.loads(json.dumps(schema()))


@pytest.mark.parametrize("command", ["config", "train"])
@pytest.mark.parametrize("word", ["stepps=1", "algorithm.gamma=2", "algorithm=pop", "algorithm.name=ppoo", "steps"])
def test_a_mistake_ends_the_command_with_its_message(monkeypatch, capsys, tmp_path, command, word):
    monkeypatch.chdir(tmp_path)
    code, out, err = shoal(monkeypatch, capsys, command, str(CONFIGS[0]), word)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert word.partition("=")[0].partition(".")[0] in err
    assert "Traceback" not in err
    assert not list(tmp_path.iterdir())


def test_a_mistake_ends_a_real_process_without_a_traceback(tmp_path):
    code = "from shoal.cli.main import main; main()"
    impala = next(path for path in CONFIGS if path.name == "impala_cartpole.yaml")
    arguments = ["train", str(impala), "algorithm.entropy_costt=1"]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: algorithm.entropy_costt: unknown setting; allowed: lr, ")
    assert done.stderr.endswith("did you mean 'entropy_cost'?\n")
    assert done.stdout == ""


def test_a_number_in_place_of_a_default_that_changes_is_pointed_out():
    lines = as_yaml(load(SMALL | {"algorithm": {"name": "impala", "lr": 1e-3, "entropy_cost": 0.02}})).splitlines()
    (lr,) = [line for line in lines if line.strip().startswith("lr:")]
    assert lr.endswith("lr: 0.001  # Learning rate. Constant here; the default goes from 0.0006 to 0.")
    (entropy,) = [line for line in lines if line.strip().startswith("entropy_cost:")]
    assert entropy.endswith("# Weight of the entropy bonus.")
    (lr,) = [line for line in as_yaml(load(SMALL | {"algorithm": {"name": "impala"}})).splitlines() if " lr:" in line]
    assert lr.endswith("# Learning rate.")
