"""A rollout: environments under a policy, as a stream of experience that is cut into items."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from shoal.core.algorithm import Algorithm, HasChoices
from shoal.core.tree import to_numpy, to_torch
from shoal.core.types import Step
from shoal.envs import Envs
from shoal.workers import packing

if TYPE_CHECKING:
    from shoal.experiment import Experiment
    from shoal.services.journal import Journal


def first_carry(algorithm: Algorithm[Any], net: nn.Module, size: int, pulls: Sequence[list[float]]) -> Any:
    """What `size` environments begin with; where a bandit chooses, it knows earlier pulls."""
    carry = algorithm.begin(net, size)
    return algorithm.informed(carry, pulls) if pulls and isinstance(algorithm, HasChoices) else carry


class Rollout:
    """The environments of one worker, from their first observations on."""

    def __init__(
        self,
        experiment: Experiment,
        index: int,
        envs: Envs,
        net: nn.Module,
        device: torch.device,
        pulls: Sequence[list[float]] = (),
    ) -> None:
        """Begin an episode in every environment of the worker with this index."""
        algorithm, size = experiment.algorithm, envs.size
        self.envs, self.net, self.device = envs, net, device
        # Each environment of each worker has its place between 0 and 1, from which exploration is derived. It is the
        # middle of its share: at the very ends, one of few environments would do hardly anything but explore.
        places = (np.arange(index * size, (index + 1) * size) + 0.5) / (experiment.actor_count * size)
        self.rank = torch.as_tensor(places, dtype=torch.float32, device=device)
        self.packer = packing.make(algorithm.experience, size)
        self.chunk = packing.Chunk(experiment.chunk)
        self.step, self.carry = envs.reset(), first_carry(algorithm, net, size, pulls)
        self.packer.observe(self.step)
        self.steps = 0  # without the dummy steps that lead to the first observation of an episode

    def act(self, algorithm: Algorithm[Any], version: int) -> packing.Items | None:
        """Choose and step once, and return the items that are complete; they are valid until the next call."""
        torch.set_num_threads(1)  # every time, since workers of one process share the number
        with torch.inference_mode():
            seen = Step(*(to_torch(part, self.device) for part in self.step))
            choice = algorithm.act(self.net, seen, self.carry, self.rank)
        self.carry, action = choice.carry, choice.action.cpu().numpy()
        self.packer.choose(action, to_numpy(choice.record), version)
        self.step = self.envs.step(action)
        self.steps += int((~self.step.first).sum())
        return self.chunk.add(self.packer.observe(self.step))

    def report(self, algorithm: Algorithm[Any], journal: Journal) -> None:
        """Report finished episodes, faults, and the algorithm's choices to the journal."""
        choices = algorithm.choices(self.carry) if isinstance(algorithm, HasChoices) else []
        episodes, faults = [list(episode) for episode in self.envs.episodes()], self.envs.faults()
        if episodes or faults or choices:  # a call may go to another process
            journal.acted(episodes, faults, choices)
