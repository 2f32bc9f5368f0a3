"""What suits a machine: actors, environments and who steps them, where a setting is `auto`, before a run begins."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from typing import Any

import numpy as np

from shoal import envs
from shoal.core.errors import SettingsError
from shoal.envs.envpool import is_mujoco
from shoal.experiment import Experiment, validate
from shoal.workers.follower import Follower
from shoal.workers.rollout import Rollout

log = logging.getLogger("shoal")
SIZES = (4, 8, 16, 32, 64)  # fewer would see too little at a time
SECONDS = 0.1  # for which each number of environments is tried
GAIN = 1.2  # how much faster twice as many environments must make an actor
PATIENCE = 30.0  # seconds after which an environment that does not answer is left to the run, which says so
UPDATES = 200  # the fewest batches in a run, where a batch grows with the number of environments
LAG = 16  # the most batches in the rollouts that all actors have begun, where it does not


def sized(experiment: Experiment) -> Experiment:
    """The experiment with numbers of actors and environments, and a backend of these, instead of `auto`."""
    experiment = with_backend(experiment)
    if "auto" not in (experiment.actors, experiment.envs):
        return experiment
    tree = experiment.model_dump(mode="json") | {"actors": experiment.actor_count}
    sizes = [experiment.env_count]
    if experiment.envs == "auto" and not experiment.lockstep:  # lockstep repeats a run, whatever the machine's mood
        allowed, highest = [size for size in (1, 2, *SIZES) if fits(tree, size)], most(experiment)
        few = [size for size in allowed if size <= SIZES[0]]
        sizes = [size for size in allowed if SIZES[0] <= size <= highest] or few[-1:] or sizes
    speeds = tried(experiment, sizes) if len(sizes) > 1 else {}
    size = best(speeds) if speeds else min(sizes, key=lambda size: abs(size - experiment.env_count))
    log.info("auto: actors=%d envs=%d%s", experiment.actor_count, size,
             "".join(f"; an actor with {size}: {speed:,.0f} steps/s" for size, speed in speeds.items()))  # fmt: skip
    return validate(tree | {"envs": size})


def with_backend(experiment: Experiment) -> Experiment:
    """The experiment with the name of who steps its environments, so that it is resumed with the same."""
    environment = experiment.environment
    if environment.backend != "auto" or not is_mujoco(environment.id):
        return experiment
    backend = envs.chosen(environment)
    log.info("auto: environment.backend=%s", backend)
    tree = experiment.model_dump(mode="json")
    return validate(tree | {"environment": tree["environment"] | {"backend": backend}})


def most(experiment: Experiment) -> int:
    """The most environments per actor with which a run has batches enough, and learns from fresh experience."""
    if experiment.replay or experiment.shared:
        return SIZES[-1]
    if experiment.algorithm.batch:
        return max(LAG * experiment.algorithm.batch // experiment.actor_count, 1)
    return max(experiment.steps // (UPDATES * experiment.algorithm.experience.length * experiment.actor_count), 1)


def fits(tree: dict[str, Any], size: int) -> bool:
    """Whether the other settings allow this number of environments."""
    try:
        validate(tree | {"envs": size})
    except SettingsError:
        return False
    return True


def best(speeds: dict[int, float]) -> int:
    """The number of environments from which on more make an actor little faster."""
    sizes = [*speeds]
    for size, more in itertools.pairwise(sizes):
        if speeds[more] < GAIN * speeds[size]:
            return size
    return sizes[-1]


def tried(experiment: Experiment, sizes: list[int]) -> dict[int, float]:
    """Steps per second of an actor for each number of environments, up to the first that gains little."""
    speeds: dict[int, float] = {}
    problem: list[Exception] = []

    def work() -> None:
        try:
            for size in sizes:
                speeds[size] = speed(experiment, size)
                if best(speeds) != size:
                    return
        except Exception as error:  # the actors meet it too, and say it in full
            problem.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    if thread.is_alive() or problem:
        log.warning("auto: the environment could not be tried: %s", problem[0] if problem else "it does not answer")
        return {}
    return speeds


def speed(experiment: Experiment, size: int) -> float:
    """Steps per second of an actor with this number of environments."""
    vector = envs.make(experiment.environment, size, seed=experiment.seed)
    try:
        policy = Follower(experiment.algorithm, vector.spec, experiment.actor_device)
        rollout = Rollout(experiment, 0, vector, policy.net, policy.device)
        moments = [time.perf_counter()]
        while moments[-1] - moments[0] < SECONDS or len(moments) < 5:
            rollout.act(experiment.algorithm, 0)
            moments.append(time.perf_counter())
        # Not the mean: others may be using the machine, and the first are slow.
        return size / float(np.quantile(np.diff(moments), 0.25))
    finally:
        vector.close()
