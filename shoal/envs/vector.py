"""Stepping B single environments in one process, under Shoal's time convention and with care for faults."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from shoal.core import doing
from shoal.core.errors import Fatal, ShoalError
from shoal.core.tree import map_tree
from shoal.core.types import MASK, Array, Spec, Step
from shoal.envs import spaces
from shoal.envs.clipping import Clip, clipped

HEALTHY_STEPS = 100  # without a fault, after which the next fault begins a new row
USUAL_FPS = 30  # what Gymnasium's own recorder takes where an environment does not say


class Episode(NamedTuple):
    """The result of one finished episode."""

    score: float  # undiscounted and unclipped
    length: int  # actions taken
    metrics: dict[str, float]
    env: int  # the index of the environment it was played in
    cut: bool = False  # by a limit that is none of the environment's own


class Sums(NamedTuple):
    """What is kept of one metric during an episode."""

    total: float = 0.0
    times: int = 0
    last: float = 0.0


class Envs(Protocol):
    """B environments stepped together; the arrays of a step are new, and the caller's to keep.

    An episode ends with its true last observation and a discount of 0 (its own rules) or 1 (cut off). The
    action given there is ignored, and the step it leads to opens the next episode: reward 0, discount 1,
    first True.
    """

    @property
    def spec(self) -> Spec:
        """What one environment shows and takes."""
        ...

    @property
    def size(self) -> int:
        """The number of environments, B."""
        ...

    @property
    def fps(self) -> float:
        """Steps in a second of watching."""
        ...

    @property
    def points(self) -> Array:
        """The rewards [B] of the last step as the environments gave them, where a step holds them clipped."""
        ...

    def reset(self) -> Step:
        """Open an episode in every environment, leaving those under way."""
        ...

    def step(self, action: Array) -> Step:
        """Take one action, of shape [B] or [B, A], in every environment."""
        ...

    def episodes(self) -> list[Episode]:
        """Hand over the episodes that ended since the last call."""
        ...

    def faults(self) -> list[str]:
        """Hand over the reports of faults since the last call: one line each, then the traceback."""
        ...

    def render(self) -> Array:
        """Draw environment 0 as it stands: uint8 [H, W, 3]; only environments that were made with `render` can."""
        ...

    def encode(self, observation: Any) -> Any:
        """Turn one observation, as an environment shows it, into arrays [1, ...]."""
        ...

    def decode(self, action: Array) -> Any:
        """Turn actions [B] or [B, A] into one per environment, as it takes them."""
        ...

    def clipped(self, points: Array) -> Array:
        """Turn rewards [B], as environments give them, into those of a step."""
        ...

    def close(self) -> None:
        """Release everything; a second call does nothing."""
        ...


class Tally:
    """Scores, lengths and metrics of the episodes that B environments are in."""

    def __init__(self, size: int, metrics: Mapping[str, str]) -> None:
        self._score = np.zeros(size)  # float64: an episode may sum many small rewards
        self._length = np.zeros(size, np.int64)
        self._metrics = metrics
        self._values: list[dict[str, Sums]] = [{} for _ in range(size)]
        self._episodes: list[Episode] = []

    def add(self, reward: Array, played: Array) -> None:
        """Count rewards of shape [B], and one action where `played`."""
        self._score += reward
        self._length += played

    def note(self, index: int, info: Mapping[str, Any]) -> None:
        """Take the metrics out of one environment's info."""
        for key in self._metrics:
            if key in info:
                try:
                    value = float(info[key])
                except (TypeError, ValueError):
                    raise ShoalError(f"metric {key!r} needs a number, but info holds {info[key]!r}") from None
                before = self._values[index].get(key, Sums())
                self._values[index][key] = Sums(before.total + value, before.times + 1, value)

    def finish(self, index: int, cut: bool = False) -> None:
        """Close an environment's episode and keep its result."""
        metrics = {}
        for key, (total, times, last) in self._values[index].items():
            metrics[key] = {"sum": total, "average": total / times, "last": last}[self._metrics[key]]
        self._episodes.append(Episode(float(self._score[index]), self.length(index), metrics, index, cut))
        self.forget(index)

    def forget(self, index: int) -> None:
        """Drop what is known of an environment's episode."""
        self._score[index] = self._length[index] = 0
        self._values[index] = {}

    def length(self, index: int) -> int:
        """Actions taken in an environment's episode so far."""
        return int(self._length[index])

    def drain(self) -> list[Episode]:
        """Hand over the finished episodes."""
        episodes, self._episodes = self._episodes, []
        return episodes


class Vector:
    """B environments with Gymnasium's interface, stepped one after another.

    An environment that raises, or whose reward or observation is not finite, is reported, closed and
    recreated with a new seed. Its episode ends at the last good observation and is not counted: the step that failed
    opens the next one, so that nothing is learned from it.
    """

    def __init__(
        self,
        name: str,
        create: Callable[[], Any],
        size: int,
        seed: int,
        max_faults: int,
        metrics: Mapping[str, str],
        render: bool = False,
        limit: int | None = None,
        clip: Clip | None = None,
        stack: int = 1,
    ) -> None:
        """Make `size` environments; none of their episodes is longer than a limit, if there is one.

        An observation shows `stack` instants.
        """
        self.size, self._limit, self._clip = size, limit, clip
        self._labels = [f"environment {index} of {size} ({name})" for index in range(size)]
        self.environments: list[Any] = []  # None: closed after a fault, about to be recreated
        self._name, self._create, self._max_faults, self._metrics = name, create, max_faults, metrics
        self._drawn = render
        try:
            for label in self._labels:
                doing.here().begin("the making", label)
                self.environments.append(create())
            doing.here().end()
            seen, self._write = spaces.observations(self.environments[0].observation_space)
            taken, self.decode = spaces.actions(self.environments[0].action_space)
            spaces.check_mask(seen, taken)
        except Exception as error:
            self.close()
            if isinstance(error, ShoalError):
                raise
            raise Fatal(f"cannot create {name}: {type(error).__name__}: {error}") from error
        self.spec = Spec(replace(seen, stack=stack) if stack > 1 else seen, taken)
        self._metadata = getattr(self.environments[0], "metadata", None) or {}
        self._observation = map_tree(lambda leaf: np.zeros((size, *leaf.shape), leaf.dtype), seen)
        self._ended = [True] * size  # the next step opens an episode
        self._seeds = np.random.SeedSequence(seed).spawn(size)
        self._seed = [derive(seeds) for seeds in self._seeds]
        self._seeded = [False] * size  # later episodes use the environment's own generator
        self._opened = [False] * size  # one that never opened will not get better by trying again
        self._row = [0] * size  # faults in a row
        self._last_fault = [0] * size
        self._reports: list[str] = []
        self._tally = Tally(size, metrics)
        self._steps = 0
        self.points = np.zeros(size)

    @property
    def fps(self) -> float:
        """Steps in a second of watching."""
        return float(self._metadata.get("render_fps") or USUAL_FPS)

    def reset(self) -> Step:
        """Open an episode in every environment, leaving those under way."""
        observation = map_tree(np.empty_like, self._observation)
        for index in range(self.size):
            self._tally.forget(index)
            self._open(index, observation)
        self._observation, self._ended = observation, [False] * self.size
        self.points = np.zeros(self.size)
        return opening(observation, self.size)

    def step(self, action: Array) -> Step:
        """Take one action, of shape [B] or [B, A], in every environment."""
        chosen = self.decode(action)
        self._check_mask(action)
        observation = map_tree(np.empty_like, self._observation)
        reward, discount = np.zeros(self.size), np.ones(self.size, np.float32)
        opens, ended = self._ended, [False] * self.size
        problems: dict[int, str] = {}
        now = doing.here()
        self._steps += 1
        for index, environment in enumerate(self.environments):
            if opens[index]:
                self._open(index, observation)
                continue
            now.begin("a step", self._labels[index])
            try:
                seen, reward[index], terminated, truncated, info = environment.step(chosen[index])
                self._write(observation, index, seen)
                if self._metrics:
                    self._tally.note(index, info)
            except Exception:
                problems[index] = traceback.format_exc()
                continue
            if terminated:
                discount[index] = 0.0
            ended[index] = terminated or truncated
        now.end()
        for index, problem in [*infinite("observation", observation), *infinite("reward", reward)]:
            problems.setdefault(index, problem)
        first = np.array(opens)
        self._tally.add(reward, ~first)
        for index, problem in problems.items():
            self._fault(index, problem)
            self._open(index, observation)
            reward[index], discount[index], first[index], ended[index] = 0.0, 1.0, True, False
        for index in range(self.size):
            cut = self._limit is not None and not ended[index] and self._tally.length(index) >= self._limit
            if ended[index] or cut:
                self._tally.finish(index, cut)
                self._row[index], ended[index] = 0, True
        self._observation, self._ended, self.points = observation, ended, reward
        return Step(observation, self.clipped(reward), discount, first)

    def _check_mask(self, action: Array) -> None:
        if isinstance(self._observation, Mapping) and MASK in self._observation:
            playing = ~np.array(self._ended)
            spaces.check_allowed(action, self._observation[MASK], self.spec.action.choices, playing)

    def episodes(self) -> list[Episode]:
        """Hand over the episodes that ended since the last call."""
        return self._tally.drain()

    def faults(self) -> list[str]:
        """Hand over the reports of faults since the last call: one line each, then the traceback."""
        reports, self._reports = self._reports, []
        return reports

    def render(self) -> Array:
        """Draw environment 0 as it stands: uint8 [H, W, 3]."""
        from shoal.envs import gymnasium

        check_drawn(self._name, self._drawn, self._opened[0])
        return gymnasium.picture(self._name, self.environments[0])

    def encode(self, observation: Any) -> Any:
        """Turn one observation, as an environment shows it, into arrays [1, ...]."""
        arrays = map_tree(lambda leaf: np.zeros((1, *leaf.shape), leaf.dtype), self.spec.observation)
        self._write(arrays, 0, observation)
        return arrays

    def clipped(self, points: Array) -> Array:
        """Turn rewards [B], as environments give them, into those of a step, which are clipped as the settings say."""
        return clipped(points, self._clip)

    def close(self) -> None:
        """Close every environment."""
        while self.environments:
            self._release(self.environments.pop())

    def _open(self, index: int, observation: Any) -> None:
        """Open an episode, recreating the environment as often as it fails."""
        now = doing.here()
        now.begin("the reset", self._labels[index])
        while (problem := self._try_open(index, observation)) is not None:
            self._fault(index, problem)
        now.end()
        self._seeded[index] = self._opened[index] = True

    def _try_open(self, index: int, observation: Any) -> str | None:
        try:
            if self.environments[index] is None:
                self.environments[index] = self._create()
            seed = None if self._seeded[index] else self._seed[index]
            seen, _ = self.environments[index].reset(seed=seed)
            self._write(observation, index, seen)
        except Exception:
            return traceback.format_exc()
        row = map_tree(lambda leaf: leaf[index : index + 1], observation)
        return next((problem for _, problem in infinite("observation", row)), None)

    def _fault(self, index: int, problem: str) -> None:
        """Report a fault and close the environment; too many in a row end the run."""
        report = (
            f"environment {index} of {self.size} ({self._name}, seed {self._seed[index]}) failed at step "
            f"{self._tally.length(index)} of its episode, step {self._steps} in all: "
            f"{problem.strip().splitlines()[-1]}\n{problem}"
        )
        healthy = self._steps - self._last_fault[index] - 1
        self._row[index] = 1 if healthy >= HEALTHY_STEPS else self._row[index] + 1
        self._last_fault[index] = self._steps
        if not self._opened[index]:
            raise Fatal(f"no episode could be opened: {report}")
        if self._row[index] > self._max_faults:
            raise Fatal(f"{self._row[index]} faults in a row, {self._max_faults} allowed; the last: {report}")
        self._reports.append(report)
        self._tally.forget(index)
        self._release(self.environments[index])
        self.environments[index] = None
        self._seed[index], self._seeded[index] = derive(self._seeds[index]), False

    def _release(self, environment: Any) -> None:
        if environment is not None:
            with suppress(Exception):  # a broken one may fail to close as well, and must not keep others open
                environment.close()


def check_drawn(name: str, drawn: bool, opened: bool) -> None:
    """Refuse to draw environments that were made without `render`, or that show nothing yet."""
    if not drawn:
        raise Fatal(f"{name} cannot be rendered: it was created without `render=True`")
    if not opened:
        raise Fatal(f"{name} cannot be rendered before reset()")


def derive(seeds: np.random.SeedSequence) -> int:
    """Return the next seed of a sequence, small enough for every environment."""
    return int(seeds.spawn(1)[0].generate_state(1)[0] >> 1)


def opening(observation: Any, size: int) -> Step:
    """Return the step that opens an episode in every environment."""
    return Step(observation, np.zeros(size, np.float32), np.ones(size, np.float32), np.ones(size, np.bool_))


def infinite(name: str, tree: Any) -> Iterator[tuple[int, str]]:
    """Find rows of arrays [B, ...] that hold NaN or infinity, each with a sentence about it."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from infinite(f"{name}.{key}", value)
    elif tree.dtype.kind == "f" and not (finite := np.isfinite(tree)).all():
        for row in np.flatnonzero(~finite.reshape(len(tree), -1).all(axis=1)):
            yield int(row), f"{name} holds {np.extract(~finite[row], tree[row])[0]}"
