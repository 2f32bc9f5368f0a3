"""A bandit that forgets: which arm to pull when what is best changes over time."""

from __future__ import annotations

from collections import deque

import numpy as np

from shoal.core.types import Array


class Bandit:
    """Sliding-window upper confidence bounds, with random pulls (arXiv:2003.13350, appendix D).

    Each arm is pulled once. After that, with a chance of ε a random one, else the one with the highest
    mean(a) + c · √(1 / n(a)) over the last pulls of the window; an arm that is not in the window comes first.
    """

    def __init__(self, arms: int, window: int, epsilon: float, bonus: float) -> None:
        """Begin without knowledge."""
        self.arms, self.epsilon, self.bonus = arms, epsilon, bonus
        self.pulls = 0
        self.history: deque[tuple[int, float]] = deque(maxlen=window)

    def choose(self) -> int:
        """The arm to pull next."""
        self.pulls += 1
        if self.pulls <= self.arms:
            return self.pulls - 1
        if np.random.random_sample() < self.epsilon:
            return int(np.random.randint(self.arms))
        return int(self.scores().argmax())

    def reward(self, arm: int, value: float) -> None:
        """Note the score of a pull of an arm, one's own or an earlier one's."""
        self.history.append((arm, value))
        self.pulls = max(self.pulls, len({pulled for pulled, _ in self.history}))

    def best(self) -> int:
        """The arm that earned most on average; before any pull the first."""
        counts, totals = self._sums()
        means = np.divide(totals, counts, out=np.full(self.arms, -np.inf), where=counts > 0)
        return int(means.argmax()) if counts.any() else 0

    def _sums(self) -> tuple[Array, Array]:
        """How often every arm was pulled within the window, and the sum of its scores."""
        counts, totals = np.zeros(self.arms), np.zeros(self.arms)
        for arm, value in self.history:
            counts[arm] += 1
            totals[arm] += value
        return counts, totals

    def scores(self) -> Array:
        """The upper confidence bound of every arm."""
        counts, totals = self._sums()
        with np.errstate(divide="ignore", invalid="ignore"):
            bounds = totals / counts + self.bonus * np.sqrt(1 / counts)
        return np.where(counts > 0, bounds, np.inf)
