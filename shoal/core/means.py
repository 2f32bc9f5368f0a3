"""Running means of numbers by name."""

from __future__ import annotations

from collections.abc import Mapping


class Means:
    """The mean of each number that was added under its name since the means were last taken."""

    def __init__(self) -> None:
        """Begin with none."""
        self._sums: dict[str, tuple[float, int]] = {}

    def __bool__(self) -> bool:
        """Whether there is any."""
        return bool(self._sums)

    def add(self, numbers: Mapping[str, float]) -> None:
        """Add one number to each of these means."""
        for name, value in numbers.items():
            total, count = self._sums.get(name, (0.0, 0))
            self._sums[name] = total + value, count + 1

    def take(self) -> dict[str, float]:
        """Return the means, and begin again."""
        means = {name: total / count for name, (total, count) in self._sums.items()}
        self._sums.clear()
        return means
