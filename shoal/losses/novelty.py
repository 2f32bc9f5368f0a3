"""How new a state is: within its episode, and over a lifetime (arXiv:2002.06038)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Table 6 of the paper, and algorithm 1.
NEIGHBOURS, KERNEL, CLUSTER, CONSTANT, MOST_SIMILAR, MOST_LASTING = 10, 1e-4, 0.008, 1e-3, 8.0, 5.0


def nearest_distances(point: Tensor, memory: Tensor, count: Tensor, neighbours: int = NEIGHBOURS) -> Tensor:
    """Squared distances [B, k] of points [B, D] to their nearest among the first `count` [B] of a memory [B, M, D].

    Where a memory holds fewer than k, the missing distances are infinite.
    """
    distances = (memory - point.unsqueeze(1)).square().sum(-1)
    unused = torch.arange(memory.shape[1], device=memory.device) >= count.unsqueeze(1)
    distances = distances.masked_fill(unused, math.inf)
    missing = neighbours - distances.shape[1]
    if missing > 0:
        distances = torch.nn.functional.pad(distances, (0, missing), value=math.inf)
    return distances.topk(neighbours, largest=False).values


def episodic_novelty(distances: Tensor, average: Tensor) -> Tensor:
    """The reward [B] for distances [B, k] to the nearest neighbours, given their running average [B] (algorithm 1).

    The point itself is not among its neighbours. Without any, as where an episode opens, there is no reward.
    """
    normalised = distances / average.clamp(min=1e-8).unsqueeze(1)
    apart = (normalised - CLUSTER).clamp(min=0.0)
    similarity = (KERNEL / (apart + KERNEL)).sum(1).sqrt() + CONSTANT
    nothing = (similarity > MOST_SIMILAR) | torch.isinf(distances).all(1)
    return torch.where(nothing, torch.zeros_like(similarity), 1 / similarity)


def lasting_novelty(error: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
    """The modulator α in [1, L] of an error of distillation, given its running mean and deviation (eq. 1)."""
    return (1 + (error - mean) / deviation.clamp(min=1e-8)).clamp(1.0, MOST_LASTING)


def betas(arms: int, largest: float) -> Tensor:
    """The weights of the intrinsic reward by arm, 0 for the first (appendix A)."""
    if arms == 1:
        return torch.zeros(1)
    index = torch.arange(arms, dtype=torch.float32)
    middle = largest * torch.sigmoid(10 * (2 * index - (arms - 2)) / max(arms - 2, 1))
    middle[0], middle[-1] = 0.0, largest
    return middle


def gammas(arms: int, largest: float, smallest: float) -> Tensor:
    """The discounts by arm, from far-sighted to short-sighted, evenly in log(1 − γ) (appendix A)."""
    share = torch.arange(arms, dtype=torch.float32) / max(arms - 1, 1)
    return 1 - torch.exp((1 - share) * math.log(1 - largest) + share * math.log(1 - smallest))
