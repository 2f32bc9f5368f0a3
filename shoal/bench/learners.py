"""One learner beside several, and batches prepared ahead beside batches prepared in turn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from shoal.bench import training
from shoal.bench.measuring import Row
from shoal.core.machine import cores


def compare(
    configs: Sequence[str],
    counts: Sequence[int],
    ahead: Sequence[str],
    seconds: float,
    rounds: int,
    overrides: Mapping[str, Any],
    smallest: bool = False,
) -> Iterator[Row]:
    """Train with each number of learners and each `prefetch`, in turn and then backwards; a row for each of them.

    All have as many actors and the same joint batch.
    """
    actors = {"actors": max(cores(), *counts)}
    for config in configs:
        found: dict[tuple[int, str], list[Row]] = {(count, number): [] for count in counts for number in ahead}
        for turn in range(rounds):
            for count, number in [*found][:: -1 if turn % 2 else 1]:
                changes = {**actors, **overrides, "learners": count, "prefetch": number}
                found[count, number].append(training.measure(config, seconds, smallest, changes))
        first = [one["updates_per_s"] for one in next(iter(found.values()))]
        for (count, number), measured in found.items():
            ratios = [one["updates_per_s"] / other for one, other in zip(measured, first, strict=True)]
            yield {"config": config, "learners": count, "prefetch": number, **row(measured), **spread("x", ratios)}


def row(measured: Sequence[Row]) -> Row:
    """The medians of what was measured of one contestant, and the spread of its updates."""
    leaders = [next(each for each in one["workers"] if each["worker"] == "learner") for one in measured]
    pairs = [*zip(measured, leaders, strict=True)]
    figures = {
        "learner_cpu_ms": [1000 * (leader["cores"] or 0.0) / one["updates_per_s"] for one, leader in pairs],
        "waits": [1 - leader["working"] for leader in leaders],
        "preparing": [one["batch_ms"] * one["updates_per_s"] / 1000 for one in measured],
        "steps_per_s": [one["steps_per_s"] for one in measured],
        "return": [one["return"] for one in measured if one["return"] is not None],
    }
    rates = spread("updates_per_s", [one["updates_per_s"] for one in measured])
    worst = max(leaders, key=lambda leader: leader["waiting_for_it"])
    middles = {name: median(values) if values else None for name, values in figures.items()}
    return {**rates, **middles, "waits_most_for": worst["waits_most_for"]}


def spread(name: str, values: Sequence[float]) -> Row:
    """The median, the least and the most."""
    return {name: median(values), f"least_{name}": min(values), f"most_{name}": max(values)}
