"""Experience that stays on a device: the same items, batches and weights as by way of arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import shoal
from shoal.core.tree import leaves, map_tree
from shoal.core.types import Sequence, Step
from shoal.nets.actor_critic import all_steps, valid_steps
from shoal.run import Run
from shoal.services.queue import Queue
from shoal.workers import rollout
from shoal.workers.packing import make, to_batch
from tests.workers.test_packing import random_stream

CPU = torch.device("cpu")


def tensors(tree: Any) -> Any:
    """Arrays as tensors with memory of their own."""
    return map_tree(lambda array: torch.tensor(np.asarray(array)), tree)


def same(ours: Any, theirs: Any) -> None:
    """Compare a tree of tensors with one of arrays."""
    for mine, other in zip(leaves(ours), leaves(theirs), strict=True):
        np.testing.assert_array_equal(np.asarray(mine), other)


@pytest.mark.parametrize("initial", [(), ("core",)])
def test_tensors_are_cut_into_the_same_items_as_arrays(initial: tuple[str, ...]) -> None:
    stream, experience = random_stream(0, size=3), Sequence(5, initial=initial)
    arrays, packer = make(experience, 3), make(experience, 3)
    emitted = 0
    for now, version in enumerate(stream.version):
        row = map_tree(lambda x, now=now: x[now], vars(stream) | {"version": stream.version[:, None]})
        step = Step(row["observation"], row["reward"], row["discount"], row["first"])
        expected = arrays.observe(step)
        items = packer.observe(Step(*map(tensors, step)), step.first)
        assert (items is None) == (expected is None)
        if expected is not None:
            assert torch.is_tensor(items["reward"])
            same(items, expected)
            emitted += 1
        arrays.choose(row["action"], row["record"], int(version))
        packer.choose(tensors(row["action"]), tensors(row["record"]), int(version))
    assert emitted > 5


def items(version: int = 0, **changes: Any) -> dict[str, Any]:
    """Two sequences of three steps, as tensors but for their versions."""
    made = {
        "observation": torch.full((4, 2, 3), version, dtype=torch.uint8),
        "first": torch.zeros(4, 2, dtype=torch.bool),
        "action": torch.ones(3, 2, dtype=torch.int64),
        "reward": torch.full((3, 2), float(version)),
        "discount": torch.ones(3, 2),
        "record": {"policy": torch.zeros(3, 2, 4)},
    }
    return {**made, **changes, "version": np.full(2, version)}


def test_a_queue_returns_tensors_as_it_does_arrays() -> None:
    ours, theirs = (Queue(4, batch=2, choices=(4,)) for _ in range(2))
    for version in (0, 1, 0):
        given = items(version)
        answers = ours.put(given), theirs.put(map_tree(np.asarray, given))
        assert answers == ((False, False) if version == 0 and len(ours.free) == 0 else (True, True))
    for _ in range(2):
        got, expected = ours.get(2), theirs.get(2)
        assert got is not None
        assert expected is not None
        assert torch.is_tensor(got["reward"])
        same(got, expected)
        batch = to_batch(got, CPU)
        assert batch.reward.dtype == torch.float32
        ours.put(items(7))  # into the same places
        same(batch.reward, np.asarray(expected["reward"]))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"reward": torch.full((3, 2), float("nan"))}, "reward holds nan"),
        ({"action": torch.full((3, 2), 4)}, "an action lies outside 0 to 3"),
        ({"record": {"policy": torch.full((3, 2, 4), float("nan"))}}, "record.policy holds nan"),
        ({"observation": torch.full((4, 2, 3), float("inf"))}, "observation holds inf"),
    ],
)
def test_tensors_that_make_no_sense_are_refused_as_arrays_are(wrong: dict[str, Any], words: str) -> None:
    queue = Queue(4, batch=2, choices=(4,))
    queue.put(items(**wrong))
    assert len(queue.filled) == 0
    assert words in queue.refused()[0]


@pytest.mark.parametrize("algorithm", ["ppo", "impala"])
def test_what_stays_on_a_device_teaches_the_same(algorithm: str, tmp_path: Any, monkeypatch: Any) -> None:
    given = {
        "environment": {"id": "Catch"},
        "algorithm": {"name": algorithm, "unroll": 8},
        "engine": "inline",
        "actors": 2,
        "envs": 4,
        "steps": 512,
        "lockstep": True,
        "threads": 1,
        "evaluation": {"every": 512, "episodes": 2},
    }
    asked: list[bool] = []

    def stays(experiment: Any, device: Any) -> bool:
        asked.append(rollout.together(experiment))
        return asked[-1]

    plain = weights(given, tmp_path / "arrays")
    monkeypatch.setattr(rollout, "stays", stays)
    assert weights(given, tmp_path / "tensors") == plain
    assert asked
    assert all(asked)


def weights(given: dict[str, Any], directory: Any) -> list[Any]:
    """Train, and return the weights of the last checkpoint."""
    shoal.train(given, run_dir=directory)
    net = Run(directory).policy("newest").follower.net
    return [value.tolist() for value in net.state_dict().values()]


@pytest.mark.parametrize(
    ("settings", "together"),
    [
        ({"engine": "threads"}, True),
        ({"engine": "processes"}, False),
        ({"engine": "threads", "inference": "central"}, False),
        ({"engine": "threads", "algorithm": {"name": "dqn"}}, False),
        ({"engine": "threads", "algorithm": {"name": "impact"}}, False),
        ({"engine": "threads", "algorithm": {"name": "a3c"}}, False),
    ],
)
def test_experience_stays_where_a_queue_is_in_the_actors_process(settings: dict[str, Any], together: bool) -> None:
    given = {"environment": {"id": "Catch"}, "algorithm": {"name": "impala"}, "envs": 4, **settings}
    assert rollout.together(shoal.configure(given)) == together


@pytest.mark.parametrize("algorithm", ["ppo", "impala"])
def test_masked_steps_that_are_kept_change_no_gradient(algorithm: str) -> None:
    extra = {"clip": 0.2, "epochs": 2} if algorithm == "impala" else {}
    given = {"environment": {"id": "Catch"}, "algorithm": {"name": algorithm, **extra}}
    made = shoal.configure(given).algorithm
    from shoal import envs

    spec = envs.spec_of(shoal.configure(given).environment)
    torch.manual_seed(0)
    net = made.build(spec)
    random = np.random.default_rng(0)
    first = random.random((6, 8)) < 0.3
    tree = {
        "observation": random.integers(0, 2, (6, 8, *spec.observation.shape)).astype(spec.observation.dtype),
        "first": first,
        "action": random.integers(3, size=(5, 8)),
        "reward": random.normal(size=(5, 8)).astype(np.float32),
        "discount": np.ones((5, 8), np.float32),
        "record": {
            "policy": np.log(random.dirichlet(np.ones(3), (5, 8)).astype(np.float32)),
            "value": random.normal(size=(5, 8)).astype(np.float32),
        },
        "weight": np.ones(8, np.float32),
        "key": np.arange(8),
        "version": np.zeros(8, np.int64),
    }
    batch = to_batch(tree, CPU)
    record = {**batch.record, "target": batch.record["value"] + 1, "advantage": batch.record["value"].square()}
    record |= {"log_prob": batch.record["value"] - 2, "valid": batch.mask, "raw": batch.action}
    losses = []
    for cut in (valid_steps, all_steps):
        single = cut(batch._replace(record=record))
        net.zero_grad()
        loss = made.loss(net, net, single)
        (loss.each * single.weight).mean().backward()
        losses.append([part.grad.clone() for part in net.parameters()])
    for ours, other in zip(*losses, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-5, atol=1e-6)
