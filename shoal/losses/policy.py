"""Policy losses, one number per step."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def policy_gradient(log_prob: Tensor, advantage: Tensor) -> Tensor:
    """Return −A_t log π(a_t|x_t) for [T, B]; no gradient flows through the advantage."""
    return -log_prob * advantage.detach()


def clipped_surrogate(log_ratio: Tensor, advantage: Tensor, clip: float) -> Tensor:
    """Return −min(r A, clip(r, 1−ε, 1+ε) A) for [T, B], with r = π/μ (arXiv:1707.06347, eq. 7)."""
    ratio = log_ratio.exp()
    advantage = advantage.detach()
    return -torch.minimum(ratio * advantage, ratio.clamp(1.0 - clip, 1.0 + clip) * advantage)


@torch.no_grad()
def approximate_kl(log_ratio: Tensor) -> Tensor:
    """Estimate KL(μ‖π) from samples of μ as r − 1 − log r, which is never negative."""
    return log_ratio.expm1() - log_ratio


@torch.no_grad()
def outside(log_ratio: Tensor, clip: float) -> Tensor:
    """Return 1 where the ratio has left [1−ε, 1+ε], else 0."""
    return (log_ratio.expm1().abs() > clip).float()


@torch.no_grad()
def implied_kl(chance: Tensor, log_ratio: Tensor, rho_bar: float) -> Tensor:
    """Return KL(π‖π̃) in nats, with π̃ ∝ min(ρ̄ μ, π) the policy whose value V-trace finds, from [A, ...] to [...].

    arXiv:1909.11583, eq. (3) and §4.3. `log_ratio` is log π − log μ of every action, and `chance` is π; or they are of
    actions drawn from π, each with the same chance.
    """
    excess = (log_ratio - math.log(rho_bar)).clamp(min=0.0)  # log π − log min(ρ̄ μ, π)
    kept = (chance * (-excess).exp()).sum(0)  # Σ min(ρ̄ μ, π)
    return (chance * excess).sum(0) + kept.log()
