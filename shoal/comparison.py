"""Runs compared with the care that few seeds ask for: Agarwal et al. 2021, arXiv:2108.13264."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from shoal.core.errors import SettingsError, nearest
from shoal.core.types import INTERRUPTED, Array
from shoal.display.plots import Estimate, estimates
from shoal.display.statistics import improvement, interquartile_mean, mean, stratified
from shoal.run import Picture, Run, grouped
from shoal.runs import metrics

log = logging.getLogger("shoal")
MEASURES: dict[str, Callable[[Array], Array]] = {"IQM": interquartile_mean, "mean": mean}
KINDS = ("final", "best")  # evaluations of a run
Scores = dict[str, dict[str, Array]]  # group → environment → scores [runs]


@dataclass
class Comparison:
    """Measures of each group, and how likely each beats the others."""

    scores: list[dict[str, Any]] = field(default_factory=list)
    pairs: list[dict[str, Any]] = field(default_factory=list)
    panels: dict[str, dict[str, Estimate]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def plot(self, path: str | Path) -> Picture:
        """Draw every measure with its interval."""
        return Picture(estimates(self.panels, path, "evaluation returns, with 95 % intervals"))


def compared(
    runs: Sequence[Run], low: Sequence[str] = (), high: Sequence[str] = (), normalise: bool = False
) -> Comparison:
    """Compare groups of runs that differ only in their seed; over several environments if scores are normalised."""
    check(runs)
    environments = [*dict.fromkeys(run.environment for run in runs)]
    bounds = _bounds(low, high, environments)
    if bounds and normalise:
        raise SettingsError("give --low and --high, or --normalise: not both")
    across = len(environments) > 1
    groups = grouped(runs, across)
    result = Comparison()
    for kind in KINDS:
        scores = {label: _scores(group, kind) for label, group in groups.items()}
        scores = _normalised(scores, bounds or (_extremes(scores) if normalise else {}))
        whole = not across or bool(bounds) or normalise
        _measure(result, kind, scores if whole else _apart(scores))
        _pair(result, kind, scores)
    if across and not (bounds or normalise):
        result.notes.append(
            "returns of several environments have no common scale, so each stands alone; to measure over all of them, "
            "give --low and --high, or --normalise"
        )
    for label, group in groups.items():
        if len(group) < 2 * len({run.environment for run in group}):
            result.notes.append(f"{label}: one seed is no sample: no interval can be had; train more seeds")
    return result


def check(runs: Sequence[Run]) -> None:
    """Refuse a run that is given twice or has no score; mention those that have not ended."""
    seen: set[Path] = set()
    for run in runs:
        place = run.directory.resolve()
        if place in seen:
            raise SettingsError(f"{run.directory} is given twice: a run counts once")
        seen.add(place)
        if run.summary.get("stopped_by", INTERRUPTED) == INTERRUPTED:
            log.warning("%s has not ended: its newest evaluation counts as its final one", run.directory)


def _scores(group: Sequence[Run], kind: str) -> dict[str, Array]:
    """Environment → scores [runs] of a group."""
    found: dict[str, list[float]] = {}
    for run in group:
        means = [*metrics.evaluations(run.directory).values()]
        if not means or not all(map(math.isfinite, means)):
            raise SettingsError(f"{run.directory} has no evaluation to compare, or one that is not a finite number")
        found.setdefault(run.environment, []).append(means[-1] if kind == "final" else max(means))
    if len({len(values) for values in found.values()}) > 1:
        counts = ", ".join(f"{len(values)} on {name}" for name, values in found.items())
        raise SettingsError(f"{group[0].title}: as many runs on each environment are needed, not {counts}")
    return {name: np.array(values) for name, values in found.items()}


def _bounds(low: Sequence[str], high: Sequence[str], known: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Environment → the scores that become 0 and 1; empty where none are given."""
    if not (low or high):
        return {}
    lows, highs = _numbers("--low", low, known), _numbers("--high", high, known)
    for name in known:
        if name not in lows or name not in highs:
            side = "--low" if name not in lows else "--high"
            raise SettingsError(f"{side} is missing for {name}: give it as {side} {name}=NUMBER, or one for all")
        if lows[name] >= highs[name]:
            raise SettingsError(f"{name}: --low {lows[name]:g} must be below --high {highs[name]:g}")
    return {name: (lows[name], highs[name]) for name in known}


def _numbers(option: str, words: Sequence[str], known: Sequence[str]) -> dict[str, float]:
    """Read NUMBER, for every environment, and ENVIRONMENT=NUMBER."""
    found: dict[str, float] = {}
    for word in sorted(words, key=lambda word: "=" in word):
        name, _, text = word.rpartition("=")
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise SettingsError(f"{option} {word}: give a number, or ENVIRONMENT=NUMBER")
        if name and name not in known:
            raise SettingsError(f"{option} {word}: no run is on {name!r}, but {', '.join(known)}{nearest(name, known)}")
        found |= dict.fromkeys([name] if name else known, value)
    return found


def _extremes(scores: Scores) -> dict[str, tuple[float, float]]:
    """Environment → the lowest and the highest score that any run reached there."""
    found: dict[str, tuple[float, float]] = {}
    for name in dict.fromkeys(name for group in scores.values() for name in group):
        there = np.concatenate([group[name] for group in scores.values() if name in group])
        found[name] = float(there.min()), float(there.max())
        if found[name][0] == found[name][1]:
            raise SettingsError(f"--normalise: all scores on {name} are {found[name][0]:g}: give --low and --high")
    return found


def _normalised(scores: Scores, bounds: Mapping[str, tuple[float, float]]) -> Scores:
    if not bounds:
        return scores
    return {
        label: {name: (values - low) / (high - low) for name, values in group.items() for low, high in [bounds[name]]}
        for label, group in scores.items()
    }


def _apart(scores: Scores) -> Scores:
    """Each environment of a group as a group."""
    return {f"{label} on {name}": {name: values} for label, group in scores.items() for name, values in group.items()}


def _measure(result: Comparison, kind: str, scores: Scores) -> None:
    """Add a row of each group's measures, and their panels."""
    for label, group in scores.items():
        matrix = np.stack([*group.values()], axis=1)  # [runs, tasks]
        row: dict[str, Any] = {"group": label, "evaluation": kind, "runs": matrix.size}
        for name, measure in MEASURES.items():
            found = _estimate(measure, matrix)
            row |= {name: found[0], f"{name} low": found[1], f"{name} high": found[2]}
            title = f"{'interquartile mean' if name == 'IQM' else name} of {kind} evaluations"
            result.panels.setdefault(title, {})[label] = found
        result.scores.append(row)


def _pair(result: Comparison, kind: str, scores: Scores) -> None:
    """Add a row for each pair of groups that have the same environments."""
    for (label, group), (other, their) in itertools.combinations(scores.items(), 2):
        if {*group} != {*their}:
            continue
        own, theirs = (np.stack([part[name] for name in group], axis=1) for part in (group, their))
        found = _estimate(improvement, own, theirs)
        result.pairs.append(
            {"group": label, "better than": other, "evaluation": kind, "probability": found[0],
             "low": found[1], "high": found[2]}
        )  # fmt: skip
        title = f"probability of improvement in {kind} evaluations"
        result.panels.setdefault(title, {})[f"{label} > {other}"] = found


def _estimate(measure: Callable[..., Array], *samples: Array) -> Estimate:
    """A measure and its 95 % interval, if there are runs enough for one."""
    middle = float(measure(*samples))
    if min(len(sample) for sample in samples) < 2:
        return middle, None, None
    return middle, *stratified(measure, *samples)
