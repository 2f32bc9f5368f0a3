"""One experiment with several seeds: a run each, and what they say together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.configs import parse_overrides, read
from shoal.core.errors import SettingsError
from shoal.core.tree import flat
from shoal.display.console import duration
from shoal.display.plots import available
from shoal.display.statistics import interval
from shoal.experiment import check_environment, load
from shoal.run import Picture, Run, compare, outcome
from shoal.runs import directory, metrics
from shoal.runs.launching import Job


def jobs(config: Path, overrides: Sequence[str], seeds: Sequence[int], run_dir: Path | None) -> dict[Job, int]:
    """The runs, each with its seed, in one folder; settings that cannot be used are refused before any starts."""
    named = "=" not in str(config)  # else it is all overrides
    settings = parse_overrides([*overrides] if named else [str(config), *overrides])
    if "seed" in settings:
        raise SettingsError("give the seeds by --seeds, or one by seed=: not both")
    experiment = load(config if named else {}, settings)
    check_environment(experiment)
    place = run_dir or directory.fresh(experiment.environment.id, experiment.algorithm_name)
    if (place / directory.CONFIG).exists():
        raise SettingsError(f"{place} is a run itself: choose another folder")
    wanted = dict(flat(experiment.model_dump(mode="json")))
    found = {Job(place / f"seed-{seed}", str(config), (*overrides, f"seed={seed}")): seed for seed in seeds}
    for job in found:
        if (job.folder / directory.CONFIG).exists():
            _check_alike(wanted, job.folder)
    return found


def _check_alike(wanted: Mapping[str, Any], run: Path) -> None:
    """Refuse to go on with a run that was begun with other settings."""
    begun = dict(flat(read(run / directory.CONFIG)))
    for key, value in wanted.items():
        if key != "seed" and value != "auto" and key in begun and begun[key] != value:
            raise SettingsError(
                f"{run} was begun with {key}={begun[key]}, not {value}: to continue it, give the same settings; else "
                "choose another folder"
            )


def row(job: Job, seed: int, complete: bool) -> dict[str, Any]:
    """What came of one run."""
    summary, scores = directory.read_summary(job.folder), [*metrics.evaluations(job.folder).values()]
    return {
        "seed": seed,
        "outcome": outcome(summary) if complete and summary else f"failed: see {job.log}",
        "last": scores[-1] if scores else None,
        "best": max(scores, default=None),
        "steps": summary.get("steps"),
        "time": duration(summary["seconds"]) if summary else "",
    }


def together(rows: Sequence[Mapping[str, Any]]) -> str:
    """The mean of the runs' evaluations with its interval, as a sentence."""
    parts = []
    for name in ("last", "best"):
        scores = [row[name] for row in rows if row[name] is not None]
        if scores:
            low, high = interval(scores)
            sure = f" (95 % interval {low:.4g} to {high:.4g})" if len(scores) > 1 else ""
            parts.append(f"{name} evaluation: mean {sum(scores) / len(scores):.4g}{sure}")
    return f"{'; '.join(parts)}, over {len(rows)} seeds" if parts else "no run was evaluated"


def plot(folders: Sequence[Path]) -> Picture | None:
    """Draw the mean of the runs with its interval, in the folder that holds them; None where nothing can be drawn."""
    runs = [Run(folder) for folder in folders if metrics.evaluations(folder)]
    return compare(runs, folders[0].parent / "comparison.png") if runs and available() else None
