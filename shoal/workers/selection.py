"""Selection: which of the candidates that a mixture offers are learned from, by distances that need the network."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from shoal.core.algorithm import HasFeatures
from shoal.core.mixing import BY_ITEM, Mixing, Part, ordered, shares
from shoal.core.tree import map_tree
from shoal.core.types import Array, Store
from shoal.workers.packing import to_batch
from shoal.workers.progress import Progress

if TYPE_CHECKING:
    from shoal.experiment import Experiment
    from shoal.services.mixture import Mixture


def distances(part: Part, features: Tensor, reference: Tensor, mask: Tensor) -> Tensor:
    """How far features [T, N, F] are from others, on average over the valid steps; [N].

    `ln_norm` is the p-norm of the difference, `cosine` 1 - the cosine, each over all steps as one vector; `kl` is
    KL(softmax of the features ‖ softmax of the reference). Like things are near, in all three.
    """
    reference = reference.expand_as(features)
    valid = mask.unsqueeze(-1)
    count = mask.sum(0).clamp(min=1)  # [N]
    if part.distance == "ln_norm":
        powers = ((features - reference).abs() ** part.norm * valid).sum((0, 2))
        return (powers / count) ** (1 / part.norm)
    if part.distance == "cosine":
        one, two = ((x * valid).transpose(0, 1).flatten(1) for x in (features, reference))
        return 1 - torch.cosine_similarity(one, two, dim=-1)
    log_p, log_q = features.log_softmax(-1), reference.log_softmax(-1)
    return ((log_p.exp() * (log_p - log_q)).sum(-1) * mask).sum(0) / count


def chosen(distance: Array, uses: Array, key: Array, size: int, strategy: int) -> Array:
    """The places of `size` candidates: near ones, by strategy; an item that was drawn twice comes last.

    1: the nearest. 2: sorted by distance and cut into `size` groups, the nearest of each. 3: the nearest among those
    used least, then among those used once more, and so on. 4: of the groups of 2, the one used least.
    """
    again = np.ones(len(key), np.bool_)
    again[np.unique(key, return_index=True)[1]] = False
    if strategy == 3:
        return np.lexsort((distance, uses, again))[:size]
    order = np.lexsort((distance, again))
    if strategy == 1:
        return order[:size]
    groups = np.array_split(order, size)
    if strategy == 2:
        return np.array([group[0] for group in groups])
    return np.array([group[np.argmin(uses[group])] for group in groups])  # the nearest of several


class Selection:
    """Draws batches from a mixture, with more candidates than needed where a part chooses among them."""

    def __init__(self, experiment: Experiment, mixture: Mixing) -> None:
        """Choose as the parts say."""
        self.mixture, self.steps = mixture, experiment.steps
        self.sizes = shares(mixture, experiment.batch_size)
        self.algorithm = experiment.algorithm
        self.metrics: dict[str, float] = {}  # of the last batch

    @classmethod
    def of(cls, experiment: Experiment) -> Selection | None:
        """The selection that an experiment needs; None: its store's batches are as they should be."""
        parts = experiment.mixture
        return cls(experiment, parts) if parts and any(part.selects for part in parts.values()) else None

    def draw(self, store: Store, net: nn.Module, device: torch.device, now: Progress) -> dict[str, Any] | None:
        """A batch in which each part has its share, near by what this network sees; None: too little yet."""
        mixture = cast("Mixture", store)  # or a stand-in of one, as the experiment says
        wanted = {}
        for name, size in self.sizes.items():
            part = self.mixture[name]
            more = part.candidates.at(now.steps, self.steps).now if part.selects else 1.0
            wanted[name] = max(int(more * size), size)
        drawn = mixture.draw(wanted, now.version)
        if drawn is None:
            return None
        number, self.metrics = np.asarray(drawn["part"]), {}
        kept = [np.flatnonzero(number == 0)]
        for index, name in enumerate(ordered(self.mixture)[1:], 1):
            if len(columns := np.flatnonzero(number == index)):
                if self.mixture[name].selects:
                    columns = self._select(name, columns, drawn, mixture, net, device)
                kept.append(columns)
        batch = taken(drawn, np.concatenate(kept))
        record = {key: value for key, value in batch["record"].items() if key != "features"}
        return {key: value for key, value in batch.items() if key not in ("part", "uses")} | {"record": record}

    def _select(
        self, name: str, columns: Array, drawn: Mapping[str, Any], store: Mixture, net: nn.Module, device: torch.device
    ) -> Array:
        """Of a part's candidates those to learn from; the store receives their distances."""
        part, size = self.mixture[name], self.sizes[name]
        attentive = int(part.kind == "attentive")  # its first item is the newest, and no candidate
        candidates = columns[attentive:]
        if len(candidates) <= size and part.insertion == "oldest":
            return candidates
        tree = taken(drawn, columns)
        batch = to_batch({key: value for key, value in tree.items() if key not in ("part", "uses")}, device)
        assert isinstance(self.algorithm, HasFeatures)
        with torch.no_grad():
            seen = self.algorithm.features(net, batch)  # [T+1, N, F]
            reference = seen[-1:, :1] if attentive else batch.record["features"]
            distance = distances(part, seen[:-1, attentive:], reference, batch.mask[:, attentive:]).cpu().numpy()
        keys, uses = np.asarray(drawn["key"])[candidates], np.asarray(drawn["uses"])[candidates]
        places = chosen(distance, uses, keys, size, part.strategy)
        picked = np.zeros(len(candidates), np.bool_)
        picked[places] = True
        store.choose(keys, distance, picked)
        self.metrics |= {
            f"{name}_candidates": float(len(candidates)),
            f"{name}_distance": float(distance.mean()),
            f"{name}_distance_chosen": float(distance[places].mean()),
        }
        return candidates[places]


def taken(tree: Mapping[str, Any], columns: Array) -> dict[str, Any]:
    """Some items of a batch."""
    return {
        key: np.asarray(value)[columns] if key in BY_ITEM else map_tree(lambda x: x[:, columns], value)
        for key, value in tree.items()
    }
