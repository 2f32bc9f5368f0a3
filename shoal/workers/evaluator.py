"""Evaluating: the newest policy without exploration, over whole episodes."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from shoal.core.algorithm import Algorithm, HasChoices
from shoal.core.doing import FIRST, Seldom, span
from shoal.core.means import Means
from shoal.core.randomness import derive, seed_everything
from shoal.core.rights import calls
from shoal.core.tree import to_numpy, to_torch
from shoal.core.types import INTERRUPTED, Act, Step, Work
from shoal.envs import Envs, Episode, make
from shoal.workers.follower import Follower
from shoal.workers.graph import drawing
from shoal.workers.rollout import first_carry

if TYPE_CHECKING:
    from shoal.experiment import Experiment
    from shoal.services.checkpoints import Checkpoints
    from shoal.services.journal import Journal
    from shoal.services.parameters import Parameters

WIDEST = 32  # environments stepped together
PATIENCE = 200  # steps between questions whether the score is still wanted, and between turns of others


@calls(
    parameters=("status", "fetch"),
    journal=("last_evaluated", "stopping", "acted", "evaluated", "report", "pulls", "stage"),
    checkpoints=("save_best",),
)
def evaluate(experiment: Experiment, parameters: Parameters, journal: Journal, checkpoints: Checkpoints) -> Work:
    """Score the weights each time enough steps have passed, and the last ones; one unit of work is a part of a score.

    Under lockstep it is a whole one, so that a score has ended before the next checkpoint.
    """
    torch.set_num_threads(1)
    own = int(np.random.randint(2**31))
    due, final = journal.last_evaluated() + experiment.evaluation_interval, False
    envs: Envs | None = None
    stage = 0
    policy: Follower | None = None
    complaint = Seldom()
    try:
        while not final:
            status = parameters.status()
            if status is None or not (status["steps"] >= due or status["final"]):
                yield False
                continue
            if status["final"] and journal.stopping():
                return  # stopped on purpose: the last score stands
            if experiment.curriculum and (now := journal.stage()) != stage:
                close(envs)
                stage, envs = now, None
            if envs is None:  # only now: at the start others need the cores
                envs = open_envs(experiment, stage, derive(own, status["steps"]) if experiment.lockstep else own)
            policy = policy or Follower(experiment.algorithm, envs.spec, experiment.actor_device)
            policy.follow(parameters)
            if experiment.lockstep:  # a score depends on the weights only, not on the scores before it
                seed_everything(derive(own, policy.steps, "choices"))
            pulls = journal.pulls() if isinstance(experiment.algorithm, HasChoices) else []
            ended = yield from score(experiment, policy, envs, pulls, journal, complaint)
            if ended is None:
                return
            result = summarise(policy.steps, ended) | ({"stage": stage} if experiment.curriculum else {})
            journal.acted([], envs.faults())
            over = journal.evaluated(result)
            best = {"weights": to_numpy(policy.net.state_dict()), "state": {**result, "pulls": pulls}}
            if problem := checkpoints.save_best(best):
                journal.report(problem)
            if over:
                return
            due, final = policy.steps + experiment.evaluation_interval, policy.final
            if experiment.lockstep:
                close(envs)
                envs = None
            yield True
    finally:
        close(envs)


def score(
    experiment: Experiment,
    policy: Follower,
    envs: Envs,
    pulls: Sequence[list[float]],
    journal: Journal,
    complaint: Seldom,
) -> Generator[bool, None, list[Episode] | None]:
    """Play the episodes of a score; None: the run is interrupted."""
    ended: list[Episode] = []
    begun = time.monotonic()
    playing = play(experiment.algorithm, policy, envs, experiment.evaluation.episodes, pulls=pulls)
    with span("evaluate"):
        for instant, ended in enumerate(playing, 1):
            if instant % PATIENCE:
                continue
            if journal.stopping() == INTERRUPTED:
                return None
            if (taken := time.monotonic() - begun) > FIRST and complaint.due():
                journal.report(slow(experiment, taken, instant, len(ended)))
            if not experiment.lockstep:
                yield True
    return ended


def close(envs: Envs | None) -> None:
    """Close environments, if there are any."""
    if envs is not None:
        envs.close()


def open_envs(experiment: Experiment, stage: int, seed: int) -> Envs:
    """Environments for evaluation in a stage of the curriculum, with seeds of their own."""
    size, limit = min(experiment.evaluation.episodes, WIDEST), experiment.evaluation.max_steps
    with span("make"):
        return make(experiment.environment_in(stage), size, seed=seed, evaluation=True, limit=limit)


def slow(experiment: Experiment, seconds: float, steps: int, ended: int) -> str:
    """An explanation for a user who waits for a score."""
    limit = experiment.evaluation.max_steps
    cuts = "never cuts an episode" if limit is None else f"cuts an episode after {limit:,} steps"
    return (
        f"evaluator: this evaluation has taken {seconds:.0f} s and {steps:,} steps of each environment so far; "
        f"{ended} of {experiment.evaluation.episodes} episodes have ended; evaluation.max_steps {cuts}"
    )


def play(
    algorithm: Algorithm[Any],
    policy: Follower,
    envs: Envs,
    count: int,
    chosen: Callable[[Step, Any, Act], None] = lambda step, carry, choice: None,
    pulls: Sequence[list[float]] = (),
) -> Iterator[list[Episode]]:
    """Play `count` whole episodes, the same number in every environment but for the remainder.

    Yields those that ended so far, after every step; `chosen` is called with each step, the carry at it, and the
    choice; `pulls` are a bandit's so far. Taking the episodes that end first would favour short ones.
    """
    size = envs.size
    wanted = np.full(size, count // size) + (np.arange(size) < count % size)
    kept: list[Episode] = []
    envs.episodes()
    with span("reset"):
        step = envs.reset()
    carry = first_carry(algorithm, policy.net, size, pulls)
    yield kept
    while wanted.any():
        torch.set_num_threads(1)  # every time, since workers of one process share the number
        seen = Step(*(to_torch(part, policy.device) for part in step))
        with span("infer"), torch.inference_mode():
            with drawing(policy.device):
                choice = algorithm.act(policy.net, seen, carry, None)
            chosen(seen, carry, choice)
            action = choice.action.cpu().numpy()
        carry = choice.carry
        with span("step"):
            step = envs.step(action)
        for episode in envs.episodes():
            if wanted[episode.env]:
                wanted[episode.env] -= 1
                kept.append(episode)
        yield kept


def summarise(steps: int, episodes: list[Episode]) -> dict[str, Any]:
    """Mean and every score, with the metrics that the environment's settings ask for."""
    scores = [float(episode.score) for episode in episodes]
    length = float(np.mean([episode.length for episode in episodes]))
    metrics = Means()
    for episode in episodes:
        metrics.add(episode.metrics)
    return {
        "steps": steps,
        "mean": float(np.mean(scores)),
        "length": length,
        "scores": scores,
        "metrics": dict(sorted(metrics.take().items())),
        "cut": sum(episode.cut for episode in episodes),
    }
