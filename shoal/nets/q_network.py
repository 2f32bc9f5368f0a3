"""Action values over one torso: plain, dueling, of quantiles, recurrent."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shoal.core.errors import Fatal
from shoal.core.tree import map_tree
from shoal.core.types import Batch, Loss, Spec, Step
from shoal.losses.q_values import huber, pick, project, quantile_huber
from shoal.nets.masks import LOWEST, masked, split_mask
from shoal.nets.memory import Lstm
from shoal.nets.normalise import ObservationMoments
from shoal.nets.torsos import Architecture, Torso, orthogonal

NOISE = 0.5  # σ₀ of factorised noise: arXiv:1706.10295, section 3.2
TEMPERATURE, BONUS, LEAST = 0.03, 0.9, -1.0  # τ, α and l₀ of Munchausen: arXiv:2007.14430, section 4


class NoisyLinear(nn.Module):
    """A linear layer whose weights are noisy while it explores, by amounts that it learns (arXiv:1706.10295, §3).

    The noise is factorised: w = μ + σ · f(ε_out) f(ε_in)ᵀ with f(x) = sign(x) √|x|, drawn anew in every pass.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        bound = inputs**-0.5
        self.on = True
        self.weight = nn.Parameter(torch.empty(outputs, inputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(outputs).uniform_(-bound, bound))
        self.weight_spread = nn.Parameter(torch.full((outputs, inputs), NOISE * bound))
        self.bias_spread = nn.Parameter(torch.full((outputs,), NOISE * bound))

    def forward(self, x: Tensor) -> Tensor:
        """Map [N, inputs] to [N, outputs]."""
        if not self.on:
            return nn.functional.linear(x, self.weight, self.bias)
        inner, outer = (torch.randn(size, device=x.device) for size in (self.weight.shape[1], len(self.weight)))
        inner, outer = inner.sign() * inner.abs().sqrt(), outer.sign() * outer.abs().sqrt()
        weight = self.weight + self.weight_spread * torch.outer(outer, inner)
        return nn.functional.linear(x, weight, self.bias + self.bias_spread * outer)


class QHead(nn.Module):
    """Values of A actions from features; with `quantiles` numbers each for their distribution (arXiv:1710.10044)."""

    def __init__(
        self, features: int, actions: int, hidden: int, dueling: bool, quantiles: int, noisy: bool = False
    ) -> None:
        super().__init__()
        self.actions, self.quantiles = actions, quantiles

        def linear(inputs: int, outputs: int, gain: float) -> nn.Module:
            return NoisyLinear(inputs, outputs) if noisy else orthogonal(nn.Linear(inputs, outputs), gain)

        def stream(outputs: int) -> nn.Module:
            last = linear(hidden or features, outputs * quantiles, 1.0)
            if not hidden:
                return last
            return nn.Sequential(linear(features, hidden, 2**0.5), nn.ReLU(inplace=True), last)

        self.advantage = stream(actions)
        self.value = stream(1) if dueling else None

    def forward(self, features: Tensor) -> Tensor:
        """Map [N, F] to [N, A, quantiles]."""
        advantage = self.advantage(features).view(-1, self.actions, self.quantiles)
        if self.value is None:
            return advantage  # type: ignore[no-any-return]  # nn.Module.__call__ is untyped
        value = self.value(features).view(-1, 1, self.quantiles)
        # arXiv:1511.06581, eq. 9: the mean is taken off so that value and advantage are identifiable.
        return value + advantage - advantage.mean(1, keepdim=True)  # type: ignore[no-any-return]


class QNetwork(nn.Module):
    """Action values of observations over time."""

    support: Tensor | None

    def __init__(
        self,
        network: Architecture,
        spec: Spec,
        dueling: bool,
        quantiles: int = 1,
        hidden: int = 0,
        extra: int = 0,
        noisy: bool = False,
        support: tuple[float, float] | None = None,
    ) -> None:
        """Take `extra` numbers beside the features, such as the last action and reward.

        With a support, the outputs of an action are not quantiles but logits of as many atoms between its ends.
        """
        super().__init__()
        if not spec.action.discrete:
            several = all(spec.action.choices)
            what = "several choices at once" if several else "continuous actions"
            instead = "turn them into one by a wrapper, or choose ppo" if several else "choose ppo"
            if not spec.action.parts:
                instead = "choose sac, td3, ppo"
            raise Fatal(
                f"a network of action values does not support {what}, which this environment has: {instead}, impala "
                "or a3c"
            )
        observation, _ = split_mask(spec.observation)
        self.moments = ObservationMoments(observation) if network.normalise_observation else None
        self.torso = Torso(network, observation)
        self.memory = Lstm(self.torso.features + extra, network.lstm) if network.lstm else None
        features = network.lstm or (self.torso.features + extra)
        self.head = QHead(features, spec.action.size, hidden, dueling, quantiles, noisy)
        self.noisy = [layer for layer in self.head.modules() if isinstance(layer, NoisyLinear)]
        atoms = None if support is None else torch.linspace(*support, quantiles)
        self.register_buffer("support", atoms, persistent=False)

    def forward(
        self, observation: Any, first: Tensor, state: Tensor | None = None, extra: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the quantiles [T, B, A, N] and the state after; observations are [T, B, ...], extra is [T, B, E]."""
        inputs, mask = split_mask(map_tree(lambda x: x.flatten(0, 1), observation))
        if self.moments is not None:
            inputs = self.moments(inputs)
        features = self.torso(inputs)
        if extra is not None:
            features = torch.cat([features, extra.flatten(0, 1)], dim=1)
        if self.memory is not None:
            features, state = self.memory(features.view(*first.shape, -1), first, state)
            features = features.flatten(0, 1)
        values = self.head(features)
        if mask is not None and self.support is None:
            values = masked(values.transpose(1, 2), mask.unsqueeze(1)).transpose(1, 2)
        return values.reshape(*first.shape, self.head.actions, -1), state

    def initial_state(self, size: int) -> Tensor | None:
        """Return the memory of `size` fresh episodes, [B, 2·units], or none."""
        return None if self.memory is None else self.memory.initial_state(size)

    def begin(self, size: int) -> dict[str, Tensor]:
        """The first carry of a recurrent network: the memory as `core`, the last action as `action`."""
        state = self.initial_state(size)
        if state is None:
            raise Fatal("this algorithm needs an LSTM: set network.lstm to its units")
        return {"core": state, "action": torch.zeros(size, dtype=torch.int64, device=state.device)}

    def scores(self, outputs: Tensor, observation: Any) -> Tensor:
        """The mean values [..., A] of outputs [..., A, N], low where the observation does not allow an action."""
        if self.support is None:
            return outputs.mean(-1)  # masked by the forward pass
        return masked(outputs.softmax(-1) @ self.support, split_mask(observation)[1])

    def values(self, step: Step, noise: bool = False) -> Tensor:
        """The mean values [B, A] of one step, for networks without memory; with noise, where layers have it."""
        for layer in self.noisy:
            layer.on = noise
        outputs, _ = self(map_tree(lambda x: x.unsqueeze(0), step.observation), step.first.unsqueeze(0))
        for layer in self.noisy:
            layer.on = True
        return self.scores(outputs[0], step.observation)

    def observe(self, batch: Batch) -> None:
        """Update the running moments, where there are any, from the valid steps of a batch."""
        if self.moments is not None:
            seen, _ = split_mask(batch.observation)
            self.moments.update(map_tree(lambda x: x[:-1], seen), batch.news)


def q_loss(
    net: QNetwork,
    target: QNetwork,
    batch: Batch,
    gamma: float,
    double: bool,
    kappa: float = 1.0,
    munchausen: bool = False,
) -> Loss:
    """The Huber loss of an n-step temporal difference, or of its quantiles, or the cross entropy of its atoms.

    The batch's discount holds γ for all but the last of the n steps, and 0 where the episode ended. The size of the
    error is the priority.
    """
    now, then = (map_tree(lambda x, t=t: x[t : t + 1], batch.observation) for t in (0, 1))
    outputs = net(now, batch.first[:1])[0][0]  # [B, A, N]
    chosen = pick(outputs, batch.action[0])  # [B, N]
    with torch.no_grad():
        goal = target(then, batch.first[1:])[0]
        if munchausen:
            future = soft(target, goal, then)
            bonus = talk(target, target(now, batch.first[:1])[0], now, batch.action[:1])
        else:
            choice = net(then, batch.first[1:])[0] if double else goal
            best = (net if double else target).scores(choice, then).argmax(-1)
            future, bonus = pick(goal, best), torch.zeros_like(batch.reward[:1])
        discount = gamma * batch.discount[0, :, None]
        earned = (batch.reward[:1] + bonus)[0, :, None]
        goals = earned + discount * (future[0] if net.support is None else net.support)
    if net.support is None:
        error = goals.mean(-1) - chosen.mean(-1)
        plain = chosen.shape[-1] == 1
        each = huber(error, kappa) if plain else quantile_huber(chosen, goals, kappa)
        priority, value = error.abs() if plain else each, chosen.mean()
    else:
        wanted = project(net.support, goals, future[0].softmax(-1))
        log_chosen = chosen.log_softmax(-1)
        each = -(wanted * log_chosen).sum(-1)
        priority = each - torch.special.entr(wanted).sum(-1)  # the divergence: 0 where both agree
        means = log_chosen.exp() @ net.support
        error, value = wanted @ net.support - means, means.mean()
    metrics = {"value_loss": each.mean(), "q": value, "td_error": error.abs().mean()}
    return Loss(each, priority.detach(), metrics)


def softmax_policy(net: QNetwork, outputs: Tensor, observation: Any) -> Tensor:
    """The logarithm [..., A] of the policy that prefers higher values."""
    return (net.scores(outputs, observation) / TEMPERATURE).log_softmax(-1)


def soft(net: QNetwork, outputs: Tensor, observation: Any) -> Tensor:
    """The values [..., N] of a softmax policy with its entropy (arXiv:2007.14430, eq. 1)."""
    log_policy = softmax_policy(net, outputs, observation)
    # Where an action is not allowed, a probability of 0 meets a huge logarithm: their product is 0.
    gained = outputs - TEMPERATURE * log_policy.clamp(min=LOWEST).unsqueeze(-1)
    return (log_policy.exp().unsqueeze(-1) * gained).sum(-2)


def talk(net: QNetwork, outputs: Tensor, observation: Any, action: Tensor) -> Tensor:
    """What an agent gives itself for an action that it was sure of (arXiv:2007.14430, eq. 2 and §4)."""
    log_policy = softmax_policy(net, outputs, observation)
    sure = TEMPERATURE * log_policy.gather(-1, action.unsqueeze(-1)).squeeze(-1)
    return BONUS * sure.clamp(LEAST, 0.0)


def epsilon_greedy(value: Tensor, epsilon: Tensor | float) -> Tensor:
    """Choose the best of [B, A], or with a chance of epsilon (one number, or [B]) any that is allowed."""
    best = value.argmax(-1)
    if isinstance(epsilon, float) and epsilon == 0:
        return best
    anything = torch.rand_like(value).masked_fill(value <= LOWEST / 2, -1.0).argmax(-1)
    return torch.where(torch.rand(best.shape, device=best.device) < epsilon, anything, best)


def ladder(rank: Tensor, base: float, alpha: float) -> Tensor:
    """The chance of a random action by rank in [0, 1]: ε^(1 + α·rank) (arXiv:1803.00933, section 4.1)."""
    return base ** (1 + alpha * rank)


def lasts(batch: Batch) -> Tensor:
    """[T, B] True where a step is the last of its episode or of the sequence."""
    return torch.cat([batch.mask[1:] == 0, torch.ones_like(batch.first[:1])])


def without_memory(network: Architecture, name: str) -> Architecture:
    """Refuse an LSTM where transitions are replayed one by one, and no state is kept with them."""
    if network.lstm:
        raise ValueError(f"lstm {network.lstm}: {name} has no memory; set it to 0, or choose r2d2")
    return network


def check_overlap(burn_in: int, unroll: int, overlap: int) -> None:
    """Refuse an overlap that would lose steps between sequences, or that would repeat them for ever."""
    if not burn_in <= overlap < burn_in + unroll:
        raise ValueError(
            f"overlap {overlap} must be at least burn_in {burn_in}, so that every step is learned from, "
            f"and below burn_in + unroll = {burn_in + unroll}"
        )


def unroll(net: nn.Module, batch: Batch, state: Tensor, extra: Tensor, burn_in: int) -> Tensor:
    """What a recurrent network says [T + 1, B, ...]; no gradient flows back into the steps that warm its memory up."""
    if not burn_in:
        return net(batch.observation, batch.first, state, extra)[0]  # type: ignore[no-any-return]
    before, after = slice(None, burn_in), slice(burn_in, None)
    # Where an episode opens, its first state is known exactly, and so these steps can be learned from as well.
    opens = bool(batch.first[0].any())
    with torch.set_grad_enabled(opens and torch.is_grad_enabled()):
        warm, state = net(map_tree(lambda x: x[before], batch.observation), batch.first[before], state, extra[before])
    rest, _ = net(map_tree(lambda x: x[after], batch.observation), batch.first[after], state.detach(), extra[after])
    return torch.cat([warm, rest])


def trained(batch: Batch, burn_in: int) -> Tensor:
    """The mask [T, B] of the steps to learn from: after the burn-in, and all where an episode opens the sequence."""
    late = torch.arange(len(batch.action), device=batch.first.device)[:, None] >= burn_in
    return batch.mask * (late | batch.first[:1])
