"""PPO's loss against its paper in NumPy, and a task small enough to learn in a test."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shoal.algorithms.ppo import Ppo
from shoal.core.algorithm import Algorithm
from shoal.core.tree import leaves, map_tree
from shoal.core.types import ActionSpec, ArraySpec, Batch, Sequence, Spec, Step
from shoal.nets.actor_critic import ActorCriticArchitecture
from shoal.workers.model import Model
from tests.algorithms.conftest import wander

SMALL = ActorCriticArchitecture(hidden=(8,))
LSTM = ActorCriticArchitecture(hidden=(8,), lstm=6)


def slow_advantage(algorithm, value, reward, discount, mask):
    """Transcribe eq. (11) of arXiv:1707.06347 for one item."""
    advantage = np.zeros(len(reward))
    for s in range(len(reward)):
        weight = 1.0
        for t in range(s, len(reward)):
            if not mask[t]:
                break
            advantage[s] += weight * (reward[t] + algorithm.gamma * discount[t] * value[t + 1] - value[t])
            weight *= algorithm.gamma * algorithm.gae_lambda * discount[t]
    return advantage


def slow_loss(algorithm, log_prob, old_log_prob, advantage, value, old_value, target, entropy):
    """Transcribe eq. (7) and (9) for valid steps."""
    clip = algorithm.clip.now
    ratio = np.exp(log_prob - old_log_prob)
    surrogate = np.minimum(ratio * advantage, np.clip(ratio, 1 - clip, 1 + clip) * advantage)
    error = (value - target) ** 2
    if algorithm.value_clip is not None:
        bound = algorithm.value_clip
        error = np.maximum(error, (old_value + np.clip(value - old_value, -bound, bound) - target) ** 2)
    return -surrogate + algorithm.value_cost * error / 2 - algorithm.entropy_cost.now * entropy


def targets(algorithm, net, batch):
    """Return values [T+1, B] and advantages [T, B] of a batch, by hand."""
    core = batch.record["core"][0] if "core" in batch.record else None
    value = net(batch.observation, batch.first, core)[1].detach().double().numpy()
    reward, discount, mask = batch.reward.double().numpy(), batch.discount.numpy(), batch.mask.numpy() > 0
    columns = [
        slow_advantage(algorithm, value[:, b], reward[:, b], discount[:, b], mask[:, b]) for b in range(reward.shape[1])
    ]
    return value, np.stack(columns, 1)


@pytest.mark.parametrize("value_clip", [None, 0.1])
@pytest.mark.parametrize("kind", ["discrete", "continuous", "mapping"])
@pytest.mark.parametrize("network", [SMALL, LSTM])
def test_loss_is_the_papers(specs, rollout, kind, network, value_clip):
    algorithm = Ppo(network=network, gamma=0.9, gae_lambda=0.8, value_clip=value_clip, entropy_cost=0.1)
    net = algorithm.build(specs[kind])
    batch = rollout(algorithm, net, specs[kind])
    old_value, advantage = targets(algorithm, net, batch)
    prepared = algorithm.prepare(net, batch)
    net = wander(net)
    loss = algorithm.loss(net, net, prepared)

    raw = batch.record.get("raw", batch.action)
    core = batch.record["core"][0] if network.lstm else None
    with torch.no_grad():
        policy, value, _ = net(batch.observation, batch.first, core)
        log_prob = net.head.log_prob(policy[:-1], raw).double().numpy()
        old_log_prob = net.head.log_prob(batch.record["policy"], raw).double().numpy()
        entropy = net.head.entropy(policy[:-1]).double().numpy()
    valid = batch.mask.numpy() > 0
    normal = (advantage - advantage[valid].mean()) / advantage[valid].std()
    each = slow_loss(
        algorithm,
        log_prob,
        old_log_prob,
        normal,
        value[:-1].double().numpy(),
        old_value[:-1],
        advantage + old_value[:-1],
        entropy,
    )
    assert not valid.all()
    expected = (each * valid).mean(0) if network.lstm else each[valid]
    np.testing.assert_allclose(loss.each.detach(), expected, rtol=1e-3, atol=1e-4)


def test_a_prepared_batch_holds_the_valid_steps_and_nothing_else(specs, rollout):
    algorithm = Ppo(network=SMALL)
    spec = specs["mapping"]
    net = algorithm.build(spec)
    batch = rollout(algorithm, net, spec)
    steps = torch.arange(15 * 6).view(15, 6)
    batch = batch._replace(reward=steps.float())
    valid = batch.mask.bool()
    prepared = algorithm.prepare(net, batch)
    count = int(valid.sum())
    assert count < 15 * 6
    np.testing.assert_array_equal(prepared.reward[0], steps[valid])
    for one, other in zip(leaves(prepared.observation), leaves(batch.observation), strict=True):
        assert torch.equal(one[0], other[:-1][valid])
    assert torch.equal(prepared.action[0], batch.action[valid])
    assert torch.equal(prepared.record["value"][0], batch.record["value"][valid])
    item = (steps % 6)[valid]
    assert torch.equal(prepared.weight, batch.weight[item])
    np.testing.assert_array_equal(prepared.key, item + 100)
    np.testing.assert_array_equal(prepared.version, item + 7)
    assert prepared.first.shape == (2, count)
    assert prepared.mask.shape == (1, count)
    assert prepared.mask.all()
    assert {len(each) for each in prepared.record.values()} == {1}


def test_a_memory_keeps_its_sequences(specs, rollout):
    algorithm = Ppo(network=LSTM)
    net = algorithm.build(specs["discrete"])
    batch = rollout(algorithm, net, specs["discrete"])
    prepared = algorithm.prepare(net, batch)
    assert prepared.action.shape == (15, 6)
    assert torch.equal(prepared.first, batch.first)
    assert prepared.record["core"].shape == (1, 6, 12)


@pytest.mark.parametrize("distribution", ["clipped", "squashed"])
@pytest.mark.parametrize("kind", ["discrete", "continuous"])
@pytest.mark.parametrize("network", [SMALL, LSTM])
def test_the_first_pass_has_ratios_of_one(specs, rollout, kind, network, distribution):
    algorithm = Ppo(network=network, distribution=distribution)
    net = algorithm.build(specs[kind])
    batch = rollout(algorithm, net, specs[kind])
    metrics = algorithm.loss(net, net, algorithm.prepare(net, batch)).metrics
    assert metrics["kl"].abs() < 1e-6
    assert metrics["clip_fraction"] == 0
    net = wander(net)
    assert algorithm.loss(net, net, algorithm.prepare(net, batch)).metrics["kl"] > 1e-4


def test_values_and_bootstrap_use_the_statistics_that_the_actors_used(specs, rollout):
    network = ActorCriticArchitecture(hidden=(8,), normalise_observation=True, normalise_reward=True)
    algorithm = Ppo(network=network)
    net = algorithm.build(specs["discrete"])
    batch = rollout(algorithm, net, specs["discrete"], length=40)
    value = net(batch.observation, batch.first)[1].detach()
    prepared = algorithm.prepare(net, batch)
    assert net.moments.parts[0].count == batch.mask.sum()
    assert net.return_moments.count == (~batch.first[:-1]).sum()
    scaled = batch._replace(reward=net.scaled(batch.reward))
    columns = [
        slow_advantage(
            algorithm,
            value[:, b].numpy(),
            *(x[:, b].numpy() for x in (scaled.reward, batch.discount, batch.mask)),
        )
        for b in range(6)
    ]
    expected = np.stack(columns, 1)[batch.mask.bool().numpy()]
    np.testing.assert_allclose(prepared.record["advantage"][0], expected, atol=1e-4)


def test_settings():
    algorithm = Ppo()
    assert isinstance(algorithm, Algorithm)
    assert algorithm.max_lag == 0
    assert algorithm.experience == Sequence(128)
    assert Ppo(network=LSTM, unroll=5).experience == Sequence(5, initial=("core",))


def learn(algorithm: Ppo, net, optimizer, batch: Batch) -> None:
    """Do what the learner does: epochs of random minibatches."""
    batch = algorithm.prepare(net, batch)
    for _ in range(algorithm.epochs):
        for part in torch.randperm(len(batch.weight)).chunk(algorithm.minibatches):
            piece = Batch(
                *(map_tree(lambda x, part=part: x[:, part], field) for field in batch[:6]),
                batch.weight[part],
                batch.key[part],
                batch.version[part],
            )
            optimizer.zero_grad()
            algorithm.loss(net, net, piece).each.mean().backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), algorithm.clip_norm)
            optimizer.step()


@pytest.mark.parametrize("continuous", [False, True])
def test_ppo_learns_to_name_what_it_sees(continuous):
    """One of three lights is on; naming it, or pointing at it, earns 1; episodes last two steps."""
    torch.manual_seed(0)
    action_spec = ActionSpec(1, (0.0,), (2.0,)) if continuous else ActionSpec(3)
    spec = Spec(ArraySpec((3,), "float32"), action_spec)
    algorithm = Ppo(lr=3e-3, unroll=9, network=ActorCriticArchitecture(hidden=(32,)), gamma=0.5, entropy_cost=0.0)
    net, items = algorithm.build(spec), 32
    optimizer = algorithm.optimizer(net)

    def score(action: torch.Tensor, light: torch.Tensor) -> torch.Tensor:
        if continuous:
            return 1 - (action.squeeze(-1) - light).abs()
        return (action == light).float()

    for _ in range(60):
        lights = torch.randint(0, 3, (10, items))
        seen = torch.eye(3)[lights]
        first = torch.zeros(10, items, dtype=torch.bool)
        first[::3] = True
        acts = []
        reward = torch.zeros(items)
        for t in range(9):
            acts.append(algorithm.act(net, Step(seen[t], reward, torch.ones(items), first[t]), {}, torch.zeros(items)))
        action = torch.stack([act.action for act in acts])
        record = {key: torch.stack([act.record[key] for act in acts]) for key in acts[0].record}
        reward = score(action, lights[:-1])
        discount = torch.ones(9, items)
        discount[1::3] = 0.0
        reward[2::3] = -50.0  # the dummy step, whatever it earns, must not be learnt from
        batch = Batch(
            seen, first, action, reward, discount, record, torch.ones(items), np.zeros(items), np.zeros(items)
        )
        learn(algorithm, net, optimizer, batch)
    lights = torch.arange(3)
    greedy = algorithm.act(
        net, Step(torch.eye(3), torch.zeros(3), torch.ones(3), torch.ones(3, dtype=torch.bool)), {}, None
    )
    assert score(greedy.action, lights).mean() > 0.9


@pytest.mark.parametrize(("most", "pieces"), [(None, 12), (1e9, 12), (1e-12, 2)])
def test_passes_stop_where_the_policy_has_moved_too_far(specs, rollout, most, pieces):
    torch.manual_seed(0)
    algorithm = Ppo(lr=1e-2, epochs=4, minibatches=3, target_kl=most)
    model = Model(algorithm, specs["discrete"], torch.device("cpu"))
    batch = rollout(algorithm, model.net, specs["discrete"])
    _, updates, metrics = model.update(algorithm, batch, 0)
    assert updates == pieces  # before the first, the policy is still that which acted
    assert metrics["kl"] > 0
