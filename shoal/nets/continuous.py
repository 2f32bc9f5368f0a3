"""A policy of continuous actions and the critics that judge them, for learning from a replay."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import layer_norm
from torch.optim import AdamW, Optimizer

from shoal.core.errors import Fatal
from shoal.core.settings import Settings
from shoal.core.tree import leaves, map_tree
from shoal.core.types import Act, Batch, Spec, Step
from shoal.losses.critics import lowest, truncated
from shoal.losses.q_values import project, quantile_huber
from shoal.nets.heads import Gaussian
from shoal.nets.memory import Lstm, previous
from shoal.nets.normalise import ObservationMoments
from shoal.nets.torsos import Flat
from shoal.nets.transitions import Transitions

WIDER = 4  # how much wider a residual block is inside: arXiv:2410.09754, section 4
LAST = 3e-3  # bound of the first weights of outputs, so that these begin near 0: arXiv:1509.02971, section 7


class ContinuousArchitecture(Settings):
    """How observations and actions become a policy and its values."""

    torso: Literal["mlp", "simba"] = Field(
        "mlp",
        description="mlp, or simba: residual blocks with layer norms (arXiv:2410.09754), to be used with "
        "normalise_observation.",
    )
    hidden: tuple[int, ...] = Field((256, 256), min_length=1, description="Units of each layer or block of the policy.")
    critic_hidden: tuple[int, ...] = Field(
        (256, 256), min_length=1, description="Units of each layer or block of a critic."
    )
    activation: Literal["tanh", "relu"] = Field("relu", description="Activation of an mlp.")
    lstm: int = Field(0, ge=0, description="Units of an LSTM whose output policy and critics see, too; 0: no memory.")
    normalise_observation: bool = Field(False, description="Whether to bring observations to mean 0 and variance 1.")


class Stack(nn.Module):
    """N linear layers side by side, as one: [N, B, inputs] to [N, B, outputs]."""

    def __init__(self, count: int, inputs: int, outputs: int, bound: float | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(count, 1, outputs))
        for one in self.weight:
            if bound is None:
                nn.init.orthogonal_(one, math.sqrt(2.0))
            else:
                nn.init.uniform_(one, -bound, bound)

    def forward(self, x: Tensor, constant: bool = False, first: int | None = None) -> Tensor:
        """Map [N, B, inputs]; as a constant no gradient reaches its weights; `first` are the layers to use."""
        weight, bias = chosen(self, constant, first)
        x = x.expand(len(weight), -1, -1)
        if weight.shape[-1] == 1:  # for which a batched product is ten times slower than one after another
            return torch.stack([torch.addmm(*parts) for parts in zip(bias, x, weight, strict=True)])
        return torch.baddbmm(bias, x, weight)


def chosen(layer: Stack | Norm, constant: bool, first: int | None) -> tuple[Tensor, Tensor]:
    """Weights and biases of the first layers among those side by side, or of all; a slice of all would cost a copy."""
    weight, bias = layer.weight, layer.bias
    if constant:
        weight, bias = weight.detach(), bias.detach()  # type: ignore[assignment]
    return (weight, bias) if first is None else (weight[:first], bias[:first])


class Norm(nn.Module):
    """N layer norms side by side."""

    def __init__(self, count: int, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(count, 1, features))
        self.bias = nn.Parameter(torch.zeros(count, 1, features))

    def forward(self, x: Tensor, constant: bool = False, first: int | None = None) -> Tensor:
        """Map [N, B, features] to the same shape."""
        weight, bias = chosen(self, constant, first)
        return layer_norm(x, x.shape[-1:]) * weight + bias


class Towers(nn.Module):
    """N networks of one shape side by side, each step of all of them in one call."""

    def __init__(self, network: ContinuousArchitecture, count: int, inputs: int, hidden: Sequence[int]) -> None:
        super().__init__()
        self.count, self.simba = count, network.torso == "simba"
        self.activation: Any = torch.tanh_ if network.activation == "tanh" else torch.relu_  # in place: less memory
        self.features = hidden[-1]
        layers: list[nn.Module]
        if self.simba:
            if len({*hidden}) > 1:
                raise Fatal(f"the blocks of torso simba are equally wide: give one number of units, not {[*hidden]}")
            width = hidden[0]
            layers = [Stack(count, inputs, width)]
            for _ in hidden:
                layers += [Norm(count, width), Stack(count, width, WIDER * width), Stack(count, WIDER * width, width)]
            layers.append(Norm(count, width))
        else:
            layers = [Stack(count, *sizes) for sizes in zip((inputs, *hidden), hidden, strict=False)]
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, constant: bool = False, first: int | None = None) -> Tensor:
        """Map [B, inputs] to [N, B, features]."""
        x = x.unsqueeze(0)
        if not self.simba:
            for layer in self.layers:
                x = self.activation(layer(x, constant, first))
            return x
        begin, *blocks, last = self.layers
        x = begin(x, constant, first)
        for norm, wide, narrow in zip(blocks[::3], blocks[1::3], blocks[2::3], strict=True):
            x = x + narrow(torch.relu_(wide(norm(x, constant, first), constant, first)), constant, first)
        return last(x, constant, first)  # type: ignore[no-any-return]  # nn.Module.__call__ is untyped


class Deterministic(nn.Module):
    """One action for each state."""

    def __init__(self, features: int, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, size)
        nn.init.uniform_(self.linear.weight, -LAST, LAST)
        nn.init.zeros_(self.linear.bias)

    def forward(self, features: Tensor) -> Tensor:
        """Map [N, F] to actions [N, A] between -1 and 1."""
        return self.linear(features).tanh()  # type: ignore[no-any-return]


class ContinuousNetwork(nn.Module):
    """A policy, critics of its actions, and what both need; inside, actions lie between -1 and 1."""

    support: Tensor | None
    centre: Tensor
    reach: Tensor
    updates: Tensor
    log_temperature: nn.Parameter | None

    def __init__(
        self,
        network: ContinuousArchitecture,
        spec: Spec,
        critics: int,
        outputs: int = 1,
        support: tuple[float, float] | None = None,
        temperature: float | None = None,
    ) -> None:
        """Make N critics with `outputs` numbers each: a mean, quantiles, or logits of atoms between a support's ends.

        With a temperature, which is learned, the policy is a squashed Gaussian; without one it is deterministic.
        """
        super().__init__()
        check(spec)
        low, high = np.asarray(spec.action.low), np.asarray(spec.action.high)
        for name, value in (("centre", (low + high) / 2), ("reach", (high - low) / 2)):
            self.register_buffer(name, torch.tensor(value, dtype=torch.float32), persistent=False)
        self.moments = ObservationMoments(spec.observation) if network.normalise_observation else None
        self.flats = nn.ModuleList(Flat(part.largest) for part in leaves(spec.observation))
        inputs, size = sum(math.prod(part.shape) for part in leaves(spec.observation)), spec.action.size
        self.choices = spec.action.choices
        # The critics teach the memory. It also sees the last action and its reward, as R2D2's does.
        self.memory = Lstm(inputs + size + 1, network.lstm) if network.lstm else None
        inputs += network.lstm
        self.torso = Towers(network, 1, inputs, network.hidden)
        stochastic = temperature is not None
        features = self.torso.features
        self.head = Gaussian(features, spec.action, True, True) if stochastic else Deterministic(features, size)
        self.critics = Towers(network, critics, inputs + size, network.critic_hidden)
        self.values = Stack(critics, self.critics.features, outputs, LAST)
        atoms = None if support is None else torch.linspace(*support, outputs)
        self.register_buffer("support", atoms, persistent=False)
        self.turn = True  # whether the present update is the policy's, too; a loss that is captured may not ask a GPU
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))  # that were made; actors see it, too
        logarithm = None if temperature is None else nn.Parameter(torch.tensor(math.log(temperature)))
        self.register_parameter("log_temperature", logarithm)

    def inputs(self, observation: Any) -> Tensor:
        """What the networks see [N, inputs] of observations [N, ...]."""
        if self.moments is not None:
            observation = self.moments(observation)
        pieces = [flat(part) for flat, part in zip(self.flats, leaves(observation), strict=True)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)

    def forward(self, observation: Any, first: Tensor, state: Tensor, extra: Tensor) -> tuple[Tensor, Tensor]:
        """What policy and critics see [T, B, inputs] of observations [T, B, ...], and the memory's state after them."""
        assert self.memory is not None
        seen = self.inputs(map_tree(lambda x: x.flatten(0, 1), observation)).view(*first.shape, -1)
        remembered, state = self.memory(torch.cat([seen, extra], -1), first, state)
        return torch.cat([seen, remembered], -1), state

    def begin(self, size: int) -> dict[str, Tensor]:
        """The first carry: the memory as `core`, the last action, between -1 and 1, as `action`."""
        if self.memory is None:
            return {}
        action = torch.zeros(size, len(self.choices), device=self.reach.device)
        return {"core": self.memory.initial_state(size), "action": action}

    def look(self, step: Step, carry: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """What policy and critics see [B, inputs] of a step, what to record, and the carry with the new memory."""
        if self.memory is None:
            return self.inputs(step.observation), {}, carry
        seen = previous(carry["action"], step.reward, step.first, self.choices)
        observation = map_tree(lambda x: x.unsqueeze(0), step.observation)
        inputs, core = self(observation, step.first.unsqueeze(0), carry["core"], seen.unsqueeze(0))
        return inputs[0], {"core": carry["core"], "previous": seen}, {**carry, "core": core}

    def take(self, action: Tensor, record: dict[str, Tensor], carry: dict[str, Tensor]) -> Act:
        """Choose actions [B, A] between -1 and 1, which the memory sees at the next step."""
        outside = self.outside(action)
        return Act(outside, record, carry if self.memory is None else {**carry, "action": self.inside(outside)})

    def policy(self, inputs: Tensor) -> Tensor:
        """The policy [N, P] of inputs [N, inputs]: actions, or means and log standard deviations."""
        return self.head(self.torso(inputs)[0])  # type: ignore[no-any-return]

    def judge(self, inputs: Tensor, action: Tensor, constant: bool = False, first: int | None = None) -> Tensor:
        """What the critics say [critics, N, outputs] of actions [N, A] between -1 and 1.

        As a constant, gradients reach the actions only; `first` is the number of critics to ask.
        """
        features = self.critics(torch.cat([inputs, action], 1), constant, first)
        return self.values(features, constant, first)  # type: ignore[no-any-return]

    def means(self, outputs: Tensor) -> Tensor:
        """The mean values [...] of what critics say, [..., outputs]."""
        if self.support is not None:
            return outputs.softmax(-1) @ self.support
        return outputs.squeeze(-1) if outputs.shape[-1] == 1 else outputs.mean(-1)  # one is its own mean

    def worth(self, inputs: Tensor, action: Tensor, cautious: bool, constant: bool = False) -> Tensor:
        """The value [N] of actions [N, A] between -1 and 1: the lowest that a critic gives, or the mean of all."""
        values = self.means(self.judge(inputs, action, constant))
        return values.amin(0) if cautious else values.mean(0)

    def best(self, inputs: Tensor) -> Tensor:
        """The policy's actions [N, A] without any noise."""
        policy = self.policy(inputs)
        return self.head.mode(policy).tanh() if isinstance(self.head, Gaussian) else policy

    def drawn(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Actions [N, A] drawn from a stochastic policy, with a gradient, and their log-density [N]."""
        assert isinstance(self.head, Gaussian)
        policy = self.policy(inputs)
        raw = self.head.sample(policy)
        return raw.tanh(), self.head.log_prob(policy, raw) + self.head.log_reach.sum()

    def inside(self, action: Tensor) -> Tensor:
        """Actions of the environment, brought to -1 … 1."""
        return (action - self.centre) / self.reach

    def outside(self, action: Tensor) -> Tensor:
        """Actions between -1 and 1, as the environment takes them."""
        return self.centre + self.reach * action.clamp(-1.0, 1.0)

    def seen(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """What the networks see [B, inputs] of a transition's two observations."""
        now, then = (self.inputs(map_tree(lambda x, t=t: x[t], batch.observation)) for t in (0, 1))
        return now, then

    def explored(self, action: Tensor) -> Tensor:
        """Actions [N, A] of a policy that has learned; before its first update any between -1 and 1."""
        return action if self.updates > 0 else torch.rand_like(action) * 2 - 1

    def observe(self, batch: Batch, every: int = 1) -> None:
        """Count an update, of which every n-th is the policy's, too; let the running moments follow what is new."""
        self.updates += 1
        self.turn = every == 1 or bool(self.updates % every == 0)  # a GPU is not asked in vain
        if self.moments is not None:
            self.moments.update(map_tree(lambda x: x[:-1], batch.observation), batch.news)


def critic_loss(
    net: ContinuousNetwork,
    target: ContinuousNetwork,
    steps: Transitions,
    action: Tensor,
    combine: str,
    drop: int = 0,
    bonus: Tensor | float = 0.0,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The loss [N] of all critics towards the n-step value of the next actions [N, A], the priority [N], and metrics.

    A bonus [N] is added to the value of the next state.
    """
    outputs = net.judge(steps.now, steps.action)  # [critics, N, outputs]
    with torch.no_grad():
        future = target.judge(steps.judged, action)
        earned, discount = steps.reward.unsqueeze(-1), steps.discount.unsqueeze(-1)
        extra = bonus.unsqueeze(-1) if isinstance(bonus, Tensor) else bonus
    if net.support is None:
        with torch.no_grad():
            if drop:
                future = truncated(future, drop)
            elif future.shape[-1] == 1:
                future = future.amin(0) if combine == "min" else future.mean(0)
            else:
                future = lowest(future, net.means(future)) if combine == "min" else truncated(future, 0)
            goals = earned + discount * (future + extra)  # [N, samples]
        error = net.means(goals) - net.means(outputs)  # [critics, N]
        if outputs.shape[-1] == 1:
            priority = error.detach().abs()
            each = 0.5 * error.square()
        else:
            each = priority = quantile_huber(outputs, goals)
    else:
        with torch.no_grad():
            chance, goals = future.softmax(-1), earned + discount * (net.support + extra)
            if combine == "min":  # by means as they are once what lies beyond the support is moved to its ends
                bounded = goals.clamp(net.support[0], net.support[-1])
                chance = lowest(chance, torch.linalg.vecdot(chance, bounded))
            else:
                chance = chance.mean(0)
            wanted = project(net.support, goals, chance)
        log_chance = outputs.log_softmax(-1)
        each = -(wanted * log_chance).sum(-1)
        priority = each - torch.special.entr(wanted).sum(-1)  # the divergence: 0 where both agree
        error = wanted @ net.support - log_chance.exp() @ net.support
    with torch.no_grad():
        metrics = {"value_loss": each.mean(), "q": net.means(outputs).mean(), "td_error": error.abs().mean()}
    return each.sum(0), priority.detach().mean(0), metrics


def check(spec: Spec) -> None:
    """Refuse environments whose actions are not numbers between bounds, or that show images."""
    action = spec.action
    if action.parts or action.discrete:
        raise Fatal(
            "this algorithm is for continuous actions, which this environment does not have: choose ppo, impala or dqn"
        )
    if not np.isfinite([*action.low, *action.high]).all():
        raise Fatal(
            f"this algorithm needs actions with finite bounds, got low {action.low} and high {action.high}: "
            "bound them with a wrapper, such as RescaleAction, or choose ppo or impala"
        )
    images = [part.shape for part in leaves(spec.observation) if len(part.shape) == 3]
    if images:
        raise Fatal(f"this algorithm sees numbers, not images such as {images[0]}: choose ppo or impala")


def make_adam(net: ContinuousNetwork, lr: float, policy_rate: float, epsilon: float, decay: float) -> Optimizer:
    """Adam for all at once; policy and temperature learn at a multiple of the learning rate, and weights may decay."""
    judging = ("critics.", "values.", "memory.")
    critics, acting = (
        [part for name, part in net.named_parameters() if name.startswith(judging) is judges]
        for judges in (True, False)
    )
    parts: list[dict[str, Any]] = [{"params": critics}, {"params": acting, "rate": policy_rate}]
    return AdamW(parts, lr, eps=epsilon, weight_decay=decay, fused=True)
