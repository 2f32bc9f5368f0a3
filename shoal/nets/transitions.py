"""Steps that a policy of continuous actions learns from: one by one, or along sequences where it has a memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from shoal.core.settings import Settings
from shoal.core.types import Batch, Loss, NStep, Sequence
from shoal.losses.masking import time_mean
from shoal.losses.q_values import look_ahead, mixed_priority
from shoal.nets.memory import all_previous
from shoal.nets.q_network import check_overlap, lasts, trained, unroll

if TYPE_CHECKING:
    from shoal.nets.continuous import ContinuousNetwork


class Sequences(Settings):
    """How experience is cut where the network has an LSTM, as in R2D2 (openreview r1lyTjAqYX), but shorter."""

    unroll: int = Field(20, ge=1, description="Steps of a sequence that are learned from.")
    burn_in: int = Field(10, ge=0, description="Steps before them that only warm the memory up.")
    # As in R2D2, half of the steps are shared, and the burn-in before them.
    overlap: int = Field(20, ge=0, description="Steps that a sequence shares with the previous one, at least burn_in.")
    eta: float = Field(0.9, ge=0, le=1, description="Share of the largest error in a sequence's priority.")

    @model_validator(mode="after")
    def _overlaps(self) -> Self:
        check_overlap(self.burn_in, self.unroll, self.overlap)
        return self

    def experience(self, memory: int, n: int, gamma: float) -> NStep | Sequence:
        """Sequences within episodes where there is a memory, else n-step transitions."""
        if not memory:
            return NStep(n, gamma)
        return Sequence(self.burn_in + self.unroll, self.overlap, across=False, initial=("core", "previous"))


class Transitions(NamedTuple):
    """N steps to learn from; `then` is the observation that their value is bootstrapped from."""

    now: Tensor  # [N, inputs] what policy and critics see
    then: Tensor  # [N, inputs]
    judged: Tensor  # [N, inputs] the same, as the target network sees it
    action: Tensor  # [N, A] between -1 and 1
    reward: Tensor  # [N] of up to n steps
    discount: Tensor  # [N] of the value then: γ for each of the steps, 0 where the episode ended
    mask: Tensor | None = None  # [T, B] which steps of sequences they are; None: each is an item of its own

    def loss(self, each: Tensor, priority: Tensor, metrics: dict[str, Tensor], eta: float) -> Loss:
        """The loss of the items from that of the steps, [N]; a sequence has the mean of its steps."""
        if self.mask is None:
            return Loss(each, priority, metrics)
        mask, where = self.mask, self.mask.flatten().nonzero().squeeze(1)
        every, errors = (x.new_zeros(mask.numel()).index_copy(0, where, x).view_as(mask) for x in (each, priority))
        return Loss(time_mean(every, mask), mixed_priority(errors, mask, eta), metrics)


def transitions(
    net: ContinuousNetwork, target: ContinuousNetwork, batch: Batch, sequences: Sequences, n: int, gamma: float
) -> Transitions:
    """The steps of a batch to learn from, as the networks see them; the first to do so learns its memory, too."""
    action = net.inside(batch.action)
    if net.memory is None:  # then the packer has added up the rewards, and discounted all but the last step
        now, then = net.seen(batch)
        return Transitions(now, then, then, action[0], batch.reward[0], gamma * batch.discount[0])
    extra = all_previous(batch._replace(action=action), net.choices)
    terms = batch, batch.record["core"][0], extra, sequences.burn_in
    seen = unroll(net, *terms)  # [T + 1, B, inputs]
    with torch.no_grad():
        judged = unroll(target, *terms)
    reward, discount, ahead = look_ahead(batch.reward, gamma * batch.discount, lasts(batch), n)
    mask = trained(batch, sequences.burn_in)
    where = mask.flatten().nonzero().squeeze(1)
    far = ahead.flatten()[where] * mask.shape[1] + where % mask.shape[1]  # in all of [T + 1, B]

    def pick(x: Tensor, index: Tensor) -> Tensor:
        return x.flatten(0, 1).index_select(0, index)

    return Transitions(
        pick(seen, where), pick(seen, far), pick(judged, far),
        pick(action, where), pick(reward, where), pick(discount, where), mask,
    )  # fmt: skip
