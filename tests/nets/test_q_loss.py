"""Parts of Rainbow and what came after it, against the papers' formulas."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from shoal.algorithms.dqn import Dqn
from shoal.core.errors import SettingsError
from shoal.core.types import ActionSpec, ArraySpec, Batch, Spec, Step
from shoal.experiment import configure
from shoal.nets.q_network import NoisyLinear
from tests.losses.test_q_values import slow_project

SPEC = Spec(ArraySpec((4,), "float32"), ActionSpec(3))
MASKED = Spec({"seen": ArraySpec((4,), "float32"), "action_mask": ArraySpec((3,), "float32")}, ActionSpec(3))
ITEMS = 7


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def drawn(masked: bool = False) -> Batch:
    """One-step transitions; of each second observation, only some actions are allowed."""
    observation: Any = torch.randn(2, ITEMS, 4)
    if masked:
        mask = (torch.rand(2, ITEMS, 3) < 0.6).float()
        mask[..., 1] = 1.0
        observation = {"seen": observation, "action_mask": mask}
    discount = (torch.rand(1, ITEMS) < 0.7).float()
    return Batch(observation, torch.zeros(2, ITEMS, dtype=torch.bool), torch.randint(3, (1, ITEMS)),
                 torch.randn(1, ITEMS), discount, {}, torch.ones(ITEMS), np.arange(ITEMS), np.zeros(ITEMS))  # fmt: skip


def outputs(net: Any, batch: Batch, t: int) -> Any:
    """What a network says at an instant, [B, A, N], in double precision."""
    seen = batch.observation
    part = {name: value[t : t + 1] for name, value in seen.items()} if isinstance(seen, dict) else seen[t : t + 1]
    with torch.no_grad():
        return net(part, batch.first[t : t + 1])[0][0].double().numpy()


def allowed(batch: Batch, t: int, item: int) -> list[int]:
    seen = batch.observation
    return [a for a in range(3) if not isinstance(seen, dict) or seen["action_mask"][t, item, a] == 1]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("double", [False, True])
def test_atoms_are_the_papers(masked: bool, double: bool) -> None:
    algorithm = Dqn(atoms=11, support=(-3.0, 2.0), gamma=0.9, double=double, dueling=True)
    spec = MASKED if masked else SPEC
    net, target, batch = algorithm.build(spec), algorithm.build(spec), drawn(masked)
    loss = algorithm.loss(net, target, batch)
    now, then, judged = outputs(net, batch, 0), outputs(net, batch, 1), outputs(target, batch, 1)
    support = np.linspace(-3, 2, 11)

    def chances(logits: Any) -> Any:
        return np.exp(logits) / np.exp(logits).sum()

    for b in range(ITEMS):
        judge = then if double else judged
        best = max(allowed(batch, 1, b), key=lambda a: chances(judge[b, a]) @ support)
        goals = float(batch.reward[0, b]) + 0.9 * float(batch.discount[0, b]) * support
        wanted = slow_project(support, goals, chances(judged[b, best]))
        said = chances(now[b, int(batch.action[0, b])])
        assert loss.each[b].item() == pytest.approx(-(wanted @ np.log(said)), rel=1e-4)
        divergence = sum(w * math.log(w / s) for w, s in zip(wanted, said, strict=True) if w > 0)
        assert loss.priority[b].item() == pytest.approx(divergence, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("quantiles", [1, 4])
def test_munchausen_is_the_papers(masked: bool, quantiles: int) -> None:
    algorithm = Dqn(munchausen=True, quantiles=quantiles, gamma=0.9)
    spec = MASKED if masked else SPEC
    net, target, batch = algorithm.build(spec), algorithm.build(spec), drawn(masked)
    loss = algorithm.loss(net, target, batch)
    chosen, before, then = outputs(net, batch, 0), outputs(target, batch, 0), outputs(target, batch, 1)
    tau, alpha, least = 0.03, 0.9, -1.0

    def log_policy(values: Any, actions: list[int]) -> dict[int, float]:
        means = {a: values[a].mean() / tau for a in actions}
        top = max(means.values())
        total = top + math.log(sum(math.exp(value - top) for value in means.values()))
        return {a: value - total for a, value in means.items()}

    if quantiles > 1:
        assert loss.each.isfinite().all()
        return
    for b in range(ITEMS):
        action = int(batch.action[0, b])
        if action not in allowed(batch, 0, b):
            continue  # never taken
        bonus = alpha * min(max(tau * log_policy(before[b], allowed(batch, 0, b))[action], least), 0.0)
        policy = log_policy(then[b], allowed(batch, 1, b))
        future = sum(math.exp(p) * (then[b, a, 0] - tau * p) for a, p in policy.items())
        goal = float(batch.reward[0, b]) + bonus + 0.9 * float(batch.discount[0, b]) * future
        assert loss.priority[b].item() == pytest.approx(abs(goal - chosen[b, action, 0]), rel=1e-3, abs=1e-4)


def test_noise_has_the_papers_size_and_can_be_learned() -> None:
    layer = NoisyLinear(16, 3)
    assert layer.weight.abs().max() <= 1 / 4
    assert torch.allclose(layer.weight_spread, torch.tensor(0.5 / 4))
    x = torch.randn(1, 16)
    said = torch.cat([layer(x) for _ in range(4000)]).detach()
    layer.on = False
    plain = layer(x)
    assert torch.equal(plain, layer(x))
    torch.testing.assert_close(said.mean(0), plain[0].detach(), atol=0.05, rtol=0)
    # f(ε) has the variance E|ε| = √(2/π), and weights have the product of two of them.
    size = math.sqrt(2 / math.pi)
    expected = (0.5 / 4) ** 2 * (size * size * x.square().sum() + size)
    assert said.var(0).mean().item() == pytest.approx(expected.item(), rel=0.25)
    layer.on = True
    layer(x).sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in layer.parameters())


def test_evaluations_are_without_noise() -> None:
    algorithm = Dqn(noisy=True, dueling=True, head=8, epsilon=0.0)
    net = algorithm.build(SPEC)
    step = Step(torch.randn(500, 4), torch.zeros(500), torch.ones(500), torch.zeros(500, dtype=torch.bool))
    with torch.inference_mode():
        calm = [algorithm.act(net, step, {}, None).action for _ in range(3)]
        bold = [algorithm.act(net, step, {}, torch.zeros(500)).action for _ in range(30)]
        assert not torch.equal(net.values(step, noise=True), net.values(step, noise=True))
    assert torch.equal(calm[0], calm[1])
    assert torch.equal(calm[1], calm[2])
    assert len({tuple(actions.tolist()) for actions in bold}) > 1


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"atoms": 11, "quantiles": 5}, "either atoms or quantiles"),
        ({"atoms": 11, "munchausen": True}, "munchausen needs a value without atoms"),
        ({"munchausen": True, "n": 3}, "set n to 1, not 3"),
        ({"atoms": 11, "support": [1, 1]}, "the lowest atom must lie below the highest"),
    ],
)
def test_what_does_not_go_together_is_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(SettingsError, match=told):
        configure({"environment": {"id": "CartPole-v1"}, "algorithm": {"name": "dqn", **settings}})
