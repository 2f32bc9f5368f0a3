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
from shoal.losses.policy import clipped_surrogate, outside, policy_gradient
from shoal.losses.returns import vtrace
from shoal.losses.value import explained_variance, squared_error
from shoal.nets.actor_critic import ActorCritic, ActorCriticArchitecture, raw_action, remembered, single_steps
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
    # arXiv:2006.11751, §3.4: V-trace for the values, the bound for the policy. Null is the paper's single pass.
    clip: float | None = Field(
        None,
        gt=0,
        description="Bound ε of the ratio to the policy that acted, beyond which it is pushed no further (PPO's); "
        "several epochs, or a long lag, need one; null: none.",
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
        """Update running statistics; with a bound on the ratio, estimate targets and advantages once for all epochs.

        A network without memory then takes single steps, so that minibatches are drawn from all of them alike.
        """
        net.observe(batch)
        if self.clip is None:
            return batch
        with torch.no_grad():
            policy, value, _ = net.unroll(batch)
            raw = raw_action(batch)
            log_rho = net.head.log_prob(policy[:-1], raw) - net.head.log_prob(batch.record["policy"], raw)
            target, advantage = self._estimate(net, batch, log_rho, value)
        kept = ("policy", "raw", *(self.experience.initial if net.memory is not None else ()))
        record = {name: batch.record[name] for name in kept if name in batch.record}
        batch = batch._replace(record=record | {"target": target, "advantage": advantage})
        return batch if net.memory is not None else single_steps(batch)

    def _estimate(self, net: ActorCritic, batch: Batch, log_rho: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """V-trace's targets and advantages [T, B] for ratios [T, B] and values [T+1, B]."""
        discount, reward = self.gamma * batch.discount, net.scaled(batch.reward)
        bounds = self.rho_bar, self.c_bar, self.lambda_
        target, advantage = vtrace(log_rho, discount, reward, value, batch.mask, *bounds)
        if self.clip is not None:  # then the loss has the ratio, which is here a factor
            later = torch.cat([target[1:], value[-1:]])
            advantage = batch.mask * (reward + discount * later - value[:-1])
        return target, advantage

    def loss(self, net: ActorCritic, target: object, batch: Batch) -> Loss:
        """Return the loss of §4.2: policy gradient, squared value error, entropy bonus; no target net."""
        head, mask, record, raw = net.head, batch.mask, batch.record, raw_action(batch)
        policy, value, _ = net.unroll(batch, None if self.clip is None else len(batch.action))
        policy = policy[: len(batch.action)]
        log_prob = head.log_prob(policy, raw)
        log_ratio = log_prob - head.log_prob(record["policy"], raw)
        log_rho = log_ratio.detach()
        if self.clip is None:
            vs, advantage = self._estimate(net, batch, log_rho, value)
            value = value[:-1]
        else:
            vs, advantage = record["target"], record["advantage"]
        scale = masked_mean(advantage.square(), mask).sqrt()
        if self.normalise_advantage:
            advantage = standardise(advantage, mask)
        if self.clip is None:
            policy_loss = policy_gradient(log_prob, advantage)
        else:
            policy_loss = clipped_surrogate(log_ratio, advantage, self.clip)
        value_loss = squared_error(value, vs)
        entropy = head.entropy(policy)
        each = policy_loss + self.value_cost * value_loss - self.entropy_cost.now * entropy
        with torch.no_grad():
            rho = log_rho.exp()
            clipped = (rho > self.rho_bar).float() if self.clip is None else outside(log_rho, self.clip)
            metrics = {
                "policy_loss": masked_mean(policy_loss, mask),
                "value_loss": masked_mean(value_loss, mask),
                "entropy": masked_mean(entropy, mask),
                "advantage": scale,
                "rho": masked_mean(rho, mask),
                "clip_fraction": masked_mean(clipped, mask),
                "kl": masked_mean(head.kl(record["policy"], policy), mask),
                "explained_variance": explained_variance(value, vs, mask),
            }
            priority = time_mean((vs - value).abs(), mask)
        return Loss(time_mean(each, mask), priority, metrics)
