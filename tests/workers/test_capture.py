"""What can be captured as a CUDA graph looks at no data and changes by no number of Python's; no GPU is needed."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any, ClassVar

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.algorithms.apex_dqn import ApexDqn
from shoal.algorithms.deterministic import ApexDpg, D4pg, FastTd3, Td3
from shoal.algorithms.dqn import Dqn
from shoal.algorithms.impact import Impact
from shoal.algorithms.impala import Impala
from shoal.algorithms.ppo import Ppo
from shoal.algorithms.sac import Sac
from shoal.core.settings import Schedule, at
from shoal.core.tree import map_tree
from shoal.core.types import MASK, ActionSpec, ArraySpec, Batch, Spec
from shoal.nets.actor_critic import ActorCriticArchitecture
from shoal.nets.continuous import ContinuousArchitecture
from shoal.nets.torsos import Architecture
from shoal.workers import graph
from shoal.workers.learner import Updates
from shoal.workers.model import Divided, Model, optimizer_step
from shoal.workers.progress import Progress
from tests.algorithms.conftest import CONTINUOUS, DISCRETE, SPECS, VECTOR, play

CPU, ELSEWHERE = torch.device("cpu"), torch.device("meta")  # where numbers have shapes and no values
ASKS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "lift_fresh", "repeat_interleave"}
ASKS |= {"unique_consecutive", "unique_dim", "_unique", "_unique2"}
UPDATES = 6
DISCRETE_SPECS = {
    "vector": SPECS["discrete"],
    "mapping": SPECS["mapping"],
    "masked": Spec({"seen": VECTOR, MASK: ArraySpec((3,), "float32")}, DISCRETE),
    "image": Spec(ArraySpec((1, 40, 40), "uint8"), DISCRETE),
}
SPEC_OF = {
    **DISCRETE_SPECS,
    "continuous": SPECS["continuous"],
    "joint": Spec(VECTOR, ActionSpec(3, parts=(DISCRETE, CONTINUOUS))),
}


class AsOnGpu(TorchFunctionMode):
    """All tensors say that they are on a GPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function == torch.Tensor.is_cuda.__get__:
            return True
        return function(*args, **(kwargs or {}))


class Watched(TorchDispatchMode):
    """Notes every operation with its numbers, and fails where the host would have to wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = function.overloadpacket.__name__, kwargs or {}
        if name.startswith("_record_function"):  # of the profiler
            return function(*args, **kwargs)
        given = [*tensors((args, kwargs))]
        bools = name.startswith("index") and any(part.dtype == torch.bool for part in tensors(args[1:2]))
        assert name not in ASKS, f"{name} looks at data, or brings a number of Python's to the GPU"
        assert not bools, f"{name} by a mask asks where it is true"
        assert kwargs.get("generator") is None, f"{name} draws from a generator of its own"
        if name.startswith("_fused_adam"):  # which these tensors do not have
            made = None
        else:
            made = function(*args, **kwargs)
        places = {part.device.type for part in [*given, *tensors(made)]}
        assert places <= {ELSEWHERE.type}, f"{name} has tensors on {places}"
        self.noted.append(f"{name} {described((args, kwargs))}")
        return made


def tensors(tree: Any) -> Iterator[torch.Tensor]:
    """All tensors among arguments."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict):
        yield from tensors([*tree.values()])
    elif isinstance(tree, list | tuple):
        for part in tree:
            yield from tensors(part)


def described(tree: Any) -> Any:
    """Arguments in words, tensors by their shape."""
    if isinstance(tree, torch.Tensor):
        return f"{tree.dtype}{[*tree.shape]}"
    if isinstance(tree, dict):
        return {key: described(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [described(part) for part in tree]
    return repr(tree)


def moved(tree: Any) -> Any:
    """Tensors elsewhere."""
    return map_tree(lambda x: x.to(ELSEWHERE), tree)


def experience(algorithm: Any, spec: Spec, mixed: bool) -> Batch:
    """A batch as the optimizer's steps receive it."""
    torch.manual_seed(0)
    net = algorithm.build(spec)
    length = 1 if algorithm.experience.length == 1 else 5
    batch = play(algorithm, net, spec, length=length)
    if mixed:
        batch = batch._replace(fresh=torch.arange(len(batch.weight)) % 2 == 0)
    with AsOnGpu(), torch.no_grad():
        batch = algorithm.prepare(net, batch)
    named = {name: moved(value) for name in graph.MOVING if (value := getattr(batch, name)) is not None}
    return batch._replace(**named)


def watched(algorithm: Any, spec: Spec, mixed: bool = False) -> list[tuple[int, list[str]]]:
    """The operations of several updates, during which schedules move, each with its form."""
    changing = {
        name: MOVING for name in type(algorithm).model_fields if getattr(getattr(algorithm, name), "changes", 0)
    }
    algorithm = algorithm.model_copy(update=changing)  # all the time, and not for a part of the run only
    batch = experience(algorithm, spec, mixed)
    model = Model(algorithm, spec, ELSEWHERE)
    graph.make_capturable(model.optimizer)
    found = []
    for update in range(1, UPDATES + 1):
        with AsOnGpu():
            if hasattr(algorithm, "phase"):
                model.net.turn = update % algorithm.policy_every == 0
            form = algorithm.phase(model.net) if hasattr(algorithm, "phase") else 0
            with Watched() as watch:
                present = at(algorithm, update, UPDATES)
                optimizer_step(present, model.net, model.target, model.optimizer, batch)
        found.append((form, watch.noted))
    return found


@pytest.fixture(autouse=True)
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the optimizers take tensors that have no values."""
    monkeypatch.setattr(import_module("torch.optim.adam"), "_device_dtype_check_for_fused", lambda *args, **more: None)


MOVING = Schedule(start=1e-2, end=1e-3)
SMALL = {"hidden": (8,), "normalise_observation": True}
VALUES = {"lr": MOVING, "network": Architecture(**SMALL)}
BOTH = {"lr": MOVING, "network": ActorCriticArchitecture(**SMALL)}
APART = {"lr": MOVING, "network": ActorCriticArchitecture(**SMALL, separate=True, normalise_reward=True)}
CONTROL = {"lr": MOVING, "network": ContinuousArchitecture(hidden=(8, 8), critic_hidden=(8, 8))}
SIMBA = {
    "lr": MOVING,
    "network": ContinuousArchitecture(torso="simba", hidden=(8, 8), critic_hidden=(8, 8), normalise_observation=True),
}
CASES: list[tuple[Any, str]] = [
    *((Dqn(**VALUES), spec) for spec in DISCRETE_SPECS),
    (Dqn(**VALUES, double=False, clip_norm=None), "vector"),
    (Dqn(**VALUES, dueling=True, quantiles=5, n=3), "masked"),
    (Dqn(**VALUES, atoms=5, head=8), "masked"),
    (Dqn(**VALUES, noisy=True, head=8), "vector"),
    (Dqn(**VALUES, munchausen=True), "masked"),
    (ApexDqn(**VALUES, head=8), "vector"),
    (ApexDqn(**VALUES, head=8, rule="adam", quantiles=5), "vector"),
    *((Ppo(**BOTH), spec) for spec in SPEC_OF),
    (Ppo(**APART, value_clip=0.2, normalise_advantage=False, clip_norm=None), "vector"),
    (Ppo(**APART, distribution="squashed"), "continuous"),
    *((Impala(**BOTH), spec) for spec in SPEC_OF),
    (Impala(**APART, rule="adam", clip=0.2, normalise_advantage=True), "vector"),
    (Impala(**BOTH, momentum=0.9, distribution="squashed"), "continuous"),
    *((Impala(**BOTH, trust_region=0.3, clone_policy=0.1, clone_value=0.1), spec) for spec in SPEC_OF),
    *((Impact(**BOTH, kl_cost=0.1, normalise_advantage=True), spec) for spec in SPEC_OF),
    (Sac(**CONTROL), "continuous"),
    (Sac(**SIMBA, policy_every=2, combine="mean", clip_norm=1.0), "continuous"),
    (Sac(**CONTROL, quantiles=5, drop=2, policy_every=2), "continuous"),
    (Sac(**CONTROL, quantiles=5, critics=3, weight_decay=0.1), "continuous"),
    (Td3(**CONTROL), "continuous"),
    (Td3(**SIMBA, quantiles=5, climb="min", target_policy=False), "continuous"),
    (FastTd3(**CONTROL), "continuous"),
    (D4pg(**CONTROL), "continuous"),
    (ApexDpg(**CONTROL), "continuous"),
]


@pytest.mark.parametrize(
    ("algorithm", "spec"), CASES, ids=[f"{type(one).__name__}-{spec}-{i}" for i, (one, spec) in enumerate(CASES)]
)
def test_what_is_captured_looks_at_nothing_and_is_always_the_same(algorithm: Any, spec: str) -> None:
    """All updates of a form do the same operations with the same numbers, whatever schedules say by then."""
    assert algorithm.capturable
    found = watched(algorithm, SPEC_OF[spec], mixed=bool(getattr(algorithm, "clone_policy", 0)))
    forms: dict[int, list[str]] = {}
    for form, noted in found[2:]:  # by then the optimizer has made its state
        assert forms.setdefault(form, noted) == noted
    assert len(forms) == 1 + (getattr(algorithm, "policy_every", 1) > 1)
    assert all(any("backward" in one for one in noted) for noted in forms.values())


class Asks(Dqn):
    """Has the host wait for a number."""

    def loss(self, net: Any, target: Any, batch: Batch) -> Any:
        loss = super().loss(net, target, batch)
        return loss._replace(each=loss.each * (2 if loss.each.mean() > 0 else 1))


class Chooses(Dqn):
    """Asks where a mask is true."""

    def loss(self, net: Any, target: Any, batch: Batch) -> Any:
        loss = super().loss(net, target, batch)
        return loss._replace(metrics={"big": loss.each[loss.each > 1].sum()})


class Brings(Dqn):
    """Brings a number of Python's to the GPU."""

    def loss(self, net: Any, target: Any, batch: Batch) -> Any:
        loss = super().loss(net, target, batch)
        return loss._replace(each=loss.each * torch.tensor(self.gamma))


class Stays(Dqn):
    """Has numbers on the host beside those on the GPU."""

    def loss(self, net: Any, target: Any, batch: Batch) -> Any:
        loss = super().loss(net, target, batch)
        return loss._replace(each=loss.each * torch.ones(()))


class Moves(Dqn):
    """Depends on a schedule."""

    def loss(self, net: Any, target: Any, batch: Batch) -> Any:
        loss = super().loss(net, target, batch)
        return loss._replace(each=loss.each * self.epsilon.now)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (Asks, "_local_scalar_dense looks at data"),
        (Chooses, "index by a mask"),
        (Brings, "lift_fresh looks at data, or brings a number"),
        (Stays, "tensors on {'cpu'}"),
        (Moves, "diff: .mul "),
    ],
)
def test_what_cannot_be_captured_is_found(made: type[Dqn], words: str) -> None:
    """So that the test above finds it, too."""
    with pytest.raises(AssertionError, match=words):
        test_what_is_captured_looks_at_nothing_and_is_always_the_same(made(**VALUES), "vector")


@pytest.mark.parametrize(
    "algorithm",
    [
        Ppo(clip=MOVING),
        Impala(entropy_cost=MOVING),
        Impact(clip=MOVING),
        Impala(network=ActorCriticArchitecture(lstm=8)),
        Sac(network=ContinuousArchitecture(lstm=8)),
        Dqn(network=Architecture(torso="package.module:Torso")),
        ApexDqn(network=Architecture(torso="package.module:Torso")),
    ],
)
def test_what_changes_or_asks_is_not_captured(algorithm: Any) -> None:
    assert not algorithm.capturable


class Replayed:
    """What a graph does, kernel by kernel."""

    made: ClassVar[list[int]] = []  # the form of each
    problem: ClassVar[RuntimeError | None] = None

    def __init__(self, step: Any, algorithm: Any, net: Any, target: Any, optimizer: Any, batch: Batch) -> None:
        Replayed.made.append(algorithm.phase(net) if hasattr(algorithm, "phase") else 0)
        if self.problem is not None:
            raise self.problem
        self.form, self.step, self.arguments = self.made[-1], step, (algorithm, net, target, optimizer)

    def replay(self, batch: Batch) -> Any:
        algorithm, net, *_ = self.arguments
        assert self.form == (algorithm.phase(net) if hasattr(algorithm, "phase") else 0)
        return self.step(*self.arguments, batch)


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Models that capture their updates as if there were a GPU."""
    monkeypatch.setattr(graph, "Graph", Replayed)
    monkeypatch.setattr(torch.cuda, "Stream", object)
    monkeypatch.setattr(graph.Captured, "_aside", lambda self, *given: self.step(*given))
    monkeypatch.setattr(Replayed, "made", [])
    monkeypatch.setattr(Replayed, "problem", None)

    def make(algorithm: Any, spec: Spec) -> tuple[Model, Model]:
        one, other = Model(algorithm, spec, CPU), Model(algorithm, spec, CPU)
        other.net.load_state_dict(one.net.state_dict())
        other.target.load_state_dict(one.target.state_dict())
        one.step = Divided(graph.Captured(optimizer_step, one.optimizer), exact=False)
        return one, other

    return make


def learn(models: tuple[Model, Model], algorithm: Any, spec: Spec, count: int = 10) -> None:
    """Let both learn the same, while the learning rate falls."""
    torch.manual_seed(0)
    for update in range(count):
        with torch.no_grad():
            batch = play(algorithm, models[0].net, spec, length=algorithm.experience.length)
        for model in models:
            torch.manual_seed(update)
            model.update(at(algorithm, update, count), batch, update)
    for mine, other in zip(*(model.net.state_dict().values() for model in models), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("made", [Sac, Td3])
def test_each_form_of_an_update_is_captured(captured: Any, made: Any, every: int) -> None:
    algorithm = made(**CONTROL, policy_every=every, policy_rate=0.3, weight_decay=0.1)
    models = captured(algorithm, SPECS["continuous"])
    learn(models, algorithm, SPECS["continuous"], count=12)
    assert sorted(Replayed.made) == ([1] if every == 1 else [0, 1])
    ours, others = ([float(group["lr"]) for group in model.optimizer.param_groups] for model in models)
    assert ours == pytest.approx(others)
    assert ours[1] == pytest.approx(0.3 * ours[0])


@pytest.mark.parametrize("algorithm", [ApexDqn(**VALUES, head=8), Dqn(**VALUES)], ids=["rmsprop", "adam"])
def test_a_learning_rate_on_the_gpu_is_the_same(captured: Any, algorithm: Any) -> None:
    models = captured(algorithm, SPECS["discrete"])
    assert torch.is_tensor(models[0].optimizer.param_groups[0]["lr"])
    learn(models, algorithm, SPECS["discrete"])


def test_an_update_that_cannot_be_captured_goes_on_kernel_by_kernel(captured: Any) -> None:
    algorithm = Dqn(**VALUES)
    models = captured(algorithm, SPECS["discrete"])
    Replayed.problem = RuntimeError("operation failed due to a previous error during capture")
    Replayed.problem.__context__ = RuntimeError("operation not permitted when stream is capturing\nand more")
    learn(models, algorithm, SPECS["discrete"])
    assert len(Replayed.made) == 1
    assert models[0].step.step is optimizer_step
    assert models[0].step.pieces == 1
    assert "could not be captured as a CUDA graph (operation not permitted when stream is capturing): from now on" in (
        models[0].step.news()
    )
    assert not models[0].step.news()


def test_a_capture_for_which_memory_is_short_cuts_batches(captured: Any) -> None:
    algorithm = Dqn(**VALUES)
    models = captured(algorithm, SPECS["discrete"])
    Replayed.problem = torch.OutOfMemoryError("CUDA out of memory.")
    learn(models, algorithm, SPECS["discrete"])
    assert models[0].step.pieces == 2
    assert "does not fit" in models[0].step.news()


def test_a_step_returns_no_graph() -> None:
    """The graph would hold on to the stream of its backward pass, and so spoil the next capture."""
    algorithm = Impala(**BOTH)
    model = Model(algorithm, SPECS["discrete"], CPU)
    batch = play(algorithm, model.net, SPECS["discrete"])
    loss = optimizer_step(algorithm, model.net, model.target, model.optimizer, batch)
    assert not any(part.requires_grad for part in (loss.each, loss.priority, *loss.metrics.values()))


def test_several_learners_capture_nothing() -> None:
    """One of them would have a learning rate of fewer digits than the others."""

    class Any_:
        """Whatever is asked of it."""

        begin, steps = 0, 7

        def look(self, *given: Any) -> str:
            return ""

    updates = object.__new__(Updates)
    algorithm = Dqn(**VALUES)
    updates.model, updates.now, updates.experiment = Model(algorithm, SPECS["discrete"], CPU), Progress(), Any_()
    updates.experiment.steps = 10
    updates.health, updates.count, updates.joint = Any_(), Any_(), Any_()
    updates._made(play(algorithm, updates.model.net, SPECS["discrete"], length=1), 3, None, 1, {})
    assert updates.now.steps == 7
    assert "step" not in vars(updates.model)
