"""The newest weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shoal.core.codec import Codec, Receiver
from shoal.core.tree import leaves
from shoal.services.parameters import Parameters


def test_there_are_none_at_first():
    parameters = Parameters()
    assert parameters.fetch(-1) is None
    assert parameters.status() is None


def test_only_what_the_caller_does_not_hold_is_fetched():
    parameters = Parameters()
    parameters.publish(3, 100, 0, False, {"w": np.ones(2)})
    assert parameters.fetch(3) is None
    assert parameters.fetch(4)["version"] == 3  # a learner went back to its checkpoint
    newest = parameters.fetch(2)
    assert (newest["version"], newest["steps"], newest["final"]) == (3, 100, False)
    assert newest["weights"]["w"].tolist() == [1, 1]
    assert parameters.fetch(-1) is not None
    parameters.publish(4, 200, 0, True, {"w": np.zeros(2)})
    newest = parameters.fetch(3)
    assert (newest["version"], newest["steps"], newest["final"]) == (4, 200, True)
    assert newest["weights"]["w"].tolist() == [0, 0]


def test_weights_are_copied_when_published():
    parameters = Parameters()
    weights = {"torso": {"w": np.ones(3, np.float32)}, "count": np.array(5)}
    parameters.publish(0, 0, 0, False, weights)
    for leaf in leaves(weights):
        leaf.fill(0)
    held = parameters.fetch(-1)["weights"]
    assert held["torso"]["w"].tolist() == [1, 1, 1]
    assert held["torso"]["w"].dtype == np.float32
    assert held["count"].shape == ()
    assert held["count"] == 5


def test_weights_lie_in_order_so_that_they_travel_as_they_are():
    parameters = Parameters()
    parameters.publish(0, 0, 0, False, {"w": np.arange(6).reshape(2, 3).T})
    held = parameters.fetch(-1)["weights"]["w"]
    assert held.flags.c_contiguous
    assert held.tolist() == [[0, 3], [1, 4], [2, 5]]


def test_what_was_fetched_stays_as_it_was():
    parameters = Parameters()
    parameters.publish(0, 0, 0, False, {"w": np.ones(2)})
    old = parameters.fetch(-1)
    parameters.publish(1, 10, 0, False, {"w": np.zeros(2)})
    assert (old["version"], old["weights"]["w"].tolist()) == (0, [1, 1])


def test_the_status_has_no_weights():
    parameters = Parameters()
    parameters.publish(7, 70, 2, True, {"w": np.ones(2)})
    known = {"version": 7, "steps": 70, "period": 2, "final": True}
    assert parameters.status() == {**known, "fetches": 0, "bytes": 0}


def test_what_is_handed_out_is_counted():
    parameters = Parameters()
    weights = {"w": np.ones((2, 3), np.float32), "count": np.array(1)}
    assert parameters.publish(0, 0, 0, False, weights) == 0
    parameters.fetch(-1)
    parameters.fetch(0)  # nothing newer
    parameters.fetch(-1)
    assert (parameters.status()["fetches"], parameters.status()["bytes"]) == (2, 2 * 32)
    assert parameters.publish(1, 10, 0, False, weights) == 64


def test_without_a_codec_weights_are_handed_out_as_they_are():
    weights = {"w": np.ones(2, np.float32)}
    for parameters in (Parameters(), Parameters(Codec())):
        parameters.publish(0, 0, 0, False, weights)
        assert [*parameters.fetch(-1)] == ["version", "steps", "period", "final", "weights"]
        assert parameters.weights()["w"].tolist() == [1, 1]


def publish_many(parameters: Parameters, versions: range, final: bool = False) -> dict[str, Any]:
    """Publish random weights under these versions, in one period; returns the last."""
    random = np.random.default_rng(versions.start)
    for version in versions:
        weights = {"w": random.normal(size=(4, 200)).astype(np.float32), "count": np.array(version)}
        parameters.publish(version, 10 * version, 0, final and version == versions[-1], weights)
    return weights


def test_a_codec_hands_out_messages_that_lead_from_what_is_held_to_the_newest():
    parameters, receiver = Parameters(Codec(kind="int8", delta=True)), Receiver(publish_many(Parameters(), range(1)))
    publish_many(parameters, range(3))
    first = parameters.fetch(-1)
    assert (first["version"], first["steps"], first["period"], first["final"]) == (2, 20, 0, False)
    assert first["message"]["base"] is None
    receiver.take(first["message"])
    weights = publish_many(parameters, range(3, 5))
    second = parameters.fetch(2)
    assert second["message"]["base"] == 2
    taken = receiver.take(second["message"])
    assert np.array_equal(taken["w"], parameters.weights()["w"])
    assert not np.array_equal(taken["w"], weights["w"])
    sizes = [sum(link.nbytes for link in answer["message"]["links"]) for answer in (first, second)]
    assert parameters.status()["bytes"] == sum(sizes)
    assert "message" not in parameters.status()
    assert parameters.fetch(4) is None


@pytest.mark.parametrize("delta", [False, True])
def test_the_final_weights_and_those_of_a_new_period_are_exact(delta: bool):
    parameters = Parameters(Codec(kind="int8", delta=delta))
    weights = publish_many(parameters, range(5), final=True)
    assert np.array_equal(parameters.weights()["w"], weights["w"])
    weights = publish_many(parameters, range(5, 7))
    assert not np.array_equal(parameters.weights()["w"], weights["w"])
    parameters.publish(7, 70, 1, False, weights)
    assert np.array_equal(parameters.weights()["w"], weights["w"])
