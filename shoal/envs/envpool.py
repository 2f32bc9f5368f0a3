"""EnvPool: MuJoCo's environments stepped together in C++, where it is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

import numpy as np

from shoal.core import doing
from shoal.core.errors import Fatal, nearest
from shoal.core.types import Array, ArraySpec, Spec, Step
from shoal.envs import spaces
from shoal.envs.clipping import Clip, clipped
from shoal.envs.vector import Episode, Tally, check_drawn, derive, infinite, opening

MUJOCO = "gymnasium.envs.mujoco"  # the package of the environments that both have


def installed() -> bool:
    """Whether EnvPool is there, without importing it."""
    return importlib.util.find_spec("envpool") is not None


def library() -> Any:
    """EnvPool, or an error that names the extra."""
    try:
        import envpool
    except ImportError as error:
        raise Fatal("environment.backend envpool needs a package: pip install 'shoal[envpool]'") from error
    return envpool


def is_mujoco(id: str) -> bool:
    """Whether an id is one of Gymnasium's MuJoCo environments."""
    import gymnasium

    spec = gymnasium.registry.get(id)
    return spec is not None and str(spec.entry_point).startswith(MUJOCO)


def knows(id: str) -> bool:
    """Whether an id is one of Gymnasium's MuJoCo environments that EnvPool has, too."""
    return is_mujoco(id) and id in library().list_all_envs()


def check(id: str) -> None:
    """Refuse an id that EnvPool does not have."""
    if not knows(id):
        known = [one for one in library().list_all_envs() if knows(one)]
        raise Fatal(f"environment.backend envpool: {id!r} is no MuJoCo environment that it has{nearest(id, known)}")


class Pool:
    """B environments that EnvPool steps together; its own way to open the next episode is Shoal's.

    An environment whose reward or observation is not finite is reported and opens its next episode. Its seeds are
    its own: the same seed gives other episodes than Gymnasium's environments have.
    """

    fps = 20.0

    def __init__(
        self,
        id: str,
        size: int,
        seed: int,
        max_faults: int,
        metrics: Mapping[str, str],
        limit: int | None = None,
        clip: Clip | None = None,
    ) -> None:
        """Make `size` environments; none of their episodes is longer than a limit, if there is one."""
        check(id)
        pool = library()
        usual = pool.make_spec(id).config.max_episode_steps
        self._cuts = limit is not None and limit < usual
        seeds = [derive(seeds) for seeds in np.random.SeedSequence(seed).spawn(size)]
        # One thread: the other cores belong to the other workers.
        options = {"num_envs": size, "num_threads": 1, "seed": seeds, "max_episode_steps": min(limit or usual, usual)}
        self._pool: Any = pool.make(id, env_type="gymnasium", **options)
        seen, self._write = spaces.observations(self._pool.observation_space)
        taken, self.decode = spaces.actions(self._pool.action_space)
        assert isinstance(seen, ArraySpec)
        self.spec, self.size = Spec(seen, taken), size
        self._id, self._label = id, f"{size} environments ({id})"
        self._max_faults, self._metrics, self._clip = max_faults, metrics, clip
        self._tally = Tally(size, metrics)
        self._over = np.zeros(size, np.bool_)  # the next step opens an episode
        self._row = np.zeros(size, np.int64)  # faults in a row
        self._reports: list[str] = []
        self.points: Array = np.zeros(size)

    def reset(self) -> Step:
        """Open an episode in every environment, leaving those under way."""
        now = doing.here()
        now.begin("the reset", self._label)
        seen, _ = self._pool.reset()
        now.end()
        for index in range(self.size):
            self._tally.forget(index)
        self._over, self.points = np.zeros(self.size, np.bool_), np.zeros(self.size)
        return opening(seen.astype(self.spec.observation.dtype), self.size)

    def step(self, action: Array) -> Step:
        """Take one action, of shape [B, A], in every environment."""
        chosen = self.decode(action)
        now = doing.here()
        now.begin("a step", self._label)
        seen, reward, terminated, truncated, info = self._pool.step(chosen)
        now.end()
        observation, first = seen.astype(self.spec.observation.dtype), self._over
        reward, over = reward.astype(np.float64), terminated | truncated
        self._tally.add(reward, ~first)
        if self._metrics:
            for index in np.flatnonzero(~first).tolist():
                self._tally.note(index, {key: values[index] for key, values in info.items()})
        problems = dict([*infinite("observation", observation), *infinite("reward", reward)])
        for index, problem in problems.items():
            self._fault(index, problem)
            observation[index] = self._pool.reset(np.array([index]))[0][0]
            reward[index], first[index], over[index] = 0.0, True, False
        discount = np.where(terminated & ~first, 0, 1)
        for index in np.flatnonzero(over).tolist():
            self._tally.finish(index, self._cuts and bool(truncated[index] & ~terminated[index]))
            self._row[index] = 0
        self._over, self.points = over, reward
        return Step(observation, self.clipped(reward), discount.astype(np.float32), first)

    def _fault(self, index: int, problem: str) -> None:
        """Report a fault; too many in a row end the run."""
        where = f"environment {index} of {self.size} ({self._id}, EnvPool)"
        report = f"{where} failed at step {self._tally.length(index)} of its episode: {problem}"
        self._tally.forget(index)
        self._row[index] += 1
        if self._row[index] > self._max_faults:
            raise Fatal(f"{self._row[index]} faults in a row, {self._max_faults} allowed; the last: {report}")
        self._reports.append(report)

    def episodes(self) -> list[Episode]:
        """Hand over the episodes that ended since the last call."""
        return self._tally.drain()

    def faults(self) -> list[str]:
        """Hand over the reports of faults since the last call."""
        reports, self._reports = self._reports, []
        return reports

    def render(self) -> Array:
        """Refuse: an environment that is drawn is Gymnasium's."""
        check_drawn(self._id, False, True)
        raise AssertionError

    def encode(self, observation: Any) -> Array:
        """Turn one observation into an array [1, ...]."""
        array = np.zeros((1, *self.spec.observation.shape), self.spec.observation.dtype)
        self._write(array, 0, observation)
        return array

    def clipped(self, points: Array) -> Array:
        """Turn rewards [B], as environments give them, into those of a step, which are clipped as the settings say."""
        return clipped(points, self._clip)

    def close(self) -> None:
        """Release the environments and their threads."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None
