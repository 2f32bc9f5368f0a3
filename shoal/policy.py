"""A trained policy, for whatever you want to do with it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from shoal.core.algorithm import HasRewardInput
from shoal.core.errors import SettingsError
from shoal.core.tree import to_torch
from shoal.core.types import Step
from shoal.envs import make
from shoal.experiment import Experiment, load_of
from shoal.runs import checkpoint, directory
from shoal.workers.follower import Follower
from shoal.workers.rollout import first_carry
from shoal.workers.saving import load_weights

if TYPE_CHECKING:
    from shoal.export import Export


class Policy:
    """Chooses actions for one environment at a time; it remembers the episode where its network is recurrent."""

    def __init__(self, experiment: Experiment, path: Path, device: str = "cpu") -> None:
        """Load the weights of a checkpoint."""
        self.experiment, self.path = experiment, path
        saved = checkpoint.read(path, ("weights",))  # not the replay, which may be large
        self.state = saved["state"]
        envs = make(experiment.environment_in(), 1, seed=0)
        try:
            self.spec, self.encode, self.decode, self.clipped = envs.spec, envs.encode, envs.decode, envs.clipped
        finally:
            envs.close()
        self.follower = Follower(experiment.algorithm, self.spec, device)
        load_weights(self.follower.net, saved["weights"])
        algorithm = experiment.algorithm
        self._sees_reward = isinstance(algorithm, HasRewardInput) and algorithm.sees_reward
        self.reset()

    @property
    def steps(self) -> int:
        """The environment steps that the weights were trained for."""
        return int(self.state["steps"])

    @property
    def pulls(self) -> list[list[float]]:
        """A bandit's newest choices when the weights were saved, each as [arm, score]."""
        return self.state.get("pulls") or self.state.get("journal", {}).get("pulls") or []

    def reset(self) -> None:
        """Begin a new episode: call it whenever the environment was reset."""
        self._carry = first_carry(self.experiment.algorithm, self.follower.net, 1, self.pulls)
        self._first = True

    def act(self, observation: Any, reward: float | None = None, explore: bool = False) -> Any:
        """Choose an action for an observation, both as the environment itself shows and takes them.

        `reward` is what the environment gave for the last action. It may be left out where the network does not see it.
        """
        if reward is None and self._sees_reward and not self._first:
            raise SettingsError(
                f"{self.experiment.algorithm_name} also sees the reward of the last action: "
                "call act(observation, reward), and reset() when an episode begins"
            )
        earned = self.clipped(np.array([0.0 if self._first else reward or 0.0]))
        step = Step(self.encode(observation), earned, np.ones(1, np.float32), np.array([self._first]))
        device = self.follower.device
        # Halfway between the least and the most exploring of the actors, where they differ.
        rank = torch.full((1,), 0.5, device=device) if explore else None
        with torch.inference_mode():
            choice = self.experiment.algorithm.act(
                self.follower.net, Step(*(to_torch(part, device) for part in step)), self._carry, rank
            )
        self._carry, self._first = choice.carry, False
        return self.decode(choice.action.cpu().numpy())[0]

    def export(self, form: str, path: str | Path) -> Export:
        """Write it as a file that runs without Shoal, `onnx` or `torch`, and check that file."""
        from shoal.export import write

        return write(self, form, path)

    def __repr__(self) -> str:
        """What it is and where it comes from."""
        count = sum(parameter.numel() for parameter in self.follower.net.parameters())
        return (
            f"Policy({self.experiment.algorithm_name} for {self.experiment.environment.id}, "
            f"{count:,} parameters, trained for {self.steps:,} steps, from {self.path})"
        )


def load(run: str | Path, checkpoint: str | int = "best", device: str = "cpu") -> Policy:
    """Load the policy of a run; by default the one with the best evaluation."""
    from shoal.runs.checkpoint import find

    if Path(run).is_file():
        raise SettingsError(f"{run} is a file: give the folder of a run; settings are read by shoal.configure")
    folder = directory.locate(run)
    return Policy(load_of(folder), find(folder, str(checkpoint)), device)
