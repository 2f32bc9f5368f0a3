"""Exporting: a policy as one file that runs without Shoal, by ONNX Runtime or by torch alone."""

from __future__ import annotations

import copy
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from pydantic import BaseModel
from torch import Tensor, nn

from shoal.core.algorithm import Algorithm, HasValues
from shoal.core.errors import SettingsError, ShoalError, nearest
from shoal.core.tree import flat, map_tree, to_numpy, to_torch
from shoal.core.types import MASK, Act, ActionSpec, Array, ArraySpec, Step
from shoal.runs import files

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from shoal.policy import Policy

Arrays: TypeAlias = dict[str, Array]

SUFFIXES = {"onnx": ".onnx", "torch": ".pt2"}
PACKAGES = ("onnx", "onnxscript", "onnxruntime")
CHATTY = ("torch.onnx", "onnx_ir", "onnxscript")  # loggers
GREEDY = {"evaluation_epsilon": 0.0, "evaluation_policy": "mode"}  # settings by which evaluations draw at random
VALUES = ("value", "policy", "q")  # records that say what a choice is based on
SIZE, STEPS = 32, 8  # environments and steps of the check
TOLERANCE = 1e-3  # of numbers, relative where they are above 1
TIES = 0.01  # share of choices that may differ, where two actions are worth nearly the same


@dataclass(frozen=True)
class Export:
    """A file that was written and checked."""

    path: Path
    signature: Mapping[str, Any]  # inputs, outputs and origin, as in the JSON beside the file
    difference: float  # the largest between numbers of the policy and of the file, relative where they are above 1
    differing: int  # choices among those checked that were not the policy's

    def __fspath__(self) -> str:
        """Where it is."""
        return str(self.path)

    def __str__(self) -> str:
        """What it takes and gives, and how exact it is."""
        made = self.signature
        lines = [f"exported: {self.path} ({made['algorithm']} for {made['environment']}, {made['steps']:,} steps)"]
        for side in ("inputs", "outputs"):
            each = (f"{one['name']} {one['dtype']} [{', '.join(map(str, one['shape']))}]" for one in made[side])
            lines.append(f"{side}: {'; '.join(each)}")
        choices = f", {self.differing} other choices" if self.differing else ""
        checked = f"checked on {SIZE * STEPS} random observations: largest difference {self.difference:.1e}{choices}"
        return "\n".join([*lines, checked])


class Decision(nn.Module):
    """The greedy choice of a policy as a function of named arrays [B, ...] and of nothing else."""

    def __init__(self, policy: Policy) -> None:
        """Copy the network, and find out by a trial what it carries from step to step."""
        super().__init__()
        self.name = policy.experiment.algorithm_name
        self.algorithm = greedy(policy.experiment.algorithm)
        self.net = copy.deepcopy(policy.follower.net).cpu().requires_grad_(False)
        self.rewards = [float(policy.clipped(np.array([end]))[0]) for end in (-np.inf, np.inf)]
        self.start = starts(policy)
        number, flag = ArraySpec((), "float32"), ArraySpec((), "bool")
        # A step and a carry, as trees of specs.
        self.shown = {"observation": policy.spec.observation, "reward": number, "discount": number, "first": flag}
        self.carried = self._carried()
        self.inputs: dict[str, ArraySpec] = {**dict(flat(self.shown)), **dict(flat(self.carried, "state"))}
        self.outputs: list[str] = []  # none: all

    def _carried(self) -> dict[str, Any]:
        """What is carried from step to step, with the types that `act` gives it."""
        before = self.algorithm.begin(self.net, 2)
        parts = dict(flat(before, "state"))
        odd = [name for name, part in parts.items() if not isinstance(part, Tensor) or part.shape[:1] != (2,)]
        if odd or not isinstance(before, Mapping):
            raise ShoalError(
                f"{self.name} cannot be exported: what it carries from step to step is more than arrays with a row for "
                f"each environment: {', '.join(odd) or type(before).__name__}"
            )
        if begun := [name for name, part in parts.items() if part.any()]:
            raise ShoalError(f"{self.name} cannot be exported: {', '.join(begun)} does not begin with zeros")
        with torch.no_grad():
            after = self.algorithm.act(self.net, self.step({}, 2), before, None).carry
        if {*dict(flat(after, "state"))} != {*parts}:
            raise ShoalError(f"{self.name} cannot be exported: it begins with {[*parts]}, but then carries {[*after]}")
        specs: dict[str, Any] = map_tree(spec_of, after)
        return specs

    def step(self, inputs: Mapping[str, Tensor], size: int) -> Step:
        """The step that inputs describe, with rewards clipped as in training."""
        parts = taken(self.shown, inputs, size)
        return Step(**{**parts, "reward": parts["reward"].clamp(*self.rewards)})

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Choose; inputs that are missing are zeros."""
        size = next(iter(inputs.values())).shape[0]
        carry = taken(self.carried, inputs, size, "state")
        choice, values = chosen(self.algorithm, self.net, self.step(inputs, size), carry)
        action = choice.action + torch.tensor(self.start) if any(self.start) else choice.action
        outputs = {"action": action, **values, **dict(flat(choice.carry, "next_state"))}
        return {name: outputs[name] for name in self.outputs or outputs}


def greedy(algorithm: Algorithm[Any]) -> Algorithm[Any]:
    """The same algorithm, whose evaluations always take the best action."""
    assert isinstance(algorithm, BaseModel)  # every experiment's is
    return algorithm.model_copy(update={name: GREEDY[name] for name in GREEDY if name in type(algorithm).model_fields})


def chosen(algorithm: Algorithm[Any], net: nn.Module, step: Step, carry: Any) -> tuple[Act, dict[str, Tensor]]:
    """A choice without exploration, and the values behind it."""
    choice = algorithm.act(net, step, carry, None)
    values = {name: choice.record[name] for name in VALUES if name in choice.record}
    if isinstance(algorithm, HasValues):
        values |= algorithm.values(net, step, carry)
    return choice, values


def starts(policy: Policy) -> list[int]:
    """The number of the first choice in the environment, for each number of an action; 0 where it is continuous."""
    spec = policy.spec.action
    nothing = np.zeros((1,) if spec.discrete else (1, spec.size), np.int64 if all(spec.choices) else np.float32)
    first = numbers(policy.decode(nothing)[0])
    return [int(number) if count else 0 for number, count in zip(first, spec.choices, strict=True)]


def numbers(action: Any) -> Array:
    """The numbers of one action of an environment, side by side."""
    if isinstance(action, Mapping | tuple):
        parts = action.values() if isinstance(action, Mapping) else action
        return np.concatenate([numbers(part) for part in parts])
    return np.ravel(action)


def spec_of(tensor: Tensor) -> ArraySpec:
    """Shape and type of an array, without its batch axis."""
    return ArraySpec((*tensor.shape[1:],), str(tensor.dtype).removeprefix("torch."))


def zeros(specs: Mapping[str, ArraySpec], size: int) -> dict[str, Tensor]:
    """Arrays of zeros."""
    return {name: torch.zeros(size, *one.shape, dtype=getattr(torch, one.dtype)) for name, one in specs.items()}


def taken(specs: Any, inputs: Mapping[str, Tensor], size: int, path: str = "") -> Any:
    """A tree of specs as a tree of the inputs that have the paths of its leaves; those that are missing are zeros."""
    if isinstance(specs, Mapping):
        return {key: taken(part, inputs, size, f"{path}.{key}" if path else key) for key, part in specs.items()}
    return inputs[path] if path in inputs else zeros({path: specs}, size)[path]


def trace(decision: Decision) -> ExportedProgram:
    """A program for batches of any size."""
    inputs = zeros(decision.inputs, 3)  # a size that no other axis is likely to have, and that is not special as 1 is
    batch = torch.export.Dim("batch")
    try:
        with torch.no_grad(), quiet():
            return torch.export.export(decision, (inputs,), dynamic_shapes=({name: {0: batch} for name in inputs},))
    except Exception as error:  # torch raises errors of all kinds
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ShoalError(
            f"{decision.name} cannot be exported, since torch cannot trace its choice: {reason}"
        ) from error


def prepare(decision: Decision) -> ExportedProgram:
    """Trace a decision, and leave out whatever its choice and its values do not depend on."""
    refuse_chance(decision)
    outputs = [*decision(zeros(decision.inputs, 2))]
    needed = dependencies(trace(decision), [*decision.inputs], outputs)
    kept = [name for name in decision.inputs if name in needed or name.partition(".")[0] == "observation"]
    decision.inputs = {name: decision.inputs[name] for name in kept}
    decision.outputs = [name for name in outputs if not name.startswith("next_state.") or previous_of(name) in kept]
    return trace(decision)


def refuse_chance(decision: Decision) -> None:
    """Refuse a policy that draws at random even in evaluations."""
    generator = np.random.default_rng(0)
    inputs = to_torch({name: drawn(name, one, generator) for name, one in decision.inputs.items()})
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        results = []
        for seed in (0, 1):
            torch.manual_seed(seed)
            results.append(decision(inputs))
    if different := [name for name in results[0] if not torch.equal(results[0][name], results[1][name])]:
        raise ShoalError(
            f"{decision.name} cannot be exported: even in evaluations it draws at random ({', '.join(different)})"
        )


def previous_of(output: str) -> str:
    """The input that takes, at the next step, what a state was after this one."""
    return output.removeprefix("next_")


def dependencies(program: ExportedProgram, inputs: list[str], outputs: list[str]) -> set[str]:
    """The inputs on which the choice and the values depend, directly or by what is carried to the next step."""
    nodes = {node.name: node for node in program.graph.nodes}
    named = dict(zip(program.graph_signature.user_inputs, inputs, strict=True))
    ends = {name: nodes[str(node)] for name, node in zip(outputs, program.graph_signature.user_outputs, strict=True)}
    waiting = [node for name, node in ends.items() if not name.startswith("next_state.")]
    seen, found = {*waiting}, set()
    while waiting:
        node = waiting.pop()
        # The size of the batch is read off any input, whether or not its numbers matter.
        further = [] if node.target == torch.ops.aten.sym_size.int else [*node.all_input_nodes]
        if node.name in named:
            found.add(named[node.name])
            further += [ends[name] for name in ends if previous_of(name) == named[node.name] != name]
        waiting += [one for one in further if one not in seen]
        seen.update(further)
    return found


@contextmanager
def quiet() -> Iterator[None]:
    """Without what libraries say of their insides: LSTMs that keep lists of their weights, passes over a graph."""
    before = {name: logging.getLogger(name).level for name in CHATTY}
    for name in CHATTY:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)


def write(policy: Policy, form: str, path: str | Path) -> Export:
    """Write a policy as a file that runs without Shoal, and check that it does what the policy does."""
    path = Path(path)
    if form not in SUFFIXES:
        raise SettingsError(f"unknown format {form!r}: expected onnx or torch{nearest(form, SUFFIXES)}")
    if path.suffix != SUFFIXES[form]:
        raise SettingsError(f"{path}: the name of a file for {form} must end with {SUFFIXES[form]}")
    if form == "onnx":
        require()
    decision = Decision(policy)
    program = prepare(decision)
    signature = describe(policy, decision, form)
    draft = path.with_name(f".draft-{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save, run = (save_onnx, run_onnx) if form == "onnx" else (save_torch, run_torch)
        with quiet():
            save(program, draft, signature)
            difference, differing = compare(policy, decision, run(draft))
        if not difference <= TOLERANCE or differing > TIES * SIZE * STEPS:
            raise ShoalError(
                f"{path} was not written: the exported file does not do what the policy does. The largest difference "
                f"is {difference:.1e}, and {differing} of {SIZE * STEPS} choices are others"
            )
        draft.replace(path)
        files.write(path.with_name(f"{path.name}.json"), json.dumps(signature, indent=2) + "\n")
    except OSError as error:
        raise ShoalError(f"cannot write {path}: {error.strerror}") from None
    finally:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
    return Export(path, signature, difference, differing)


def require() -> None:
    """Refuse to begin without the packages that ONNX needs."""
    if missing := [package for package in PACKAGES if find_spec(package) is None]:
        raise ShoalError(f"ONNX needs {', '.join(missing)}: pip install 'shoal[onnx]'")


def describe(policy: Policy, decision: Decision, form: str) -> dict[str, Any]:
    """What a file takes and gives, and where it comes from."""
    outputs = {name: spec_of(tensor) for name, tensor in decision(zeros(decision.inputs, 2)).items()}

    def arrays(specs: Mapping[str, ArraySpec]) -> list[dict[str, Any]]:
        return [{"name": name, "shape": ["batch", *one.shape], "dtype": one.dtype} for name, one in specs.items()]

    return {
        "format": form,
        "environment": policy.experiment.environment.id,
        "algorithm": policy.experiment.algorithm_name,
        "checkpoint": policy.path.name,
        "steps": policy.steps,
        "inputs": arrays(decision.inputs),
        "outputs": arrays(outputs),
        "action": ranges(policy.spec.action, decision.start),
        "torch": torch.__version__,
    }


def ranges(spec: ActionSpec, start: list[int]) -> list[dict[str, float]]:
    """What each number of an action may be."""
    each: list[dict[str, float]] = []
    for part in spec.parts or (spec,):
        if part.discrete:
            each.append({"choices": part.size, "start": start[len(each)]})
        else:
            each += [{"low": low, "high": high} for low, high in zip(part.low, part.high, strict=True)]
    return each


def save_torch(program: ExportedProgram, path: Path, signature: Mapping[str, Any]) -> None:
    """Write what `torch.export.load` reads."""
    torch.export.save(program, path, extra_files={"shoal.json": json.dumps(signature)})


def run_torch(path: Path) -> Callable[[Arrays], Arrays]:
    """What a file for torch does, as a function."""
    module = torch.export.load(path).module()
    return lambda inputs: to_numpy(module(to_torch(inputs)))


def save_onnx(program: ExportedProgram, path: Path, signature: Mapping[str, Any]) -> None:
    """Write what ONNX Runtime reads."""
    inputs, outputs = ([one["name"] for one in signature[side]] for side in ("inputs", "outputs"))
    made = torch.onnx.export(program, dynamo=True, verbose=False, input_names=inputs, output_names=outputs)
    assert made is not None  # which it is where a path is given
    shape = made.model.graph.inputs[0].shape
    assert shape is not None  # every input's is known
    made.rename_axes({str(shape[0]): "batch"})
    made.model.metadata_props["shoal"] = json.dumps(signature)
    made.save(path, external_data=False)


def run_onnx(path: Path) -> Callable[[Arrays], Arrays]:
    """What a file for ONNX Runtime does, as a function."""
    session = import_module("onnxruntime").InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return lambda inputs: dict(zip(names, session.run(names, inputs), strict=True))


def compare(policy: Policy, decision: Decision, run: Callable[[Arrays], Arrays]) -> tuple[float, int]:
    """Show the policy and an exported file the same: the largest difference, and how many choices are others."""
    net, device, algorithm = policy.follower.net, policy.follower.device, decision.algorithm
    generator = np.random.default_rng(0)
    choices = np.array(policy.spec.action.choices) > 0
    carry = algorithm.begin(net, SIZE)
    difference, differing = 0.0, 0
    for _ in range(STEPS):
        arrays = {name: drawn(name, one, generator) for name, one in flat(decision.shown)}
        seen = to_torch({**arrays, "reward": policy.clipped(arrays["reward"])}, device)
        arrays |= {name: part.cpu().numpy() for name, part in flat(carry, "state")}
        found = run({name: arrays[name].astype(one.dtype) for name, one in decision.inputs.items()})
        with torch.inference_mode():
            choice, values = chosen(algorithm, net, Step(**taken(decision.shown, seen, SIZE)), carry)
        carry = choice.carry
        wanted = to_numpy({**values, **dict(flat(carry, "next_state"))})
        action = np.stack([numbers(one) for one in policy.decode(choice.action.cpu().numpy())])  # [B, K]
        wrong = np.abs(found.pop("action").reshape(action.shape) - action)
        same = ~wrong[:, choices].any(1)  # after another choice, what is carried on is another too
        differing += int((~same).sum())
        apart = [wrong[:, ~choices] / np.maximum(np.abs(action[:, ~choices]), 1)]
        for name, part in found.items():
            apart.append((np.abs(part - wanted[name]) / np.maximum(np.abs(wanted[name]), 1))[same])
        difference = float(np.max([difference, *(part.max() for part in apart if part.size)]))  # NaN if any is
    return difference, differing


def drawn(name: str, spec: ArraySpec, generator: np.random.Generator) -> Array:
    """Random arrays of a spec; masks and flags are likely to be 1 and 0."""
    shape = (SIZE, *spec.shape)
    if spec.dtype == "uint8":
        return generator.integers(0, int(spec.largest) + 1, shape).astype(np.uint8)
    if spec.dtype == "bool":
        return generator.random(shape) < 0.2
    if spec.dtype == "int64":  # of choices, of which there are two at least
        return generator.integers(0, 2, shape)
    if name.endswith(MASK):
        return (generator.random(shape) < 0.7).astype(np.float32)
    return generator.normal(0.0, 2.0, shape).astype(spec.dtype)
