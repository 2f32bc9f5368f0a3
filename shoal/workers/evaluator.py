"""Evaluating: the newest policy without exploration, over whole episodes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from shoal import envs
from shoal.core.algorithm import Algorithm
from shoal.core.tree import to_torch
from shoal.core.types import INTERRUPTED, Step, Work
from shoal.workers.policy import Follower

WIDEST = 32  # environments stepped together
PATIENCE = 200  # steps between questions whether anyone still wants to know


def evaluate(experiment: Any, parameters: Any, journal: Any) -> Work:
    """Score the weights each time enough steps have passed, and the last ones; one unit of work is one score."""
    torch.set_num_threads(1)
    due, final = experiment.evaluation_interval, False
    worlds: Any = None
    try:
        while not final:
            status = parameters.status()
            if status is None or not (status["steps"] >= due or status["final"]):
                yield False
                continue
            if status["final"] and journal.stopping():
                return  # stopped on purpose: the last score stands
            if worlds is None:  # only now, since a start has better use for the cores
                worlds = open_worlds(experiment)
                policy = Follower(experiment.algorithm, worlds.spec, experiment.actor_device)
            policy.follow(parameters)
            episodes = play(
                experiment.algorithm,
                policy,
                worlds,
                experiment.evaluation.episodes,
                lambda: journal.stopping() == INTERRUPTED,
            )
            if episodes is None:
                return
            if journal.evaluated(summarise(policy.steps, episodes)):
                return
            due, final = policy.steps + experiment.evaluation_interval, policy.final
            yield True
    finally:
        if worlds is not None:
            worlds.close()


def open_worlds(experiment: Any) -> envs.Worlds:
    """Environments for evaluation, with seeds of their own."""
    size = min(experiment.evaluation.episodes, WIDEST)
    return envs.make(experiment.environment, size, seed=int(np.random.randint(2**31)), evaluation=True)


def play(
    algorithm: Algorithm, policy: Follower, worlds: Any, count: int, given_up: Callable[[], bool]
) -> list[envs.Episode] | None:
    """Play so many whole episodes, the same number in every environment but for the remainder; None: given up.

    Taking those that end first would favour short ones.
    """
    torch.set_num_threads(1)
    size = worlds.size
    wanted = np.full(size, count // size) + (np.arange(size) < count % size)
    kept: list[envs.Episode] = []
    worlds.episodes()
    step, carry = worlds.reset(), algorithm.begin(policy.net, size)
    for instant in itertools.count(1):
        if instant % PATIENCE == 0 and given_up():
            return None
        with torch.inference_mode():
            choice = algorithm.act(policy.net, Step(*(to_torch(part, policy.device) for part in step)), carry, None)
        carry = choice.carry
        step = worlds.step(choice.action.cpu().numpy())
        for episode in worlds.episodes():
            if wanted[episode.world]:
                wanted[episode.world] -= 1
                kept.append(episode)
        if not wanted.any():
            break
    return kept


def summarise(steps: int, episodes: list[envs.Episode]) -> dict[str, Any]:
    """Mean and every score, with the metrics that the environment's settings ask for."""
    scores = [float(episode.score) for episode in episodes]
    names = sorted({name for episode in episodes for name in episode.metrics})
    metrics = {
        name: float(np.mean([episode.metrics[name] for episode in episodes if name in episode.metrics]))
        for name in names
    }
    length = float(np.mean([episode.length for episode in episodes]))
    return {
        "steps": steps,
        "mean": float(np.mean(scores)),
        "length": length,
        "scores": scores,
        "metrics": metrics,
    }
