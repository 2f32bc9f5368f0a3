"""Ape-X DQN: many actors that explore differently fill one prioritized replay (arXiv:1803.00933)."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator
from torch import Tensor
from torch.optim import Optimizer

from shoal.core.settings import Replaying, Schedule, Settings
from shoal.core.types import Act, Batch, Loss, NStep, Spec, Step
from shoal.nets.optimizers import make_optimizer
from shoal.nets.q_network import QNetwork, epsilon_greedy, ladder, q_loss, without_memory
from shoal.nets.torsos import Architecture


class ApexDqn(Settings):
    """Distributed prioritized experience replay; defaults are the paper's for Atari (section 4.1, appendix C)."""

    lr: Schedule = Field(Schedule(start=0.00025 / 4, shape="constant"), description="Learning rate.")
    batch: int | None = Field(512, ge=1, description="Items per update.")
    gamma: float = Field(0.99, ge=0, le=1, description="Discount per step.")
    n: int = Field(3, ge=1, description="Steps of each return before its bootstrap.")
    double: bool = Field(True, description="Whether the online network chooses the action that is bootstrapped from.")
    dueling: bool = Field(True, description="Whether value and advantage are separate streams.")
    # 200 quantiles and κ = 1 for Atari: arXiv:1710.10044, section 5.
    quantiles: int = Field(1, ge=1, description="Quantiles of each return's distribution; 1: its mean only.")
    kappa: float = Field(1.0, gt=0, description="Error beyond which the Huber loss is linear.")
    epsilon: float = Field(0.4, gt=0, le=1, description="Chance of a random action of the boldest environment.")
    epsilon_spread: float = Field(7.0, ge=0, description="Exponent by which the chance falls from first to last.")
    evaluation_epsilon: float = Field(0.0, ge=0, le=1, description="Chance of a random action in evaluations.")
    target_every: int = Field(2_500, ge=1, description="Updates between copies to the target network.")
    # 2 million items that are sent in chunks of 50, weights fetched every 400 frames: appendix C.
    replay: Replaying = Field(
        Replaying(
            capacity=2_000_000,
            minimum=50_000,
            beta=Schedule(start=0.4, shape="constant"),
            chunk=50,
            refresh=8,
        ),
        description="How experience is kept and drawn again.",
    )
    actor_priorities: bool = Field(
        True, description="Whether actors compute the priority of new items; else it is the highest so far."
    )
    clip_norm: float | None = Field(40.0, gt=0, description="Largest gradient norm; null: unlimited.")
    rule: Literal["rmsprop", "adam"] = Field("rmsprop", description="Optimizer; the paper's is centred RMSProp.")
    decay: float = Field(0.95, ge=0, lt=1, description="Decay of RMSProp's mean square.")
    optimizer_epsilon: float = Field(1.5e-7, gt=0, description="Added inside RMSProp's root, or to Adam's denominator.")
    head: int = Field(512, ge=0, description="Units between the torso and each stream of values; 0: none.")
    network: Architecture = Field(Architecture(activation="relu"), description="The network.")

    @field_validator("network")
    @classmethod
    def _no_memory(cls, network: Architecture) -> Architecture:
        return without_memory(network, "apex_dqn")

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
        return QNetwork(self.network, spec, self.dueling, self.quantiles, self.head)

    def optimizer(self, net: QNetwork) -> Optimizer:
        """Make the optimizer."""
        return make_optimizer(self.rule, net, self.lr.now, self.optimizer_epsilon, self.decay, centered=True)

    def begin(self, net: QNetwork, size: int) -> dict[str, Tensor]:
        """Nothing is carried."""
        return {}

    def act(self, net: QNetwork, step: Step, carry: Any, rank: Tensor | None) -> Act:
        """Take the best action, or with a chance that depends on the rank any; an evaluation records the values."""
        epsilon = self.evaluation_epsilon if rank is None else ladder(rank, self.epsilon, self.epsilon_spread)
        values = net.values(step)
        return Act(epsilon_greedy(values, epsilon), {"q": values} if rank is None else {}, carry)

    def prepare(self, net: QNetwork, batch: Batch) -> Batch:
        """Update running statistics."""
        net.observe(batch)
        return batch

    def loss(self, net: QNetwork, target: QNetwork, batch: Batch) -> Loss:
        """Return the loss of section 3: half the squared (here: Huber) n-step double Q error, or its quantiles'."""
        return q_loss(net, target, batch, self.gamma, self.double, self.kappa)
