"""Several learners make the updates that one learner makes with all their items."""

from __future__ import annotations

import copy
from collections.abc import Generator
from typing import Any

import numpy as np
import pytest
import torch

from shoal.algorithms.dqn import Dqn
from shoal.algorithms.impala import Impala
from shoal.core.caller import call_as
from shoal.core.errors import Fatal
from shoal.core.tree import map_tree
from shoal.core.types import Batch
from shoal.nets.torsos import Architecture
from shoal.services.reduction import Reduction
from shoal.workers.joint import Joint, unless
from shoal.workers.model import Model
from shoal.workers.progress import Progress
from tests.algorithms.conftest import SPECS, play

SPEC = SPECS["discrete"]
CPU = torch.device("cpu")
SMALL = {"hidden": (8,)}
ALGORITHMS: dict[str, tuple[Any, int]] = {
    "impala": (Impala.model_validate({"network": SMALL, "lr": 1e-2, "clip_norm": 0.1}), 15),
    "dqn": (Dqn(network=Architecture(hidden=(8,)), lr=1e-2, target_every=2, clip_norm=0.1), 1),  # type: ignore[arg-type]
}
NAMES = ["learner", "learner-1"]


def part(batch: Batch, index: int, of: int) -> Batch:
    """One learner's share of a batch."""
    chosen = np.arange(len(batch.key)).reshape(of, -1)[index]
    pick = lambda x: x[:, chosen]  # noqa: E731
    timed = {name: map_tree(pick, getattr(batch, name)) for name in Batch._fields[:6]}
    return batch._replace(**timed, weight=batch.weight[chosen], key=batch.key[chosen], version=batch.version[chosen])


def together(works: list[Generator[bool, None, Any]]) -> list[Any]:
    """Give learners turns until all have finished; each calls under its own name."""
    results: list[Any] = [None] * len(works)
    waiting = dict(enumerate(works))
    while waiting:
        for index, work in [*waiting.items()]:
            call_as(NAMES[index])
            try:
                next(work)
            except StopIteration as end:
                results[index] = end.value
                del waiting[index]
    return results


def crew(algorithm: Any, model: Model) -> tuple[list[Model], list[Joint]]:
    """Two learners with the same network as another."""
    models = [copy.deepcopy(model) for _ in NAMES]
    for one in models:
        one.optimizer = algorithm.optimizer(one.net)
    reduction = Reduction(NAMES)
    joints = [Joint(reduction, one, len(NAMES), None) for one in models]
    call_as("learner")
    joints[0].begin(models[0], Progress())
    return models, joints


@pytest.mark.parametrize("name", [*ALGORITHMS])
def test_two_learners_equal_one_with_the_joint_batch(name: str) -> None:
    torch.manual_seed(0)
    algorithm, length = ALGORITHMS[name]
    one = Model(algorithm, SPEC, CPU)
    models, joints = crew(algorithm, one)
    for updates in range(5):
        batch = play(algorithm, one.net, SPEC, length)
        weights = torch.rand(len(batch.key)) + 0.5
        batch = batch._replace(weight=weights)
        _, _, metrics = one.update(algorithm, batch, updates)
        for joint, own in zip(joints, (3 * updates, 5 * updates), strict=True):
            joint.own = own
        results = together(
            [
                each.updating(algorithm, part(batch, index, 2), updates, joint.step)
                for index, (each, joint) in enumerate(zip(models, joints, strict=True))
            ]
        )
        assert [joint.steps for joint in joints] == [8 * updates] * 2
        assert all(
            result[2]["gradient_norm"] == pytest.approx(metrics["gradient_norm"], rel=1e-4) for result in results
        )
        assert results[0][2] == results[1][2]  # every learner reports the means over all
    for kind in ("net", "target"):
        expected, *found = [getattr(each, kind).state_dict() for each in (one, *models)]
        for key, value in expected.items():
            assert torch.equal(found[0][key], found[1][key])  # among each other bit for bit
            assert torch.allclose(found[0][key], value, atol=1e-6)  # with one learner but for the order of sums
    assert any((one.net.state_dict()[key] != value).any() for key, value in one.target.state_dict().items()) == (
        name == "dqn"
    )


def test_a_share_that_is_not_finite_is_skipped_by_all() -> None:
    algorithm, length = ALGORITHMS["impala"]
    models, joints = crew(algorithm, Model(algorithm, SPEC, CPU))
    before = copy.deepcopy(models[0].net.state_dict())
    batch = play(algorithm, models[0].net, SPEC, length)
    parts = [part(batch, index, 2) for index in range(2)]
    parts[1].reward[0, 0] = float("nan")
    works = [
        each.updating(algorithm, own, 0, joint.step) for each, own, joint in zip(models, parts, joints, strict=True)
    ]
    assert [result[1:] for result in together(works)] == [(0, {"skipped": 1.0})] * 2
    for model in models:
        assert all(torch.equal(before[key], value) for key, value in model.net.state_dict().items())


def test_an_update_that_others_do_not_come_to_is_given_up_when_the_run_is_over() -> None:
    algorithm, length = ALGORITHMS["impala"]
    models, joints = crew(algorithm, Model(algorithm, SPEC, CPU))
    before = copy.deepcopy(models[0].net.state_dict())
    batch = play(algorithm, models[0].net, SPEC, length)
    answers = iter([False, False, True])
    work = unless(lambda: next(answers), models[0].updating(algorithm, batch, 0, joints[0].step))
    assert next(work) is False
    assert next(work) is False
    with pytest.raises(StopIteration) as ended:
        next(work)
    assert ended.value.value is None
    assert all(torch.equal(before[key], value) for key, value in models[0].net.state_dict().items())


def test_an_update_that_others_come_to_is_made_whatever_the_answer_would_be() -> None:
    algorithm, length = ALGORITHMS["impala"]
    models, joints = crew(algorithm, Model(algorithm, SPEC, CPU))
    batch = play(algorithm, models[0].net, SPEC, length)
    works = [model.updating(algorithm, batch, 0, joint.step) for model, joint in zip(models, joints, strict=True)]
    call_as(NAMES[1])
    next(works[1])
    call_as(NAMES[0])
    with pytest.raises(StopIteration) as ended:
        next(unless(lambda: True, works[0]))
    assert ended.value.value[1] == 1


def test_a_share_that_does_not_fit_into_memory_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm, length = ALGORITHMS["impala"]
    models, joints = crew(algorithm, Model(algorithm, SPEC, CPU))
    batch = play(algorithm, models[0].net, SPEC, length)

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Impala, "loss", full)
    with pytest.raises(Fatal, match=r"share of a batch does not fit.*: raise learners"):
        next(models[0].updating(algorithm, batch, 0, joints[0].step))


def test_running_statistics_are_refused() -> None:
    algorithm = Impala.model_validate({"network": {"normalise_observation": True}})
    with pytest.raises(Fatal, match="running statistics"):
        crew(algorithm, Model(algorithm, SPEC, CPU))
