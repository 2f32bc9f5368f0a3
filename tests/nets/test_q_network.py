"""The network of action values, how it explores, and which steps of a sequence it learns from."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shoal.core.errors import Fatal
from shoal.core.tree import map_tree
from shoal.core.types import ActionSpec, ArraySpec, Batch, Spec, Step
from shoal.nets.memory import previous
from shoal.nets.q_network import QHead, QNetwork, epsilon_greedy, ladder, trained, unroll
from shoal.nets.torsos import Architecture

VECTOR = ArraySpec((5,), "float32")
OBSERVATIONS = {
    "vector": VECTOR,
    "image": ArraySpec((1, 12, 9), "uint8"),
    "mapping": {"camera": ArraySpec((3, 40, 37), "uint8"), "joints": VECTOR},
}


@pytest.fixture(autouse=True)
def seed() -> None:
    """Draw the same numbers every time."""
    torch.manual_seed(0)


def observe(observation, *leading: int):
    def one(spec: ArraySpec) -> torch.Tensor:
        if spec.dtype == "uint8":
            return torch.randint(0, 256, (*leading, *spec.shape), dtype=torch.uint8)
        return torch.randn(*leading, *spec.shape)

    return map_tree(one, observation)


def a_batch(first: torch.Tensor) -> Batch:
    """Random experience of as many steps and items as there are beginnings [T+1, B]."""
    length, items = len(first) - 1, first.shape[1]
    steps = torch.zeros(length, items)
    keys = np.zeros(items, np.int64)
    action = torch.randint(3, (length, items))
    return Batch(observe(VECTOR, length + 1, items), first, action, steps, steps, {}, steps[0], keys, keys)


@pytest.mark.parametrize("settings", [{}, {"lstm": 6}, {"normalise_observation": True}])
@pytest.mark.parametrize("observation", OBSERVATIONS)
@pytest.mark.parametrize(("dueling", "quantiles", "hidden", "extra"), [(False, 1, 0, 0), (True, 7, 9, 2)])
def test_shapes(observation, settings, dueling, quantiles, hidden, extra):
    spec = Spec(OBSERVATIONS[observation], ActionSpec(4))
    net = QNetwork(Architecture(hidden=(8,), **settings), spec, dueling, quantiles, hidden, extra)
    extra = torch.randn(3, 2, extra) if extra else None
    none = torch.zeros(3, 2, dtype=torch.bool)
    values, state = net(observe(spec.observation, 3, 2), none, net.initial_state(2), extra)
    assert values.shape == (3, 2, 4, quantiles)
    assert (None if state is None else state.shape) == ((2, 12) if "lstm" in settings else None)


@pytest.mark.parametrize("quantiles", [1, 3])
@pytest.mark.parametrize("hidden", [0, 6])
def test_dueling_streams_are_put_together_as_the_paper_says(hidden, quantiles):
    """Eq. (9) of arXiv:1511.06581, from the weights, one number at a time."""
    head = QHead(5, 4, hidden, dueling=True, quantiles=quantiles)
    features = torch.randn(7, 5)

    def slow_stream(stream, x):
        """A dense layer, or two with a rectifier between them."""
        layers = [stream] if hidden == 0 else [stream[0], stream[2]]
        for depth, layer in enumerate(layers):
            weight, bias = layer.weight.detach().double().numpy(), layer.bias.detach().double().numpy()
            x = [sum(w * each for w, each in zip(row, x, strict=True)) + b for row, b in zip(weight, bias, strict=True)]
            x = [max(each, 0.0) for each in x] if depth < len(layers) - 1 else x
        return x

    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_()
        found = head(features)
    for item in range(7):
        value = slow_stream(head.value, features[item].double().tolist())
        advantage = slow_stream(head.advantage, features[item].double().tolist())
        for quantile in range(quantiles):
            column = [advantage[action * quantiles + quantile] for action in range(4)]
            for action in range(4):
                expected = value[quantile] + column[action] - sum(column) / 4
                assert found[item, action, quantile].item() == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_without_dueling_the_values_are_one_stream():
    head = QHead(5, 4, 0, dueling=False, quantiles=2)
    features = torch.randn(7, 5)
    torch.testing.assert_close(head(features), (features @ head.advantage.weight.T).view(7, 4, 2))
    assert len([*head.parameters()]) == 2


def test_the_value_of_a_step_is_the_mean_of_its_quantiles():
    net = QNetwork(Architecture(hidden=(8,)), Spec(VECTOR, ActionSpec(3)), dueling=True, quantiles=5)
    none = torch.zeros(6, dtype=torch.bool)
    step = Step(observe(VECTOR, 6), torch.zeros(6), torch.ones(6), none)
    quantiles, _ = net(step.observation[None], none[None])
    torch.testing.assert_close(net.values(step), sum(quantiles[0, :, :, i] for i in range(5)) / 5)


def test_what_it_is_told_beside_the_observation_reaches_the_values_of_its_own_step():
    net = QNetwork(Architecture(hidden=(8,)), Spec(VECTOR, ActionSpec(3)), dueling=True, extra=2)
    extra = torch.randn(4, 3, 2, requires_grad=True)
    net(observe(VECTOR, 4, 3), torch.zeros(4, 3, dtype=torch.bool), None, extra)[0][2, 1].sum().backward()
    where = torch.zeros(4, 3, dtype=torch.bool)
    where[2, 1] = True
    assert torch.equal(extra.grad.abs().sum(-1) > 0, where)


def test_continuous_actions_and_a_missing_memory_are_refused():
    with pytest.raises(Fatal, match=r"does not support continuous actions.*choose sac, td3, ppo, impala or a3c"):
        QNetwork(Architecture(), Spec(VECTOR, ActionSpec(2, (-1.0, -1.0), (1.0, 1.0))), dueling=False)
    with pytest.raises(Fatal, match=r"set network\.lstm"):
        QNetwork(Architecture(), Spec(VECTOR, ActionSpec(2)), dueling=False).begin(3)


def test_a_memory_begins_empty_and_with_no_action():
    net = QNetwork(Architecture(lstm=6), Spec(VECTOR, ActionSpec(3)), dueling=False)
    carry = net.begin(4)
    assert {key: (value.shape, value.any().item()) for key, value in carry.items()} == {
        "core": ((4, 12), False),
        "action": ((4,), False),
    }


def test_observations_are_normalised_by_valid_steps_seen_by_the_learner():
    network = Architecture(hidden=(8,), normalise_observation=True)
    net = QNetwork(network, Spec(VECTOR, ActionSpec(3)), dueling=True)
    batch = a_batch(torch.rand(41, 3) < 0.3)
    net(batch.observation, batch.first)
    assert net.moments.parts[0].count == 0  # acting does not touch the statistics
    net.observe(batch)
    valid = batch.observation[:-1][~batch.first[1:]].double().numpy()
    plain = QNetwork(Architecture(hidden=(8,)), Spec(VECTOR, ActionSpec(3)), dueling=True)
    plain.load_state_dict(net.state_dict(), strict=False)
    by_hand = torch.tensor((batch.observation.numpy() - valid.mean(0)) / valid.std(0)).float()
    torch.testing.assert_close(net(batch.observation, batch.first)[0], plain(by_hand, batch.first)[0])


@pytest.mark.parametrize("epsilon", [0.0, 0.3, 1.0])
def test_epsilon_greedy_is_as_random_as_said(epsilon):
    count, actions = 40_000, 4
    value = torch.randn(count, actions)
    chosen = epsilon_greedy(value, epsilon)
    best = value.argmax(-1)
    assert (chosen == best).float().mean() == pytest.approx(1 - epsilon + epsilon / actions, abs=0.01)
    for action in range(actions):  # of what is not the best, everything is as likely
        share = (chosen[best != action] == action).float().mean()
        assert share == pytest.approx(epsilon / actions, abs=0.01)


def test_every_item_may_have_its_own_epsilon():
    epsilon = torch.tensor([0.0, 0.5, 1.0]).repeat(20_000)
    value = torch.tensor([1.0, 0.0]).expand(60_000, 2)
    chosen = epsilon_greedy(value, epsilon).view(-1, 3).float().mean(0)
    torch.testing.assert_close(chosen, torch.tensor([0.0, 0.25, 0.5]), atol=0.015, rtol=0)
    assert chosen[0] == 0


@pytest.mark.parametrize("count", [2, 8, 360])
def test_the_ladder_is_apexs(count):
    """ε_i = ε^(1 + i/(N−1)·α), section 4.1 of arXiv:1803.00933."""
    found = ladder(torch.arange(count) / (count - 1), 0.4, 7.0)
    for i in range(count):
        assert found[i].item() == pytest.approx(0.4 ** (1 + i / (count - 1) * 7), rel=1e-4)
    assert found[0].item() == pytest.approx(0.4)
    assert found[-1].item() == pytest.approx(0.4**8, rel=1e-4)
    assert (found.diff() < 0).all()


def test_previous_tells_the_action_and_the_reward_and_at_an_opening_nothing():
    action, reward = torch.tensor([[2, 0], [1, 1]]), torch.tensor([[0.5, -3.0], [7.0, 9.0]])
    first = torch.tensor([[False, False], [True, False]])
    assert previous(action, reward, first, [3]).tolist() == [
        [[0, 0, 1, 0.5], [1, 0, 0, -3.0]],
        [[0, 0, 0, 0], [0, 1, 0, 9.0]],
    ]


FIRST = torch.zeros(9, 4, dtype=torch.bool)
FIRST[0, 1] = FIRST[0, 3] = True  # two items open an episode
FIRST[6:, 2] = FIRST[2:, 3] = True  # two are padded


@pytest.mark.parametrize("burn_in", [0, 1, 3, 7])
def test_steps_after_the_burn_in_are_learned_from_and_all_of_an_opening(burn_in):
    mask = trained(a_batch(FIRST), burn_in)
    for t in range(8):
        for item in range(4):
            valid = not FIRST[t + 1, item]
            assert mask[t, item] == (valid and (t >= burn_in or bool(FIRST[0, item])))


@pytest.mark.parametrize("burn_in", [0, 1, 3, 7])
def test_unrolling_in_two_parts_is_as_in_one(burn_in):
    net = QNetwork(Architecture(hidden=(8,), lstm=6), Spec(VECTOR, ActionSpec(3)), dueling=True, extra=2)
    batch, extra, state = a_batch(FIRST), torch.randn(9, 4, 2), torch.randn(4, 12)
    whole, _ = net(batch.observation, batch.first, state, extra)
    torch.testing.assert_close(unroll(net, batch, state, extra, burn_in), whole)
    assert not torch.allclose(unroll(net, batch, 0 * state, extra, burn_in)[:, [0, 2]], whole[:, [0, 2]])


@pytest.mark.parametrize("burn_in", [1, 3])
def test_no_gradient_reaches_the_burn_in_but_of_an_opening(burn_in):
    net = QNetwork(Architecture(hidden=(8,), lstm=6), Spec(VECTOR, ActionSpec(3)), dueling=True, extra=2)
    batch = a_batch(FIRST)
    extra, state = torch.randn(9, 4, 2, requires_grad=True), torch.randn(4, 12, requires_grad=True)
    values = unroll(net, batch, state, extra, burn_in)
    (values[:-1].sum((2, 3)) * trained(batch, burn_in)).sum().backward()
    reached = extra.grad.abs().sum(-1) > 0
    for item in range(4):
        for t in range(9):
            valid = t < 8 and not FIRST[t + 1, item]
            assert reached[t, item] == (valid and (t >= burn_in or bool(FIRST[0, item])))
    assert not state.grad.any()  # an opening forgets it, the others only warm up with it


def test_without_an_opening_the_burn_in_keeps_no_graph():
    net = QNetwork(Architecture(hidden=(8,), lstm=6), Spec(VECTOR, ActionSpec(3)), dueling=True, extra=2)
    batch = a_batch(torch.zeros(6, 2, dtype=torch.bool))
    values = unroll(net, batch, torch.randn(2, 12), torch.randn(6, 2, 2), 3)
    for parameter in net.parameters():
        (gradient,) = torch.autograd.grad(values[:3].sum(), parameter, retain_graph=True)
        assert not gradient.any()
    with torch.no_grad():
        assert not unroll(net, a_batch(FIRST), torch.randn(4, 12), torch.randn(9, 4, 2), 3).requires_grad


def test_observations_that_come_again_are_counted_once():
    net = QNetwork(Architecture(hidden=(4,), normalise_observation=True), Spec(VECTOR, ActionSpec(2)), dueling=False)
    observation, first = torch.randn(2, 6, 5), torch.zeros(2, 6, dtype=torch.bool)
    flat = torch.zeros(1, 6)
    batch = Batch(observation, first, flat.long(), flat, flat, {}, torch.ones(6), np.arange(6), np.zeros(6, np.int64))
    net.observe(batch._replace(fresh=torch.tensor([True, False, True, True, False, False])))
    moments = net.moments.parts[0]
    assert moments.count == 3
    torch.testing.assert_close(moments.mean.float(), observation[0, [0, 2, 3]].mean(0))
    net.observe(batch)  # nothing is said about it: all are new
    assert moments.count == 9
