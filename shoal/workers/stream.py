"""Environments under a policy: a stream of experience, cut into items."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from shoal import envs
from shoal.core.tree import to_numpy, to_torch
from shoal.core.types import Step
from shoal.workers import packing


class Stream:
    """The environments of one worker, from their first observations on."""

    def __init__(self, experiment: Any, index: int, worlds: envs.Worlds, net: Any, device: torch.device) -> None:
        """Begin an episode in every environment of the worker with this index."""
        algorithm, size = experiment.algorithm, worlds.size
        self.worlds, self.net, self.device = worlds, net, device
        # Each environment of each worker has its place between 0 and 1, from which exploration is derived.
        places = np.arange(index * size, (index + 1) * size) / max(experiment.actor_count * size - 1, 1)
        self.rank = torch.as_tensor(places, dtype=torch.float32, device=device)
        self.packer = packing.make(algorithm.experience, size)
        self.chunk = packing.Chunk(experiment.chunk)
        self.step, self.carry = worlds.reset(), algorithm.begin(net, size)
        self.packer.observe(self.step)
        self.steps = 0  # real ones: into the first observation of an episode leads none

    def act(self, algorithm: Any, version: int) -> packing.Items | None:
        """Choose and step once, and return the items that are complete; they are valid until the next call."""
        torch.set_num_threads(1)  # again and again, since workers of one process share the number
        with torch.inference_mode():
            seen = Step(*(to_torch(part, self.device) for part in self.step))
            choice = algorithm.act(self.net, seen, self.carry, self.rank)
        self.carry, action = choice.carry, choice.action.cpu().numpy()
        self.packer.choose(action, to_numpy(choice.record), version)
        self.step = self.worlds.step(action)
        self.steps += int((~self.step.first).sum())
        return self.chunk.add(self.packer.observe(self.step))

    def report(self, algorithm: Any, journal: Any) -> None:
        """Tell the journal of the episodes that ended, of faults, and of the algorithm's choices."""
        choices = algorithm.choices(self.carry) if hasattr(algorithm, "choices") else []
        episodes, faults = [list(episode) for episode in self.worlds.episodes()], self.worlds.faults()
        if episodes or faults or choices:  # a call may go to another process
            journal.acted(episodes, faults, choices)
