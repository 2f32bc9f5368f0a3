"""What a run's folder says about its speed and its learning: shares of time, curves, settings, and its machine."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import yaml

from shoal.display.page.reading import Curves, ending, mapping, number
from shoal.runs import checkpoint, directory

PROVENANCE = "provenance.json"
LARGEST = 4 << 20  # bytes of a file that is still read
RECENT = 1 / 3  # of the rows so far: what "now" means for a metric
FEWEST = 6  # evaluations from which on one can say that scores do not rise
CONTENDED = 0.7  # of its core-time that the learner gets, below which no core is idle
CLEARLY = 2.0  # standard errors
WEIGHTS = "weights"
MOMENTS = re.compile(r"(^|\.)(return_)?moments\b.*\bcount$")

Column = list[float]


@dataclass(frozen=True)
class Facts:
    """A run as it stands; everything comes from files that somebody else may have written."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    workers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # shares of time by worker
    train: Mapping[str, Column] = field(default_factory=dict)  # the metrics over time
    scores: Column = field(default_factory=list)  # of the evaluations so far
    counts: Mapping[str, float] = field(default_factory=dict)
    cores: float = 1.0
    gpus: int = 0
    counted: tuple[float, ...] | None = None  # observations in each running mean; None: nothing was saved yet

    @classmethod
    def of(cls, folder: Path, curves: Curves | None = None) -> Self:
        """Read them; `curves` are those of somebody who follows the run anyway."""
        own = curves or Curves(folder)
        try:
            if curves is None:
                own.refresh()
            rows, evaluations = (own.kinds[kind].columns() for kind in ("train", "evaluation"))
        finally:
            if curves is None:
                own.lines.close()
        status, summary = (document(folder, name) for name in (directory.STATUS, directory.SUMMARY))
        over = bool(summary) and not directory.held(folder)
        told = status or summary
        # Of a run that is over all of its time counts, and not only its last seconds.
        workers = status.get("spent") or summary.get("workers") if over else status.get("workers")
        machine = newest_start(folder)
        settings = settings_of(folder)
        return cls(
            settings=settings,
            workers={str(name): mapping(each) for name, each in mapping(workers).items()},
            train={name.rpartition("/")[2]: known(column) for name, column in rows.items()},
            scores=known(evaluations.get("evaluation/return", [])),
            counts={key: value for key in COUNTS if (value := number(told.get(key))) is not None}
            | (rates(summary) if over else {}),
            cores=number(machine.get("usable_cores")) or 1.0,
            gpus=len(machine["devices"]) if isinstance(machine.get("devices"), list) else 0,
            counted=moments(folder) if normalises(settings) else None,
        )

    def setting(self, path: str, default: Any = None) -> Any:
        """A setting by its dotted name; what moves has its value at the start."""
        value = self.written(path)
        value = value.get("start") if isinstance(value, Mapping) and "start" in value else value
        return default if value is None else value

    def written(self, path: str) -> Any:
        """A setting as it is in the configuration; None where it has no such setting."""
        value: Any = self.settings
        for part in path.split("."):
            value = mapping(value).get(part)
        return value

    def count(self, path: str, default: float = 0.0) -> float:
        """A setting that is a number."""
        value = number(self.setting(path))
        return default if value is None else value

    @property
    def algorithm(self) -> str:
        """Its name."""
        return str(self.setting("algorithm.name"))

    @property
    def apart(self) -> bool:
        """Whether workers run beside each other, each at its own pace."""
        return self.setting("engine") != "inline" and not self.setting("lockstep")

    def role(self, name: str) -> list[Mapping[str, Any]]:
        """The workers of one kind, in whatever group."""
        return [each for worker, each in self.workers.items() if re.fullmatch(rf"(.+/)?{name}(-\d+)?", worker)]

    @property
    def players(self) -> str:
        """The kind of the workers that have environments."""
        return "actor" if self.role("actor") else "gradient"

    def working(self, role: str) -> float:
        """The share of their time that workers of a kind work, in the mean."""
        return mean([between(each.get("working")) for each in self.role(role)])

    def part(self, role: str, name: str) -> float:
        """The share of their time that workers of a kind spend in a part of their work."""
        return mean([between(mapping(each.get("parts")).get(name)) for each in self.role(role)])

    def waiting(self, role: str, *calls: str) -> float:
        """The share of their time that workers of a kind wait for calls of a service, such as `store.put`."""
        totals = []
        for each in self.role(role):
            waits = mapping(each.get("waits")).items()
            parts = [between(part) for call, part in waits if re.sub(r"-\d+\.", ".", str(call)).endswith(calls)]
            totals.append(min(sum(parts), 1.0))
        return mean(totals)

    @property
    def starved(self) -> float:
        """The share of its time that the learner waits for experience."""
        return self.waiting("learner", "store.get", "store.draw", "store.choose", "store.look", "store.status")

    @property
    def blocked(self) -> float:
        """The share of their time that actors wait until the learner takes more."""
        return self.waiting("actor", "store.put", "store.admit")

    @property
    def lasted(self) -> float:
        """Seconds that are behind the shares."""
        return max((number(each.get("seconds")) or 0.0 for each in self.workers.values()), default=0.0)

    @property
    def learner_threads(self) -> float:
        """Threads with which the learner computes."""
        alternates = self.setting("algorithm.max_lag") == 0
        return self.count("threads") or (self.cores if alternates and self.apart else 1.0)

    @property
    def on_gpu(self) -> bool:
        """Whether the learner computes on a GPU."""
        return self.gpus > 0 and self.setting("device", "auto") in ("auto", "cuda")

    def used(self, role: str) -> float:
        """Cores that all workers of a kind use: what their processes used where it is known, else as if work were that.

        Work is more where an environment waits for something, or a GPU computes.
        """
        threads = self.learner_threads if role == "learner" and not self.on_gpu else 1.0
        total = 0.0
        for each in self.role(role):
            known = number(each.get("computing"))
            total += max(known, 0.0) if known is not None else between(each.get("working")) * threads
        return total

    @property
    def granted(self) -> float:
        """The part of the core-time that the learner asks for and gets; less than 1: other programs use the cores."""
        known = [(number(each.get("computing")), between(each.get("working"))) for each in self.role("learner")]
        asked = sum(working for computing, working in known if computing is not None)
        given = sum(computing for computing, _ in known if computing is not None)
        return 1.0 if self.on_gpu or asked <= 0.3 * len(known) else min(given / asked, 1.0)

    @property
    def idle_cores(self) -> float:
        """Cores that nobody uses, as far as this run can tell."""
        if self.granted < CONTENDED:
            return 0.0
        return max(self.cores - sum(map(self.used, (*LEARNERS, "actor", "gradient", "evaluator", "inference"))), 0.0)

    def recent(self, metric: str) -> float | None:
        """The mean of a metric over the last third of the run; None: it has none, or too few rows."""
        column = self.train.get(metric, [])
        return mean(column[-max(round(len(column) * RECENT), 1) :]) if len(column) >= FEWEST else None

    def opening(self, metric: str) -> float | None:
        """The first value of a metric."""
        column = self.train.get(metric, [])
        return column[0] if column else None

    @property
    def done(self) -> float:
        """The share of its steps that the run has made."""
        return between(self.counts.get("steps", 0.0) / max(self.count("steps"), 1.0))

    @property
    def reached(self) -> bool:
        """Whether an evaluation reached the target."""
        target = number(self.setting("evaluation.target"))
        return target is not None and max(self.scores, default=-math.inf) >= target

    @cached_property
    def stuck(self) -> bool:
        """Whether scores are not clearly higher than a third of the run ago, though the target is not reached.

        Without a target nobody knows how high they could be: then only scores and returns that never rose are stuck.
        """
        if len(self.scores) < FEWEST or self.reached:
            return False
        if number(self.setting("evaluation.target")) is not None:
            return not clearly_above(self._third(2), self._third(1))
        returns = self.train.get("return", [])
        first, last = returns[: max(len(returns) // 10, 2)], returns[-max(len(returns) // 3, 2) :]
        rose = len(returns) >= FEWEST and clearly_above(last, first)
        return not rose and not clearly_above(self._third(2), self._third(0))

    @property
    def fell(self) -> bool:
        """Whether scores were clearly higher in the middle of the run than now."""
        return len(self.scores) >= FEWEST and clearly_above(self._third(1), self._third(2))

    @property
    def best_third(self) -> float:
        """The highest mean score of a third of the run."""
        return max(mean(self._third(which)) for which in range(3))

    @property
    def last_third(self) -> float:
        """The mean score of the last third of the run."""
        return mean(self._third(2))

    @property
    def spread(self) -> float:
        """How far apart scores are."""
        return max(self.scores, default=0.0) - min(self.scores, default=0.0)

    def _third(self, which: int) -> Column:
        size = len(self.scores) // 3
        return self.scores[len(self.scores) - size :] if which == 2 else self.scores[which * size : (which + 1) * size]


LEARNERS = ("learner", "overseer", "shard")
COUNTS = ("steps", "updates", "episodes", "faults", "seconds", "return", "steps_per_s", "updates_per_s")


def mean(values: Column) -> float:
    """The mean; 0 where there is nothing."""
    return sum(values) / len(values) if values else 0.0


def rates(summary: Mapping[str, Any]) -> dict[str, float]:
    """Steps and updates per second over a whole run that has ended."""
    seconds = number(summary.get("seconds")) or 0.0
    counts = {name: number(summary.get(name)) for name in ("steps", "updates")}
    return {f"{name}_per_s": value / seconds for name, value in counts.items() if value is not None and seconds > 0}


def between(value: Any) -> float:
    """A share of time as it was read, between 0 and 1."""
    return min(max(number(value) or 0.0, 0.0), 1.0)


def clearly_above(one: Column, other: Column) -> bool:
    """Whether the mean of one is more than two standard errors above that of the other."""

    def variance(values: Column) -> float:
        return sum((value - mean(values)) ** 2 for value in values) / max(len(values) - 1, 1) / len(values)

    return mean(one) - mean(other) > CLEARLY * math.sqrt(variance(one) + variance(other)) + 1e-9


def known(column: list[float | None]) -> Column:
    """The numbers of a column."""
    return [value for value in column if value is not None]


def document(folder: Path, name: str) -> Mapping[str, Any]:
    """A JSON file as a mapping; empty where it is none."""
    content = ending(folder, name, LARGEST + 1)
    try:
        return mapping(json.loads(content)) if 0 < len(content) <= LARGEST else {}
    except (ValueError, RecursionError):
        return {}


def settings_of(folder: Path) -> Mapping[str, Any]:
    """The settings as they are written; nothing that they name is imported."""
    try:
        return mapping(yaml.safe_load(ending(folder, directory.CONFIG, LARGEST)))
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}


def newest_start(folder: Path) -> Mapping[str, Any]:
    """What is known of the machine on which the run was started last."""
    try:
        starts = json.loads(ending(folder, PROVENANCE, LARGEST) or b"[]")
    except (ValueError, RecursionError):
        return {}
    return mapping(starts[-1]) if isinstance(starts, list) and starts else {}


def normalises(settings: Mapping[str, Any]) -> bool:
    """Whether a running mean is asked for."""
    network = mapping(mapping(settings.get("algorithm")).get("network"))
    return any(network.get(f"normalise_{what}") is True for what in ("observation", "reward"))


def moments(folder: Path) -> tuple[float, ...] | None:
    """How many observations each running mean of the newest checkpoint has seen; None: there is no checkpoint."""
    from safetensors import SafetensorError, safe_open

    saved = checkpoint.paths(folder)
    if not saved:
        return None
    try:
        with safe_open(saved[-1] / f"{WEIGHTS}.safetensors", "numpy") as file:
            return tuple(float(file.get_tensor(name)) for name in file.keys() if MOMENTS.search(name))  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, TypeError):
        return None
