"""A bandit that forgets: which arm to pull when what is best changes over time."""

from __future__ import annotations

from collections import deque

import numpy as np


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
        """Note the score of a pull of an arm."""
        self.history.append((arm, value))

    def scores(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """The upper confidence bound of every arm."""
        counts, totals = np.zeros(self.arms), np.zeros(self.arms)
        for arm, value in self.history:
            counts[arm] += 1
            totals[arm] += value
        with np.errstate(divide="ignore", invalid="ignore"):
            bounds = totals / counts + self.bonus * np.sqrt(1 / counts)
        return np.where(counts > 0, bounds, np.inf)
