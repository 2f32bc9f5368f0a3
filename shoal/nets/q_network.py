"""Action values over one torso: plain, dueling, of quantiles, recurrent."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shoal.core.errors import Fatal
from shoal.core.tree import map_tree
from shoal.core.types import Batch, Loss, Spec, Step
from shoal.losses.q_values import bootstrap, huber, pick, quantile_huber
from shoal.nets.memory import Lstm
from shoal.nets.normalise import ObservationMoments
from shoal.nets.torsos import Architecture, Torso, orthogonal


class QHead(nn.Module):
    """Values of A actions from features; with `quantiles` numbers each for their distribution (arXiv:1710.10044)."""

    def __init__(self, features: int, actions: int, hidden: int, dueling: bool, quantiles: int) -> None:
        super().__init__()
        self.actions, self.quantiles = actions, quantiles

        def stream(outputs: int) -> nn.Module:
            last = orthogonal(nn.Linear(hidden or features, outputs * quantiles), gain=1.0)
            if not hidden:
                return last
            return nn.Sequential(orthogonal(nn.Linear(features, hidden)), nn.ReLU(inplace=True), last)

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

    def __init__(
        self, network: Architecture, spec: Spec, dueling: bool, quantiles: int = 1, hidden: int = 0, extra: int = 0
    ) -> None:
        """Take `extra` numbers beside the features, such as the last action and reward."""
        super().__init__()
        if not spec.action.discrete:
            raise Fatal(
                "a network of action values does not support continuous actions, which this environment has: "
                "choose ppo or impala"
            )
        self.moments = ObservationMoments(spec.observation) if network.normalise_observation else None
        self.torso = Torso(network, spec.observation)
        self.memory = Lstm(self.torso.features + extra, network.lstm) if network.lstm else None
        features = network.lstm or (self.torso.features + extra)
        self.head = QHead(features, spec.action.size, hidden, dueling, quantiles)

    def forward(
        self, observation: Any, first: Tensor, state: Tensor | None = None, extra: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the quantiles [T, B, A, N] and the state after; observations are [T, B, ...], extra is [T, B, E]."""
        inputs = map_tree(lambda x: x.flatten(0, 1), observation)
        if self.moments is not None:
            inputs = self.moments(inputs)
        features = self.torso(inputs)
        if extra is not None:
            features = torch.cat([features, extra.flatten(0, 1)], dim=1)
        if self.memory is not None:
            features, state = self.memory(features.view(*first.shape, -1), first, state)
            features = features.flatten(0, 1)
        return self.head(features).view(*first.shape, self.head.actions, -1), state

    def initial_state(self, size: int) -> Tensor | None:
        """Return the memory of `size` fresh episodes, [B, 2·units], or none."""
        return None if self.memory is None else self.memory.initial_state(size)

    def begin(self, size: int) -> dict[str, Tensor]:
        """The first carry of a recurrent network: the memory as `core`, the last action as `action`."""
        state = self.initial_state(size)
        if state is None:
            raise Fatal("this algorithm needs an LSTM: set network.lstm to its units")
        return {"core": state, "action": torch.zeros(size, dtype=torch.int64, device=state.device)}

    def values(self, step: Step) -> Tensor:
        """The mean values [B, A] of one step, for networks without memory."""
        quantiles, _ = self(map_tree(lambda x: x.unsqueeze(0), step.observation), step.first.unsqueeze(0))
        return quantiles[0].mean(-1)  # type: ignore[no-any-return]  # nn.Module.__call__ is untyped

    def observe(self, batch: Batch) -> None:
        """Update the running moments, where there are any, from the valid steps of a batch."""
        if self.moments is not None:
            self.moments.update(map_tree(lambda x: x[:-1], batch.observation), batch.mask)


def q_loss(net: QNetwork, target: QNetwork, batch: Batch, gamma: float, double: bool) -> Loss:
    """The Huber loss of an n-step temporal difference, or of its quantiles; its size is the priority.

    The batch's discount holds γ for all but the last of the n steps, and 0 where the episode ended.
    """
    now, then = (map_tree(lambda x, t=t: x[t : t + 1], batch.observation) for t in (0, 1))
    chosen = pick(net(now, batch.first[:1])[0][0], batch.action[0])  # [B, N]
    with torch.no_grad():
        goal = target(then, batch.first[1:])[0][0]
        choice = net(then, batch.first[1:])[0][0] if double else goal
        future = bootstrap(choice, goal)
        goals = batch.reward[0, :, None] + gamma * batch.discount[0, :, None] * future
    error = goals.mean(-1) - chosen.mean(-1)
    plain = chosen.shape[-1] == 1
    each = huber(error) if plain else quantile_huber(chosen, goals)
    metrics = {"value_loss": each.mean(), "q": chosen.mean(), "td_error": error.abs().mean()}
    return Loss(each, (error.abs() if plain else each).detach(), metrics)


def epsilon_greedy(value: Tensor, epsilon: Tensor | float) -> Tensor:
    """Choose the best of [B, A], or with a chance of epsilon (one number, or [B]) any."""
    best = value.argmax(-1)
    anything = torch.randint(value.shape[-1], best.shape, device=best.device)
    return torch.where(torch.rand(best.shape, device=best.device) < epsilon, anything, best)


def ladder(rank: Tensor, base: float, alpha: float) -> Tensor:
    """The chance of a random action by rank in [0, 1]: ε^(1 + α·rank) (arXiv:1803.00933, section 4.1)."""
    return base ** (1 + alpha * rank)


def previous(action: Tensor, reward: Tensor, first: Tensor, actions: int) -> Tensor:
    """What an LSTM sees of the previous step: its action as one-hot and its reward; zeros where an episode begins."""
    seen = torch.cat([torch.nn.functional.one_hot(action, actions).to(reward.dtype), reward.unsqueeze(-1)], dim=-1)
    return seen * (~first).unsqueeze(-1)


def all_previous(batch: Batch, actions: int) -> Tensor:
    """`previous` at every step [T + 1, B, E] of a sequence; that of the first step is on record."""
    return torch.cat([batch.record["previous"], previous(batch.action, batch.reward, batch.first[1:], actions)])


def lasts(batch: Batch) -> Tensor:
    """[T, B] True where a step is the last of its episode or of the sequence."""
    return torch.cat([batch.mask[1:] == 0, torch.ones_like(batch.first[:1])])


def check_overlap(burn_in: int, unroll: int, overlap: int) -> None:
    """Refuse an overlap that would lose steps between sequences, or that would repeat them for ever."""
    if not burn_in <= overlap < burn_in + unroll:
        raise ValueError(
            f"overlap {overlap} must be at least burn_in {burn_in}, so that every step is learned from, "
            f"and below burn_in + unroll = {burn_in + unroll}"
        )


def unroll(net: QNetwork, batch: Batch, state: Tensor, extra: Tensor, burn_in: int) -> Tensor:
    """Quantiles [T + 1, B, A, N] of a sequence; no gradient flows back into the steps that warm the memory up."""
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
