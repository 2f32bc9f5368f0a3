"""An update captured as a CUDA graph does what the same update does kernel by kernel; both need a GPU."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from shoal.algorithms.apex_dqn import ApexDqn
from shoal.algorithms.deterministic import D4pg, FastTd3, Td3
from shoal.algorithms.dqn import Dqn
from shoal.algorithms.impact import Impact
from shoal.algorithms.impala import Impala
from shoal.algorithms.ppo import Ppo
from shoal.algorithms.sac import Sac
from shoal.core.settings import Schedule, at
from shoal.core.types import ActionSpec, ArraySpec, Batch, Spec
from shoal.nets.actor_critic import ActorCriticArchitecture
from shoal.nets.continuous import ContinuousArchitecture
from shoal.nets.torsos import Architecture
from shoal.workers.graph import MOST, WARM, Captured
from shoal.workers.model import Divided, Model, optimizer_step
from shoal.workers.packing import to_batch
from shoal.workers.saving import resume, to_arrays

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and CUDA_VISIBLE_DEVICES=0")
SPEC = Spec(observation=ArraySpec((4,), "float32"), action=ActionSpec(3))
FALLING = {"lr": Schedule(start=1e-2, end=1e-3), "network": Architecture(hidden=(32,)), "target_every": 5}
NORMALISED = {"network": Architecture(hidden=(32,), normalise_observation=True)}
ALGORITHMS = [
    Dqn(**FALLING),
    Dqn(**FALLING | NORMALISED, dueling=True, quantiles=5),
    ApexDqn(**FALLING, head=16),
    ApexDqn(**FALLING, head=16, rule="adam"),
    Dqn(**FALLING, atoms=5, head=16, noisy=True),
]
SMALL = {"lr": Schedule(start=1e-2, end=1e-3), "network": ActorCriticArchitecture(hidden=(32,))}
PASSES = {"epochs": 2, "minibatches": 3}  # 16 items in 3 pieces are of two sizes
ACTOR_CRITICS = [
    Ppo(**SMALL, **PASSES),
    Ppo(**SMALL | {"network": ActorCriticArchitecture(hidden=(32,), normalise_observation=True, separate=True)}),
    Impala(**SMALL),
    Impala(**SMALL, rule="adam", clip=0.2, **PASSES, normalise_advantage=True),
    Impala(**SMALL, trust_region=0.3, rho_bar_policy=2.0),
    Impact(**SMALL, target_every=5),
]
CONTROL = {
    "lr": Schedule(start=1e-2, end=1e-3),
    "network": ContinuousArchitecture(hidden=(32, 32), critic_hidden=(32, 32), normalise_observation=True),
}
CONTINUOUS = [
    Sac(**CONTROL, policy_rate=0.3),
    Sac(**CONTROL, policy_every=2, quantiles=5, drop=1, clip_norm=1.0, weight_decay=0.1),
    Td3(**CONTROL, smoothing=0.0),
    FastTd3(**CONTROL),
    D4pg(**CONTROL, policy_every=3),
]


def spec_of(algorithm: Any) -> Spec:
    """The environment that an algorithm is for."""
    action = ActionSpec(2, (-2.0, 0.0), (2.0, 1.0)) if algorithm in CONTINUOUS else ActionSpec(3)
    return Spec(observation=ArraySpec((4,), "float32"), action=action)


def batches(count: int, size: int = 16, length: int = 1, continuous: bool = False) -> list[Batch]:
    """Made-up experience; sequences have episodes that begin, and the policy and value of whoever acted."""
    random = np.random.default_rng(0)
    chances = random.dirichlet(np.ones(3), (count, length, size)).astype(np.float32)
    trees = [
        {
            "observation": random.normal(size=(length + 1, size, 4)).astype(np.float32),
            "first": (random.random((length + 1, size)) < 0.1) & (length > 1),
            "action": random.random((length, size, 2)).astype(np.float32)
            if continuous
            else random.integers(3, size=(length, size)),
            "reward": random.normal(size=(length, size)).astype(np.float32),
            "discount": (random.random((length, size)) < 0.9).astype(np.float32),
            "record": {"policy": np.log(chances[index]), "value": chances[index, ..., 0]} if length > 1 else {},
            "weight": random.random(size).astype(np.float32),
            "key": np.arange(size),
            "version": np.zeros(size, np.int64),
        }
        for index in range(count)
    ]
    return [to_batch(tree, torch.device("cuda")) for tree in trees]


def learn(model: Model, algorithm: Any, given: list[Batch]) -> list[tuple[Any, dict[str, float]]]:
    """Update once for every batch."""
    results = []
    for index, batch in enumerate(given):
        priority, _, metrics = model.update(at(algorithm, index, len(given)), batch, index)
        results.append((np.zeros(0) if priority is None else priority.copy(), metrics))
    return results


@pytest.mark.parametrize("algorithm", ALGORITHMS + ACTOR_CRITICS + CONTINUOUS)
def test_captured_updates_are_those_taken_kernel_by_kernel(algorithm: Any) -> None:
    torch.manual_seed(0)
    given = batches(30, length=5 if algorithm in ACTOR_CRITICS else 1, continuous=algorithm in CONTINUOUS)
    captured = Model(algorithm, spec_of(algorithm), torch.device("cuda"))
    plain = Model(algorithm, spec_of(algorithm), torch.device("cuda"))
    plain.net.load_state_dict(captured.net.state_dict())
    plain.target.load_state_dict(captured.target.state_dict())
    plain.step = Divided(optimizer_step, exact=False)
    torch.manual_seed(1)  # for the shuffles, and for losses that draw
    mine = learn(captured, algorithm, given)
    torch.manual_seed(1)
    theirs = learn(plain, algorithm, given)
    assert isinstance(captured.step.step, Captured)
    assert len({form for form, *_ in captured.step.step.graphs}) == 1 + (getattr(algorithm, "policy_every", 1) > 1)
    for (priority, metrics), (expected, others) in zip(mine, theirs, strict=True):
        np.testing.assert_allclose(priority, expected, rtol=1e-3, atol=1e-5)
        assert metrics == pytest.approx(others, rel=1e-3, abs=1e-5)
    for ours, other in zip(captured.net.parameters(), plain.net.parameters(), strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-3, atol=1e-5)


def test_shapes_beyond_the_most_are_updated_kernel_by_kernel() -> None:
    algorithm = Dqn(**FALLING)
    model = Model(algorithm, SPEC, torch.device("cuda"))
    for size in range(8, 8 + MOST + 2):
        learn(model, algorithm, batches(WARM + 2, size))
    assert len(model.step.step.graphs) == MOST


class Asks(Dqn):
    """Has the host wait for a number."""

    def loss(self, net: Any, target: Any, batch: Batch) -> Any:
        loss = super().loss(net, target, batch)
        loss.metrics["asked"] = loss.each.detach() * loss.each.mean().item()
        return loss._replace(metrics={name: value.mean() for name, value in loss.metrics.items()})


def test_a_capture_that_fails_harms_nobody() -> None:
    torch.manual_seed(0)
    algorithm, given, stream = Asks(**FALLING), batches(20), torch.cuda.current_stream()
    model, plain = (Model(algorithm, SPEC, torch.device("cuda")) for _ in range(2))
    plain.net.load_state_dict(model.net.state_dict())
    plain.target.load_state_dict(model.target.state_dict())
    plain.step = Divided(optimizer_step, exact=False)
    learn(plain, algorithm, given)
    learn(model, algorithm, given)
    assert model.step.step is optimizer_step
    assert "could not be captured" in model.step.news()
    assert torch.cuda.current_stream() == stream
    for ours, other in zip(model.net.parameters(), plain.net.parameters(), strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-3, atol=1e-5)
    assert len(torch.rand(3, device="cuda").unique()) == 3
    test_captured_updates_are_those_taken_kernel_by_kernel(ALGORITHMS[-1])  # which draws, too


@pytest.mark.parametrize("algorithm", [ALGORITHMS[2], CONTINUOUS[2]], ids=["apex_dqn", "td3"])
def test_a_captured_learner_goes_on_from_its_checkpoint(algorithm: Any) -> None:
    given = batches(20, continuous=algorithm in CONTINUOUS)
    model = Model(algorithm, spec_of(algorithm), torch.device("cuda"))
    learn(model, algorithm, given[:10])
    saved = copy.deepcopy(to_arrays(model.net, model.optimizer)) | {"state": dict.fromkeys(PROGRESS, 0)}
    saved["target"] = {name: value.cpu().numpy() for name, value in model.target.state_dict().items()}
    again = Model(algorithm, spec_of(algorithm), torch.device("cuda"))
    resume(saved, again, Quiet(), Quiet())
    before, after = learn(model, algorithm, given[10:]), learn(again, algorithm, given[10:])
    assert len(after) > WARM
    for (priority, _), (expected, _) in zip(after, before, strict=True):
        np.testing.assert_allclose(priority, expected, rtol=1e-3, atol=1e-5)


PROGRESS = ("steps", "updates", "version", "period")


class Quiet:
    """A store and a journal that need nothing."""

    def restore(self, content: Any) -> None:
        """Take nothing."""

    def went_back(self, steps: int) -> None:
        """Take nothing."""


@pytest.mark.parametrize(
    ("algorithm", "pieces"),
    [
        (Dqn(**FALLING), 1),
        (Dqn(**FALLING | NORMALISED), 1),
        *((one, 6) for one in (ACTOR_CRITICS[0], ACTOR_CRITICS[3])),
        *((one, 1) for one in CONTINUOUS[:3]),
    ],
)
@pytest.mark.parametrize("when", [0, 1, WARM, 10])
def test_an_update_that_makes_no_sense_is_taken_back(algorithm: Any, pieces: int, when: int) -> None:
    """With several pieces, a graph is captured within the first update."""
    torch.manual_seed(0)
    given = batches(20, length=1 if pieces == 1 else 5, continuous=algorithm in CONTINUOUS)
    spoiled = given[when]._replace(reward=given[when].reward * float("nan"))
    one = Model(algorithm, spec_of(algorithm), torch.device("cuda"))
    other = Model(algorithm, spec_of(algorithm), torch.device("cuda"))
    other.net.load_state_dict(one.net.state_dict())
    other.target.load_state_dict(one.target.state_dict())
    for index, batch in enumerate(given):
        if index == when:
            priority, count, metrics = one.update(algorithm, spoiled, index)
            assert (priority, count, metrics) == (None, 0, {"skipped": pieces})
        for model in (one, other):
            torch.manual_seed(index)  # for the shuffles, and for losses that draw
            model.update(algorithm, batch, index)
    for ours, theirs in zip(one.net.state_dict().values(), other.net.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)
