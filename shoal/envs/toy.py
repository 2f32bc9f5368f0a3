"""Toy environments: small enough to be solved in seconds or followed by hand.

They have Gymnasium's interface but are plain classes, registered nowhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np

from shoal.core.types import Array

Opening: TypeAlias = tuple[Any, dict[str, Any]]
Outcome: TypeAlias = tuple[Any, float, bool, bool, dict[str, Any]]

METADATA = {"render_modes": ["rgb_array"], "render_fps": 5}  # slow enough to follow
BLOCK = 24  # pixels along the side of a drawn cell
LEVELS = 10  # cells in a bar


def blocks(cells: Array) -> Array:
    """Draw cells [rows, columns] between 0 and 1 as grey blocks: uint8 [H, W, 3]."""
    tile = np.full((BLOCK, BLOCK), 255.0)
    tile[0], tile[-1], tile[:, 0], tile[:, -1] = 0, 0, 0, 0  # a dark edge parts the cells
    grey = np.kron(0.15 + 0.85 * cells, tile).astype(np.uint8)
    return np.repeat(grey[..., None], 3, axis=2)


def bars(values: Array) -> Array:
    """Draw numbers between 0 and 1 as bars side by side, the last cell of each as bright as it is full."""
    return blocks(np.clip(LEVELS * np.asarray(values) - np.arange(LEVELS)[::-1, None], 0, 1))


class Catch:
    """Move a paddle under a falling ball: +1 for catching it, -1 for missing it.

    The board and its rules are those of bsuite, arXiv:1908.03568; with `pixels` it is an image of `pixels` × `pixels`.
    """

    metadata = METADATA

    def __init__(self, rows: int = 10, columns: int = 5, pixels: int = 0) -> None:
        from gymnasium import spaces

        shape, picture = (rows * columns,), (1, pixels, pixels)
        plain, painted = spaces.Box(0.0, 1.0, shape, np.float32), spaces.Box(0, 255, picture, np.uint8)
        self.observation_space = painted if pixels else plain
        self._pixels = pixels
        self.action_space = spaces.Discrete(3)  # left, stay, right
        self._rows, self._columns = rows, columns
        self._random = np.random.default_rng()

    def reset(self, *, seed: int | None = None, options: Any = None) -> Opening:
        """Drop a new ball."""
        if seed is not None:
            self._random = np.random.default_rng(seed)
        self._ball = [0, int(self._random.integers(self._columns))]
        self._paddle = self._columns // 2
        return self._board(), {}

    def step(self, action: int) -> Outcome:
        """Move the paddle and let the ball fall by one row."""
        self._paddle = min(max(self._paddle + action - 1, 0), self._columns - 1)
        self._ball[0] += 1
        landed = self._ball[0] == self._rows - 1
        reward = (1.0 if self._ball[1] == self._paddle else -1.0) if landed else 0.0
        return self._board(), reward, landed, False, {}

    def render(self) -> Array:
        """Draw the board, with the paddle a little darker than the ball."""
        cells = np.zeros((self._rows, self._columns))
        cells[-1, self._paddle] = 0.6
        cells[self._ball[0], self._ball[1]] = 1.0
        return blocks(cells)

    def close(self) -> None:
        """Nothing to release."""

    def _board(self) -> Array:
        board = np.zeros((self._rows, self._columns), np.float32)
        board[self._ball[0], self._ball[1]] = 1.0
        board[-1, self._paddle] = 1.0
        if not self._pixels:
            return board.ravel()
        row, column = (np.arange(self._pixels) * cells // self._pixels for cells in board.shape)
        return (255 * board[row][:, column]).astype(np.uint8)[None]


class Identity:
    """Name the state that is shown: +1 each time it is right."""

    metadata = METADATA

    def __init__(self, states: int = 4, length: int = 10) -> None:
        from gymnasium import spaces

        self.observation_space = spaces.Discrete(states)
        self.action_space = spaces.Discrete(states)
        self._states, self._length = states, length
        self._random = np.random.default_rng()

    def reset(self, *, seed: int | None = None, options: Any = None) -> Opening:
        """Draw a first state."""
        if seed is not None:
            self._random = np.random.default_rng(seed)
        self._count = 0
        self._state = self._random.integers(self._states)
        return self._state, {}

    def step(self, action: int) -> Outcome:
        """Judge the action and draw the next state."""
        reward = float(action == self._state)
        self._count += 1
        self._state = self._random.integers(self._states)
        return self._state, reward, self._count == self._length, False, {}

    def render(self) -> Array:
        """Draw the state as the one full bar."""
        return bars(np.arange(self._states) == self._state)

    def close(self) -> None:
        """Nothing to release."""


class Target:
    """Name the numbers that are shown: minus the squared distance each time."""

    metadata = METADATA

    def __init__(self, size: int = 1, length: int = 10) -> None:
        from gymnasium import spaces

        self.observation_space = spaces.Box(-1.0, 1.0, (size,), np.float32)
        self.action_space = spaces.Box(-1.0, 1.0, (size,), np.float32)
        self._size, self._length = size, length
        self._random = np.random.default_rng()

    def reset(self, *, seed: int | None = None, options: Any = None) -> Opening:
        """Draw the first numbers."""
        if seed is not None:
            self._random = np.random.default_rng(seed)
        self._count = 0
        self._target = self._draw()
        return self._target, {}

    def step(self, action: Array) -> Outcome:
        """Judge the action and draw the next numbers."""
        reward = -float(np.square(action - self._target).sum())
        self._count += 1
        self._target = self._draw()
        return self._target, reward, self._count == self._length, False, {}

    def render(self) -> Array:
        """Draw the numbers as bars; half full is zero."""
        return bars((self._target + 1) / 2)

    def close(self) -> None:
        """Nothing to release."""

    def _draw(self) -> Array:
        return self._random.uniform(-1.0, 1.0, self._size).astype(np.float32)


class Counting:
    """Show integers that say when and where a step was: proof that time is aligned.

    An observation is [actions taken in this episode, episode, a number of this environment's own, last
    action or -1]; the reward is the number of actions taken, so the action chosen at count c earns c + 1.
    """

    metadata = METADATA

    def __init__(
        self,
        length: int = 5,
        ending: Literal["termination", "truncation"] = "termination",
        actions: int = 4,
    ) -> None:
        from gymnasium import spaces

        if ending not in ("termination", "truncation"):
            raise ValueError(f"ending must be 'termination' or 'truncation', not {ending!r}")
        self.observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float32)
        self.action_space = spaces.Discrete(actions)
        self._length, self._ending, self._actions = length, ending, actions
        self._episode, self._own = -1, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Opening:
        """Count from zero."""
        if seed is not None:  # float32 holds whole numbers up to 2²⁴
            self._own = int(np.random.default_rng(seed).integers(2**24))
        self._episode += 1
        self._count = 0
        return self._show(-1), {}

    def step(self, action: int) -> Outcome:
        """Count one further."""
        self._count += 1
        ended = self._count == self._length
        terminated = ended and self._ending == "termination"
        return self._show(action), float(self._count), terminated, ended and not terminated, {}

    def render(self) -> Array:
        """Draw the observation as bars, of which the episode's fills up again every tenth."""
        count, episode, own, action = self._seen
        return bars(
            np.array([count / self._length, episode % LEVELS / LEVELS, own / 2**24, (action + 1) / self._actions])
        )

    def close(self) -> None:
        """Nothing to release."""

    def _show(self, action: int) -> Array:
        self._seen = np.array([self._count, self._episode, self._own, action], np.float32)
        return self._seen


class Memory:
    """Recall, after a blank time, a cue that was shown at first: +1 for it, -1 for any other.

    An observation is [one-hot cue or zeros, share of the time that has passed]. The cue stands in the first
    observation only; `length` blank ones follow, and the action chosen at the last of them is judged.
    """

    metadata = METADATA

    def __init__(self, cues: int = 2, length: int = 8) -> None:
        from gymnasium import spaces

        self.observation_space = spaces.Box(0.0, 1.0, (cues + 1,), np.float32)
        self.action_space = spaces.Discrete(cues)
        self._cues, self._length = cues, length
        self._random = np.random.default_rng()

    def reset(self, *, seed: int | None = None, options: Any = None) -> Opening:
        """Show a cue."""
        if seed is not None:
            self._random = np.random.default_rng(seed)
        self._count = 0
        self._cue = int(self._random.integers(self._cues))
        self._seen = self._blank()
        self._seen[self._cue] = 1.0
        return self._seen, {}

    def step(self, action: int) -> Outcome:
        """Let time pass, and judge the action at its end."""
        judged = self._count == self._length
        reward = (1.0 if action == self._cue else -1.0) if judged else 0.0
        self._count = min(self._count + 1, self._length)
        self._seen = self._blank()
        return self._seen, reward, judged, False, {}

    def render(self) -> Array:
        """Draw the observation as bars."""
        return bars(self._seen)

    def close(self) -> None:
        """Nothing to release."""

    def _blank(self) -> Array:
        observation = np.zeros(self._cues + 1, np.float32)
        observation[-1] = self._count / self._length
        return observation


class DeepSea:
    """Dive to the far corner of a square, where each step towards it costs a little: +1 for the treasure there.

    The rules are those of bsuite, arXiv:1908.03568: which of two actions leads right differs from cell to cell, a step
    to the right costs 0.01 / size, and one wrong step forfeits the treasure. A random diver finds it once in 2^size.
    """

    metadata = METADATA

    def __init__(self, size: int = 10, layout: int = 0) -> None:
        from gymnasium import spaces

        self.observation_space = spaces.Box(0.0, 1.0, (size * size,), np.float32)
        self.action_space = spaces.Discrete(2)
        self._size = size
        self._right = np.random.default_rng(layout).integers(0, 2, (size, size))

    def reset(self, *, seed: int | None = None, options: Any = None) -> Opening:
        """Begin at the surface, on the left."""
        self._row = self._column = 0
        return self._board(), {}

    def step(self, action: int) -> Outcome:
        """Sink by one row, to the left or to the right."""
        reward = 0.0
        if action == self._right[self._row, self._column]:
            found = self._row == self._column == self._size - 1
            reward = float(found) - 0.01 / self._size
            self._column = min(self._column + 1, self._size - 1)
        else:
            self._column = max(self._column - 1, 0)
        self._row += 1
        return self._board(), reward, self._row == self._size, False, {}

    def render(self) -> Array:
        """Draw the square."""
        return blocks(self._board().reshape(self._size, self._size))

    def close(self) -> None:
        """Nothing to release."""

    def _board(self) -> Array:
        board = np.zeros((self._size, self._size), np.float32)
        if self._row < self._size:
            board[self._row, self._column] = 1.0
        return board.ravel()


class Chain:
    """Walk along a chain: a little for each step spent at its near end, +1 for each at its far end.

    The rewards, the start beside the near end and the length of an episode, size + 9 steps, are those of
    arXiv:1602.04621, section 5.1. It is harder here: which of two actions leads onward differs from cell to cell, and
    the other leads all the way back, so that chance alone arrives once in 2^size.
    """

    metadata = METADATA

    def __init__(self, size: int = 20, layout: int = 0) -> None:
        from gymnasium import spaces

        self.observation_space = spaces.Box(0.0, 1.0, (size,), np.float32)
        self.action_space = spaces.Discrete(2)
        self._size = size
        self._onward = np.random.default_rng(layout).integers(0, 2, size)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Opening:
        """Begin beside the near end."""
        self._cell, self._count = 1, 0
        return self._show(), {}

    def step(self, action: int) -> Outcome:
        """Go on or back."""
        self._cell = min(self._cell + 1, self._size - 1) if action == self._onward[self._cell] else 0
        self._count += 1
        reward = {0: 0.001, self._size - 1: 1.0}.get(self._cell, 0.0)
        return self._show(), reward, self._count == self._size + 9, False, {}

    def render(self) -> Array:
        """Draw the chain."""
        return blocks(self._show()[None])

    def close(self) -> None:
        """Nothing to release."""

    def _show(self) -> Array:
        shown = np.zeros(self._size, np.float32)
        shown[self._cell] = 1.0
        return shown


class Cues:
    """Answer each cue with the action that a task assigns to it: an equal share of 1 for each right answer.

    An observation is [one-hot task, one-hot cue]. Which action belongs to which cue is drawn for each task from the
    number `layout`, so that one task says nothing about another. An episode is one round of all cues in random order.
    """

    metadata = METADATA

    def __init__(self, tasks: int = 3, cues: int = 12, actions: int = 4, task: int = 0, layout: int = 0) -> None:
        from gymnasium import spaces

        self.observation_space = spaces.Box(0.0, 1.0, (tasks + cues,), np.float32)
        self.action_space = spaces.Discrete(actions)
        self._tasks, self._cues, self._task = tasks, cues, task
        self._answers = np.random.default_rng(layout).integers(0, actions, (tasks, cues))[task]
        self._random = np.random.default_rng()

    def reset(self, *, seed: int | None = None, options: Any = None) -> Opening:
        """Shuffle the cues, and show the first."""
        if seed is not None:
            self._random = np.random.default_rng(seed)
        self._order, self._count = self._random.permutation(self._cues), 0
        return self._seen(), {}

    def step(self, action: int) -> Outcome:
        """Judge the answer, and show the next cue; at the end the last one stays."""
        right = int(action) == self._answers[self._order[self._count]]
        over = self._count == self._cues - 1
        self._count += not over
        return self._seen(), float(right) / self._cues, over, False, {}

    def _seen(self) -> Array:
        seen = np.zeros(self._tasks + self._cues, np.float32)
        seen[self._task], seen[self._tasks + self._order[self._count]] = 1.0, 1.0
        return seen

    def render(self) -> Array:
        """Draw the observation as a row of cells."""
        return blocks(self._seen()[None])

    def close(self) -> None:
        """Nothing to release."""


class Still:
    """Always show the same: no environment costs less, so that what a run can do is all its own.

    `shape` makes it an image, such as [4, 84, 84]; with `seconds` a step takes that long, without using a core.
    """

    metadata = METADATA

    def __init__(self, shape: Sequence[int] = (), length: int = 1000, seconds: float = 0.0) -> None:
        from gymnasium import spaces

        self._seconds = seconds
        image, plain = spaces.Box(0, 255, tuple(shape), np.uint8), spaces.Box(0.0, 1.0, (4,), np.float32)
        self.observation_space = image if shape else plain
        self.action_space = spaces.Discrete(2)
        self._seen, self._left, self._length = np.zeros_like(self.observation_space.low), length, length

    def reset(self, *, seed: int | None = None, options: Any = None) -> Opening:
        """Begin an episode, which is like all others."""
        self._left = self._length
        return self._seen, {}

    def step(self, action: int) -> Outcome:
        """Count the step."""
        if self._seconds:
            time.sleep(self._seconds)
        self._left -= 1
        return self._seen, 0.0, False, self._left == 0, {}

    def render(self) -> Array:
        """Draw how much of the episode is left."""
        return bars(np.array([self._left / self._length]))

    def close(self) -> None:
        """Nothing to release."""


ENVS: dict[str, Callable[..., Any]] = {
    "Catch": Catch,
    "Identity": Identity,
    "Target": Target,
    "Counting": Counting,
    "Memory": Memory,
    "DeepSea": DeepSea,
    "Chain": Chain,
    "Cues": Cues,
    "Still": Still,
}
TOYS: dict[str, str] = {name: str(env.__doc__).splitlines()[0] for name, env in ENVS.items()}
