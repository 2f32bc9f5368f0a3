"""Networks that measure how new a state is: an embedding of what can be controlled, and random distillation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shoal.core.tree import map_tree
from shoal.core.types import Batch, Spec
from shoal.losses.masking import time_mean
from shoal.losses.novelty import lasting_novelty
from shoal.nets.masks import split_mask
from shoal.nets.normalise import ObservationMoments
from shoal.nets.torsos import Architecture, Torso, orthogonal

FOLLOW = 0.01  # share of each batch in the moments of the error


class Novelty(nn.Module):
    """The embedding with its inverse dynamics (arXiv:2002.06038, section 2), and RND (arXiv:1810.12894)."""

    error_mean: Tensor
    error_square: Tensor

    def __init__(self, network: Architecture, spec: Spec, size: int) -> None:
        super().__init__()

        seen, _ = split_mask(spec.observation)

        def encoder() -> nn.Module:
            torso = Torso(network, seen)
            return nn.Sequential(torso, orthogonal(nn.Linear(torso.features, size)))

        self.moments = ObservationMoments(seen) if network.normalise_observation else None
        self.encoder, self.predictor, self.random = encoder(), encoder(), encoder()
        self.random.requires_grad_(False)
        self.inverse = nn.Sequential(
            orthogonal(nn.Linear(2 * size, 128)), nn.ReLU(inplace=True), orthogonal(nn.Linear(128, spec.action.size))
        )
        self.register_buffer("error_mean", torch.zeros(()))
        self.register_buffer("error_square", torch.zeros(()))

    def _seen(self, observation: Any) -> Any:
        observation, _ = split_mask(observation)
        return observation if self.moments is None else self.moments(observation)

    def embedding(self, observation: Any) -> Tensor:
        """What can be controlled [N, E] of observations [N, ...]."""
        return self.encoder(self._seen(observation))  # type: ignore[no-any-return]

    def error(self, observation: Any) -> Tensor:
        """The squared error of distillation [N] of observations [N, ...]."""
        observation = self._seen(observation)
        return (self.predictor(observation) - self.random(observation)).square().mean(-1)  # type: ignore[no-any-return]

    @torch.no_grad()
    def lasting(self, observation: Any) -> Tensor:
        """The life-long modulator [N] of observations [N, ...]."""
        deviation = (self.error_square - self.error_mean.square()).clamp(min=0.0).sqrt()
        return lasting_novelty(self.error(observation), self.error_mean, deviation)

    @torch.no_grad()
    def observe(self, batch: Batch) -> None:
        """Update running moments; those of the error follow it, since as it falls, old ones would hide what is new."""
        if not batch.mask.any():
            return
        if self.moments is not None:
            seen, _ = split_mask(batch.observation)
            self.moments.update(map_tree(lambda x: x[:-1], seen), batch.news)
        error = self.error(map_tree(lambda x: x[:-1][batch.mask.bool()], batch.observation))
        share = FOLLOW if self.error_square > 0 else 1.0
        self.error_mean.lerp_(error.mean(), share)
        self.error_square.lerp_(error.square().mean(), share)

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Losses [B] of the inverse dynamics and of the distillation."""
        length, items = batch.action.shape
        flat = map_tree(lambda x: x.flatten(0, 1), batch.observation)
        embedded = self.embedding(flat).view(length + 1, items, -1)
        logits = self.inverse(torch.cat([embedded[:-1], embedded[1:]], -1).flatten(0, 1))
        inverse = nn.functional.cross_entropy(logits, batch.action.flatten(), reduction="none").view(length, items)
        error = self.error(map_tree(lambda x: x[:-1].flatten(0, 1), batch.observation)).view(length, items)
        return time_mean(inverse, batch.mask), time_mean(error, batch.mask)
