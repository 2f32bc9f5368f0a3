"""The actor-critic: shapes, records, carries, statistics."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shoal.core.tree import map_tree
from shoal.core.types import ActionSpec, ArraySpec, Batch, Spec, Step
from shoal.nets.actor_critic import ActorCritic, ActorCriticArchitecture

VECTOR = ArraySpec((5,), "float32")
OBSERVATIONS = {
    "vector": VECTOR,
    "image": ArraySpec((1, 12, 9), "uint8"),
    "mapping": {"camera": ArraySpec((3, 40, 37), "uint8"), "joints": VECTOR},
}
ACTIONS = {"discrete": ActionSpec(4), "continuous": ActionSpec(2, (-1.0, 0.0), (1.0, 3.0))}


def observe(observation, *leading: int):
    def one(spec: ArraySpec) -> torch.Tensor:
        if spec.dtype == "uint8":
            return torch.randint(0, 256, (*leading, *spec.shape), dtype=torch.uint8)
        return torch.randn(*leading, *spec.shape)

    return map_tree(one, observation)


def a_step(observation, size: int, first: bool = False) -> Step:
    flags = torch.full((size,), first)
    return Step(observe(observation, size), torch.randn(size), torch.ones(size), flags)


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("observation", OBSERVATIONS)
@pytest.mark.parametrize("settings", [{}, {"separate": True}, {"lstm": 6}, {"normalise_observation": True}])
def test_shapes(observation, action, settings):
    spec = Spec(OBSERVATIONS[observation], ACTIONS[action])
    net = ActorCritic(ActorCriticArchitecture(hidden=(8,), **settings), spec, gamma=0.9)
    first = torch.zeros(3, 2, dtype=torch.bool)
    policy, value, state = net(observe(spec.observation, 3, 2), first, net.initial_state(2))
    assert policy.shape == (3, 2, 4)
    assert value.shape == (3, 2)
    assert (None if state is None else state.shape) == ((2, 12) if "lstm" in settings else None)
    act = net.act(a_step(spec.observation, 2), net.begin(2), greedy=False)
    assert act.action.shape == ((2,) if action == "discrete" else (2, 2))
    assert act.record["policy"].shape == (2, 4)
    assert act.record["value"].shape == (2,)
    assert ("raw" in act.record) == (action == "continuous")
    assert ("core" in act.record) == ("core" in act.carry) == ("lstm" in settings)
    assert not any(each.requires_grad for each in act.record.values())


def test_separate_torsos_share_nothing():
    net = ActorCritic(ActorCriticArchitecture(hidden=(8,), separate=True), Spec(VECTOR, ActionSpec(3)), gamma=0.9)
    first = torch.zeros(1, 4, dtype=torch.bool)
    net(observe(VECTOR, 1, 4), first)[1].sum().backward()
    assert all(parameter.grad is None for parameter in net.torso.parameters())
    assert all(parameter.grad is not None for parameter in net.value_torso.parameters())


def test_greedy_takes_the_mode_and_acting_draws():
    net = ActorCritic(ActorCriticArchitecture(), Spec(VECTOR, ActionSpec(50)), gamma=0.9)
    step = a_step(VECTOR, 30)
    greedy = net.act(step, {}, greedy=True)
    assert torch.equal(greedy.action, greedy.record["policy"].argmax(-1))
    assert not torch.equal(net.act(step, {}, greedy=False).action, greedy.action)


def test_the_recorded_core_is_the_one_before_the_step():
    net = ActorCritic(ActorCriticArchitecture(lstm=6), Spec(VECTOR, ActionSpec(3)), gamma=0.9)
    begin = net.begin(2)
    one = net.act(a_step(VECTOR, 2, first=True), begin, greedy=True)
    two = net.act(a_step(VECTOR, 2), one.carry, greedy=True)
    assert torch.equal(one.record["core"], begin["core"])
    assert torch.equal(two.record["core"], one.carry["core"])
    assert not torch.equal(two.record["core"], two.carry["core"])


def play(net: ActorCritic, length: int, items: int) -> tuple[Batch, np.ndarray]:
    """Act on random steps with many beginnings; also return each step's own reward [T+1, B]."""
    carry = net.begin(items)
    steps, acts = [], []
    for t in range(length + 1):
        step = a_step(VECTOR, items)
        step = step._replace(first=torch.rand(items) < 0.3 if t else torch.ones(items, dtype=torch.bool))
        act = net.act(step, carry, greedy=False)
        carry = act.carry
        steps.append(step)
        acts.append(act)
    steps_stacked = [torch.stack(parts) for parts in zip(*steps, strict=True)]
    observation, reward, discount, first = steps_stacked
    record = {key: torch.stack([act.record[key] for act in acts[:-1]]) for key in acts[0].record}
    action = torch.stack([act.action for act in acts[:-1]])
    nothing = np.zeros(items, dtype=np.int64)
    weight = torch.ones(items)
    batch = Batch(observation, first, action, reward[1:], discount[1:], record, weight, nothing, nothing)
    return batch, reward.numpy()


def test_reward_scale_is_that_of_the_discounted_return():
    """As in Gymnasium's NormalizeReward: G ← γ G + r, reset with the episode; r / std(G), clipped."""
    torch.manual_seed(0)
    net = ActorCritic(ActorCriticArchitecture(normalise_reward=True), Spec(VECTOR, ActionSpec(3)), gamma=0.9)
    batch, reward = play(net, 40, 3)
    first = batch.first.numpy()
    seen = []
    for item in range(3):
        total = 0.0
        for t in range(40):  # the return at step t comes from the rewards of steps up to t
            total = 0.0 if first[t, item] else 0.9 * total + reward[t, item]
            np.testing.assert_allclose(batch.record["return"][t, item], total, atol=1e-5)
            if not first[t, item]:
                seen.append(total)
    net.observe(batch)
    np.testing.assert_allclose(net.scaled(batch.reward), batch.reward / np.std(seen), rtol=1e-4)
    assert net.scaled(torch.tensor(1e6)) == 10


def test_observations_are_normalised_by_valid_steps_seen_by_the_learner():
    net = ActorCritic(ActorCriticArchitecture(normalise_observation=True), Spec(VECTOR, ActionSpec(3)), gamma=0.9)
    batch, _ = play(net, 40, 3)
    assert net.moments.parts[0].count == 0  # acting does not touch the statistics
    net.observe(batch)
    valid = batch.observation[:-1][batch.mask.bool()].double().numpy()
    moments = net.moments.parts[0]
    np.testing.assert_allclose(moments.mean, valid.mean(0), atol=1e-6)
    plain = ActorCritic(ActorCriticArchitecture(), Spec(VECTOR, ActionSpec(3)), gamma=0.9)
    plain.load_state_dict(net.state_dict(), strict=False)
    by_hand = torch.tensor((batch.observation.numpy() - valid.mean(0)) / valid.std(0))
    torch.testing.assert_close(net(batch.observation, batch.first)[1], plain(by_hand.float(), batch.first)[1])
