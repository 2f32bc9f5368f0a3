"""Acting: environments and a policy produce experience for a store."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from shoal import envs
from shoal.core.tree import to_numpy, to_torch
from shoal.core.types import Step, Work
from shoal.workers import packing
from shoal.workers.policy import Follower


def act(experiment: Any, index: int, store: Any, parameters: Any, journal: Any) -> Work:
    """Fill the store with experience of the newest policy; one unit of work is one put."""
    torch.set_num_threads(1)  # the other cores belong to the other workers
    algorithm, size = experiment.algorithm, experiment.envs
    worlds = envs.make(experiment.environment, size, seed=int(np.random.randint(2**31)))
    try:
        policy = Follower(algorithm, worlds.spec, experiment.actor_device)
        # Each environment of each actor has its place between 0 and 1, from which exploration is derived.
        places = np.arange(index * size, (index + 1) * size) / max(experiment.actor_count * size - 1, 1)
        rank = torch.as_tensor(places, dtype=torch.float32, device=policy.device)
        packer = packing.make(algorithm.experience, size)
        step, carry = worlds.reset(), algorithm.begin(policy.net, size)
        while not policy.follow(parameters):
            yield False
        while True:
            if (items := packer.observe(step)) is not None:
                while not store.put(items, None):
                    yield False
                journal.acted([list(episode) for episode in worlds.episodes()], worlds.faults())
                yield True
                fresh = policy.follow(parameters)
                while algorithm.max_lag == 0 and not fresh:
                    yield False
                    fresh = policy.follow(parameters)
            torch.set_num_threads(1)  # again, since workers of one process share the number
            with torch.inference_mode():
                choice = algorithm.act(policy.net, Step(*(to_torch(part, policy.device) for part in step)), carry, rank)
            carry, action = choice.carry, choice.action.cpu().numpy()
            packer.choose(action, to_numpy(choice.record), policy.version)
            step = worlds.step(action)
    finally:
        worlds.close()
