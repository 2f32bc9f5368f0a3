"""A policy and a value over one torso, with all that acting on them needs."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from shoal.core.tree import map_tree
from shoal.core.types import Act, Batch, Spec, Step
from shoal.nets.heads import make_head
from shoal.nets.masks import split_mask
from shoal.nets.memory import Lstm, all_previous, previous
from shoal.nets.normalise import CLIP, ObservationMoments, RunningMoments
from shoal.nets.torsos import Architecture, Torso, orthogonal


class ActorCriticArchitecture(Architecture):
    """How observations become features of a policy and a value."""

    separate: bool = Field(False, description="Whether policy and value have a torso each.")
    # arXiv:1802.01561, fig. 3.
    previous: bool = Field(False, description="Whether the LSTM also sees the last action and its reward.")
    state_std: bool = Field(
        False, description="Whether the spread of continuous actions depends on the state; else it is a parameter."
    )
    normalise_reward: bool = Field(
        False, description="Whether to divide rewards by the standard deviation of the discounted return."
    )

    @model_validator(mode="after")
    def _one_memory(self) -> Self:
        if self.separate and self.lstm:
            raise ValueError("separate torsos cannot share an LSTM: set lstm to 0 or separate to false")
        if self.previous and not self.lstm:
            raise ValueError(
                "only an LSTM sees the last action and reward: set lstm to its units, or previous to false"
            )
        return self


class ActorCritic(nn.Module):
    """Policy and value of observations over time, in one pass."""

    def __init__(
        self, network: ActorCriticArchitecture, spec: Spec, gamma: float, distribution: str = "clipped"
    ) -> None:
        super().__init__()
        self.gamma = gamma
        observation, _ = split_mask(spec.observation)
        self.moments = ObservationMoments(observation) if network.normalise_observation else None
        self.return_moments = RunningMoments(()) if network.normalise_reward else None
        self.torso = Torso(network, observation)
        self.value_torso = Torso(network, observation) if network.separate else None
        self.action = spec.action
        self.previous = network.previous
        extra = sum(count or 1 for count in spec.action.choices) + 1 if network.previous else 0
        self.memory = Lstm(self.torso.features + extra, network.lstm) if network.lstm else None
        features = network.lstm or self.torso.features
        self.head = make_head(features, spec.action, distribution, network.state_std)
        self.value = orthogonal(nn.Linear(features, 1), gain=1.0)

    def initial_state(self, size: int) -> Tensor | None:
        """Return the memory of `size` fresh episodes, [B, 2·units], or none."""
        return None if self.memory is None else self.memory.initial_state(size)

    def forward(
        self, observation: Any, first: Tensor, state: Tensor | None = None, extra: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the policy [T, B, P], the value [T, B] and the state after; observations are [T, B, ...].

        Extra [T, B, E] is what the memory sees beside them.
        """
        features, value_features, mask, state = self.encode(observation, first, state, extra)
        policy = self.head(features, mask).view(*first.shape, -1)
        return policy, self.value(value_features).view(first.shape), state

    def encode(
        self, observation: Any, first: Tensor, state: Tensor | None = None, extra: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Return the features of the policy and of the value, [T·B, F], the mask of actions and the state after."""
        inputs, mask = split_mask(map_tree(lambda x: x.flatten(0, 1), observation))
        if self.moments is not None:
            inputs = self.moments(inputs)
        features = self.torso(inputs)
        value_features = features if self.value_torso is None else self.value_torso(inputs)
        if self.memory is not None:
            features = features.view(*first.shape, -1)
            if extra is not None:
                features = torch.cat([features, extra], -1)
            features, state = self.memory(features, first, state)
            value_features = features = features.flatten(0, 1)
        return features, value_features, mask, state

    def begin(self, size: int) -> dict[str, Tensor]:
        """Return the first carry: the memory as `core`, the discounted return so far as `return`."""
        carry = {}
        if self.memory is not None:
            carry["core"] = self.memory.initial_state(size)
        if self.return_moments is not None:
            carry["return"] = torch.zeros(size, device=self.value.weight.device)
        if self.previous:
            columns = () if self.action.discrete else (self.action.size,)
            carry["action"] = torch.zeros(size, *columns, device=self.value.weight.device)
        return carry

    def unroll(self, batch: Batch, length: int | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return policy, value and state along a batch, or along its first steps."""
        return self(*self._along(batch, length))  # type: ignore[no-any-return]

    def features(self, batch: Batch) -> Tensor:
        """Return what the policy sees of each observation of a batch, [T+1, B, F]."""
        return self.encode(*self._along(batch, None))[0].view(*batch.first.shape, -1)

    def _along(self, batch: Batch, length: int | None) -> tuple[Any, Tensor, Tensor | None, Tensor | None]:
        extra = all_previous(batch, self.action.choices)[:length] if self.previous else None
        observation = map_tree(lambda x: x[:length], batch.observation)
        return observation, batch.first[:length], initial_core(batch), extra

    @torch.no_grad()
    def act(self, step: Step, carry: dict[str, Tensor], greedy: bool, keep_features: bool = False) -> Act:
        """Choose by the policy's mode, or draw from it; record the policy, the value and what the carry held.

        `core` is recorded as it was before the step, and `return` as it is after the step's reward; `features`, what
        the policy saw, only where somebody wants them.
        """
        observation = map_tree(lambda x: x.unsqueeze(0), step.observation)
        seen = previous(carry["action"], step.reward, step.first, self.action.choices) if self.previous else None
        extra = None if seen is None else seen.unsqueeze(0)
        first = step.first.unsqueeze(0)
        features, value_features, mask, core = self.encode(observation, first, carry.get("core"), extra)
        policy, value = self.head(features, mask), self.value(value_features).squeeze(-1)
        raw = self.head.mode(policy) if greedy else self.head.sample(policy)
        action = self.head.action(raw)
        record = {"policy": policy, "value": value}
        after = {}
        if keep_features:
            record["features"] = features
        if action is not raw:
            record["raw"] = raw
        if core is not None:
            record["core"], after["core"] = carry["core"], core
        if seen is not None:
            record["previous"], after["action"] = seen, action
        if self.return_moments is not None:
            earned = (self.gamma * carry["return"] + step.reward) * ~step.first
            record["return"] = after["return"] = earned
        return Act(action, record, after)

    def observe(self, batch: Batch) -> None:
        """Update the running moments, where there are any, from the valid steps of a batch."""
        length = len(batch.action)
        if self.moments is not None:
            seen, _ = split_mask(batch.observation)
            self.moments.update(map_tree(lambda x: x[:length], seen), batch.news)
        if self.return_moments is not None:
            # An opening step has earned nothing yet, and padding is made of opening steps.
            earned = ~batch.first[:length] if batch.fresh is None else ~batch.first[:length] & batch.fresh
            self.return_moments.update(batch.record["return"][earned])

    def scaled(self, reward: Tensor) -> Tensor:
        """Divide rewards by the standard deviation of the discounted return.

        Gymnasium's NormalizeReward: the mean is not taken off, so that signs and zeros stay.
        """
        if self.return_moments is None:
            return reward
        return (reward * self.return_moments.scale()).clamp(-CLIP, CLIP)


def raw_action(batch: Batch) -> Tensor:
    """Return what the policy drew, [T, B, ...]: the action itself unless the head changed it to fit the bounds."""
    return batch.record.get("raw", batch.action)


def initial_core(batch: Batch) -> Tensor | None:
    """Return the memory's state before the batch, [B, 2·units], or none."""
    return batch.record["core"][0] if "core" in batch.record else None


def remembered(network: ActorCriticArchitecture) -> tuple[str, ...]:
    """The records of which a sequence needs the first only: the memory's state, and what it saw of the last step."""
    return (*(("core",) if network.lstm else ()), *(("previous",) if network.previous else ()))


def single_steps(batch: Batch) -> Batch:
    """Cut [T, B] into its valid steps, [1, N]: minibatches are then drawn from all of them alike."""
    return all_steps(batch) if batch.mask.is_cuda else valid_steps(batch)


def all_steps(batch: Batch) -> Batch:
    """Cut [T, B] into its steps, [1, T·B], of which those that do not count stay masked.

    To leave these out is to wait for a GPU, and to get batches of all sizes. Weights make up for them.
    """
    length, valid = len(batch.action), batch.mask.flatten()

    def take(x: Tensor) -> Tensor:
        return x[:length].flatten(0, 1).unsqueeze(0)

    return Batch(
        observation=map_tree(take, batch.observation),
        first=torch.stack([torch.zeros_like(valid), 1 - valid]).bool(),
        action=take(batch.action),
        reward=take(batch.reward),
        discount=take(batch.discount),
        record=map_tree(take, batch.record),
        weight=batch.weight.repeat(length) * (len(valid) / valid.sum().clamp(min=1.0)),
        key=np.tile(batch.key, length),
        version=np.tile(batch.version, length),
        fresh=None if batch.fresh is None else batch.fresh.repeat(length),
    )


def valid_steps(batch: Batch) -> Batch:
    """Cut [T, B] into its valid steps, [1, N]."""
    length, items = batch.action.shape[:2]
    valid = batch.mask.flatten().nonzero().squeeze(1)  # [N]
    item = valid % items

    def take(x: Tensor) -> Tensor:
        return x[:length].flatten(0, 1).index_select(0, valid).unsqueeze(0)

    on_host = item.cpu().numpy()
    return Batch(
        observation=map_tree(take, batch.observation),
        first=torch.zeros(2, len(valid), dtype=torch.bool, device=valid.device),
        action=take(batch.action),
        reward=take(batch.reward),
        discount=take(batch.discount),
        record=map_tree(take, batch.record),
        weight=batch.weight[item],
        key=batch.key[on_host],
        version=batch.version[on_host],
        fresh=None if batch.fresh is None else batch.fresh[item],
    )
