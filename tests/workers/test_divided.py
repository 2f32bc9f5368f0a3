"""Batches that a GPU's memory does not hold are cut; the memory is made up, so that no GPU is needed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import shoal
from shoal.algorithms.dqn import Dqn
from shoal.algorithms.impact import Impact
from shoal.algorithms.impala import Impala
from shoal.algorithms.ppo import Ppo
from shoal.core.errors import Fatal, ShoalError
from shoal.core.types import ActionSpec, ArraySpec, Batch, Loss, Spec
from shoal.nets.actor_critic import ActorCriticArchitecture
from shoal.nets.torsos import Architecture
from shoal.workers.model import Model
from tests.algorithms.conftest import play

SPEC = Spec(ArraySpec((4,), "float32"), ActionSpec(3))
LSTM = ActorCriticArchitecture(hidden=(8,), lstm=6)
RULES = {"rule": "adam", "clip_norm": 0.1}
CPU = torch.device("cpu")


def hungry(algorithm: Any, room: int) -> Any:
    """The algorithm, where memory holds so many items."""

    class Hungry(type(algorithm)):  # type: ignore[misc]
        def loss(self, net: Any, target: Any, batch: Batch) -> Loss:
            loss = super().loss(net, target, batch)
            if len(batch.weight) > room:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nmore")
            return loss

    return Hungry(**dict(algorithm))


class Small(Impala):
    """IMPALA where memory holds two sequences."""

    def loss(self, net: Any, target: object, batch: Batch) -> Loss:
        if len(batch.weight) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        return super().loss(net, target, batch)


@pytest.mark.parametrize(("room", "pieces"), [(6, 1), (5, 2), (3, 2), (2, 4), (1, 6)])
@pytest.mark.parametrize(
    "algorithm",
    [
        Impala(network=LSTM, **RULES),
        Impact(network=LSTM, clip_norm=0.1),
        Ppo(network=LSTM, epochs=1, minibatches=1, normalise_advantage=False),
        Dqn(network=Architecture(hidden=(8,)), n=1),
    ],
    ids=["impala", "impact", "ppo", "dqn"],
)
def test_the_pieces_do_what_the_whole_does(algorithm, room, pieces):
    """Weights of items count, and so does a norm: it is of the whole gradient."""
    torch.manual_seed(0)
    model = Model(algorithm, SPEC, CPU)
    other = Model(algorithm, SPEC, CPU)
    other.net.load_state_dict(copy.deepcopy(model.net.state_dict()))
    other.target.load_state_dict(copy.deepcopy(model.target.state_dict()))
    batch = play(algorithm, model.net, SPEC, length=1 if isinstance(algorithm, Dqn) else 15)
    priority, _, metrics = model.update(algorithm, batch, 0)
    found, updates, cut = other.update(hungry(algorithm, room), batch, 0)
    assert (other.step.pieces, updates) == (pieces, 1)
    for one, two in zip(model.net.parameters(), other.net.parameters(), strict=True):
        torch.testing.assert_close(two.grad, one.grad, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found, priority, rtol=1e-4, atol=1e-5)
    assert cut.keys() == metrics.keys()
    assert cut["gradient_norm"] == pytest.approx(metrics["gradient_norm"], rel=1e-3)


def test_once_cut_batches_stay_cut_and_it_is_said_once():
    algorithm = Impala(network=LSTM)
    model, tries = Model(algorithm, SPEC, CPU), []
    batch, greedy = play(algorithm, model.net, SPEC), hungry(algorithm, 3)
    whole = type(greedy).loss
    type(greedy).loss = lambda self, net, target, part: (
        tries.append(len(part.weight)),
        whole(self, net, target, part),
    )[1]
    model.update(greedy, batch, 0)
    assert tries == [6, 3, 3]
    assert "a batch does not fit into the GPU's memory: from now on each is cut into 2 pieces" in model.step.news()
    model.update(greedy, batch, 1)
    assert tries == [6, 3, 3, 3, 3]
    assert model.step.news() == ""


def test_a_single_item_that_does_not_fit_is_an_error_in_words():
    algorithm = Impala(network=LSTM)
    model = Model(algorithm, SPEC, CPU)
    batch = play(algorithm, model.net, SPEC)
    with pytest.raises(Fatal, match=r"not even one item.*lower algorithm\.unroll; CUDA out of memory\..*GiB\.$"):
        model.update(hungry(algorithm, 0), batch, 0)


RUN = {"environment": {"id": "CartPole-v1"}, "engine": "inline", "actors": 1, "envs": 2, "threads": 1, "steps": 300}
LEARNER = {"name": "tests.workers.test_divided:Small", "batch": 4, "unroll": 10, "network": {"hidden": [8]}}


def test_a_run_goes_on_in_pieces(tmp_path, caplog):
    run = shoal.train({**RUN, "algorithm": LEARNER, "evaluation": {"episodes": 1}}, tmp_path / "run")
    assert run.summary["steps"] >= 300
    assert caplog.text.count("from now on each is cut into 2 pieces") == 1


def test_lockstep_does_not_cut(tmp_path):
    with pytest.raises(ShoalError, match=r"in lockstep it is not cut: lower algorithm\.batch"):
        shoal.train({**RUN, "algorithm": LEARNER, "lockstep": True, "evaluation": {"episodes": 1}}, tmp_path / "run")
