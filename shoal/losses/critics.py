"""What several critics say together of a state's value."""

from __future__ import annotations

from torch import Tensor


def lowest(outputs: Tensor, means: Tensor) -> Tensor:
    """The outputs [..., N] of the critic whose mean [critics, ...] is the lowest, of [critics, ..., N].

    For single values this is the minimum of arXiv:1802.09477, section 4.2.
    """
    index = means.argmin(0)[None, ..., None].expand(1, *outputs.shape[1:])
    return outputs.gather(0, index).squeeze(0)


def truncated(quantiles: Tensor, drop: int) -> Tensor:
    """All critics' quantiles [critics, B, N] in one, sorted, without the `drop` highest per critic: [B, kept].

    arXiv:2005.04269, section 3, eq. 9 to 11.
    """
    critics, items, count = quantiles.shape
    pooled = quantiles.transpose(0, 1).reshape(items, critics * count)
    return pooled.sort(-1).values[:, : critics * (count - drop)] if drop else pooled
