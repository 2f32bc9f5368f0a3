"""Acting: environments and a policy produce experience for a store."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from shoal import envs
from shoal.core.randomness import derive, seed_everything
from shoal.core.rights import calls
from shoal.core.settings import at
from shoal.core.types import Work
from shoal.workers.policy import Follower
from shoal.workers.stream import Stream


@calls(store=("put", "admit"), parameters=("fetch", "status"), journal=("acted",))
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
    algorithm, puts = experiment.algorithm, 0
    stream = Stream(experiment, index, worlds, policy.net, policy.device)
    while policy.version < 0 and not policy.follow(parameters):
        yield False

    def over() -> bool:
        return bool(experiment.lockstep and parameters.status()["period"] != policy.period)

    while True:
        while algorithm.max_lag is not None and not store.admit(index, policy.version, experiment.envs):
            yield False
            if over():
                return
            policy.follow(parameters)
        while (items := stream.act(algorithm, policy.version)) is None:
            pass
        priority = policy.judge(algorithm, items) if experiment.judged_by_actors else None
        while not store.put(items, priority, index):
            yield False
            if over():
                return
        stream.report(algorithm, journal)
        puts += 1
        yield True
        if over():
            return
        if puts % experiment.refresh == 0:
            policy.follow(parameters)
        algorithm = at(experiment.algorithm, policy.steps / experiment.steps)
