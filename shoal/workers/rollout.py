"""A rollout: environments under a policy, as a stream of experience that is cut into items."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Sequence_
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from shoal.core.algorithm import Algorithm, HasChoices
from shoal.core.doing import span
from shoal.core.tree import to_numpy, to_torch, upload
from shoal.core.types import Array, Sequence, Step
from shoal.envs import Envs
from shoal.workers import packing
from shoal.workers.graph import drawing

if TYPE_CHECKING:
    from shoal.experiment import Experiment
    from shoal.services.journal import Journal


def first_carry(algorithm: Algorithm[Any], net: nn.Module, size: int, pulls: Sequence_[list[float]]) -> Any:
    """What `size` environments begin with; where a bandit chooses, it knows earlier pulls."""
    carry = algorithm.begin(net, size)
    return algorithm.informed(carry, pulls) if pulls and isinstance(algorithm, HasChoices) else carry


class Stream:
    """Environments, and what they show and are told to do as a stream that is cut into items."""

    def __init__(
        self,
        experiment: Experiment,
        index: int,
        envs: Envs,
        part: int = 0,
        parts: int = 1,
        device: torch.device | None = None,
    ) -> None:
        """Begin an episode in every environment: the `part`-th of equal `parts` that the actor with this index has.

        With a device, each step is sent there once, and items are made of what is there.
        """
        self.envs, self.device = envs, device
        # Each environment of each worker has its place between 0 and 1, from which exploration is derived. It is the
        # middle of its share: at the very ends, one of few environments would do hardly anything but explore.
        begin = (index * parts + part) * envs.size
        places = (np.arange(begin, begin + envs.size) + 0.5) / (experiment.actor_count * parts * envs.size)
        self.rank = places.astype(np.float32)
        self.packer = packing.make(experiment.algorithm.experience, envs.size)
        self.chunk = packing.Chunk(experiment.chunk)
        with span("reset"):
            self.step = envs.reset()
        self._observe()
        self.steps = 0  # without the dummy steps that lead to the first observation of an episode

    def take(self, action: Array, record: Mapping[str, Any], version: int, chosen: Any = None) -> packing.Items | None:
        """Step once, and return the items that are complete; they are valid until the next call.

        With a device, `chosen` is the action there.
        """
        self.packer.choose(action if chosen is None else chosen, record, version)
        with span("step"):
            self.step = self.envs.step(action)
        self.steps += int((~self.step.first).sum())
        return self.chunk.add(self._observe())

    def _observe(self) -> packing.Items | None:
        """Show the present step to the packer."""
        if self.device is None:
            return self.packer.observe(self.step)
        with span("upload"):
            self.there = Step(*(upload(part, self.device) for part in self.step))
        return self.packer.observe(self.there, self.step.first)

    def report(self, choices: list[list[float]], journal: Journal) -> None:
        """Report finished episodes, faults, and the algorithm's choices to the journal."""
        episodes, faults = [list(episode) for episode in self.envs.episodes()], self.envs.faults()
        if episodes or faults or choices:  # a call may go to another process
            journal.acted(episodes, faults, choices)


def together(experiment: Experiment) -> bool:
    """Whether there is a queue in the actors' process, which takes their experience as it is, on whatever device."""
    cut = experiment.algorithm.experience
    whole = isinstance(cut, Sequence) and cut.across and not cut.overlap
    other = experiment.replay or experiment.circular or experiment.mixture or experiment.central or experiment.shared
    return experiment.engine in ("inline", "threads") and whole and not other


def stays(experiment: Experiment, device: torch.device) -> bool:
    """Whether experience stays on the device where actions are chosen."""
    return device.type != "cpu" and together(experiment)


class Rollout:
    """The environments of one worker under a network of its own, from their first observations on."""

    def __init__(
        self,
        experiment: Experiment,
        index: int,
        envs: Envs,
        net: nn.Module,
        device: torch.device,
        pulls: Sequence_[list[float]] = (),
    ) -> None:
        """Begin an episode in every environment of the worker with this index."""
        self.net, self.device = net, device
        self.resident = stays(experiment, device)
        self.stream = Stream(experiment, index, envs, device=device if self.resident else None)
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
            stream = self.stream
            seen = stream.there if self.resident else Step(*(to_torch(part, self.device) for part in stream.step))
            with drawing(self.device):
                choice = algorithm.act(self.net, seen, self.carry, self.rank)
            self.carry, action = choice.carry, choice.action.cpu().numpy()
        if self.resident:
            return self.stream.take(action, choice.record, version, choice.action)
        return self.stream.take(action, to_numpy(choice.record), version)

    def report(self, algorithm: Algorithm[Any], journal: Journal) -> None:
        """Report finished episodes, faults, and the algorithm's choices to the journal."""
        choices = algorithm.choices(self.carry) if isinstance(algorithm, HasChoices) else []
        self.stream.report(choices, journal)
