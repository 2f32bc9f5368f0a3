"""IMPACT: a clipped surrogate against a target network, on batches that are used several times (arXiv:1912.00167)."""

from __future__ import annotations

import math
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.optim import Optimizer

from shoal.core.settings import Circling, Schedule, Settings
from shoal.core.types import Act, Batch, Loss, Sequence, Spec, Step
from shoal.losses.masking import masked_mean, standardise, time_mean
from shoal.losses.policy import clipped_surrogate, outside
from shoal.losses.returns import vtrace
from shoal.losses.value import explained_variance, squared_error
from shoal.nets.actor_critic import ActorCritic, ActorCriticArchitecture, raw_action, remembered
from shoal.nets.optimizers import make_optimizer


class Impact(Settings):
    """Importance-weighted asynchronous architecture with clipped target networks; defaults are RLlib's.

    RLlib's are by authors of the paper; for continuous actions they are `circular: {batches: 16, times: 20}`.
    """

    lr: Schedule = Field(Schedule(start=5e-4, shape="constant"), description="Learning rate.")
    batch: int | None = Field(
        10, ge=1, description="Sequences per update; null: one from every environment of every actor."
    )
    unroll: int = Field(50, ge=1, description="Actions per sequence.")
    circular: Circling = Field(Circling(), description="How many batches are held, and how often each is used.")
    # §3.2: batches × times makes it PPO's, which compares with the policy before its epochs.
    target_every: int = Field(8, ge=1, description="Updates between copies of the weights to the target network.")
    gamma: float = Field(0.99, ge=0, le=1, description="Discount per step.")
    rho_bar: float = Field(1.0, gt=0, description="Bound of π_target/μ in each step's error.")
    c_bar: float = Field(1.0, ge=0, description="Bound of π_target/μ in the trace.")
    lambda_: float = Field(1.0, ge=0, le=1, description="Decay of the trace.")
    clip: Schedule = Field(
        Schedule(start=0.4, shape="constant"),
        description="Bound ε of the ratio to the target policy, beyond which the policy is pushed no further.",
    )
    worker_bound: float = Field(
        2.0, gt=0, description="Bound of μ/π_target in that ratio, which is π/max(π_target, μ/bound)."
    )
    value_cost: float = Field(0.5, ge=0, description="Weight of the value loss.")
    entropy_cost: Schedule = Field(Schedule(start=0.01, shape="constant"), description="Weight of the entropy bonus.")
    kl_cost: float = Field(0.0, ge=0, description="Weight of KL(π_target‖π); 0: off.")
    clip_norm: float | None = Field(40.0, gt=0, description="Largest gradient norm; null: unlimited.")
    optimizer_epsilon: float = Field(1e-8, gt=0, description="Added to Adam's denominator.")
    normalise_advantage: bool = Field(
        False, description="Whether each batch's advantages are brought to mean 0 and variance 1."
    )
    distribution: Literal["clipped", "squashed"] = Field(
        "clipped", description="How a Gaussian keeps to the bounds of continuous actions."
    )
    evaluation_policy: Literal["mode", "sample"] = Field(
        "mode", description="Whether evaluations take the policy's mode, or draw from it as actors do."
    )
    network: ActorCriticArchitecture = Field(ActorCriticArchitecture(), description="The network.")

    @property
    def experience(self) -> Sequence:
        """Sequences that run on across episodes, with the recurrent state before the first step."""
        return Sequence(self.unroll, initial=remembered(self.network))

    @property
    def sees_reward(self) -> bool:
        """Whether the network sees the reward of the last action."""
        return self.network.previous

    @property
    def capturable(self) -> bool:
        """Whether its loss looks at no data and at no schedule but `lr`."""
        return self.network.capturable and not (self.clip.changes or self.entropy_cost.changes)

    def build(self, spec: Spec) -> ActorCritic:
        """Make the network."""
        return ActorCritic(self.network, spec, self.gamma, self.distribution)

    def optimizer(self, net: ActorCritic) -> Optimizer:
        """Make the optimizer."""
        return make_optimizer("adam", net, self.lr.now, self.optimizer_epsilon)

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

    def loss(self, net: ActorCritic, target: ActorCritic, batch: Batch) -> Loss:
        """Return the clipped surrogate of §3.1, squared value error, entropy bonus and KL divergence from the target.

        V-trace is of the target policy: A_t = Σ_k (γλ)^k (Π c) ρ δ_{t+k} with c and ρ of π_target/μ. The surrogate's
        ratio is π/μ · min(μ/π_target, bound): an action that the target policy hardly takes is pushed no harder.
        """
        head, mask, raw, acted = net.head, batch.mask, raw_action(batch), batch.record["policy"]
        policy, value, _ = net.unroll(batch)
        policy = policy[:-1]
        log_prob = head.log_prob(policy, raw)
        with torch.no_grad():
            aimed = target.unroll(batch)[0][:-1]
            log_aimed, log_acted = head.log_prob(aimed, raw), head.log_prob(acted, raw)
            log_rho = log_aimed - log_acted
            discount, reward = self.gamma * batch.discount, net.scaled(batch.reward)
            vs, _ = vtrace(log_rho, discount, reward, value, mask, self.rho_bar, self.c_bar, self.lambda_)
            advantage = vs - value[:-1]
            scale = masked_mean(advantage.square(), mask).sqrt()
            if self.normalise_advantage:
                advantage = standardise(advantage, mask)
        value = value[:-1]
        log_ratio = log_prob - torch.maximum(log_aimed, log_acted - math.log(self.worker_bound))
        policy_loss = clipped_surrogate(log_ratio, advantage, self.clip.now)
        value_loss = squared_error(value, vs)
        entropy, kl = head.entropy(policy), head.kl(aimed, policy)
        each = policy_loss + self.value_cost * value_loss + self.kl_cost * kl - self.entropy_cost.now * entropy
        with torch.no_grad():
            metrics = {
                "policy_loss": masked_mean(policy_loss, mask),
                "value_loss": masked_mean(value_loss, mask),
                "entropy": masked_mean(entropy, mask),
                "advantage": scale,
                "rho": masked_mean(log_rho.exp(), mask),
                "clip_fraction": masked_mean(outside(log_ratio, self.clip.now), mask),
                "kl": masked_mean(kl, mask),
                "explained_variance": explained_variance(value, vs, mask),
            }
            priority = time_mean((vs - value).abs(), mask)
        return Loss(time_mean(each, mask), priority, metrics)
