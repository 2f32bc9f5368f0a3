"""PPO: an actor-critic that takes several bounded steps on each fresh batch (arXiv:1707.06347)."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.optim import Optimizer

from shoal.core.settings import Schedule, Settings
from shoal.core.tree import map_tree
from shoal.core.types import Act, Batch, Loss, Sequence, Spec, Step
from shoal.losses.masking import masked_mean, standardise, time_mean
from shoal.losses.policy import approximate_kl, clipped_surrogate, outside
from shoal.losses.returns import gae
from shoal.losses.value import explained_variance, squared_error
from shoal.nets.actor_critic import ActorCritic, ActorCriticArchitecture, raw_action, remembered, single_steps
from shoal.nets.optimizers import make_optimizer


class Ppo(Settings):
    """Proximal policy optimization; defaults are the paper's for Atari (table 5) unless a comment differs."""

    lr: Schedule = Field(Schedule(start=2.5e-4, end=0.0), description="Learning rate.")
    batch: int | None = Field(
        None, ge=1, description="Sequences per update; null: one from every environment of every actor."
    )
    unroll: int = Field(128, ge=1, description="Actions per sequence.")
    gamma: float = Field(0.99, ge=0, le=1, description="Discount per step.")
    gae_lambda: float = Field(0.95, ge=0, le=1, description="Decay of the advantage estimator.")
    # 0.2 is the paper's best of three (table 1).
    clip: Schedule = Field(
        Schedule(start=0.2, shape="constant"), description="How far the ratio of policies may move from 1."
    )
    value_clip: float | None = Field(
        None, gt=0, description="How far a value may move from its old one; null: unlimited."
    )
    # 0.5, 4 epochs and 0.5 for the norm are those of OpenAI's own implementation.
    value_cost: float = Field(0.5, ge=0, description="Weight of the value loss.")
    entropy_cost: Schedule = Field(Schedule(start=0.01, shape="constant"), description="Weight of the entropy bonus.")
    epochs: int = Field(4, ge=1, description="Passes over each batch.")
    minibatches: int = Field(4, ge=1, description="Pieces into which each pass is cut.")
    target_kl: float | None = Field(
        None,
        gt=0,
        description="KL divergence from the acting policy at which the passes over a batch stop; null: never.",
    )
    clip_norm: float | None = Field(0.5, gt=0, description="Largest gradient norm; null: unlimited.")
    # 1e-5 is that of OpenAI's own implementation, too; torch's default is 1e-8.
    optimizer_epsilon: float = Field(1e-5, gt=0, description="Added to Adam's denominator.")
    max_lag: int | None = Field(
        0, ge=0, description="Most policy versions between acting and learning; null: unlimited."
    )
    normalise_advantage: bool = Field(
        True, description="Whether each minibatch's advantages are brought to mean 0 and variance 1."
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

    @torch.no_grad()
    def prepare(self, net: ActorCritic, batch: Batch) -> Batch:
        """Update running statistics, compute advantages and targets, and cut the batch into single steps.

        A recurrent network needs its sequences whole: those stay, and keep their dummy steps masked.
        """
        value = self._values(net, batch)
        net.observe(batch)  # after the values, which the actors computed with the statistics before it
        reward = net.scaled(batch.reward)
        advantage = gae(reward, self.gamma * batch.discount, value, batch.mask, self.gae_lambda)
        raw = raw_action(batch)
        record = {
            "log_prob": net.head.log_prob(batch.record["policy"], raw),
            "value": value[:-1],
            "advantage": advantage,
            "target": advantage + value[:-1],
            "raw": raw,
        }
        if net.memory is not None:
            initial = {name: batch.record[name] for name in self.experience.initial}
            return batch._replace(record=record | initial)
        return single_steps(batch._replace(record=record))

    def _values(self, net: ActorCritic, batch: Batch) -> Tensor:
        """Return the values [T+1, B]: recorded but for the last, or all computed where there is a memory."""
        if net.memory is not None:
            return net.unroll(batch)[1]
        last = map_tree(lambda x: x[-1:], batch.observation)
        return torch.cat([batch.record["value"], net(last, batch.first[-1:])[1]])

    def loss(self, net: ActorCritic, target: object, batch: Batch) -> Loss:
        """Return the loss of eq. (9) on a prepared batch: surrogate, value error, entropy; no target net."""
        length, mask, record = len(batch.action), batch.mask, batch.record
        policy, value, _ = net.unroll(batch, length)
        log_ratio = net.head.log_prob(policy, record["raw"]) - record["log_prob"]
        advantage = record["advantage"]
        if self.normalise_advantage:
            advantage = standardise(advantage, mask)
        policy_loss = clipped_surrogate(log_ratio, advantage, self.clip.now)
        value_loss = squared_error(value, record["target"], record["value"], self.value_clip)
        entropy = net.head.entropy(policy)
        each = policy_loss + self.value_cost * value_loss - self.entropy_cost.now * entropy
        with torch.no_grad():
            metrics = {
                "policy_loss": masked_mean(policy_loss, mask),
                "value_loss": masked_mean(value_loss, mask),
                "entropy": masked_mean(entropy, mask),
                "kl": masked_mean(approximate_kl(log_ratio), mask),
                "clip_fraction": masked_mean(outside(log_ratio, self.clip.now), mask),
                "explained_variance": explained_variance(record["value"], record["target"], mask),
            }
            priority = time_mean((record["target"] - value).abs(), mask)
        return Loss(time_mean(each, mask), priority, metrics)
