"""IMPALA: an actor-critic whose lag behind its actors V-trace corrects (arXiv:1802.01561)."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.optim import Optimizer

from shoal.core.settings import Schedule, Settings
from shoal.core.types import Act, Batch, Loss, Sequence, Spec, Step
from shoal.losses.masking import masked_mean, standardise, time_mean
from shoal.losses.policy import policy_gradient
from shoal.losses.returns import vtrace
from shoal.losses.value import explained_variance, squared_error
from shoal.nets.actor_critic import ActorCritic, ActorCriticArchitecture, raw_action, remembered
from shoal.nets.optimizers import make_optimizer

# The paper sums its loss over 20 steps of 32 sequences. Here it is a mean, so what it compares with the size of a
# gradient (the bound of its norm, the root of RMSProp's epsilon) is divided by their number.
SUMMED = 20 * 32


class Impala(Settings):
    """Importance-weighted actor-learner; defaults are the paper's for Atari (table G.1)."""

    lr: Schedule = Field(Schedule(start=6e-4, end=0.0), description="Learning rate.")
    batch: int | None = Field(
        32, ge=1, description="Sequences per update; null: one from every environment of every actor."
    )
    unroll: int = Field(20, ge=1, description="Actions per sequence.")
    gamma: float = Field(0.99, ge=0, le=1, description="Discount per step.")
    rho_bar: float = Field(1.0, gt=0, description="Bound of the importance ratio: which value is learnt.")
    c_bar: float = Field(1.0, ge=0, description="Bound of the trace's ratio: how fast it is learnt.")
    lambda_: float = Field(1.0, ge=0, le=1, description="Decay of the trace.")
    value_cost: float = Field(0.5, ge=0, description="Weight of the value loss.")
    entropy_cost: Schedule = Field(Schedule(start=0.01, shape="constant"), description="Weight of the entropy bonus.")
    kl_cost: float = Field(
        0.0,
        ge=0,
        description="Weight of KL(actor's policy‖network's), which holds the network back where it has moved away from "
        "the policy that acted: over several epochs, or with many environments.",
    )
    clip_norm: float | None = Field(40 / SUMMED, gt=0, description="Largest gradient norm; null: unlimited.")
    rule: Literal["rmsprop", "adam"] = Field("rmsprop", description="Optimizer.")
    optimizer_epsilon: float = Field(
        0.01 / SUMMED**2, gt=0, description="Added inside RMSProp's root, or to Adam's denominator."
    )
    decay: float = Field(0.99, ge=0, lt=1, description="Decay of RMSProp's mean square.")
    momentum: float = Field(0.0, ge=0, lt=1, description="Momentum of RMSProp.")
    epochs: int = Field(1, ge=1, description="Passes over each batch.")
    minibatches: int = Field(1, ge=1, description="Pieces into which each pass is cut.")
    max_lag: int | None = Field(
        None, ge=0, description="Most policy versions between acting and learning; null: unlimited."
    )
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

    def build(self, spec: Spec) -> ActorCritic:
        """Make the network."""
        return ActorCritic(self.network, spec, self.gamma, self.distribution)

    def optimizer(self, net: ActorCritic) -> Optimizer:
        """Make the optimizer."""
        return make_optimizer(self.rule, net, self.lr.now, self.optimizer_epsilon, self.decay, self.momentum)

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
        """Return the loss of §4.2: policy gradient, squared value error, entropy bonus; no target net."""
        head, mask, raw = net.head, batch.mask, raw_action(batch)
        policy, value, _ = net.unroll(batch)
        behaviour, policy, value_now = batch.record["policy"], policy[:-1], value[:-1]
        log_prob = head.log_prob(policy, raw)
        log_rho = log_prob.detach() - head.log_prob(behaviour, raw)
        vs, advantage = vtrace(
            log_rho,
            self.gamma * batch.discount,
            net.scaled(batch.reward),
            value,
            mask,
            self.rho_bar,
            self.c_bar,
            self.lambda_,
        )
        scale = masked_mean(advantage.square(), mask).sqrt()
        if self.normalise_advantage:
            advantage = standardise(advantage, mask)
        policy_loss = policy_gradient(log_prob, advantage)
        value_loss = squared_error(value_now, vs)
        entropy = head.entropy(policy)
        each = policy_loss + self.value_cost * value_loss - self.entropy_cost.now * entropy
        kl = head.kl(behaviour, policy if self.kl_cost else policy.detach())  # else it is only a metric
        if self.kl_cost:
            each = each + self.kl_cost * kl  # the penalty of arXiv:1707.06347, §4
        with torch.no_grad():
            rho = log_rho.exp()
            metrics = {
                "policy_loss": masked_mean(policy_loss, mask),
                "value_loss": masked_mean(value_loss, mask),
                "entropy": masked_mean(entropy, mask),
                "advantage": scale,
                "rho": masked_mean(rho, mask),
                "clip_fraction": masked_mean((rho > self.rho_bar).float(), mask),
                "kl": masked_mean(kl, mask),
                "explained_variance": explained_variance(value_now, vs, mask),
            }
            priority = time_mean((vs - value_now).abs(), mask)
        return Loss(time_mean(each, mask), priority, metrics)
