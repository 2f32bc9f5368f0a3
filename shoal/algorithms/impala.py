"""IMPALA: an actor-critic whose lag behind its actors V-trace corrects (arXiv:1802.01561)."""

from __future__ import annotations

from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.optim import Optimizer

from shoal.core.mixing import Part, keeps_features
from shoal.core.settings import Schedule, Settings
from shoal.core.types import Act, Batch, Loss, Sequence, Spec, Step
from shoal.losses.masking import masked_mean, standardise, time_mean
from shoal.losses.policy import clipped_surrogate, implied_kl, outside, policy_gradient
from shoal.losses.returns import vtrace
from shoal.losses.value import explained_variance, squared_error
from shoal.nets.actor_critic import ActorCritic, ActorCriticArchitecture, raw_action, remembered, single_steps
from shoal.nets.heads import outcomes
from shoal.nets.optimizers import make_optimizer

# The paper sums its loss over 20 steps of 32 sequences. Here it is a mean, so what it compares with the size of a
# gradient (the bound of its norm, the root of RMSProp's epsilon) is divided by their number.
SUMMED = 20 * 32
ESTIMATES = ("target", "advantage", "valid")  # records of a prepared batch


class Impala(Settings):
    """Importance-weighted actor-learner; defaults are the paper's for Atari (table G.1)."""

    lr: Schedule = Field(Schedule(start=6e-4, end=0.0), description="Learning rate.")
    batch: int | None = Field(
        32, ge=1, description="Sequences per update; null: one from every environment of every actor."
    )
    unroll: int = Field(20, ge=1, description="Actions per sequence.")
    gamma: float = Field(0.99, ge=0, le=1, description="Discount per step.")
    rho_bar: float = Field(1.0, gt=0, description="Bound of the importance ratio: which value is learnt.")
    rho_bar_policy: float | None = Field(
        None, gt=0, description="Bound of the importance ratio in the policy's gradient; null: rho_bar."
    )
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
    # arXiv:1909.11583, §4.3.
    trust_region: float | None = Field(
        None,
        gt=0,
        description="KL divergence in nats, of the policy from the one whose value V-trace finds, from which on a step "
        "is not learned from and returns end before it; the entropy bonus is then of fresh items only; null: none.",
    )
    # arXiv:1811.11682, §3: 0.01 and 0.005 in its experiments.
    clone_policy: float = Field(
        0.0, ge=0, description="Weight of KL(μ‖π) on replayed items, with μ the policy that acted; 0: off."
    )
    clone_value: float = Field(
        0.0, ge=0, description="Weight of (V − V_μ)² on replayed items, with V_μ the value when they were made; 0: off."
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
    # arXiv:1811.11682 (CLEAR) takes half of each batch from its replay.
    mixture: dict[str, Part] | None = Field(
        None, description="Stores, by a name of yours, of which each gives its share of a batch; null: fresh only."
    )
    network: ActorCriticArchitecture = Field(ActorCriticArchitecture(), description="The network.")

    @model_validator(mode="after")
    def _one_bound(self) -> Self:
        if self.clip is not None and self.rho_bar_policy is not None:
            raise ValueError(
                "rho_bar_policy: with clip, that is the bound of the policy's ratio; leave out one of them"
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

    @property
    def capturable(self) -> bool:
        """Whether its loss looks at no data and at no schedule but `lr`."""
        return self.network.capturable and not self.entropy_cost.changes

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
        greedy = rank is None and self.evaluation_policy == "mode"
        return net.act(step, carry, greedy, keeps_features(self.mixture))

    def features(self, net: ActorCritic, batch: Batch) -> Tensor:
        """Return what the policy sees of each observation, [T+1, B, F]."""
        return net.features(batch)

    def prepare(self, net: ActorCritic, batch: Batch) -> Batch:
        """Update running statistics; with a bound on the ratio, estimate targets and advantages once for all epochs.

        A network without memory then takes single steps, so that minibatches are drawn from all of them alike.
        """
        net.observe(batch)
        if self.clip is None:
            return batch
        with torch.no_grad():
            policy, value, _ = net.unroll(batch)
            estimates = self._estimate(net, batch, policy[:-1], value)
        recalled = self.experience.initial if net.memory is not None else ()
        record = {name: batch.record[name] for name in ("policy", "value", "raw", *recalled) if name in batch.record}
        batch = batch._replace(record=record | dict(zip(ESTIMATES, estimates, strict=True)))
        return batch if net.memory is not None else single_steps(batch)

    def _estimate(self, net: ActorCritic, batch: Batch, policy: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """V-trace's targets and advantages for a policy [T, B, P] and values [T+1, B], and the steps that count.

        In a trust region, a step on which the policy that acted is too different counts for nothing, so that targets
        and advantages before it bootstrap from the value there (arXiv:1909.11583, eq. (8) and §4.3).
        """
        acted, raw = batch.record["policy"], raw_action(batch)
        log_rho = net.head.log_prob(policy, raw) - net.head.log_prob(acted, raw)
        valid = batch.mask
        if self.trust_region is not None:
            valid = valid * (implied_kl(*outcomes(net.head, policy, acted), self.rho_bar) < self.trust_region)
        discount, reward = self.gamma * batch.discount, net.scaled(batch.reward)
        bounds = self.rho_bar, self.c_bar, self.lambda_, self.rho_bar_policy
        target, advantage = vtrace(log_rho, discount, reward, value, valid, *bounds)
        if self.clip is not None:  # then the loss has the ratio, which is here a factor
            later = torch.cat([target[1:], value[-1:]])
            advantage = valid * (reward + discount * later - value[:-1])
        return target, advantage, valid

    def loss(self, net: ActorCritic, target: object, batch: Batch) -> Loss:
        """Return the loss of §4.2: policy gradient, squared value error, entropy bonus; no target net."""
        head, mask, record, raw = net.head, batch.mask, batch.record, raw_action(batch)
        policy, value, _ = net.unroll(batch, None if self.clip is None else len(batch.action))
        policy = policy[: len(batch.action)]
        log_prob = head.log_prob(policy, raw)
        log_ratio = log_prob - head.log_prob(record["policy"], raw)
        if self.clip is None:
            vs, advantage, valid = self._estimate(net, batch, policy.detach(), value.detach())
            value = value[:-1]
        else:
            vs, advantage, valid = (record[name] for name in ESTIMATES)
        scale = masked_mean(advantage.square(), valid).sqrt()
        if self.normalise_advantage:
            advantage = standardise(advantage, valid)
        if self.clip is None:
            policy_loss = policy_gradient(log_prob, advantage)
        else:
            policy_loss = clipped_surrogate(log_ratio, advantage, self.clip)
        value_loss = squared_error(value, vs)
        entropy = head.entropy(policy)
        # arXiv:1909.11583, §5.1: the bonus on fresh items only.
        explored = mask if self.trust_region is None else batch.news
        each = valid * (policy_loss + self.value_cost * value_loss) - self.entropy_cost.now * explored * entropy
        cloning, cloned = self._cloning(net, batch, policy, value, valid)
        with torch.no_grad():
            log_rho = log_ratio.detach()
            rho = log_rho.exp()
            clipped = (rho > self.rho_bar).float() if self.clip is None else outside(log_rho, self.clip)
            metrics = {
                "policy_loss": masked_mean(policy_loss, valid),
                "value_loss": masked_mean(value_loss, valid),
                "entropy": masked_mean(entropy, mask),
                "advantage": scale,
                "rho": masked_mean(rho, mask),
                "clip_fraction": masked_mean(clipped, mask),
                "kl": masked_mean(head.kl(record["policy"], policy), mask),
                "explained_variance": explained_variance(value, vs, valid),
                **cloned,
            }
            if self.trust_region is not None:
                metrics["trusted"] = masked_mean(valid, mask)
            priority = time_mean((vs - value).abs(), mask)
        return Loss(time_mean(each + cloning, mask), priority, metrics)

    def _cloning(
        self, net: ActorCritic, batch: Batch, policy: Tensor, value: Tensor, valid: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """CLEAR's losses on replayed items [T, B], weighted, and what they are by name (arXiv:1811.11682, §3)."""
        replayed = torch.zeros_like(valid) if batch.fresh is None else valid * ~batch.fresh
        total, named = torch.zeros_like(valid), {}
        if self.clone_policy:
            divergence = net.head.kl(batch.record["policy"], policy)
            total = total + self.clone_policy * replayed * divergence
            named["policy_cloning"] = masked_mean(divergence.detach(), replayed)
        if self.clone_value:
            error = (value - batch.record["value"]).square()
            total = total + self.clone_value * replayed * error
            named["value_cloning"] = masked_mean(error.detach(), replayed)
        return total, named
