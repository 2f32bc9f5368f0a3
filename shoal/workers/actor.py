"""Acting: environments and a policy produce experience for a store."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from shoal.core.algorithm import HasChoices
from shoal.core.doing import span
from shoal.core.randomness import derive, seed_everything
from shoal.core.rights import calls
from shoal.core.settings import at
from shoal.core.types import Array, Store, Work
from shoal.envs import Envs, make
from shoal.workers.follower import Follower
from shoal.workers.inference import RemoteActing, RemotePolicy
from shoal.workers.model import first_priorities
from shoal.workers.rollout import Rollout, Stream
from shoal.workers.sharding import stored

if TYPE_CHECKING:
    from shoal.experiment import Experiment
    from shoal.services.journal import Journal
    from shoal.services.parameters import Parameters
    from shoal.services.requests import Requests
    from shoal.workers.packing import Items


@calls(
    store=("put", "admit"),
    parameters=("fetch", "status"),
    journal=("acted", "pulls", "stage"),
    requests=("open", "ask", "answer", "newest"),
)
def act(
    experiment: Experiment,
    index: int,
    period: int,
    store: Store,
    parameters: Parameters,
    journal: Journal,
    requests: Requests | None = None,
) -> Work:
    """Fill the store with experience of the newest policy; one unit of work is one put.

    With `requests` the policy is an inference worker's, and the actor has no network.
    """
    torch.set_num_threads(1)  # the other cores belong to the other workers
    own = int(np.random.randint(2**31))
    policy: Follower | RemotePolicy | None = None if requests is None else RemotePolicy(requests)
    while True:
        stage = journal.stage() if experiment.curriculum else 0
        root = derive(own, "stage", stage) if stage else own
        with span("make"):
            groups = make_groups(experiment, stage, derive(root, period))
        try:
            policy = policy or Follower(experiment.algorithm, groups[0].spec, experiment.actor_device)
            if experiment.lockstep:  # a period depends on its number only, not on what came before
                seed_everything(derive(root, period, "choices"))
            while policy.version < 0 and not policy.follow(parameters):
                yield False
            pulls = journal.pulls if isinstance(experiment.algorithm, HasChoices) else list
            acting: Acting
            if isinstance(policy, RemotePolicy):
                streams = [Stream(experiment, index, envs, part, len(groups)) for part, envs in enumerate(groups)]
                seed = derive(root, period, "choices") if experiment.lockstep else int(np.random.randint(2**31))
                acting = RemoteActing(policy.requests, index, streams, seed, pulls)
            else:
                acting = LocalActing(experiment, index, groups[0], policy, pulls())
            yield from fill(experiment, index, stage, acting, policy, store, parameters, journal)
        finally:
            for envs in groups:
                envs.close()
        policy.follow(parameters)
        period = policy.period


def make_groups(experiment: Experiment, stage: int, seed: int) -> list[Envs]:
    """The environments of an actor, in as many groups as step in turns."""
    count, settings = experiment.env_groups, experiment.environment_in(stage)
    groups: list[Envs] = []
    try:
        for group in range(count):
            own = derive(seed, "group", group) if group else seed
            groups.append(make(settings, experiment.env_count // count, seed=own))
    except BaseException:
        for envs in groups:
            envs.close()
        raise
    return groups


class Acting(Protocol):
    """Environments under a policy, wherever its network is."""

    def collect(self) -> Generator[bool, None, Items]:
        """Act until there are items to send."""
        ...

    def priorities(self, items: Items) -> Generator[bool, None, Array]:
        """The first priorities of items."""
        ...

    def report(self, journal: Journal) -> None:
        """Report finished episodes, faults, and the algorithm's choices to the journal."""
        ...


class LocalActing:
    """Acting with a network of the actor's own."""

    def __init__(
        self, experiment: Experiment, index: int, envs: Envs, policy: Follower, pulls: Sequence[list[float]]
    ) -> None:
        """Begin an episode in every environment."""
        self.experiment, self.policy, self.algorithm = experiment, policy, experiment.algorithm
        self.rollout = Rollout(experiment, index, envs, policy.net, policy.device, pulls)

    def collect(self) -> Generator[bool, None, Items]:
        """Act until there are items to send."""
        yield from ()
        self.algorithm = at(self.experiment.algorithm, self.policy.steps, self.experiment.steps)
        while (items := self.rollout.act(self.algorithm, self.policy.version)) is None:
            pass
        return items

    def priorities(self, items: Items) -> Generator[bool, None, Array]:
        """The first priorities of items."""
        yield from ()
        with span("priorities"):
            return first_priorities(self.algorithm, self.policy.net, items, self.policy.device)

    def report(self, journal: Journal) -> None:
        """Report finished episodes, faults, and the algorithm's choices to the journal."""
        self.rollout.report(self.algorithm, journal)


def fill(
    experiment: Experiment,
    index: int,
    stage: int,
    acting: Acting,
    policy: Follower | RemotePolicy,
    store: Store,
    parameters: Parameters,
    journal: Journal,
) -> Work:
    """Act until a new period or another stage of the curriculum begins."""
    puts, sharded = 0, experiment.replay is not None and experiment.replay.shards > 1

    def over() -> bool:
        if experiment.curriculum and journal.stage() != stage:
            return True
        if not experiment.lockstep:
            return False
        status = parameters.status()
        return status is not None and status["period"] != policy.period

    while True:
        while experiment.max_lag is not None and not store.admit(index, policy.version, experiment.env_count):
            yield False
            if over():
                return
            policy.follow(parameters)
        items = yield from acting.collect()
        priority = (yield from acting.priorities(items)) if experiment.actor_priorities else None
        while not stored(store, items, priority, index, sharded):
            yield False
            if over():
                return
        acting.report(journal)
        puts += 1
        yield True
        if over():
            return
        if puts % experiment.refresh == 0:
            policy.follow(parameters)
