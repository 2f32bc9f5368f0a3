"""An exported policy chooses as the policy does, in a program that has no Shoal."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import shoal
from shoal import export
from shoal.cli.main import app
from shoal.core.errors import SettingsError, ShoalError
from shoal.core.tree import to_numpy, to_torch
from shoal.core.types import Array
from shoal.policy import Policy
from shoal.runs import checkpoint
from shoal.workers.follower import Follower
from shoal.writing import as_yaml
from tests.pace import seconds

WITHOUT = "the packages of ONNX are not installed: pip install 'shoal[onnx]'"
EPISODES, LENGTH = 20, 50  # environments that are played side by side, and steps of each
SMALL = {"hidden": [8], "lstm": 6}
CONTROL = {"hidden": [8], "critic_hidden": [8], "normalise_observation": True}
SEQUENCES = {"unroll": 4, "burn_in": 0, "overlap": 0, "batch": 2, "head": 4, "network": SMALL}
TINY = {"height": 36, "width": 36}  # pixels: the smallest that the network of Nature takes

CASES: dict[str, Any] = {
    "pixels": ({"id": "ALE/Pong-v5", "atari": TINY}, {"name": "dqn", "head": 0, "network": {"torso": "nature"}}),
    "memory": ({"id": "CartPole-v1"}, {"name": "impala", "network": {**SMALL, "previous": True}}),
    "control": ({"id": "Pendulum-v1"}, {"name": "sac", "network": CONTROL}),
    "atari": ({"id": "ALE/Pong-v5"}, {"name": "impala", "network": {"torso": "nature", "lstm": 16}}),
    "a3c": ({"id": "CartPole-v1"}, {"name": "a3c", "evaluation_policy": "sample"}),
    "ppo": ({"id": "Pendulum-v1"}, {"name": "ppo", "minibatches": 1, "network": {**SMALL, "previous": True}}),
    "dqn": ({"id": "CartPole-v1"}, {"name": "dqn", "noisy": True, "atoms": 11, "evaluation_epsilon": 0.5}),
    "apex_dqn": ({"id": "CartPole-v1"}, {"name": "apex_dqn", "quantiles": 3, "head": 4}),
    "r2d2": ({"id": "ALE/Pong-v5", "atari": TINY}, {"name": "r2d2", **SEQUENCES}),
    "td3": ({"id": "Pendulum-v1"}, {"name": "td3", "quantiles": 5, "drop": 1, "network": CONTROL}),
    "d4pg": ({"id": "Pendulum-v1"}, {"name": "d4pg", "network": {**CONTROL, "torso": "simba"}}),
    "apex_dpg": ({"id": "Pendulum-v1"}, {"name": "apex_dpg", "network": CONTROL}),
}

# What a user's program does: it knows the JSON beside the file, and steps many environments at once.
PROGRAM = """
import json, sys
import numpy as np
sys.modules["shoal"] = None  # an import of it fails

for path in sys.argv[1:]:
    signature = json.load(open(path + ".json"))
    if path.endswith(".onnx"):
        import onnxruntime
        session = onnxruntime.InferenceSession(path)
        names = [output.name for output in session.get_outputs()]
        choose = lambda inputs: dict(zip(names, session.run(None, inputs)))
    else:
        import torch
        torch.set_num_threads(1)
        module = torch.export.load(path).module()
        choose = lambda inputs: {name: part.numpy() for name, part in
                                 module({name: torch.from_numpy(part) for name, part in inputs.items()}).items()}
    shown, taken = np.load(path + ".npz"), []
    size = shown["first"].shape[1]
    inputs = {one["name"]: np.zeros([size, *one["shape"][1:]], one["dtype"]) for one in signature["inputs"]}
    for t in range(len(shown["first"])):
        inputs |= {name: shown[name][t] for name in shown if name in inputs}
        outputs = choose(inputs)
        taken.append(outputs)
        inputs |= {name.removeprefix("next_"): part for name, part in outputs.items() if name.startswith("next_")}
    np.savez(path + ".out.npz", **{name: np.stack([each[name] for each in taken]) for name in taken[0]})
assert not [name for name in sys.modules if name.startswith("shoal.")]
"""


def make(name: str, folder: Path) -> Path:
    """A run whose only checkpoint has random weights, and a normaliser that has seen something."""
    environment, algorithm = {**CASES, **MIXED, "ngu": ({"id": "Catch"}, {"name": "ngu", **SEQUENCES})}[name]
    experiment = shoal.configure({"environment": environment, "algorithm": algorithm, "engine": "inline"})
    folder.mkdir()
    (folder / "config.yaml").write_text(as_yaml(experiment))
    torch.manual_seed(1)
    net = Follower(experiment.algorithm, shoal.envs.spec_of(experiment.environment), "cpu").net
    for parameter in net.parameters():  # the first policy of many networks is nearly the same everywhere
        if parameter.dim() > 1:  # by the number of inputs, or rounding errors would grow from layer to layer
            parameter.data += 2 * torch.randn_like(parameter) / math.sqrt(parameter[0].numel())
    if (moments := getattr(net, "moments", None)) is not None:
        moments.parts[0].update(0.5 + 2 * torch.randn(50, 3))
    content = {"weights": to_numpy(net.state_dict()), "state": {"steps": 1234}}
    checkpoint.write(folder / "checkpoints" / "best", content)
    return folder


def draw(policy: Policy) -> dict[str, Array]:
    """Random observations [T, B, ...] and rewards, and where episodes begin."""
    generator, spec = np.random.default_rng(2), policy.spec.observation
    shape = (LENGTH, EPISODES)
    if spec.dtype == "uint8":
        observation = generator.integers(0, 256, (*shape, *spec.shape), dtype=np.uint8)
    else:
        observation = (0.5 + generator.standard_normal((*shape, *spec.shape))).astype(np.float32)
    first = generator.random(shape) < 0.1
    first[0] = True
    reward = 3 * generator.standard_normal(shape).astype(np.float32)
    return {"observation": observation, "first": first, "reward": reward}


def played(policy: Policy, shown: dict[str, Array]) -> Array:
    """What the policy itself chooses [T, B, ...], one environment after another."""
    columns = []
    for index in range(EPISODES):
        column = []
        for t in range(LENGTH):
            if shown["first"][t, index]:
                policy.reset()
            column.append(policy.act(shown["observation"][t, index], float(shown["reward"][t, index])))
        columns.append(np.stack(column))
    return np.stack(columns, 1)


def run_without_shoal(files: dict[Any, tuple[Policy, Path]], folder: Path) -> dict[Any, tuple[Policy, Any]]:
    """The policies, and what another program got from their files."""
    for policy, path in files.values():
        np.savez(f"{path}.npz", **draw(policy))  # type: ignore[arg-type]
    words = [sys.executable, "-c", PROGRAM, *(str(path) for _, path in files.values())]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=seconds(100), check=False)
    assert done.returncode == 0, done.stderr
    return {key: (policy, dict(np.load(f"{path}.out.npz"))) for key, (policy, path) in files.items()}


def check(policy: Policy, outputs: dict[str, Array]) -> None:
    """Every one of 1,000 actions is the policy's, which draws nothing at random."""
    algorithm = export.greedy(policy.experiment.algorithm)
    policy.experiment = policy.experiment.model_copy(update={"algorithm": algorithm})
    wanted = played(policy, draw(policy))
    assert outputs["action"].shape == wanted.shape
    assert len(np.unique(wanted)) > 1
    if policy.spec.action.discrete:
        np.testing.assert_array_equal(outputs["action"], wanted)
    else:
        np.testing.assert_allclose(outputs["action"], wanted, atol=1e-5)


def skipped_without(*values: Any) -> Any:
    """Parameters of a test that needs the packages of ONNX."""
    missing = [package for package in export.PACKAGES if find_spec(package) is None]
    return pytest.param(*values, marks=pytest.mark.skipif(bool(missing), reason=WITHOUT))


SHORT = [("pixels", "torch"), ("control", "torch"), skipped_without("memory", "onnx")]


@pytest.fixture(scope="module", autouse=True)
def _no_monitor() -> Iterator[None]:
    """Keep tqdm, which torch uses in ONNX's export, from starting a thread that never ends."""
    with pytest.MonkeyPatch.context() as patch:
        if find_spec("tqdm"):
            patch.setattr("tqdm.tqdm.monitor_interval", 0)
        yield


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, tuple[Path, str]]:
    """Runs that the command exported, and what it said."""
    folder, done = tmp_path_factory.mktemp("runs"), {}
    runs = {name: make(name, folder / name) for name in ("memory", "control", "pixels")}
    for name, form in (one.values if hasattr(one, "values") else one for one in SHORT):
        if form == "torch" or all(map(find_spec, export.PACKAGES)):
            said = CliRunner().invoke(app, ["export", str(runs[name]), f"--{form}"])
            assert said.exit_code == 0, said.output
            done[name, form] = runs[name], said.output
    return done


@pytest.fixture(scope="module")
def outcomes(commands: dict[Any, tuple[Path, str]], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What a program without Shoal got from the exported files."""
    files = {
        (name, form): (shoal.load(run), run / "exports" / f"best{export.SUFFIXES[form]}")
        for (name, form), (run, _) in commands.items()
    }
    return run_without_shoal(files, tmp_path_factory.mktemp("elsewhere"))


@pytest.mark.parametrize(("name", "form"), SHORT)
def test_a_program_without_shoal_chooses_the_same(outcomes: Any, name: str, form: str) -> None:
    check(*outcomes[name, form])


@pytest.mark.long
@pytest.mark.parametrize("form", ["torch", skipped_without("onnx")])
@pytest.mark.parametrize("name", CASES)
def test_every_algorithm_chooses_the_same_without_shoal(name: str, form: str, tmp_path: Path) -> None:
    policy = shoal.load(make(name, tmp_path / name))
    path = policy.export(form, tmp_path / f"policy{export.SUFFIXES[form]}").path
    check(*run_without_shoal({name: (policy, path)}, tmp_path)[name])


def test_the_command_says_what_the_file_takes_and_gives(commands: Any) -> None:
    run, said = commands["pixels", "torch"]
    lines = said.splitlines()
    assert lines[0] == f"exported: {run}/exports/best.pt2 (dqn for ALE/Pong-v5, 1,234 steps)"
    assert lines[1] == "inputs: observation uint8 [batch, 4, 36, 36]"
    assert lines[2] == "outputs: action int64 [batch]; q float32 [batch, 6]"
    assert re.fullmatch(r"checked on 256 random observations: largest difference \d\.\de[-+]\d\d", lines[3])


def test_the_json_beside_a_file_says_where_it_comes_from(commands: Any) -> None:
    run, _ = commands["control", "torch"]
    told = json.loads((run / "exports" / "best.pt2.json").read_text())
    assert told["inputs"] == [{"name": "observation", "shape": ["batch", 3], "dtype": "float32"}]
    assert [one["name"] for one in told["outputs"]] == ["action", "q"]
    assert told["action"] == [{"low": -2.0, "high": 2.0}]
    facts = {name: told[name] for name in ("environment", "algorithm", "checkpoint", "steps")}
    assert facts == {"environment": "Pendulum-v1", "algorithm": "sac", "checkpoint": "best", "steps": 1234}
    inside = {"shoal.json": ""}
    torch.export.load(run / "exports" / "best.pt2", extra_files=inside)
    assert json.loads(inside["shoal.json"]) == told


MIXED = {
    "several": ({"id": "tests.programs:Named-v0", "arguments": {"kind": "several"}}, {"name": "ppo"}),
    "hybrid": ({"id": "tests.programs:Named-v0", "arguments": {"kind": "hybrid"}}, {"name": "ppo"}),
    "pair": ({"id": "tests.programs:Named-v0", "arguments": {"kind": "pair"}}, {"name": "a3c"}),
    "masked": ({"id": "tests.programs:Allowing-v0"}, {"name": "dqn"}),
    "mapping": ({"id": "tests.programs:Mixed-v0"}, {"name": "impala", "network": SMALL}),
}


def eager(decision: export.Decision) -> Any:
    """A decision as if it had been written to a file and read again."""
    return lambda inputs: to_numpy(decision(to_torch(inputs)))


@pytest.mark.parametrize("name", MIXED)
def test_actions_are_in_the_units_of_the_environment(name: str, tmp_path: Path) -> None:
    policy = shoal.load(make(name, tmp_path / "run"))
    decision = export.Decision(policy)
    assert export.compare(policy, decision, eager(decision)) == (pytest.approx(0, abs=1e-6), 0)


@pytest.mark.long
@pytest.mark.parametrize("form", ["torch", skipped_without("onnx")])
@pytest.mark.parametrize("name", MIXED)
def test_observations_and_actions_of_all_kinds_are_exported(name: str, form: str, tmp_path: Path) -> None:
    exported = shoal.Run(make(name, tmp_path / "run")).export(form)
    assert exported.difference < 1e-4
    assert exported.differing == 0
    names = [one["name"] for one in exported.signature["inputs"]]
    assert name != "masked" or "observation.action_mask" in names
    assert name != "mapping" or {"observation.camera", "observation.inner.speed", "observation.symbol"} < {*names}
    assert name != "several" or exported.signature["action"] == [
        {"choices": 3, "start": 5},
        {"choices": 4, "start": 0},
    ]


def test_a_file_that_does_something_else_is_not_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = shoal.load(make("control", tmp_path / "run"))
    wrong = export.Decision(policy)
    wrong.net.moments.parts[0].mean += 1  # type: ignore[operator, union-attr, index]
    monkeypatch.setattr(export, "prepare", lambda decision: None)
    monkeypatch.setattr(export, "save_torch", lambda program, path, signature: path.write_text("a file"))
    monkeypatch.setattr(export, "run_torch", lambda path: eager(wrong))
    with pytest.raises(ShoalError, match="was not written: the exported file does not do what the policy does"):
        policy.export("torch", tmp_path / "policy.pt2")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_what_is_not_a_number_is_noticed(tmp_path: Path) -> None:
    policy = shoal.load(make("control", tmp_path / "run"))
    decision = export.Decision(policy)
    run = eager(decision)
    difference, _ = export.compare(policy, decision, lambda inputs: {**run(inputs), "q": np.full(32, np.nan)})
    assert np.isnan(difference)


def test_ngu_is_refused_in_words(tmp_path: Path) -> None:
    policy = shoal.load(make("ngu", tmp_path / "run"))
    with pytest.raises(ShoalError, match=r"ngu cannot be exported: what it carries .*: state\.bandits"):
        policy.export("torch", tmp_path / "policy.pt2")


def test_a_policy_that_draws_at_random_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = shoal.load(make("dqn", tmp_path / "run"))
    monkeypatch.setattr(export, "GREEDY", {})
    with pytest.raises(ShoalError, match=r"dqn cannot be exported: even in evaluations it draws at random \(action\)"):
        policy.export("torch", tmp_path / "policy.pt2")


def test_what_cannot_be_traced_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = shoal.load(make("control", tmp_path / "run"))
    act = type(policy.experiment.algorithm).act

    def looking(self: Any, net: Any, step: Any, carry: Any, rank: Any) -> Any:
        choice = act(self, net, step, carry, rank)
        return choice if step.observation.sum() < 1e9 else None

    monkeypatch.setattr(type(policy.experiment.algorithm), "act", looking)
    with pytest.raises(ShoalError, match="sac cannot be exported, since torch cannot trace its choice: "):
        policy.export("torch", tmp_path / "policy.pt2")


def test_mistakes_are_answered_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make("control", tmp_path / "run")
    policy = shoal.load(run)
    with pytest.raises(SettingsError, match="unknown format 'onx': expected onnx or torch; did you mean 'onnx'"):
        policy.export("onx", tmp_path / "policy.onnx")
    with pytest.raises(SettingsError, match=r"policy\.pt: the name of a file for torch must end with \.pt2"):
        policy.export("torch", tmp_path / "policy.pt")
    monkeypatch.setattr(export, "PACKAGES", ("onnx_of_nobody",))
    with pytest.raises(ShoalError, match=r"ONNX needs onnx_of_nobody: pip install 'shoal\[onnx\]'"):
        shoal.Run(run).export("onnx")
    for flags in ([], ["--onnx", "--torch"]):
        said = CliRunner().invoke(app, ["export", str(run), *flags])
        assert str(said.exception) == "give either --onnx or --torch"
