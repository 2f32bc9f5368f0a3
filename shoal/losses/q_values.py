"""Losses of action values, one number per item and step; [T, B] are time and items."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.losses.returns import accumulate

EPSILON = 1e-3  # of the value rescaling: openreview r1lyTjAqYX, section 2.3


def pick(values: Tensor, action: Tensor) -> Tensor:
    """The entries [..., N] of [..., A, N] that belong to the actions [...]."""
    index = action[..., None, None].expand(*action.shape, 1, values.shape[-1])
    return values.gather(-2, index).squeeze(-2)


def bootstrap(choice: Tensor, target: Tensor) -> Tensor:
    """The target network's quantiles [..., N] of the action that `choice`, both [..., A, N], holds for the best.

    Double Q-learning lets the online network choose (arXiv:1509.06461, eq. 4), the original the target network.
    """
    return pick(target, choice.mean(-1).argmax(-1))


def huber(error: Tensor, bound: float = 1.0) -> Tensor:
    """½ δ² within the bound, linear beyond it."""
    small = error.abs().clamp(max=bound)
    return small * (error.abs() - 0.5 * small)


def quantile_huber(quantiles: Tensor, target: Tensor, bound: float = 1.0) -> Tensor:
    """The quantile Huber loss of [..., N] towards samples [..., M] (arXiv:1710.10044, eq. 10 and section 4).

    Mean over the samples, sum over the quantiles, whose fractions are (i + ½) / N.
    """
    count = quantiles.shape[-1]
    fraction = (torch.arange(count, device=quantiles.device, dtype=quantiles.dtype) + 0.5) / count
    error = target.detach().unsqueeze(-2) - quantiles.unsqueeze(-1)  # [..., N, M]
    weight = (fraction[:, None] - (error.detach() < 0).to(quantiles.dtype)).abs()
    return (weight * huber(error, bound) / bound).mean(-1).sum(-1)


def project(support: Tensor, goals: Tensor, probability: Tensor) -> Tensor:
    """Probabilities [..., N] that lie at the goals [..., N], moved to the evenly spaced atoms of the support [N].

    What lies between two atoms is shared by them, and what lies beyond the ends goes there (arXiv:1707.06887, eq. 7).
    """
    width = (support[-1] - support[0]) / (len(support) - 1)
    place = (goals.clamp(support[0], support[-1]) - support[0]) / width
    # A GPU adds by index in no fixed order, and the same seed would not give the same weights.
    return share_with_all(place, probability) if place.is_cuda else share_with_two(place, probability)


def share_with_two(place: Tensor, probability: Tensor) -> Tensor:
    """Probabilities [..., N] at places [..., N] between 0 and N − 1, shared by the whole numbers beside each."""
    lower = place.floor().clamp(max=place.shape[-1] - 2)
    index, upper = lower.nan_to_num().long(), probability * (place - lower)
    found = torch.zeros_like(upper).scatter_add_(-1, index, probability - upper)
    return found.scatter_add_(-1, index + 1, upper)


def share_with_all(place: Tensor, probability: Tensor) -> Tensor:
    """The same in time and memory of N², but without an index."""
    atoms = torch.arange(place.shape[-1], device=place.device, dtype=place.dtype)
    share = (1 - (place.unsqueeze(-1) - atoms).abs()).clamp(min=0.0)  # [..., N, N]
    return (probability.unsqueeze(-1) * share).sum(-2)


def rescale(x: Tensor) -> Tensor:
    """h(x) = sign(x)(√(|x| + 1) − 1) + εx (arXiv:1805.11593, proposition A.2)."""
    return x.sign() * ((x.abs() + 1).sqrt() - 1) + EPSILON * x


def unscale(x: Tensor) -> Tensor:
    """The inverse of `rescale`."""
    root = (1 + 4 * EPSILON * (x.abs() + 1 + EPSILON)).sqrt()
    y = 2 * (x.abs() + 1 + EPSILON) / (root + 1)  # (root − 1) / 2ε, without the difference of near equals
    return x.sign() * (y - 1) * (y + 1)


def n_step_targets(reward: Tensor, discount: Tensor, bootstrap: Tensor, last: Tensor, n: int) -> Tensor:
    """n-step returns [T, B] along sequences.

    `discount` [T, B] holds γ, 0 where the episode ended by its rules. `bootstrap` [T + 1, B] is the value of the best
    action at every observation. `last` [T, B] is True where the run of rewards must stop after this step: there, and
    at the sequence's end, the return bootstraps early from the observation it has reached.
    """
    total, factor, ahead = look_ahead(reward, discount, last, n)
    return total + factor * bootstrap.gather(0, ahead)


def look_ahead(reward: Tensor, discount: Tensor, last: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """The rewards of n steps [T, B], the discount of what comes then, and the instant up to T at which it does."""
    length = len(reward)
    total, factor, going = torch.zeros_like(reward), torch.ones_like(reward), torch.ones_like(last)
    ahead = torch.arange(length, device=last.device)[:, None].repeat(1, last.shape[1])
    for step in range(min(n, length)):
        still = length - step  # starts from which `step` steps stay within the sequence
        on = going[:still]
        total[:still] += torch.where(on, factor[:still] * reward[step:], 0.0)
        factor[:still] *= torch.where(on, discount[step:], 1.0)
        ahead[:still] += on
        going[:still] &= ~last[step:]
    return total, factor, ahead


def retrace_targets(
    reward: Tensor,  # [T, B]
    discount: Tensor,  # [T, B] γ, 0 where the episode ended by its rules
    chosen: Tensor,  # [T, B] the value of the action that was taken
    bootstrap: Tensor,  # [T + 1, B] the target policy's value of every observation
    ratio: Tensor,  # [T, B] π(a|x) / μ(a|x) of the action that was taken
    last: Tensor,  # [T, B] True where the return must bootstrap from the observation that this step leads to
    lambda_: float,
) -> Tensor:
    """Retrace(λ) returns [T, B] along sequences (arXiv:1606.02647, eq. 3 and 4; c = λ min(1, π/μ)).

    G_t = Q_t + δ_t + γ c_{t+1} (G_{t+1} − Q_{t+1}) with δ_t = r_t + γ V_{t+1} − Q_t.
    """
    delta = reward + discount * bootstrap[1:] - chosen
    trace = discount * ~last
    trace[:-1] *= lambda_ * ratio[1:].clamp(max=1.0)
    trace[-1] = 0.0
    return chosen + accumulate(delta, trace)


def mixed_priority(error: Tensor, mask: Tensor, eta: float) -> Tensor:
    """η max |δ| + (1 − η) mean |δ| over the valid steps of [T, B] (openreview r1lyTjAqYX, section 2.3)."""
    size = error.abs() * mask
    return eta * size.amax(0) + (1 - eta) * size.sum(0) / mask.sum(0).clamp(min=1.0)
