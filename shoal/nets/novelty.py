"""Networks that measure how new a state is: an embedding of what can be controlled, and random distillation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shoal.core.tree import map_tree
from shoal.core.types import Batch, Spec
from shoal.losses.masking import time_mean
from shoal.losses.novelty import NEIGHBOURS, episodic_novelty, lasting_novelty, nearest_distances
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


def nothing_seen(size: int, embedding: int, device: torch.device) -> dict[str, Tensor]:
    """The memory of episodes that begin, in which a state is that many numbers."""
    return {
        "states": torch.zeros(size, 0, embedding, device=device),
        "count": torch.zeros(size, dtype=torch.int64, device=device),
        "distance": torch.zeros(size, device=device),  # running average of the neighbours' distances
        "distances": torch.zeros(size, device=device),  # how many went into it
    }


def recall(memory: Mapping[str, Tensor], point: Tensor, first: Tensor, most: int) -> dict[str, Tensor]:
    """How new embedded states [N, E] are within their episodes, as `novelty`, and the memory with them.

    Algorithm 1 of arXiv:2002.06038; at most `most` states of an episode are remembered, and the oldest give way.
    """
    states, count = memory["states"], memory["count"] * ~first
    nearest = nearest_distances(point, states, count, NEIGHBOURS)
    known = nearest.isfinite()
    total = memory["distance"] * memory["distances"] + torch.where(known, nearest, torch.zeros(())).sum(1)
    distances = memory["distances"] + known.sum(1)
    distance = total / distances.clamp(min=1)
    place = count % most
    if int(place.max()) >= states.shape[1]:
        grown = min(max(2 * states.shape[1], 16), most)
        states = torch.cat([states, states.new_zeros(len(place), grown - states.shape[1], states.shape[2])], 1)
    states[torch.arange(len(place), device=place.device), place] = point
    novelty = episodic_novelty(nearest, distance)
    return {"states": states, "count": count + 1, "distance": distance, "distances": distances, "novelty": novelty}
