"""Acting: environments and a policy produce experience for a store."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from shoal.core.algorithm import HasChoices
from shoal.core.randomness import derive, seed_everything
from shoal.core.rights import calls
from shoal.core.settings import at
from shoal.core.types import Store, Work
from shoal.envs import Envs, make
from shoal.workers.follower import Follower
from shoal.workers.model import first_priorities
from shoal.workers.rollout import Rollout
from shoal.workers.sharding import stored

if TYPE_CHECKING:
    from shoal.experiment import Experiment
    from shoal.services.journal import Journal
    from shoal.services.parameters import Parameters


@calls(store=("put", "admit"), parameters=("fetch", "status"), journal=("acted", "pulls", "stage"))
def act(
    experiment: Experiment, index: int, period: int, store: Store, parameters: Parameters, journal: Journal
) -> Work:
    """Fill the store with experience of the newest policy; one unit of work is one put."""
    torch.set_num_threads(1)  # the other cores belong to the other workers
    own = int(np.random.randint(2**31))
    policy: Follower | None = None
    while True:
        stage = journal.stage() if experiment.curriculum else 0
        root = derive(own, "stage", stage) if stage else own
        envs = make(experiment.environment_in(stage), experiment.env_count, seed=derive(root, period))
        try:
            policy = policy or Follower(experiment.algorithm, envs.spec, experiment.actor_device)
            if experiment.lockstep:  # a period depends on its number only, not on what came before
                seed_everything(derive(root, period, "choices"))
            yield from fill(experiment, index, stage, envs, policy, store, parameters, journal)
        finally:
            envs.close()
        policy.follow(parameters)
        period = policy.period


def fill(
    experiment: Experiment,
    index: int,
    stage: int,
    envs: Envs,
    policy: Follower,
    store: Store,
    parameters: Parameters,
    journal: Journal,
) -> Work:
    """Act until a new period or another stage of the curriculum begins."""
    puts, sharded = 0, experiment.replay is not None and experiment.replay.shards > 1
    pulls = journal.pulls() if isinstance(experiment.algorithm, HasChoices) else ()
    rollout = Rollout(experiment, index, envs, policy.net, policy.device, pulls)
    while policy.version < 0 and not policy.follow(parameters):
        yield False

    def over() -> bool:
        if experiment.curriculum and journal.stage() != stage:
            return True
        if not experiment.lockstep:
            return False
        status = parameters.status()
        return status is not None and status["period"] != policy.period

    while True:
        algorithm = at(experiment.algorithm, policy.steps, experiment.steps)
        while experiment.max_lag is not None and not store.admit(index, policy.version, experiment.env_count):
            yield False
            if over():
                return
            policy.follow(parameters)
        while (items := rollout.act(algorithm, policy.version)) is None:
            pass
        priority = None
        if experiment.actor_priorities:
            priority = first_priorities(algorithm, policy.net, items, policy.device)
        while not stored(store, items, priority, index, sharded):
            yield False
            if over():
                return
        rollout.report(algorithm, journal)
        puts += 1
        yield True
        if over():
            return
        if puts % experiment.refresh == 0:
            policy.follow(parameters)
