"""Batches as an actor and a packer would make them."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from shoal.core.tree import map_tree
from shoal.core.types import ActionSpec, ArraySpec, Batch, Spec, Step

DISCRETE = ActionSpec(3)
CONTINUOUS = ActionSpec(2, (-2.0, 0.0), (2.0, 1.0))
VECTOR = ArraySpec((4,), "float32")
SPECS = {
    "discrete": Spec(VECTOR, DISCRETE),
    "continuous": Spec(VECTOR, CONTINUOUS),
    "mapping": Spec({"a": VECTOR, "b": ArraySpec((1, 5, 4), "uint8")}, DISCRETE),
}


def wander(net: Any) -> Any:
    """A network whose weights are others, as after learning."""
    other = copy.deepcopy(net)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return other


def observe(spec: Spec, items: int) -> Any:
    """Draw random observations."""

    def one(array: ArraySpec) -> torch.Tensor:
        if array.dtype == "uint8":
            return torch.randint(0, 256, (items, *array.shape), dtype=torch.uint8)
        return torch.randn(items, *array.shape)

    return map_tree(one, spec.observation)


def play(algorithm: Any, net: Any, spec: Spec, length: int = 15, items: int = 6) -> Batch:
    """Act in random episodes, some terminated, some truncated, each followed by its dummy step."""
    carry = algorithm.begin(net, items)
    first = torch.rand(items) < 0.5
    steps, acts = [], []
    for _ in range(length + 1):
        terminated, truncated = ~first & (torch.rand(items) < 0.15), ~first & (torch.rand(items) < 0.1)
        step = Step(observe(spec, items), torch.randn(items), (~terminated).float(), first)
        act = algorithm.act(net, step, carry, torch.linspace(0, 1, items))
        carry = act.carry
        steps.append(step)
        acts.append(act)
        first = terminated | truncated
    pile = [map_tree(lambda *each: torch.stack(each), parts[0], *parts[1:]) for parts in zip(*steps, strict=True)]
    observation, reward, discount, first = pile
    record = {key: torch.stack([act.record[key] for act in acts[:-1]]) for key in acts[0].record}
    for key in algorithm.experience.initial:
        record[key] = record[key][:1]
    return Batch(
        observation=observation,
        first=first,
        action=torch.stack([act.action for act in acts[:-1]]),
        reward=reward[1:],
        discount=discount[1:],
        record=record,
        weight=torch.rand(items),
        key=np.arange(items) + 100,
        version=np.arange(items) + 7,
    )


def looked_at(net: Any, batch: Batch) -> list[Any]:
    """What an actor-critic loss looks at, as arrays of [T, B]."""
    raw = batch.record.get("raw", batch.action)
    with torch.no_grad():
        policy, value, _ = net(batch.observation, batch.first, batch.record["core"][0] if net.memory else None)
        log_pi, log_mu = net.head.log_prob(policy[:-1], raw), net.head.log_prob(batch.record["policy"], raw)
        arrays = [log_pi, log_mu, net.head.entropy(policy[:-1]), value, batch.reward, batch.discount, batch.mask]
    return [array.double().numpy() for array in arrays]


def vtrace_targets(algorithm: Any, ratio: Any, value: Any, reward: Any, discount: Any, mask: Any) -> tuple[Any, Any]:
    """Transcribe section 4.1 of arXiv:1802.01561 for one item: targets and advantages."""
    length, gamma, lambda_ = len(reward), algorithm.gamma, getattr(algorithm, "lambda_", 1.0)
    rho, c = np.minimum(algorithm.rho_bar, ratio), lambda_ * np.minimum(algorithm.c_bar, ratio)
    vs = value.copy()
    for s in range(length):
        weight = 1.0
        for t in range(s, length):
            if not mask[t]:
                break
            vs[s] += weight * rho[t] * (reward[t] + gamma * discount[t] * value[t + 1] - value[t])
            weight *= gamma * discount[t] * c[t]
    return vs, rho * (reward + gamma * discount * vs[1:] - value[:-1])


def vtrace_loss(
    algorithm: Any, log_pi: Any, log_mu: Any, entropy: Any, value: Any, reward: Any, discount: Any, mask: Any
) -> tuple[float, float]:
    """Transcribe section 4.2 of arXiv:1802.01561 for one item."""
    vs, advantage = vtrace_targets(algorithm, np.exp(log_pi - log_mu), value, reward, discount, mask)
    total = 0.0
    for t in range(len(reward)):
        if mask[t]:
            total -= log_pi[t] * advantage[t]
            total += algorithm.value_cost * (vs[t] - value[t]) ** 2 / 2
            total -= algorithm.entropy_cost.now * entropy[t]
    return total / len(reward), np.abs(vs - value)[:-1][mask > 0].sum() / len(reward)


@pytest.fixture
def specs() -> dict[str, Spec]:
    """One of each kind of environment."""
    return SPECS


@pytest.fixture
def rollout() -> Any:
    """Return the function that plays."""
    torch.manual_seed(0)
    return play
