"""Recurrent actor-critics that see the last action and its reward."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError

from shoal.algorithms.a3c import A3c
from shoal.algorithms.impact import Impact
from shoal.algorithms.impala import Impala
from shoal.algorithms.ppo import Ppo
from shoal.core.types import ActionSpec, ArraySpec, Spec, Step, joint
from shoal.nets.actor_critic import ActorCriticArchitecture
from shoal.workers.model import Model
from tests.algorithms.conftest import play

SEEN = ArraySpec((4,), "float32")
NUMBERS = ActionSpec(2, (-1.0, -2.0), (1.0, 2.0))
SPECS = {
    "discrete": Spec(SEEN, ActionSpec(3)),
    "continuous": Spec(SEEN, NUMBERS),
    "several": Spec(SEEN, joint([ActionSpec(3), ActionSpec(2)])),
    "hybrid": Spec(SEEN, joint([ActionSpec(3), NUMBERS])),
}
NETWORK = ActorCriticArchitecture(hidden=(8,), lstm=6, previous=True)


@pytest.mark.parametrize("kind", [*SPECS])
@pytest.mark.parametrize("make", [Impact, Impala, Ppo, A3c])
def test_the_loss_sees_what_acting_saw(make, kind):
    torch.manual_seed(0)
    algorithm, spec = make(network=NETWORK, unroll=15), SPECS[kind]
    assert algorithm.experience.initial == ("core", "previous")
    assert algorithm.sees_reward
    model = Model(algorithm, spec, torch.device("cpu"))
    batch = play(algorithm, model.net, spec)
    with torch.no_grad():
        policy, value, _ = model.net.unroll(batch)
    torch.testing.assert_close(policy[:-1], batch.record["policy"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(value[:-1], batch.record["value"], rtol=1e-4, atol=1e-5)
    _, updates, metrics = model.update(algorithm, batch, 0)
    assert updates >= 1
    assert all(number == number for number in metrics.values())


def test_action_and_reward_matter_but_not_where_an_episode_begins():
    algorithm = Impala(network=NETWORK)
    net = algorithm.build(SPECS["discrete"])
    seen = torch.randn(1, 4).expand(4, 4)
    reward, first = torch.tensor([0.0, 0.0, 5.0, 5.0]), torch.tensor([False, False, False, True])
    carry = algorithm.begin(net, 4) | {"action": torch.tensor([0, 1, 0, 1])}
    values = net.act(Step(seen, reward, torch.ones(4), first), carry, greedy=True).record["value"]
    assert len({round(value, 6) for value in values[:3].tolist()}) == 3
    fresh = net.act(Step(seen[:1], reward[:1], torch.ones(1), torch.tensor([True])), algorithm.begin(net, 1), True)
    torch.testing.assert_close(values[3:], fresh.record["value"])


def test_without_a_memory_it_is_refused():
    with pytest.raises(ValidationError, match="only an LSTM sees the last action and reward"):
        ActorCriticArchitecture(previous=True)
