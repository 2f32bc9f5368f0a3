"""Policy heads: from features to a distribution over actions.

A policy is one tensor of [..., P]: log-probabilities of the choices, or means and log standard deviations. A
sample of it is `raw`; `action(raw)` is what the environment takes. The loss needs raw, for which the density
is exact: the environment's action has lost what was clipped or squashed away.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from shoal.core.errors import ShoalError
from shoal.core.types import ActionSpec
from shoal.nets.torsos import orthogonal

POLICY_GAIN = 0.01  # a nearly uniform first policy: arXiv:2006.05990, §3.2
NODES = 16  # of the quadrature for a squashed Gaussian's entropy: a thousandth of a nat where std is 1 or 2
LOG_SQRT_TWO_PI = 0.5 * math.log(2 * math.pi)


class Categorical(nn.Module):
    """A choice among `size` actions; the policy holds their log-probabilities."""

    def __init__(self, features: int, spec: ActionSpec) -> None:
        super().__init__()
        self.linear = orthogonal(nn.Linear(features, spec.size), POLICY_GAIN)

    def forward(self, features: Tensor) -> Tensor:
        """Map [N, F] to a policy [N, A]."""
        return self.linear(features).log_softmax(-1)  # type: ignore[no-any-return]  # untyped call

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

    The standard deviation is a parameter of its own, the same in every state (arXiv:1707.06347, §6.1). In raw
    units the bounds are -1 and 1; a number without finite bounds is not stretched.
    """

    centre: Tensor
    reach: Tensor
    low: Tensor
    high: Tensor
    nodes: Tensor
    weights: Tensor

    def __init__(self, features: int, spec: ActionSpec, squashed: bool) -> None:
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
        self.log_std = nn.Parameter(torch.zeros(spec.size))
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

    def forward(self, features: Tensor) -> Tensor:
        """Map [N, F] to a policy [N, 2A]."""
        mean = self.linear(features)
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
        return 2 * (math.log(2) - raw - softplus(-2 * raw)) + self.reach.log()

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


def make_head(features: int, spec: ActionSpec, distribution: str) -> Categorical | Gaussian:
    """Return the head for an action space; the distribution only matters where actions are continuous."""
    if spec.discrete:
        return Categorical(features, spec)
    return Gaussian(features, spec, squashed=distribution == "squashed")
