"""A rollout: environments under a policy, as a stream of experience that is cut into items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from shoal.core.algorithm import Algorithm, HasChoices
from shoal.core.doing import span
from shoal.core.tree import to_numpy, to_torch
from shoal.core.types import Array, Step
from shoal.envs import Envs
from shoal.workers import packing

if TYPE_CHECKING:
    from shoal.experiment import Experiment
    from shoal.services.journal import Journal


def first_carry(algorithm: Algorithm[Any], net: nn.Module, size: int, pulls: Sequence[list[float]]) -> Any:
    """What `size` environments begin with; where a bandit chooses, it knows earlier pulls."""
    carry = algorithm.begin(net, size)
    return algorithm.informed(carry, pulls) if pulls and isinstance(algorithm, HasChoices) else carry


class Stream:
    """Environments, and what they show and are told to do as a stream that is cut into items."""

    def __init__(self, experiment: Experiment, index: int, envs: Envs, part: int = 0, parts: int = 1) -> None:
        """Begin an episode in every environment: the `part`-th of equal `parts` that the actor with this index has."""
        self.envs = envs
        # Each environment of each worker has its place between 0 and 1, from which exploration is derived. It is the
        # middle of its share: at the very ends, one of few environments would do hardly anything but explore.
        begin = (index * parts + part) * envs.size
        places = (np.arange(begin, begin + envs.size) + 0.5) / (experiment.actor_count * parts * envs.size)
        self.rank = places.astype(np.float32)
        self.packer = packing.make(experiment.algorithm.experience, envs.size)
        self.chunk = packing.Chunk(experiment.chunk)
        with span("reset"):
            self.step = envs.reset()
        self.packer.observe(self.step)
        self.steps = 0  # without the dummy steps that lead to the first observation of an episode

    def take(self, action: Array, record: Mapping[str, Array], version: int) -> packing.Items | None:
        """Step once, and return the items that are complete; they are valid until the next call."""
        self.packer.choose(action, record, version)
        with span("step"):
            self.step = self.envs.step(action)
        self.steps += int((~self.step.first).sum())
        return self.chunk.add(self.packer.observe(self.step))

    def report(self, choices: list[list[float]], journal: Journal) -> None:
        """Report finished episodes, faults, and the algorithm's choices to the journal."""
        episodes, faults = [list(episode) for episode in self.envs.episodes()], self.envs.faults()
        if episodes or faults or choices:  # a call may go to another process
            journal.acted(episodes, faults, choices)


class Rollout:
    """The environments of one worker under a network of its own, from their first observations on."""

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
        self.net, self.device = net, device
        self.stream = Stream(experiment, index, envs)
        self.rank = torch.as_tensor(self.stream.rank, device=device)
        self.carry = first_carry(experiment.algorithm, net, envs.size, pulls)

    @property
    def steps(self) -> int:
        """Steps so far, without the dummy steps that lead to the first observation of an episode."""
        return self.stream.steps

    def act(self, algorithm: Algorithm[Any], version: int) -> packing.Items | None:
        """Choose and step once, and return the items that are complete; they are valid until the next call."""
        torch.set_num_threads(1)  # every time, since workers of one process share the number
        with span("infer"), torch.inference_mode():
            seen = Step(*(to_torch(part, self.device) for part in self.stream.step))
            choice = algorithm.act(self.net, seen, self.carry, self.rank)
            self.carry, action = choice.carry, choice.action.cpu().numpy()
        return self.stream.take(action, to_numpy(choice.record), version)

    def report(self, algorithm: Algorithm[Any], journal: Journal) -> None:
        """Report finished episodes, faults, and the algorithm's choices to the journal."""
        choices = algorithm.choices(self.carry) if isinstance(algorithm, HasChoices) else []
        self.stream.report(choices, journal)
