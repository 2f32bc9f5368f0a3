"""What came of a sweep: the score of each trial, a table of them, a picture, and the best config."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.core.errors import SettingsError
from shoal.display import plots
from shoal.display.console import duration
from shoal.runs import directory, files, metrics
from shoal.sweeps.plan import Choice, Plan, check_same
from shoal.sweeps.study import JOURNAL, Study, Trial

BEST = "best.yaml"
PICTURE = "sweep.png"


def folders(plan: Plan, folder: Path, number: int) -> list[Path]:
    """The folders of a trial's runs, one for each seed."""
    name = f"trial-{number:03d}"
    return [folder / (name if len(plan.seeds) == 1 else f"{name}-seed-{seed}") for seed in plan.seeds]


def score(plan: Plan, folder: Path, number: int) -> float | None:
    """The mean over a trial's runs of their best or last evaluation; None where one has none."""
    best = max if plan.direction == "maximize" else min
    found = []
    for run in folders(plan, folder, number):
        means = [*metrics.evaluations(run).values()]
        if not means or not all(map(math.isfinite, means)):
            return None
        found.append(means[-1] if plan.score == "last" else best(means))
    return sum(found) / len(found)


def curve(plan: Plan, folder: Path, number: int) -> dict[int, float]:
    """The evaluations of a trial at whole multiples of their interval: the mean over its runs, as far as all have got.

    On most engines runs are evaluated a little after each multiple, and may skip one: the newest value stands then.
    """
    every = plan.experiment.evaluation_interval
    runs = []
    for run in folders(plan, folder, number):
        points, value = dict[int, float](), math.nan
        for steps, mean in metrics.evaluations(run).items():
            for point in range(max(points, default=0) + 1, steps // every):
                if points:
                    points[point] = value
            value = mean
            points[steps // every] = value
        runs.append(points)
    common = set.intersection(*({*points} for points in runs))
    means = {point: sum(points[point] for points in runs) / len(runs) for point in sorted(common)}
    return {point: mean for point, mean in means.items() if math.isfinite(mean)}


def best(plan: Plan, trials: Sequence[Trial]) -> Trial | None:
    """The trial with the best score so far, the first of equal ones."""
    found: Trial | None = None
    for trial in trials:
        if trial.score is not None and (found is None or found.score is None or plan.better(trial.score, found.score)):
            found = trial
    return found


def short(value: Any) -> str:
    """A value of a setting to read."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def row(plan: Plan, folder: Path, trial: Trial) -> dict[str, Any]:
    """A trial as a row: steps and seconds are those of all its runs."""
    steps, seconds = 0, 0.0
    for run in folders(plan, folder, trial.number):
        summary = directory.read_summary(run)
        rows = [] if summary else metrics.read(run)
        steps += summary.get("steps", max((one["steps"] for one in rows), default=0))
        seconds += summary.get("seconds", rows[-1]["time"] - rows[0]["time"] if rows else 0.0)
    return {
        "trial": trial.number,
        "state": trial.state,
        "score": trial.score,
        **trial.values,
        "steps": steps,
        "seconds": seconds,
        "problem": trial.problem,
    }


def opened(plan: Plan, folder: Path) -> Study:
    """The study of a sweep that has begun."""
    if not (folder / JOURNAL).exists():
        raise SettingsError(f"{folder} holds no sweep yet: begin it without --show")
    check_same(plan, folder)
    return Study(plan, folder)


def table(plan: Plan, folder: Path, trials: Sequence[Trial]) -> list[dict[str, Any]]:
    """A row for each trial, best first; those without a score last."""
    sign = -1 if plan.direction == "maximize" else 1
    order = {"complete": 0, "pruned": 1, "running": 2, "failed": 3}
    ranked = sorted(trials, key=lambda t: (order[t.state], sign * (t.score or 0.0), t.number))
    return [row(plan, folder, trial) for trial in ranked]


def readable(rows: Sequence[Mapping[str, Any]], plan: Plan) -> list[dict[str, Any]]:
    """The rows of a table with short names and times; problems only where there are any."""
    names = {name: name.removeprefix("algorithm.") for name in plan.space}
    problems = any(row["problem"] for row in rows)
    return [
        {
            **{
                names.get(key, key): short(value) if key in plan.space else value
                for key, value in row.items()
                if key not in ("seconds", "problem")
            },
            "time": duration(row["seconds"]),
            **({"problem": row["problem"]} if problems else {}),
        }
        for row in rows
    ]


def write(plan: Plan, folder: Path, trials: Sequence[Trial]) -> list[Path]:
    """Write the config of the best trial, and draw all where Matplotlib is installed; the files that were written."""
    found = best(plan, trials)
    if found is None:
        return []
    axes = {
        name: ("choices", part.values)
        if isinstance(part, Choice)
        else ("log" if part.log else "linear", (part.low, part.high))
        for name, part in plan.space.items()
    }
    scored = [
        {"trial": trial.number, "state": trial.state, "score": _shown(plan, folder, trial), "values": trial.values}
        for trial in trials
    ]
    title = f"{folder.name}: {plan.experiment.algorithm_name} on {plan.experiment.environment.id}"
    files.write(folder / BEST, (folders(plan, folder, found.number)[0] / directory.CONFIG).read_text())
    if not plots.available():
        return [folder / BEST]
    return [plots.search(scored, axes, folder / PICTURE, title, plan.direction == "maximize"), folder / BEST]


def _shown(plan: Plan, folder: Path, trial: Trial) -> float | None:
    """The score of a trial, also of one that was stopped early."""
    return score(plan, folder, trial.number) if trial.state == "pruned" else trial.score
