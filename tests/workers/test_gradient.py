"""One network and one optimizer in a shared block: alone it is a learner, together nobody's work is lost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import shoal
from shoal import envs
from shoal.engines.memory import private
from shoal.workers.gradient import learn_from
from shoal.workers.model import Model
from shoal.workers.packing import fresh_batch
from shoal.workers.rollout import Rollout
from shoal.workers.saving import optimizer_state
from shoal.workers.shared_model import CPU, SharedModel, initial_block

NORMALISED = {"hidden": [8], "normalise_observation": True, "normalise_reward": True}
ALGORITHMS = {
    "rmsprop": {"name": "a3c", "network": NORMALISED},
    "adam": {"name": "a3c", "rule": "adam", "network": {"hidden": [8], "lstm": 4}},
    "momentum": {"name": "impala", "momentum": 0.9, "unroll": 5},
    "ppo": {"name": "ppo", "unroll": 8, "epochs": 2, "minibatches": 2},
    "dqn": {"name": "dqn", "n": 2, "target_every": 2, "batch": 4, "network": {"hidden": [8]}},
}


def prepared(algorithm: dict[str, Any], env: str = "CartPole-v1") -> tuple[Any, Any, dict[str, Any]]:
    """An experiment of two workers, its spec, and a block."""
    experiment = shoal.configure(
        {"environment": {"id": env}, "algorithm": algorithm, "topology": "gradient_workers", "actors": 2, "envs": 3}
    )
    return experiment, envs.spec_of(experiment.environment), private(initial_block(experiment, None))


def batches(experiment: Any, net: Any, count: int) -> list[Any]:
    """Fresh experience of a network."""
    torch.manual_seed(0)
    np.random.seed(0)
    vector = envs.make(experiment.environment, experiment.env_count, seed=1)
    rollout = Rollout(experiment, 0, vector, net, CPU)
    found: list[Any] = []
    while len(found) < count:
        if (items := rollout.act(experiment.algorithm, 0)) is not None:
            found.append(fresh_batch(items, CPU))
    vector.close()
    return found


@pytest.mark.parametrize("name", [*ALGORITHMS])
def test_alone_it_learns_as_a_learner_does(name: str) -> None:
    experiment, spec, block = prepared(ALGORITHMS[name])
    algorithm = experiment.algorithm
    shared, model = SharedModel(algorithm, spec, block, 0), Model(algorithm, spec, CPU)
    shared.follow()
    model.net.load_state_dict({key: tensor.clone() for key, tensor in shared.net.state_dict().items()})
    model.target.load_state_dict(model.net.state_dict())
    updates = 0
    for batch in batches(experiment, shared.own, 5):
        torch.manual_seed(updates)
        shared.update(algorithm, batch)
        torch.manual_seed(updates)
        updates += model.update(algorithm, batch, updates)[1]
    assert block["updates"].tolist() == [updates, 0]
    for mine, theirs in ((shared.net, model.net), (shared.own, model.net), (shared.target, model.target)):
        for key, tensor in theirs.state_dict().items():
            assert torch.equal(mine.state_dict()[key], tensor), key
    mine, theirs = optimizer_state(shared.optimizer), optimizer_state(model.optimizer)
    assert {*mine} == {*theirs}
    assert all(torch.equal(mine[key], theirs[key]) for key in theirs)


@pytest.mark.parametrize("name", [*ALGORITHMS])
def test_all_that_is_learned_lies_in_the_block(name: str) -> None:
    experiment, spec, block = prepared(ALGORITHMS[name])
    model = SharedModel(experiment.algorithm, spec, block, 1)
    model.follow()
    (batch,) = batches(experiment, model.own, 1)
    before = {key: array.copy() for key, array in block.items()}
    model.update(experiment.algorithm, batch)
    lying = {array.ctypes.data for array in block.values()}
    parts = {**model.net.state_dict(), **optimizer_state(model.optimizer)} | {
        f"target {key}": tensor for key, tensor in model.target.state_dict().items() if model.every
    }
    assert all(tensor.data_ptr() in lying for tensor in parts.values())
    changed = [key for key in block if not np.array_equal(block[key], before[key])]
    assert any(key.startswith("net/") for key in changed)
    assert any(key.startswith("optimizer/") for key in changed)
    assert block.get("optimizer/0.step", block["updates"].sum()) == block["updates"].sum()  # where steps are counted


def test_two_share_weights_statistics_and_moments() -> None:
    experiment, spec, block = prepared(ALGORITHMS["rmsprop"])
    algorithm = experiment.algorithm
    one, two = SharedModel(algorithm, spec, block, 0), SharedModel(algorithm, spec, block, 1)
    one.follow()
    two.follow()
    first, second = batches(experiment, one.own, 2)
    one.update(algorithm, first)
    after_one = {key: array.copy() for key, array in block.items()}
    assert not torch.equal(one.own.value.weight, two.own.value.weight)  # until it follows
    two.update(algorithm, second)
    assert block["updates"].tolist() == [1, 1]
    learned = [key for key in block if key.startswith(("net/", "optimizer/"))]
    assert all(not np.array_equal(block[key], after_one[key]) for key in learned)
    one.follow()
    for name, tensor in two.own.state_dict().items():
        assert torch.equal(one.own.state_dict()[name], tensor), name
    count = block["net/moments.parts.0.count"]
    assert count == first.mask.sum() + second.mask.sum()  # both saw the same running moments


def test_pictures_are_learned_from_in_another_order_of_memory() -> None:
    """Gradients of convolutions come with channels last, and the block holds them first."""
    experiment, spec, block = prepared({"name": "dqn", "batch": 4}, "ALE/Pong-v5")
    shared = SharedModel(experiment.algorithm, spec, block, 0)
    model = Model(experiment.algorithm, spec, CPU)
    shared.follow()
    model.net.load_state_dict(shared.net.state_dict())
    model.target.load_state_dict(model.net.state_dict())
    for batch in batches(experiment, shared.own, 2):
        shared.update(experiment.algorithm, batch)
        model.update(experiment.algorithm, batch, 0)
    for key, tensor in model.net.state_dict().items():
        torch.testing.assert_close(shared.net.state_dict()[key], tensor, rtol=1e-3, atol=1e-5)


class Shelf:
    """A store that notes who asks for what."""

    def __init__(self, items: Any) -> None:
        self.items, self.put_in, self.drawn, self.updated = items, 0, [], 0

    def put(self, items: Any, priority: Any) -> bool:
        self.put_in += 1
        return True

    def get(self, size: int, oldest: int, beta: float, seed: int) -> Any:
        self.drawn.append(seed)
        count = len(self.items["version"])
        return {**self.items, "key": np.arange(count), "weight": np.ones(count, np.float32)}

    def update(self, key: Any, priority: Any) -> None:
        self.updated += 1


def test_the_replay_is_learned_from_as_often_as_its_ratio_says() -> None:
    replay = {"capacity": 100, "minimum": 1}
    experiment, spec, block = prepared({"name": "a3c", "replay": replay, "replay_ratio": 3})
    model = SharedModel(experiment.algorithm, spec, block, 0)
    vector = envs.make(experiment.environment, experiment.env_count, seed=1)
    rollout = Rollout(experiment, 0, vector, model.own, CPU)
    while (items := rollout.act(experiment.algorithm, 0)) is None:
        pass
    vector.close()
    store, rounds = Shelf(items), 60
    np.random.seed(0)
    updates = [
        metrics for _ in range(rounds) for metrics in learn_from(experiment, experiment.algorithm, model, items, store)
    ]
    assert store.put_in == rounds
    assert len(store.drawn) == store.updated == len(updates) - rounds == block["updates"].sum() - rounds
    assert len({*store.drawn}) == len(store.drawn)  # never the same seed
    assert 2.5 < len(store.drawn) / rounds < 3.5  # of 180 ± 13
