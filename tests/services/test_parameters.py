"""The newest weights."""

from __future__ import annotations

import numpy as np

from shoal.core.tree import leaves
from shoal.services.parameters import Parameters


def test_there_are_none_at_first():
    parameters = Parameters()
    assert parameters.fetch(-1) is None
    assert parameters.status() is None


def test_only_what_is_newer_is_fetched():
    parameters = Parameters()
    parameters.publish(3, 100, 0, False, {"w": np.ones(2)})
    assert parameters.fetch(3) is None
    assert parameters.fetch(4) is None
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
    assert parameters.status() == {"version": 7, "steps": 70, "period": 2, "final": True}
