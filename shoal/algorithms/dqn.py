"""DQN with its well-known improvements as switches (doi:10.1038/nature14236, arXiv:1710.02298)."""

from __future__ import annotations

from typing import Any, Self

from pydantic import Field, field_validator, model_validator
from torch import Tensor
from torch.optim import Optimizer

from shoal.core.settings import Replaying, Schedule, Settings
from shoal.core.types import Act, Batch, Loss, NStep, Spec, Step
from shoal.nets.optimizers import make_optimizer
from shoal.nets.q_network import QNetwork, epsilon_greedy, q_loss, without_memory
from shoal.nets.torsos import Architecture


class Dqn(Settings):
    """Deep Q-learning; double, dueling, n-step, prioritized and quantile versions are switches."""

    # Mnih et al. 2015, extended data table 1, unless a comment differs.
    lr: Schedule = Field(Schedule(start=1e-4, shape="constant"), description="Learning rate.")
    batch: int | None = Field(32, ge=1, description="Items per update.")
    gamma: float = Field(0.99, ge=0, le=1, description="Discount per step.")
    n: int = Field(1, ge=1, description="Steps of each return before its bootstrap.")
    double: bool = Field(True, description="Whether the online network chooses the action that is bootstrapped from.")
    dueling: bool = Field(False, description="Whether value and advantage are separate streams.")
    # 200 quantiles and κ = 1 for Atari: arXiv:1710.10044, section 5.
    quantiles: int = Field(1, ge=1, description="Quantiles of each return's distribution; 1: its mean only.")
    kappa: float = Field(1.0, gt=0, description="Error beyond which the Huber loss is linear.")
    # 51 atoms between -10 and 10 for Atari: arXiv:1707.06887, section 5.
    atoms: int | None = Field(
        None, ge=2, description="Atoms of each return's distribution (C51), instead of quantiles; null: none."
    )
    support: tuple[float, float] = Field((-10.0, 10.0), description="The lowest and the highest atom.")
    noisy: bool = Field(False, description="Whether noise in the head's weights explores; set epsilon to 0 with it.")
    munchausen: bool = Field(False, description="Whether the logarithm of the policy is added to rewards; n must be 1.")
    # Over the first tenth of the run, as Stable-Baselines3 has it; the paper's tenth is of a run of 10 million frames.
    epsilon: Schedule = Field(
        Schedule(start=1.0, end=0.05, until=0.1), description="Chance of a random action while training."
    )
    evaluation_epsilon: float = Field(0.0, ge=0, le=1, description="Chance of a random action in evaluations.")
    target_every: int = Field(1_000, ge=1, description="Updates between copies to the target network.")
    replay: Replaying = Field(
        Replaying(alpha=0.0, samples_per_insert=8.0), description="How experience is kept and drawn again."
    )
    actor_priorities: bool = Field(
        False, description="Whether actors compute the priority of new items; else it is the highest so far."
    )
    clip_norm: float | None = Field(10.0, gt=0, description="Largest gradient norm; null: unlimited.")
    optimizer_epsilon: float = Field(1e-5, gt=0, description="Added to Adam's denominator.")
    head: int = Field(0, ge=0, description="Units between the torso and each stream of values; 0: none.")
    network: Architecture = Field(Architecture(activation="relu"), description="The network.")

    @field_validator("network")
    @classmethod
    def _no_memory(cls, network: Architecture) -> Architecture:
        return without_memory(network, "dqn")

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        if self.atoms and (self.quantiles > 1 or self.munchausen):
            raise ValueError(
                "atoms: a return has either atoms or quantiles, and munchausen needs a value without atoms"
            )
        if self.munchausen and self.n > 1:
            raise ValueError(f"munchausen is defined for one step: set n to 1, not {self.n}")
        if self.support[0] >= self.support[1]:
            raise ValueError(f"support {[*self.support]}: the lowest atom must lie below the highest")
        return self

    @property
    def experience(self) -> NStep:
        """n-step transitions."""
        return NStep(self.n, self.gamma)

    @property
    def capturable(self) -> bool:
        """Whether its loss looks at no data and at no schedule but `lr`."""
        return self.network.capturable

    def build(self, spec: Spec) -> QNetwork:
        """Make the network."""
        return QNetwork(
            self.network,
            spec,
            self.dueling,
            self.atoms or self.quantiles,
            self.head,
            noisy=self.noisy,
            support=self.support if self.atoms else None,
        )

    def optimizer(self, net: QNetwork) -> Optimizer:
        """Make the optimizer."""
        return make_optimizer("adam", net, self.lr.now, self.optimizer_epsilon)

    def begin(self, net: QNetwork, size: int) -> dict[str, Tensor]:
        """Nothing is carried."""
        return {}

    def act(self, net: QNetwork, step: Step, carry: Any, rank: Tensor | None) -> Act:
        """Take the best action, or with a chance of epsilon any; an evaluation records the values."""
        epsilon = self.evaluation_epsilon if rank is None else self.epsilon.now
        values = net.values(step, noise=rank is not None)
        return Act(epsilon_greedy(values, epsilon), {"q": values} if rank is None else {}, carry)

    def prepare(self, net: QNetwork, batch: Batch) -> Batch:
        """Update running statistics."""
        net.observe(batch)
        return batch

    def loss(self, net: QNetwork, target: QNetwork, batch: Batch) -> Loss:
        """Return the Huber loss of the n-step temporal difference, or of its quantiles."""
        return q_loss(net, target, batch, self.gamma, self.double, self.kappa, self.munchausen)
