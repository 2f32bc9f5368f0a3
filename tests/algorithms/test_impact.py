"""IMPACT's loss against its paper in NumPy, and its buffer in whole runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import shoal
from shoal.algorithms.impact import Impact
from shoal.core.algorithm import Algorithm, HasCircular, HasTarget
from shoal.core.errors import SettingsError
from shoal.core.settings import Replaying
from shoal.core.types import Sequence
from shoal.nets.actor_critic import ActorCriticArchitecture
from shoal.runs import metrics
from shoal.workers.model import Model
from tests.algorithms.conftest import looked_at, vtrace_targets, wander

SMALL = ActorCriticArchitecture(hidden=(8,))
LSTM = ActorCriticArchitecture(hidden=(8,), lstm=6)
CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize("kind", ["discrete", "continuous", "mapping"])
@pytest.mark.parametrize("network", [SMALL, LSTM])
def test_loss_is_the_papers(specs, rollout, kind, network):
    """Section 3.1 of arXiv:1912.00167: min(R Â, clip(R, 1 ± ε) Â) with R = π/μ · min(μ/π_target, ρ)."""
    algorithm = Impact(
        network=network, gamma=0.9, rho_bar=1.2, c_bar=0.9, lambda_=0.95, entropy_cost=0.1, clip=0.2, worker_bound=1.1,
        kl_cost=0.3,
    )  # fmt: skip
    net = algorithm.build(specs[kind])
    batch = rollout(algorithm, net, specs[kind])
    target = wander(net)
    net = wander(target)
    loss = algorithm.loss(net, target, batch)
    log_pi, log_mu, entropy, value, reward, discount, mask = looked_at(net, batch)
    log_target = looked_at(target, batch)[0]
    with torch.no_grad():
        kl = net.head.kl(target.unroll(batch)[0][:-1], net.unroll(batch)[0][:-1]).double().numpy()
    clipped = bounded = 0
    for item in range(mask.shape[1]):
        ratio = np.exp(log_target - log_mu)[:, item]
        vs, _ = vtrace_targets(algorithm, ratio, *(x[:, item] for x in (value, reward, discount, mask)))
        total = 0.0
        for t in np.flatnonzero(mask[:, item]):
            advantage = vs[t] - value[t, item]
            of_worker = np.exp(log_mu[t, item] - log_target[t, item])
            surrogate = np.exp(log_pi[t, item] - log_mu[t, item]) * min(of_worker, 1.1)
            inside = min(max(surrogate, 0.8), 1.2)
            clipped, bounded = clipped + (inside != surrogate), bounded + (of_worker > 1.1)
            total -= min(surrogate * advantage, inside * advantage)
            total += algorithm.value_cost * advantage**2 / 2 + 0.3 * kl[t, item] - 0.1 * entropy[t, item]
        np.testing.assert_allclose(loss.each[item].item(), total / len(mask), rtol=2e-4, atol=1e-5)
    assert clipped
    assert bounded


def test_advantages_on_policy_are_those_of_gae(specs, rollout):
    """Where all three policies are one, and λ < 1, V-trace's sum is eq. (16) of arXiv:1506.02438."""
    algorithm = Impact(network=SMALL, gamma=0.9, lambda_=0.8, entropy_cost=0, value_cost=1)
    net = algorithm.build(specs["discrete"])
    batch = rollout(algorithm, net, specs["discrete"])
    loss = algorithm.loss(net, net, batch)
    _, _, _, value, reward, discount, mask = looked_at(net, batch)
    for item in range(mask.shape[1]):
        advantage, last = np.zeros(len(mask)), 0.0
        for t in reversed(range(len(mask))):
            error = reward[t, item] + 0.9 * discount[t, item] * value[t + 1, item] - value[t, item]
            advantage[t] = last = mask[t, item] * (error + 0.9 * 0.8 * discount[t, item] * last)
        expected = (-advantage + advantage**2 / 2).mean()
        np.testing.assert_allclose(loss.each[item].item(), expected, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(loss.priority[item], np.abs(advantage).mean(), rtol=1e-4)


def test_no_gradient_reaches_the_target_network(specs, rollout):
    algorithm = Impact(network=SMALL, kl_cost=1.0)
    net = algorithm.build(specs["discrete"])
    batch, target = rollout(algorithm, net, specs["discrete"]), wander(net)
    algorithm.loss(net, target, batch).each.mean().backward()
    assert all(parameter.grad is None for parameter in target.parameters())


def test_the_target_network_is_a_copy_every_so_many_updates(specs, rollout):
    algorithm = Impact(network=SMALL, target_every=3)
    model = Model(algorithm, specs["discrete"], torch.device("cpu"))
    batch = rollout(algorithm, model.net, specs["discrete"])
    same = []
    for update in range(6):
        model.update(algorithm, batch, update)
        pairs = zip(model.net.parameters(), model.target.parameters(), strict=True)
        same.append(all(torch.equal(one, two) for one, two in pairs))
    assert same == [False, False, True] * 2


def test_settings():
    algorithm = Impact()
    assert isinstance(algorithm, Algorithm)
    assert isinstance(algorithm, HasTarget)
    assert isinstance(algorithm, HasCircular)
    assert algorithm.target_every == algorithm.circular.batches * algorithm.circular.times
    assert Impact(network=LSTM, unroll=5).experience == Sequence(5, initial=("core",))


RUN = {"environment": {"id": "CartPole-v1"}, "engine": "inline", "actors": 1, "envs": 2, "threads": 1}


def test_steps_are_counted_once_however_often_they_are_learned_from(tmp_path):
    small = {"name": "impact", "batch": 4, "unroll": 10, "circular": {"batches": 3, "times": 5}}
    run = shoal.train(
        {**RUN, "algorithm": small | {"network": {"hidden": [8]}}, "steps": 600, "log_every": 0.01,
         "evaluation": {"episodes": 1, "every": 10**6}}, tmp_path / "run",
    )  # fmt: skip
    batches = run.summary["steps"] / (4 * 10)  # fewer steps each, where episodes end
    assert batches * 4 < run.summary["updates"] < batches * 5 * 1.2
    rows = [row["metrics"] for row in metrics.read(run.directory) if row["kind"] == "train"]
    assert max(row["lag"] for row in rows) <= (2 + 3) * 5 + 1  # what waits, and what is held


def test_gradient_workers_have_no_circular_buffer():
    with pytest.raises(SettingsError, match=r"algorithm\.circular applies to topology actors_and_learner only"):
        shoal.configure({**RUN, "algorithm": {"name": "impact"}}, topology="gradient_workers")


class Wrong(Impact):
    """Its buffer is a number."""

    circular: int = 3


class Both(Impact):
    """It has two stores."""

    replay: Replaying = Replaying()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Wrong", r"its circular is a int, not a shoal\.core\.settings\.Circling or None"),
        ("Both", "both a replay and a"),
    ],
)
def test_an_algorithm_has_one_store_of_a_kind_that_there_is(name, message):
    with pytest.raises(SettingsError, match=message):
        shoal.configure({**RUN, "algorithm": {"name": f"tests.algorithms.test_impact:{name}"}})


def test_it_learns_to_name_what_it_sees(tmp_path):
    algorithm = {"name": "impact", "lr": 3e-3, "batch": 4, "unroll": 16, "gamma": 0.5, "network": {"hidden": [32]}}
    settings = {**RUN, "environment": {"id": "Identity"}, "envs": 4, "algorithm": algorithm, "steps": 20_000}
    best = {"evaluation": {"every": 2_000, "episodes": 5, "target": 9.5}}
    assert shoal.train({**settings, **best}, tmp_path / "run").solved


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_cartpole_is_solved(tmp_path, seed):
    assert shoal.train(CONFIGS / "impact_cartpole.yaml", tmp_path / "run", seed=seed).solved
