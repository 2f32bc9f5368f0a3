"""A network that follows the newest weights, however they travel."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from shoal.algorithms.impala import Impala
from shoal.core.codec import Codec
from shoal.core.errors import Diverged
from shoal.core.tree import to_numpy
from shoal.core.types import ActionSpec, ArraySpec, Spec
from shoal.services.parameters import Parameters
from shoal.workers.follower import Follower

SPEC = Spec(ArraySpec((4,), "float32"), ActionSpec(2))
ALGORITHM = Impala(network={"hidden": [16], "normalise_observation": True})


def published(parameters: Parameters, versions: range, seed: int = 0) -> dict[str, Any]:
    """Publish the weights of a network that changes; returns the last."""
    random = np.random.default_rng(seed)
    weights = to_numpy(ALGORITHM.build(SPEC).state_dict())
    for version in versions:
        weights = {
            name: array + (0.01 * random.normal(size=array.shape)).astype(array.dtype) if array.size > 2 else array
            for name, array in weights.items()
        }
        parameters.publish(version, 10 * version, 0, False, weights)
    return weights


def holds(follower: Follower, weights: Any) -> bool:
    """Whether the network has exactly these weights."""
    held = to_numpy(follower.net.state_dict())
    return held.keys() == weights.keys() and all(np.array_equal(held[name], weights[name]) for name in held)


@pytest.mark.parametrize("kind", ["float32", "float16", "int8"])
@pytest.mark.parametrize("delta", [False, True])
def test_followers_hold_the_same_weights_however_often_they_look(kind: str, delta: bool):
    torch.manual_seed(0)
    parameters = Parameters(Codec(kind=kind, delta=delta))
    often, seldom = Follower(ALGORITHM, SPEC, "cpu"), Follower(ALGORITHM, SPEC, "cpu")
    assert not often.follow(parameters)
    for version in range(0, 12, 3):
        weights = published(parameters, range(version, version + 3), seed=version)
        assert often.follow(parameters)
        assert not often.follow(parameters)
        assert (often.version, often.steps) == (version + 2, 10 * version + 20)
        assert holds(often, parameters.weights())
    assert seldom.follow(parameters)
    assert holds(seldom, parameters.weights())
    assert holds(seldom, weights) == (kind == "float32")


def test_a_follower_of_a_learner_that_went_back_asks_for_the_whole():
    torch.manual_seed(0)
    follower = Follower(ALGORITHM, SPEC, "cpu")
    before, after = Parameters(Codec(kind="int8", delta=True)), Parameters(Codec(kind="int8", delta=True))
    published(before, range(8))
    follower.follow(before)
    published(after, range(5, 9), seed=1)
    assert after.fetch(7)["message"]["base"] == 7  # as if it were the version that the follower holds
    assert follower.follow(after)
    assert follower.version == 8
    assert holds(follower, after.weights())


def test_weights_that_never_come_out_right_are_not_loaded():
    torch.manual_seed(0)
    follower = Follower(ALGORITHM, SPEC, "cpu")
    parameters = Parameters(Codec(kind="int8", delta=True))
    published(parameters, range(2))
    follower.follow(parameters)
    before = {name: array.copy() for name, array in to_numpy(follower.net.state_dict()).items()}
    published(parameters, range(2, 4))
    parameters.sender.digest = "0" * 64
    with pytest.raises(Diverged):
        follower.follow(parameters)
    assert follower.version == 1
    assert holds(follower, before)
