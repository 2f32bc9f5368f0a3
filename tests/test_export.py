"""An exported policy chooses as the policy does, in a program that has no Shoal."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shoal
from shoal import export
from shoal.core.errors import SettingsError, ShoalError
from shoal.core.tree import to_numpy
from shoal.core.types import ActionSpec, Array
from shoal.policy import Policy
from shoal.runs import checkpoint
from shoal.workers.follower import Follower
from tests.conftest import SHOAL
from tests.pace import long, seconds

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
    environment, algorithm = CASES[name]
    experiment = shoal.configure({"environment": environment, "algorithm": algorithm, "engine": "inline"})
    folder.mkdir()
    (folder / "config.yaml").write_text(shoal.experiment.as_yaml(experiment))
    torch.manual_seed(1)
    net = Follower(experiment.algorithm, shoal.envs.spec_of(experiment.environment), "cpu").net
    for parameter in net.parameters():  # the first policy of many networks is nearly the same everywhere
        parameter.data += 0.1 * torch.randn_like(parameter)
    if (moments := getattr(net, "moments", None)) is not None:
        moments.parts[0].update(3 + 2 * torch.randn(50, 3))
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
        observation = (3 + 2 * generator.standard_normal((*shape, *spec.shape))).astype(np.float32)
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


def run_without_shoal(names: list[str], forms: list[str], folder: Path) -> dict[tuple[str, str], tuple[Policy, Any]]:
    """The policies, and what another program got from their files."""
    files = {}
    for name in names:
        policy = shoal.load(make(name, folder / name))
        for form in forms:
            path = policy.export(form, folder / f"{name}{export.SUFFIXES[form]}").path
            np.savez(f"{path}.npz", **draw(policy))  # type: ignore[arg-type]
            files[name, form] = policy, path
    words = [sys.executable, "-c", PROGRAM, *(str(path) for _, path in files.values())]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=seconds(100), check=False)
    assert done.returncode == 0, done.stderr
    return {key: (policy, dict(np.load(f"{path}.out.npz"))) for key, (policy, path) in files.items()}


def greedy(policy: Policy) -> Policy:
    """The same policy, which draws nothing at random."""
    algorithm = export.greedy(policy.experiment.algorithm)
    policy.experiment = policy.experiment.model_copy(update={"algorithm": algorithm})
    return policy


def check(policy: Policy, outputs: dict[str, Array]) -> None:
    """Every action is the policy's."""
    shown = draw(policy)
    wanted = played(greedy(policy), shown)
    assert outputs["action"].shape == wanted.shape
    assert len(np.unique(wanted)) > 1
    if policy.spec.action.discrete:
        np.testing.assert_array_equal(outputs["action"], wanted)
    else:
        np.testing.assert_allclose(outputs["action"], wanted, atol=1e-5)


SHORT = ["pixels", "memory", "control"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Files for torch and for ONNX Runtime, and what a program without Shoal got from them."""
    forms = ["torch", "onnx"] if installed() else ["torch"]
    return run_without_shoal(SHORT, forms, tmp_path_factory.mktemp("files"))


def installed() -> bool:
    """Whether ONNX can be written and run."""
    try:
        export.require()
    except ShoalError:
        return False
    return True


@pytest.mark.parametrize(
    "form", ["torch", pytest.param("onnx", marks=pytest.mark.skipif(not installed(), reason=WITHOUT))]
)
@pytest.mark.parametrize("name", SHORT)
def test_a_program_without_shoal_chooses_the_same(files: Any, name: str, form: str) -> None:
    check(*files[name, form])
