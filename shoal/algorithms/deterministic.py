"""Policies of one action per state that climb their critics: TD3, FastTD3, D4PG and Ape-X DPG, by switches of one."""

from __future__ import annotations

import copy
from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.optim import Optimizer

from shoal.core.settings import Replaying, Schedule, Settings
from shoal.core.types import Act, Batch, Loss, NStep, Sequence, Spec, Step
from shoal.nets.continuous import ContinuousArchitecture, ContinuousNetwork, critic_loss, make_adam
from shoal.nets.transitions import Sequences, transitions


class Td3(Settings):
    """Twin delayed deterministic policy gradient; defaults are the paper's (arXiv:1802.09477, section 6.1)."""

    lr: Schedule = Field(Schedule(start=1e-3, shape="constant"), description="Learning rate.")
    policy_rate: float = Field(1.0, gt=0, description="Learning rate of the policy, as a multiple of lr.")
    batch: int | None = Field(100, ge=1, description="Items per update.")
    gamma: float = Field(0.99, ge=0, le=1, description="Discount per step.")
    n: int = Field(1, ge=1, description="Steps of each return before its bootstrap.")
    critics: int = Field(2, ge=1, description="Number of critics.")
    combine: Literal["min", "mean"] = Field(
        "min", description="Which value the critics' targets have: that of the lowest critic, or the mean of all."
    )
    quantiles: int = Field(1, ge=1, description="Quantiles of each critic's distribution; 1: its mean only.")
    drop: int = Field(0, ge=0, description="Highest quantiles per critic that targets leave out (TQC).")
    atoms: int | None = Field(
        None, ge=2, description="Atoms of each critic's distribution (C51), instead of quantiles; null: none."
    )
    support: tuple[float, float] = Field((-10.0, 10.0), description="The lowest and the highest atom.")
    noise: float = Field(
        0.1, ge=0, description="Standard deviation of the boldest environment's noise; actions reach from -1 to 1."
    )
    noise_least: float | None = Field(
        None,
        gt=0,
        description="That of the most careful environment's; those between have steps of one factor; null: the same.",
    )
    noise_drawn: bool = Field(
        False,
        description="Whether an environment draws that of its noise for each episode, evenly between the two, instead "
        "of having the one of its rank.",
    )
    smoothing: float = Field(0.2, ge=0, description="Standard deviation of the noise on the targets' actions.")
    smoothing_most: float = Field(0.5, gt=0, description="Most noise on a target's action.")
    target_policy: bool = Field(
        True, description="Whether the targets' actions are the target network's; else they are the policy's own."
    )
    climb: Literal["first", "min"] = Field(
        "first", description="Which value the policy climbs: that of the first critic, or of the lowest."
    )
    policy_every: int = Field(2, ge=1, description="Updates of the critics per update of the policy.")
    target_every: int = Field(2, ge=1, description="Updates between moves of the target network.")
    tau: float = Field(0.005, gt=0, le=1, description="How far the target network then moves; 1: it is a copy.")
    replay: Replaying = Field(
        Replaying(capacity=1_000_000, minimum=10_000, alpha=0.0, samples_per_insert=100.0),
        description="How experience is kept and drawn again; actions are random until there is the minimum.",
    )
    actor_priorities: bool = Field(
        False, description="Whether actors compute the priority of new items; else it is the highest so far."
    )
    sequences: Sequences = Field(Sequences(), description="How experience is cut where the network has an lstm.")
    clip_norm: float | None = Field(None, gt=0, description="Largest gradient norm; null: unlimited.")
    optimizer_epsilon: float = Field(1e-8, gt=0, description="Added to Adam's denominator.")
    weight_decay: float = Field(0.0, ge=0, description="Weight decay, apart from Adam's moments (AdamW).")
    network: ContinuousArchitecture = Field(
        ContinuousArchitecture(hidden=(400, 300), critic_hidden=(400, 300)), description="The networks."
    )

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        if self.atoms and self.quantiles > 1:
            raise ValueError("atoms: a critic has either atoms or quantiles")
        if self.drop and self.drop >= self.quantiles:
            raise ValueError(f"drop {self.drop}: a critic has only {self.quantiles} quantiles, raise quantiles")
        if self.support[0] >= self.support[1]:
            raise ValueError(f"support {[*self.support]}: the lowest atom must lie below the highest")
        if self.noise_least is not None and self.noise_least > self.noise:
            raise ValueError(f"noise_least {self.noise_least}: at most noise {self.noise}")
        return self

    @property
    def experience(self) -> NStep | Sequence:
        """n-step transitions, or sequences for a memory."""
        return self.sequences.experience(self.network.lstm, self.n, self.gamma)

    @property
    def sees_reward(self) -> bool:
        """Whether the network sees the reward of the last action."""
        return self.network.lstm > 0

    @property
    def capturable(self) -> bool:
        """Whether its loss looks at no data: with a memory, it asks which steps count."""
        return not self.network.lstm

    def phase(self, net: ContinuousNetwork) -> int:
        """Whether an update is the policy's, too."""
        return int(net.turn)

    def build(self, spec: Spec) -> ContinuousNetwork:
        """Make the networks."""
        support = self.support if self.atoms else None
        return ContinuousNetwork(self.network, spec, self.critics, self.atoms or self.quantiles, support)

    def optimizer(self, net: ContinuousNetwork) -> Optimizer:
        """Make the optimizer."""
        return make_adam(net, self.lr.now, self.policy_rate, self.optimizer_epsilon, self.weight_decay)

    def begin(self, net: ContinuousNetwork, size: int) -> dict[str, Tensor]:
        """What a memory carries, and the noise of each environment, where it is drawn."""
        drawn = {"spread": torch.zeros(size, device=net.reach.device)} if self.noise_drawn else {}
        return net.begin(size) | drawn

    def act(self, net: ContinuousNetwork, step: Step, carry: dict[str, Tensor], rank: Tensor | None) -> Act:
        """Take the policy's action, with noise by rank or as drawn; before the first update anything goes."""
        inputs, record, carry = net.look(step, carry)
        action = net.best(inputs)
        if rank is not None:
            spread, carry = self._spread(step.first, carry, rank)
            action = net.explored(action + spread.unsqueeze(-1) * torch.randn_like(action))
        return net.take(action, record, carry)

    def values(self, net: ContinuousNetwork, step: Step, carry: dict[str, Tensor]) -> dict[str, Tensor]:
        """The value of the policy's action, for recordings of episodes."""
        inputs, *_ = net.look(step, carry)
        return {"q": net.worth(inputs, net.best(inputs), self.combine == "min" and not self.drop)}

    def _spread(self, first: Tensor, carry: dict[str, Tensor], rank: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The standard deviations [B] of the noise, and what is carried on of them."""
        least = self.noise if self.noise_least is None else self.noise_least
        if not self.noise_drawn:
            return self.noise ** (1 - rank) * least**rank, carry
        drawn = least + (self.noise - least) * torch.rand_like(rank)
        spread = torch.where(first, drawn, carry["spread"])
        return spread, {**carry, "spread": spread}

    def prepare(self, net: ContinuousNetwork, batch: Batch) -> Batch:
        """Count the update, and update running statistics."""
        net.observe(batch, self.policy_every)
        return batch

    def loss(self, net: ContinuousNetwork, target: ContinuousNetwork, batch: Batch) -> Loss:
        """Return the losses of the critics and of the policy (arXiv:1802.09477, algorithm 1)."""
        steps = transitions(net, target, batch, self.sequences, self.n, self.gamma)
        with torch.no_grad():
            action = target.policy(steps.judged) if self.target_policy else net.policy(steps.then)
            if self.smoothing:
                noise = self.smoothing * torch.randn_like(action)
                action = (action + noise.clamp(-self.smoothing_most, self.smoothing_most)).clamp(-1.0, 1.0)
        each, priority, metrics = critic_loss(net, target, steps, action, self.combine, self.drop)
        if torch.is_grad_enabled() and net.turn:  # an actor wants priorities only
            # One critic is enough to climb: section 4.2.
            first = 1 if self.climb == "first" else None
            now = steps.now.detach()
            value = net.means(net.judge(now, net.policy(now), constant=True, first=first)).amin(0)
            each = each - value
            metrics["policy_loss"] = -value.mean().detach()
        return steps.loss(each, priority, metrics, self.sequences.eta)


def instead(name: str, default: Any) -> Any:
    """A field of TD3 with another default."""
    field = copy.copy(Td3.model_fields[name])
    field.default = default
    return field


class FastTd3(Td3):
    """TD3 for very many environments and large batches; defaults follow arXiv:2505.22642, for 128 environments."""

    lr: Schedule = instead("lr", Schedule(start=3e-4, shape="constant"))
    batch: int | None = instead("batch", 32_768)
    atoms: int | None = instead("atoms", 101)
    support: tuple[float, float] = instead("support", (-250.0, 250.0))
    noise: float = instead("noise", 0.4)
    noise_least: float | None = instead("noise_least", 0.001)
    noise_drawn: bool = instead("noise_drawn", True)
    smoothing: float = instead("smoothing", 0.001)
    target_policy: bool = instead("target_policy", False)
    climb: Literal["first", "min"] = instead("climb", "min")
    target_every: int = instead("target_every", 1)
    tau: float = instead("tau", 0.1)
    # Per environment 51,200 items, 10 of them before the first update; two updates per step of all.
    replay: Replaying = instead(
        "replay", Replaying(capacity=128 * 51_200, minimum=1_280, alpha=0.0, samples_per_insert=512.0)
    )
    weight_decay: float = instead("weight_decay", 0.1)
    network: ContinuousArchitecture = instead(
        "network",
        ContinuousArchitecture(hidden=(512, 256, 128), critic_hidden=(1024, 512, 256), normalise_observation=True),
    )


class D4pg(Td3):
    """Distributed distributional deterministic policy gradient; defaults follow arXiv:1804.08617, section 4."""

    lr: Schedule = instead("lr", Schedule(start=1e-4, shape="constant"))
    batch: int | None = instead("batch", 256)
    n: int = instead("n", 5)
    critics: int = instead("critics", 1)
    # 51 atoms, whose support the paper chooses by task.
    atoms: int | None = instead("atoms", 51)
    support: tuple[float, float] = instead("support", (-150.0, 150.0))
    noise: float = instead("noise", 0.3)
    smoothing: float = instead("smoothing", 0.0)
    policy_every: int = instead("policy_every", 1)
    target_every: int = instead("target_every", 100)
    tau: float = instead("tau", 1.0)
    replay: Replaying = instead(
        "replay",
        Replaying(capacity=1_000_000, minimum=10_000, alpha=0.6, samples_per_insert=32.0, chunk=8, refresh=4),
    )


class ApexDpg(Td3):
    """Ape-X with a deterministic policy; defaults follow arXiv:1803.00933, appendix D, with noise by environment."""

    lr: Schedule = instead("lr", Schedule(start=1e-4, shape="constant"))
    batch: int | None = instead("batch", 256)
    n: int = instead("n", 5)
    critics: int = instead("critics", 1)
    noise: float = instead("noise", 0.3)
    noise_least: float | None = instead("noise_least", 0.03)
    smoothing: float = instead("smoothing", 0.0)
    policy_every: int = instead("policy_every", 1)
    target_every: int = instead("target_every", 100)
    tau: float = instead("tau", 1.0)
    replay: Replaying = instead(
        "replay",
        Replaying(
            capacity=1_000_000,
            minimum=10_000,
            alpha=0.6,
            beta=Schedule(start=0.4, shape="constant"),
            chunk=32,
            refresh=8,
        ),
    )
    actor_priorities: bool = instead("actor_priorities", True)
