"""Policy heads: from features to a distribution over actions.

A policy is one tensor of [..., P]: log-probabilities of the choices, or means and log standard deviations. A
sample of it is `raw`; `action(raw)` is what the environment takes. The loss needs raw, for which the density
is exact: the environment's action has lost what was clipped or squashed away.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from shoal.core.errors import ShoalError
from shoal.core.types import ActionSpec
from shoal.nets.masks import masked
from shoal.nets.torsos import orthogonal

POLICY_GAIN = 0.01  # a nearly uniform first policy: arXiv:2006.05990, §3.2
NODES = 16  # of the quadrature for a squashed Gaussian's entropy: a thousandth of a nat where std is 1 or 2
SPREADS = (-5.0, 2.0)  # bounds of a log standard deviation that a network predicts: arXiv:1812.05905's own code
DRAWS = 32  # of actions, where there are too many to list
LOG_SQRT_TWO_PI = 0.5 * math.log(2 * math.pi)


class Categorical(nn.Module):
    """A choice among `size` actions; the policy holds their log-probabilities."""

    def __init__(self, features: int, spec: ActionSpec) -> None:
        super().__init__()
        self.linear = orthogonal(nn.Linear(features, spec.size), POLICY_GAIN)

    def forward(self, features: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map [N, F], and which actions are allowed, [N, A], to a policy [N, A]."""
        return masked(self.linear(features), mask).log_softmax(-1)

    def sample(self, policy: Tensor) -> Tensor:
        """Draw from the policy: of clocks that ring at the rates of the probabilities, the first to ring."""
        return (policy - torch.empty_like(policy).exponential_().log_()).argmax(-1)

    def mode(self, policy: Tensor) -> Tensor:
        """Return the most probable choice."""
        return policy.argmax(-1)

    def action(self, raw: Tensor) -> Tensor:
        """Return what the environment takes."""
        return raw

    def log_prob(self, policy: Tensor, raw: Tensor) -> Tensor:
        """Return the log-probability of a choice."""
        return policy.gather(-1, raw.long().unsqueeze(-1)).squeeze(-1)

    def entropy(self, policy: Tensor) -> Tensor:
        """Return the entropy in nats."""
        return -(policy.exp() * policy).sum(-1)

    def kl(self, policy: Tensor, other: Tensor) -> Tensor:
        """Return KL(policy‖other) in nats."""
        return (policy.exp() * (policy - other)).sum(-1)


class Gaussian(nn.Module):
    """A vector of independent normal numbers, stretched to the action's bounds and then clipped or squashed.

    The standard deviation is a parameter of its own, the same in every state (arXiv:1707.06347, §6.1), unless it shall
    depend on the state. In raw units the bounds are -1 and 1; a number without finite bounds is not stretched.
    """

    centre: Tensor
    reach: Tensor
    log_reach: Tensor
    low: Tensor
    high: Tensor
    nodes: Tensor
    weights: Tensor

    def __init__(self, features: int, spec: ActionSpec, squashed: bool, state_std: bool = False) -> None:
        super().__init__()
        low, high = np.asarray(spec.low), np.asarray(spec.high)
        bounded = np.isfinite(low) & np.isfinite(high)
        if squashed and not bounded.all():
            raise ShoalError(
                f"a squashed policy needs finite action bounds, got low {spec.low} and high {spec.high}:"
                " choose distribution clipped"
            )
        self.squashed = squashed
        self.linear = orthogonal(nn.Linear(features, spec.size), POLICY_GAIN)
        predicted = orthogonal(nn.Linear(features, spec.size), POLICY_GAIN) if state_std else None
        self.log_std: Any = predicted or nn.Parameter(torch.zeros(spec.size))
        nodes, weights = np.polynomial.hermite_e.hermegauss(NODES)
        constants = {
            "centre": (np.where(bounded, low, 0) + np.where(bounded, high, 0)) / 2,
            "reach": (np.where(bounded, high, 1) - np.where(bounded, low, -1)) / 2,
            "low": low,
            "high": high,
            "nodes": nodes,
            "weights": weights / weights.sum(),
        }
        for name, value in constants.items():
            self.register_buffer(name, torch.tensor(value, dtype=torch.float32), persistent=False)
        self.register_buffer("log_reach", self.reach.log(), persistent=False)

    def forward(self, features: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map [N, F] to a policy [N, 2A]; there is nothing to mask."""
        mean = self.linear(features)
        if isinstance(self.log_std, nn.Linear):
            return torch.cat([mean, self.log_std(features).clamp(*SPREADS)], -1)
        return torch.cat([mean, self.log_std.expand_as(mean)], -1)

    def sample(self, policy: Tensor) -> Tensor:
        """Draw from the policy, in raw units."""
        mean, log_std = policy.chunk(2, -1)
        return torch.addcmul(mean, log_std.exp(), torch.randn_like(mean))

    def mode(self, policy: Tensor) -> Tensor:
        """Return the mean, in raw units."""
        return policy.chunk(2, -1)[0]

    def action(self, raw: Tensor) -> Tensor:
        """Return what the environment takes: within the bounds."""
        stretched = self.centre + self.reach * (raw.tanh() if self.squashed else raw)
        return torch.minimum(torch.maximum(stretched, self.low), self.high)

    def _log_slope(self, raw: Tensor) -> Tensor:
        """Return log |d action / d raw| of squashing, from 1 − tanh² x = 4 e^(−2x) / (1 + e^(−2x))²."""
        return 2 * (math.log(2) - raw - softplus(-2 * raw)) + self.log_reach

    def log_prob(self, policy: Tensor, raw: Tensor) -> Tensor:
        """Return the log-density: of the action where it is squashed, of raw where it is clipped."""
        mean, log_std = policy.chunk(2, -1)
        each = -0.5 * ((raw - mean) * (-log_std).exp()).square() - log_std - LOG_SQRT_TWO_PI
        return (each - self._log_slope(raw) if self.squashed else each).sum(-1)

    def entropy(self, policy: Tensor) -> Tensor:
        """Return the entropy in nats, of what log_prob is the density of.

        Squashing adds the mean of its log slope, which has no closed form: Gauss-Hermite quadrature gives it.
        """
        mean, log_std = policy.chunk(2, -1)
        each = log_std + 0.5 + LOG_SQRT_TWO_PI
        if self.squashed:
            raw = mean + log_std.exp() * self.nodes.view(-1, *[1] * mean.dim())  # [nodes, ..., A]
            each = each + torch.tensordot(self.weights, self._log_slope(raw), dims=1)
        return each.sum(-1)

    def kl(self, policy: Tensor, other: Tensor) -> Tensor:
        """Return KL(policy‖other) in nats, before clipping; squashing does not change it."""
        mean, log_std = policy.chunk(2, -1)
        other_mean, other_log_std = other.chunk(2, -1)
        spread = (2 * log_std).exp() + (mean - other_mean).square()
        return (other_log_std - log_std + 0.5 * spread * (-2 * other_log_std).exp() - 0.5).sum(-1)


class Joint(nn.Module):
    """Several independent actions at once; the policy holds those of the parts side by side."""

    def __init__(self, features: int, spec: ActionSpec, distribution: str, state_std: bool = False) -> None:
        super().__init__()
        self.heads: Any = nn.ModuleList(make_head(features, part, distribution, state_std) for part in spec.parts)
        self.widths = [len(part.choices) for part in spec.parts]
        self.policies = [part.size if part.discrete else 2 * part.size for part in spec.parts]
        self.masks = [part.size if part.discrete else 0 for part in spec.parts]
        self.exact = all(part.discrete for part in spec.parts)  # actions are integers

    def _each(self, policy: Tensor, raw: Tensor | None = None) -> Iterator[tuple[Any, Tensor, Tensor]]:
        """Every head with its part of a policy [..., P], and of raw [..., K]."""
        rest = policy if raw is None else raw
        widths = self.policies if raw is None else self.widths
        pieces = zip(self.heads, torch.split(policy, self.policies, -1), torch.split(rest, widths, -1), strict=True)
        for head, own, drawn in pieces:
            yield head, own, drawn.squeeze(-1) if isinstance(head, Categorical) else drawn

    def _side_by_side(self, parts: list[Tensor]) -> Tensor:
        columns = [part.unsqueeze(-1) if isinstance(head, Categorical) else part
                   for head, part in zip(self.heads, parts, strict=True)]  # fmt: skip
        return torch.cat(columns if self.exact else [column.float() for column in columns], -1)

    def forward(self, features: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map [N, F], and which choices are allowed, to a policy [N, P]."""
        masks = [None] * len(self.heads) if mask is None else torch.split(mask, self.masks, -1)
        return torch.cat([head(features, own) for head, own in zip(self.heads, masks, strict=True)], -1)

    def sample(self, policy: Tensor) -> Tensor:
        """Draw from the policy: [..., K]."""
        return self._side_by_side([head.sample(own) for head, own, _ in self._each(policy)])

    def mode(self, policy: Tensor) -> Tensor:
        """Return what is most probable of every part."""
        return self._side_by_side([head.mode(own) for head, own, _ in self._each(policy)])

    def action(self, raw: Tensor) -> Tensor:
        """Return what the environment takes."""
        if self.exact:
            return raw
        parts = torch.split(raw, self.widths, -1)
        return torch.cat([head.action(part) for head, part in zip(self.heads, parts, strict=True)], -1)

    def log_prob(self, policy: Tensor, raw: Tensor) -> Tensor:
        """Return the log-probability of all parts together."""
        return torch.stack([head.log_prob(own, drawn) for head, own, drawn in self._each(policy, raw)]).sum(0)

    def entropy(self, policy: Tensor) -> Tensor:
        """Return the entropy in nats."""
        return torch.stack([head.entropy(own) for head, own, _ in self._each(policy)]).sum(0)

    def kl(self, policy: Tensor, other: Tensor) -> Tensor:
        """Return KL(policy‖other) in nats."""
        others = torch.split(other, self.policies, -1)
        each = [head.kl(own, its) for (head, own, _), its in zip(self._each(policy), others, strict=True)]
        return torch.stack(each).sum(0)


def outcomes(head: Categorical | Gaussian | Joint, policy: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Return the chances of actions under a policy, and the logarithms of the ratio policy / other, both [A, ...].

    They are of all choices, or of actions drawn from the policy, each with the same chance, where one cannot list them.
    """
    if isinstance(head, Categorical):
        return policy.exp().movedim(-1, 0), (policy - other).movedim(-1, 0)
    many, others = (each.expand(DRAWS, *each.shape) for each in (policy, other))
    raw = head.sample(many)
    log_ratio = head.log_prob(many, raw) - head.log_prob(others, raw)
    return torch.full_like(log_ratio, 1 / DRAWS), log_ratio


def make_head(
    features: int, spec: ActionSpec, distribution: str, state_std: bool = False
) -> Categorical | Gaussian | Joint:
    """Return the head for an action space; all but the spec only matters where actions are continuous."""
    if spec.parts:
        return Joint(features, spec, distribution, state_std)
    if spec.discrete:
        return Categorical(features, spec)
    return Gaussian(features, spec, distribution == "squashed", state_std)
