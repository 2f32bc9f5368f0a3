"""Soft actor-critic: a policy that earns as much as it can while acting as randomly as it can (arXiv:1812.05905)."""

from __future__ import annotations

from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.optim import Optimizer

from shoal.core.settings import Replaying, Schedule, Settings
from shoal.core.types import Act, Batch, Loss, NStep, Sequence, Spec, Step
from shoal.nets.continuous import ContinuousArchitecture, ContinuousNetwork, critic_loss, make_adam
from shoal.nets.transitions import Sequences, transitions


class Sac(Settings):
    """Soft actor-critic with a learned temperature; defaults are the paper's (table 1) unless a comment differs."""

    lr: Schedule = Field(Schedule(start=3e-4, shape="constant"), description="Learning rate.")
    policy_rate: float = Field(1.0, gt=0, description="Learning rate of policy and temperature, as a multiple of lr.")
    batch: int | None = Field(256, ge=1, description="Items per update.")
    gamma: float = Field(0.99, ge=0, le=1, description="Discount per step.")
    n: int = Field(1, ge=1, description="Steps of each return before its bootstrap.")
    critics: int = Field(2, ge=1, description="Number of critics.")
    combine: Literal["min", "mean"] = Field(
        "min", description="Which value the critics' targets have: that of the lowest critic, or the mean of all."
    )
    # 25 quantiles, of which 2 per critic are dropped: arXiv:2005.04269, section 5.
    quantiles: int = Field(1, ge=1, description="Quantiles of each critic's distribution; 1: its mean only.")
    drop: int = Field(0, ge=0, description="Highest quantiles per critic that targets leave out (TQC).")
    temperature: float = Field(1.0, gt=0, description="Weight of the entropy at the beginning.")
    entropy: float = Field(
        -1.0, description="Entropy per number of an action, in nats, that the temperature is learned for."
    )
    policy_every: int = Field(1, ge=1, description="Updates of the critics per update of the policy.")
    target_every: int = Field(1, ge=1, description="Updates between moves of the target network.")
    tau: float = Field(0.005, gt=0, le=1, description="How far the target network then moves; 1: it is a copy.")
    # The paper draws one batch of 256 per step, and begins with random actions.
    replay: Replaying = Field(
        Replaying(capacity=1_000_000, minimum=10_000, alpha=0.0, samples_per_insert=256.0),
        description="How experience is kept and drawn again; actions are random until there is the minimum.",
    )
    actor_priorities: bool = Field(
        False, description="Whether actors compute the priority of new items; else it is the highest so far."
    )
    sequences: Sequences = Field(Sequences(), description="How experience is cut where the network has an lstm.")
    clip_norm: float | None = Field(None, gt=0, description="Largest gradient norm; null: unlimited.")
    optimizer_epsilon: float = Field(1e-8, gt=0, description="Added to Adam's denominator.")
    weight_decay: float = Field(0.0, ge=0, description="Weight decay, apart from Adam's moments (AdamW).")
    network: ContinuousArchitecture = Field(ContinuousArchitecture(), description="The networks.")

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        if self.drop and self.drop >= self.quantiles:
            raise ValueError(f"drop {self.drop}: a critic has only {self.quantiles} quantiles, raise quantiles")
        return self

    @property
    def _cautious(self) -> bool:
        """Whether the lowest critic decides what an action is worth."""
        return self.combine == "min" and not self.drop

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
        return ContinuousNetwork(self.network, spec, self.critics, self.quantiles, temperature=self.temperature)

    def optimizer(self, net: ContinuousNetwork) -> Optimizer:
        """Make the optimizer."""
        return make_adam(net, self.lr.now, self.policy_rate, self.optimizer_epsilon, self.weight_decay)

    def begin(self, net: ContinuousNetwork, size: int) -> dict[str, Tensor]:
        """What a memory carries."""
        return net.begin(size)

    def act(self, net: ContinuousNetwork, step: Step, carry: dict[str, Tensor], rank: Tensor | None) -> Act:
        """Draw from the policy; an evaluation takes its mode, and before the first update anything goes."""
        inputs, record, carry = net.look(step, carry)
        action = net.best(inputs) if rank is None else net.explored(net.drawn(inputs)[0])
        return net.take(action, record, carry)

    def values(self, net: ContinuousNetwork, step: Step, carry: dict[str, Tensor]) -> dict[str, Tensor]:
        """The value of the policy's action, for recordings of episodes."""
        inputs, *_ = net.look(step, carry)
        return {"q": net.worth(inputs, net.best(inputs), self._cautious)}

    def prepare(self, net: ContinuousNetwork, batch: Batch) -> Batch:
        """Count the update, and update running statistics."""
        net.observe(batch, self.policy_every)
        return batch

    def loss(self, net: ContinuousNetwork, target: ContinuousNetwork, batch: Batch) -> Loss:
        """Return the losses of the critics (eq. 5 and 6), of the policy (eq. 7) and of the temperature (eq. 18)."""
        assert net.log_temperature is not None
        steps = transitions(net, target, batch, self.sequences, self.n, self.gamma)
        temperature = net.log_temperature.exp()
        with torch.no_grad():
            action, log_prob = net.drawn(steps.then)
            bonus = -temperature * log_prob
        each, priority, metrics = critic_loss(net, target, steps, action, self.combine, self.drop, bonus)
        metrics["temperature"] = temperature.detach()
        if torch.is_grad_enabled() and net.turn:  # an actor wants priorities only
            now = steps.now.detach()
            action, log_prob = net.drawn(now)
            value = net.worth(now, action, self._cautious, constant=True)
            surplus = (log_prob + self.entropy * action.shape[-1]).detach()
            policy_loss = temperature.detach() * log_prob - value
            each = each + policy_loss - temperature * surplus
            metrics |= {"policy_loss": policy_loss.mean().detach(), "entropy": -log_prob.mean().detach()}
        return steps.loss(each, priority, metrics, self.sequences.eta)
