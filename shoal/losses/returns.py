"""Returns and advantages along a sequence that may run across episodes.

`discount` is already γ times the environment's discount. On a masked transition the error is 0 and the trace
is cut, so what comes before it bootstraps from the value of its episode's last observation and nothing later.
"""

from __future__ import annotations

import torch
from torch import Tensor


def accumulate(deltas: Tensor, traces: Tensor) -> Tensor:
    """Solve x[t] = delta[t] + trace[t] · x[t+1] backwards from x[T] = 0."""
    total = torch.zeros_like(deltas[0])
    totals = []
    for delta, trace in zip(reversed(deltas.unbind()), reversed(traces.unbind()), strict=True):
        total = torch.addcmul(delta, trace, total)
        totals.append(total)
    return torch.stack(totals[::-1])


@torch.no_grad()
def vtrace(
    log_rho: Tensor,  # [T, B] log π(a|x) − log μ(a|x)
    discount: Tensor,  # [T, B]
    reward: Tensor,  # [T, B]
    value: Tensor,  # [T+1, B]
    mask: Tensor,  # [T, B]
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
    lambda_: float = 1.0,
    rho_bar_gradient: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the V-trace targets and the policy gradient's advantages, both [T, B].

    arXiv:1802.01561, §4.1 eq. (1), remark 2 for λ, and §4.2: v_t = V_t + δ_t + γ c_t (v_{t+1} − V_{t+1}) with
    δ_t = ρ_t (r_t + γ V_{t+1} − V_t), ρ_t = min(ρ̄, π/μ), c_t = λ min(c̄, π/μ), and the advantage is
    ρ_t (r_t + γ v_{t+1} − V_t), whose ratio may have a bound of its own.
    """
    ratio = log_rho.exp()
    rho = ratio.clamp(max=rho_bar)
    value_now, value_next = value[:-1], value[1:]
    delta = mask * rho * (reward + discount * value_next - value_now)
    trace = mask * discount * ratio.clamp(max=c_bar) * lambda_
    vs = value_now + accumulate(delta, trace)
    vs_next = torch.cat([vs[1:], value[-1:]])
    rho_gradient = rho if rho_bar_gradient is None else ratio.clamp(max=rho_bar_gradient)
    advantage = mask * rho_gradient * (reward + discount * vs_next - value_now)
    return vs, advantage


@torch.no_grad()
def gae(
    reward: Tensor,  # [T, B]
    discount: Tensor,  # [T, B]
    value: Tensor,  # [T+1, B]
    mask: Tensor,  # [T, B]
    lambda_: float = 0.95,
) -> Tensor:
    """Return the generalised advantage estimates [T, B].

    arXiv:1506.02438, eq. (16): A_t = Σ_l (γλ)^l δ_{t+l} with δ_t = r_t + γ V_{t+1} − V_t.
    """
    delta = mask * (reward + discount * value[1:] - value[:-1])
    return accumulate(delta, mask * discount * lambda_)
