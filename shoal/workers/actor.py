"""Acting: environments and a policy produce experience for a store."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from shoal import envs
from shoal.core.randomness import derive, seed_everything
from shoal.core.settings import at
from shoal.core.tree import to_numpy, to_torch
from shoal.core.types import Step, Work
from shoal.workers import packing
from shoal.workers.policy import Follower


def act(experiment: Any, index: int, period: int, store: Any, parameters: Any, journal: Any) -> Work:
    """Fill the store with experience of the newest policy; one unit of work is one put."""
    torch.set_num_threads(1)  # the other cores belong to the other workers
    own = int(np.random.randint(2**31))
    policy: Follower | None = None
    while True:
        worlds = envs.make(experiment.environment, experiment.envs, seed=derive(own, period))
        try:
            policy = policy or Follower(experiment.algorithm, worlds.spec, experiment.actor_device)
            if experiment.lockstep:  # a period depends on its number only, not on what came before
                seed_everything(derive(own, period, "choices"))
            yield from fill(experiment, index, worlds, policy, store, parameters, journal)
        finally:
            worlds.close()
        policy.follow(parameters)
        period = policy.period


def fill(
    experiment: Any, index: int, worlds: envs.Worlds, policy: Follower, store: Any, parameters: Any, journal: Any
) -> Work:
    """Act until a new period begins."""
    algorithm, size = experiment.algorithm, worlds.size
    # Each environment of each actor has its place between 0 and 1, from which exploration is derived.
    places = np.arange(index * size, (index + 1) * size) / max(experiment.actor_count * size - 1, 1)
    rank = torch.as_tensor(places, dtype=torch.float32, device=policy.device)
    packer = packing.make(algorithm.experience, size)
    chunk = packing.Chunk(experiment.chunk)
    step, carry, puts = worlds.reset(), algorithm.begin(policy.net, size), 0
    while policy.version < 0 and not policy.follow(parameters):
        yield False

    def over() -> bool:
        return bool(experiment.lockstep and parameters.status()["period"] != policy.period)

    while True:
        if (items := chunk.add(packer.observe(step))) is not None:
            priority = policy.judge(algorithm, items) if experiment.judged_by_actors else None
            while not store.put(items, priority):
                yield False
                if over():
                    return
            choices = algorithm.choices(carry) if hasattr(algorithm, "choices") else []
            journal.acted([list(episode) for episode in worlds.episodes()], worlds.faults(), choices)
            puts += 1
            yield True
            if puts % experiment.refresh == 0:
                while not over() and not policy.follow(parameters) and algorithm.max_lag == 0:
                    yield False
            if over():
                return
            algorithm = at(experiment.algorithm, policy.steps / experiment.steps)
        torch.set_num_threads(1)  # again, since workers of one process share the number
        with torch.inference_mode():
            choice = algorithm.act(policy.net, Step(*(to_torch(part, policy.device) for part in step)), carry, rank)
        carry, action = choice.carry, choice.action.cpu().numpy()
        packer.choose(action, to_numpy(choice.record), policy.version)
        step = worlds.step(action)
