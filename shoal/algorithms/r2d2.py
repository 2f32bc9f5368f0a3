"""R2D2: recurrent replay with stored states and burn-in (openreview r1lyTjAqYX)."""

from __future__ import annotations

from typing import ClassVar, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.optim import Optimizer

from shoal.core.settings import Replaying, Schedule, Settings
from shoal.core.tree import map_tree
from shoal.core.types import Act, Batch, Loss, Sequence, Spec, Step
from shoal.losses.masking import masked_mean, time_mean
from shoal.losses.q_values import bootstrap, mixed_priority, n_step_targets, pick, rescale, unscale
from shoal.nets.memory import all_previous, previous
from shoal.nets.optimizers import make_optimizer
from shoal.nets.q_network import (
    QNetwork,
    check_overlap,
    epsilon_greedy,
    ladder,
    lasts,
    trained,
    unroll,
)
from shoal.nets.torsos import Architecture

# The paper sums a sequence's loss over its 80 steps. Here it is a mean, so what it compares with the size of a gradient
# (the bound of its norm, Adam's epsilon) is divided by their number.
SUMMED = 80


class R2d2(Settings):
    """Recurrent experience replay in distributed reinforcement learning; defaults are the paper's (table 2)."""

    lr: Schedule = Field(Schedule(start=1e-4, shape="constant"), description="Learning rate.")
    batch: int | None = Field(64, ge=1, description="Sequences per update.")
    gamma: float = Field(0.997, ge=0, le=1, description="Discount per step.")
    n: int = Field(5, ge=1, description="Steps of each return before its bootstrap.")
    unroll: int = Field(80, ge=1, description="Steps of a sequence that are learned from.")
    burn_in: int = Field(40, ge=0, description="Steps before them that only warm the memory up.")
    # Sequences begin every 40 steps: half of the 80 are shared, and the burn-in before them.
    overlap: int = Field(80, ge=0, description="Steps that a sequence shares with the previous one, at least burn_in.")
    rescale: bool = Field(True, description="Whether values are learned on the scale of h.")
    double: bool = Field(True, description="Whether the online network chooses the action that is bootstrapped from.")
    dueling: bool = Field(True, description="Whether value and advantage are separate streams.")
    eta: float = Field(0.9, ge=0, le=1, description="Share of the largest error in a sequence's priority.")
    epsilon: float = Field(0.4, gt=0, le=1, description="Chance of a random action of the boldest environment.")
    epsilon_spread: float = Field(7.0, ge=0, description="Exponent by which the chance falls from first to last.")
    evaluation_epsilon: float = Field(0.0, ge=0, le=1, description="Chance of a random action in evaluations.")
    target_every: int = Field(2_500, ge=1, description="Updates between copies to the target network.")
    replay: Replaying = Field(
        Replaying(
            capacity=100_000,
            minimum=5_000,
            alpha=0.9,
            beta=Schedule(start=0.6, shape="constant"),
            chunk=1,
            refresh=5,
        ),
        description="How experience is kept and drawn again.",
    )
    actor_priorities: bool = Field(
        True, description="Whether actors compute the priority of new items; else it is the highest so far."
    )
    clip_norm: float | None = Field(40 / SUMMED, gt=0, description="Largest gradient norm; null: unlimited.")
    optimizer_epsilon: float = Field(1e-3 / SUMMED, gt=0, description="Added to Adam's denominator.")
    head: int = Field(512, ge=0, description="Units between the memory and each stream of values; 0: none.")
    network: Architecture = Field(
        Architecture(activation="relu", lstm=512), description="The network; it needs an lstm."
    )

    sees_reward: ClassVar[bool] = True

    @model_validator(mode="after")
    def _overlaps(self) -> Self:
        check_overlap(self.burn_in, self.unroll, self.overlap)
        return self

    @property
    def experience(self) -> Sequence:
        """Sequences within episodes, with the recurrent state before the first step."""
        return Sequence(self.burn_in + self.unroll, self.overlap, across=False, initial=("core", "previous"))

    def build(self, spec: Spec) -> QNetwork:
        """Make the network; its memory also sees the last action and reward."""
        return QNetwork(self.network, spec, self.dueling, 1, self.head, extra=spec.action.size + 1)

    def optimizer(self, net: QNetwork) -> Optimizer:
        """Make the optimizer."""
        return make_optimizer("adam", net, self.lr.now, self.optimizer_epsilon)

    def begin(self, net: QNetwork, size: int) -> dict[str, Tensor]:
        """The LSTM's state, and the previous action."""
        return net.begin(size)

    def act(self, net: QNetwork, step: Step, carry: dict[str, Tensor], rank: Tensor | None) -> Act:
        """Take the best action, or with a chance that depends on the rank any; an evaluation records the values."""
        seen = previous(carry["action"], step.reward, step.first, [net.head.actions])
        observation = map_tree(lambda x: x.unsqueeze(0), step.observation)
        outputs, core = net(observation, step.first.unsqueeze(0), carry["core"], seen.unsqueeze(0))
        values = outputs[0, :, :, 0]  # [B, A]
        epsilon = self.evaluation_epsilon if rank is None else ladder(rank, self.epsilon, self.epsilon_spread)
        action = epsilon_greedy(values, epsilon)
        record = {"core": carry["core"], "previous": seen} | ({"q": values} if rank is None else {})
        return Act(action, record, {"core": core, "action": action})

    def prepare(self, net: QNetwork, batch: Batch) -> Batch:
        """Update running statistics."""
        net.observe(batch)
        return batch

    def loss(self, net: QNetwork, target: QNetwork, batch: Batch) -> Loss:
        """Return half the squared n-step double Q error on the scale of h, after the burn-in."""
        extra = all_previous(batch, [net.head.actions])
        core = batch.record["core"][0]
        values = unroll(net, batch, core, extra, self.burn_in)
        with torch.no_grad():
            goal = unroll(target, batch, core, extra, self.burn_in)
            future = bootstrap(values if self.double else goal, goal)[..., 0]
            returns = n_step_targets(
                batch.reward,
                self.gamma * batch.discount,
                unscale(future) if self.rescale else future,
                lasts(batch),
                self.n,
            )
            goals = rescale(returns) if self.rescale else returns
        chosen = pick(values[:-1], batch.action)[..., 0]
        error = goals - chosen
        mask = trained(batch, self.burn_in)
        metrics = {
            "value_loss": masked_mean(0.5 * error.square(), mask),
            "q": masked_mean(chosen, mask),
            "td_error": masked_mean(error.abs(), mask),
        }
        priority = mixed_priority(error.detach(), mask, self.eta)
        return Loss(time_mean(0.5 * error.square(), mask), priority, metrics)
