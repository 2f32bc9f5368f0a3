"""The mean of several learners' gradients: the same whoever comes first, checked, and nobody else's business."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shoal.core.caller import call_as
from shoal.core.errors import Refused
from shoal.services.reduction import Reduction

NAMES = ["learner", "learner-1", "learner-2"]


@pytest.fixture
def reduction() -> Any:
    call_as("learner")
    made = Reduction(NAMES)
    assert made.state() is None
    made.begin(4, {"state": {"steps": 5}})
    yield made
    call_as("")


def put(reduction: Reduction, name: str, vector: Any, round_: int = 0, **numbers: float) -> bool:
    call_as(name)
    return reduction.put(round_, np.asarray(vector, np.float32), numbers)


def test_the_mean_does_not_depend_on_who_comes_first(reduction: Reduction) -> None:
    vectors = dict(zip(NAMES, ([1e8, 1, 2, 3], [1, 1, 2, 3], [-1e8, 1, 2, 3]), strict=True))  # floats lose the 1
    means = []
    for round_, order in enumerate((NAMES, NAMES[::-1], [NAMES[0], NAMES[2], NAMES[1]])):
        for index, name in enumerate(order):
            assert reduction.take(round_) is None
            put(reduction, name, vectors[name], round_, steps=float(index), loss=1.0)
        means.append(reduction.take(round_))
    assert all(np.array_equal(mean["vector"], means[0]["vector"]) for mean in means)
    assert means[0]["vector"].tolist() == [0, 1, 2, 3]
    assert means[0]["numbers"] == {"steps": 1.0, "loss": 1.0}
    assert reduction.take(0) is None  # it is over


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_one_gradient_that_is_not_finite_spoils_the_round_for_all(reduction: Reduction, wrong: float) -> None:
    for name in NAMES:
        put(reduction, name, [1, 2, 3, wrong if name == "learner-1" else 4], loss=wrong if name == "learner" else 1.0)
    assert reduction.take(0) == {"numbers": {}}
    for name in NAMES:
        put(reduction, name, [1, 2, 3, 4], 1)
    assert reduction.take(1)["vector"].tolist() == [1, 2, 3, 4]


def test_what_does_not_fit_is_refused(reduction: Reduction) -> None:
    with pytest.raises(Refused, match="4 numbers of type float32"):
        put(reduction, "learner", [1, 2, 3])
    with pytest.raises(Refused, match="4 numbers of type float32"):
        reduction.put(0, np.zeros(4), {})
    with pytest.raises(Refused, match="for round 1 is refused: round 0 is open"):
        put(reduction, "learner", [1, 2, 3, 4], 1)
    with pytest.raises(Refused, match="each a float"):
        reduction.put(0, np.zeros(4, np.float32), {"steps": "many"})
    with pytest.raises(Refused, match="actor-0 has no part"):
        put(reduction, "actor-0", [1, 2, 3, 4])
    call_as("learner-1")
    with pytest.raises(Refused, match="learner-1 has no part"):
        reduction.begin(4, {})  # which only the first may
    call_as("learner")
    with pytest.raises(Refused, match="an integer of at least 1"):
        reduction.begin(0, {})


def test_who_begins_again_begins_with_the_first_round(reduction: Reduction) -> None:
    for name in NAMES:
        put(reduction, name, [1, 2, 3, 4])
    put(reduction, "learner-1", [9, 9, 9, 9], 1)  # of a round that never ends
    call_as("learner")
    reduction.begin(4, {"state": {"steps": 3}})
    assert reduction.state() == {"state": {"steps": 3}}
    for name in ("learner", "learner-2", "learner-1"):  # whose gradient from before does not count
        assert reduction.take(0) is None
        put(reduction, name, [1, 1, 1, 1])
    assert reduction.take(0)["vector"].tolist() == [1, 1, 1, 1]
