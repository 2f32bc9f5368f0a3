"""A3C: every core plays and learns, on one network that all of them share (arXiv:1602.01783)."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.optim import Optimizer

from shoal.core.settings import Replaying, Schedule, Settings
from shoal.core.types import Act, Batch, Loss, Sequence, Spec, Step
from shoal.losses.masking import masked_mean, time_mean
from shoal.losses.policy import policy_gradient
from shoal.losses.returns import vtrace
from shoal.losses.value import explained_variance, squared_error
from shoal.nets.actor_critic import ActorCritic, ActorCriticArchitecture, raw_action, remembered
from shoal.nets.optimizers import make_optimizer


class A3c(Settings):
    """Asynchronous advantage actor-critic; defaults are the paper's for Atari (section 8) unless a comment differs.

    Fresh experience is on-policy, and there V-trace with ρ̄ = c̄ = 1 is the paper's n-step return: all ratios are 1, and
    v_t = Σ γ^k r_{t+k} + γ^n V(x_{t+n}). So one loss serves fresh and replayed sequences alike, and it needs no second
    head of action values, as Retrace in ACER (arXiv:1611.01224) does.
    """

    # The paper draws it from LogUniform(1e-4, 1e-2) and lets it fall to 0; 7e-4 is about the middle of that on a
    # logarithmic scale, and what OpenAI's A2C takes.
    lr: Schedule = Field(Schedule(start=7e-4, end=0.0), description="Learning rate.")
    unroll: int = Field(5, ge=1, description="Actions per sequence, t_max of the paper.")
    gamma: float = Field(0.99, ge=0, le=1, description="Discount per step.")
    lambda_: float = Field(1.0, ge=0, le=1, description="Decay of the trace; 1: n-step returns.")
    # Of half the squared error. The paper's algorithm S3 has the whole square, for a network of its own.
    value_cost: float = Field(1.0, ge=0, description="Weight of the value loss.")
    entropy_cost: Schedule = Field(Schedule(start=0.01, shape="constant"), description="Weight of the entropy bonus.")
    # The paper names no bound; 0.5, and 1e-5 for optimizer_epsilon, are OpenAI's A2C's, whose loss is a mean as well.
    clip_norm: float | None = Field(0.5, gt=0, description="Largest gradient norm; null: unlimited.")
    rule: Literal["rmsprop", "adam"] = Field(
        "rmsprop", description="Optimizer, with statistics that all workers share."
    )
    optimizer_epsilon: float = Field(1e-5, gt=0, description="Added inside RMSProp's root, or to Adam's denominator.")
    decay: float = Field(0.99, ge=0, lt=1, description="Decay of RMSProp's mean square.")
    replay: Replaying | None = Field(None, description="A replay of sequences that all workers share; null: none.")
    # arXiv:1611.01224, section 5: 4 was best of those tried on Atari.
    replay_ratio: float = Field(4.0, ge=0, description="Updates from the replay after each fresh one, on average.")
    rho_bar: float = Field(1.0, gt=0, description="Bound of the importance ratio: which value is learnt.")
    c_bar: float = Field(1.0, ge=0, description="Bound of the trace's ratio: how fast it is learnt.")
    distribution: Literal["clipped", "squashed"] = Field(
        "clipped", description="How a Gaussian keeps to the bounds of continuous actions."
    )
    evaluation_policy: Literal["mode", "sample"] = Field(
        "mode", description="Whether evaluations take the policy's mode, or draw from it as actors do."
    )
    network: ActorCriticArchitecture = Field(ActorCriticArchitecture(), description="The network.")

    topology: ClassVar[str] = "gradient_workers"
    batch: ClassVar[int | None] = None  # one sequence from every environment of a worker
    max_lag: ClassVar[int | None] = 0  # with actors and a learner, all wait for each other: that is A2C

    @model_validator(mode="after")
    def _one_ratio(self) -> Self:
        if self.replay is not None and self.replay.samples_per_insert is not None:
            raise ValueError(
                "replay.samples_per_insert: set replay_ratio instead, which is how often experience is replayed"
            )
        return self

    @property
    def experience(self) -> Sequence:
        """Sequences that run on across episodes, with the recurrent state before the first step."""
        return Sequence(self.unroll, initial=remembered(self.network))

    @property
    def sees_reward(self) -> bool:
        """Whether the network sees the reward of the last action."""
        return self.network.previous

    def build(self, spec: Spec) -> ActorCritic:
        """Make the network."""
        return ActorCritic(self.network, spec, self.gamma, self.distribution)

    def optimizer(self, net: ActorCritic) -> Optimizer:
        """Make the optimizer."""
        return make_optimizer(self.rule, net, self.lr.now, self.optimizer_epsilon, self.decay)

    def begin(self, net: ActorCritic, size: int) -> dict[str, Tensor]:
        """Return the first carry."""
        return net.begin(size)

    def act(self, net: ActorCritic, step: Step, carry: dict[str, Tensor], rank: Tensor | None) -> Act:
        """Draw from the policy; an evaluation may take its mode."""
        return net.act(step, carry, greedy=rank is None and self.evaluation_policy == "mode")

    def prepare(self, net: ActorCritic, batch: Batch) -> Batch:
        """Update running statistics."""
        net.observe(batch)
        return batch

    def loss(self, net: ActorCritic, target: object, batch: Batch) -> Loss:
        """Return policy gradient, squared value error and entropy bonus of section 4; no target net."""
        head, mask, raw = net.head, batch.mask, raw_action(batch)
        policy, value, _ = net.unroll(batch)
        policy, value_now = policy[:-1], value[:-1]
        log_prob = head.log_prob(policy, raw)
        log_rho = log_prob.detach() - head.log_prob(batch.record["policy"], raw)
        discount, reward = self.gamma * batch.discount, net.scaled(batch.reward)
        returns, advantage = vtrace(log_rho, discount, reward, value, mask, self.rho_bar, self.c_bar, self.lambda_)
        policy_loss = policy_gradient(log_prob, advantage)
        value_loss = squared_error(value_now, returns)
        entropy = head.entropy(policy)
        each = policy_loss + self.value_cost * value_loss - self.entropy_cost.now * entropy
        with torch.no_grad():
            metrics = {
                "policy_loss": masked_mean(policy_loss, mask),
                "value_loss": masked_mean(value_loss, mask),
                "entropy": masked_mean(entropy, mask),
                "rho": masked_mean(log_rho.exp(), mask),
                "explained_variance": explained_variance(value_now, returns, mask),
            }
            priority = time_mean((returns - value_now).abs(), mask)
        return Loss(time_mean(each, mask), priority, metrics)
