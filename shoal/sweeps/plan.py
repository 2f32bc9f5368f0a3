"""What a sweep is to do: its file, read and checked in full before anything starts."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError, field_validator

from shoal.complaints import explain
from shoal.configs import read
from shoal.core.errors import SettingsError, nearest
from shoal.core.machine import cores
from shoal.core.settings import Settings
from shoal.core.tree import flat
from shoal.experiment import Count, Experiment, check_environment, validate

BOUNDS = ("low", "high", "log", "step")
EXAMPLE = "{low: 1e-4, high: 1e-2, log: true}"
PLAN = "plan.yaml"  # in a sweep's folder: what it was begun with
MOST = 2.0**53  # the greatest bound: beyond it, whole numbers cannot be told apart
CHANGEABLE = {"trials", "at_once"}  # when a sweep is continued


@dataclass(frozen=True)
class Range:
    """A setting that may take any number between two."""

    low: float
    high: float
    log: bool = False
    step: float | None = None
    whole: bool = False

    @property
    def tried(self) -> tuple[Any, ...]:
        """The values that are checked beforehand."""
        return self.low, self.high


@dataclass(frozen=True)
class Choice:
    """A setting that may take one of several values."""

    values: tuple[Any, ...]

    @property
    def tried(self) -> tuple[Any, ...]:
        """The values that are checked beforehand."""
        return self.values


class Plan(Settings):
    """A sweep: an experiment, the settings to search, and how."""

    config: str | dict[str, Any] = Field(description="A config's name or file, or an experiment itself.")
    overrides: dict[str, Any] = Field(default_factory=dict, description="Settings of every trial.")
    search: dict[str, Any] = Field(description="Dotted settings, each with bounds or a list of choices.")
    trials: int = Field(20, ge=1, description="How many settings are tried.")
    at_once: Count = Field("auto", description="Runs at a time; auto: as many as fit the cores.")
    seeds: tuple[int, ...] = Field((0,), description="Seeds of each trial; its score is their mean.")
    score: Literal["best", "last"] = Field("best", description="Which evaluation of a run is its score.")
    direction: Literal["maximize", "minimize"] = Field("maximize", description="Which scores are better.")
    prune: Literal["median", "quartile", "halving"] | None = Field(
        None, description="Which trials are stopped early, by their evaluations."
    )
    prune_from: float = Field(0.2, ge=0, lt=1, description="Share of a run before which none is stopped.")
    seed: int = Field(0, ge=0, description="Seed of the search itself.")

    @field_validator("seeds", mode="before")
    @classmethod
    def _count_or_list(cls, value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, int | list | tuple):
            raise ValueError(f"a number of seeds, or a list of them such as [0, 1, 2]; got {value!r}")
        found = range(value) if isinstance(value, int) else value
        if not found or any(type(seed) is not int or seed < 0 for seed in found) or len({*found}) < len(found):
            raise ValueError(f"one seed at least, each a whole number ≥ 0 and different; got {value!r}")
        return tuple(found)

    @cached_property
    def base(self) -> dict[str, Any]:
        """The experiment of every trial, before the searched settings; a target of its config would cut scores off."""
        return read(read(self.config, {"evaluation": {"target": None}}), self.overrides)

    @cached_property
    def experiment(self) -> Experiment:
        """The experiment of every trial, checked."""
        return validate(self.base)

    @cached_property
    def space(self) -> dict[str, Range | Choice]:
        """The searched settings."""
        known = dict(flat(self.experiment.model_dump(mode="json")))
        return {name: _dimension(name, given, known.get(name)) for name, given in self.search.items()}

    @property
    def number_at_once(self) -> int:
        """How many runs there are at a time."""
        if self.at_once != "auto":
            return self.at_once
        return max(cores() // cores_of(self.experiment), 1)

    def better(self, score: float, other: float) -> bool:
        """Whether a score is better than another."""
        return score > other if self.direction == "maximize" else score < other

    def as_yaml(self) -> str:
        """The plan with its experiment in full."""
        tree = {**self.model_dump(mode="json"), "config": self.base, "overrides": {}}
        return yaml.safe_dump(tree, sort_keys=False)


def cores_of(experiment: Experiment) -> int:
    """The cores that a run keeps busy on this machine; one that has its own machines counts as all of them."""
    if experiment.engine not in ("inline", "threads", "processes"):
        return cores()
    threads = experiment.learner_threads
    if experiment.engine == "inline":
        return threads
    if experiment.shared:
        return experiment.actor_count * experiment.groups
    if experiment.lockstep or experiment.max_lag == 0:
        return max(experiment.actor_count, threads)
    return experiment.actor_count + threads


def read_plan(file: Path) -> Plan:
    """Read a sweep's file; every mistake in it is refused in words."""
    tree = read(file)
    for key in tree:
        if key not in Plan.model_fields:
            hint = "; a setting of the experiment goes below overrides" if key in Experiment.model_fields else ""
            raise SettingsError(
                f"{file}: {key}: unknown; allowed: {', '.join(Plan.model_fields)}"
                f"{hint or nearest(str(key), Plan.model_fields)}"
            )
    for key in ("config", "search"):
        if not tree.get(key):
            nothing = "nothing to search: name settings" if key == "search" else "missing: give a config's name or file"
            example = f"search: {{algorithm.lr: {EXAMPLE}}}" if key == "search" else "config: ppo_cartpole"
            raise SettingsError(f"{file}: {key}: {nothing}, such as `{example}`")
    if isinstance(tree["config"], str) and (beside := file.parent / tree["config"]).is_file():
        tree = {**tree, "config": str(beside)}
    try:
        plan = Plan.model_validate(tree)
    except ValidationError as error:
        raise SettingsError(f"{file}: {explain(error, Experiment, tree)}") from None
    check(plan, file)
    return plan


def check(plan: Plan, file: Path) -> None:
    """Refuse settings that do not exist, and values that the experiment refuses."""
    check_environment(plan.experiment)
    names = [*plan.space]
    for name in names:
        for other in names:
            if other.startswith(f"{name}."):
                raise SettingsError(f"{file}: search: {other} is a part of {name}: search one of them")
        if name == "seed" or name.split(".")[0] == "evaluation":
            raise SettingsError(f"{file}: search.{name}: decides how a trial is scored, and cannot be searched")
    for name, dimension in plan.space.items():
        for value in dimension.tried:
            try:
                validate(read(plan.base, {name: value}))
            except SettingsError as error:
                raise SettingsError(f"{file}: search.{name}, at {value!r}: {error}") from None
    every, steps = plan.experiment.evaluation_interval, plan.experiment.steps
    if plan.prune and 2 * every > steps:
        raise SettingsError(
            f"{file}: prune: {plan.prune}: a run of {steps:,} steps has no evaluation before its last, with "
            f"evaluation.every {every:,}: lower that, or leave out prune"
        )


def check_same(plan: Plan, folder: Path) -> None:
    """Refuse a plan that differs from what a folder was begun with."""
    if not (folder / PLAN).exists():
        return
    before = yaml.safe_load((folder / PLAN).read_text())
    for key, value in yaml.safe_load(plan.as_yaml()).items():
        if key not in CHANGEABLE and before.get(key) != value:
            raise SettingsError(
                f"{folder} was begun with another {key}: to continue it, give the same; for a new sweep, rename the "
                "file or give --folder"
            )


def _dimension(name: str, given: Any, usual: Any) -> Range | Choice:
    """Read what a setting may be; `usual` is what it is without a search."""
    place = f"search.{name}"
    if isinstance(given, list):
        written = [json.dumps(value, sort_keys=True, default=str) for value in given]
        if len({*written}) < max(len(given), 2):
            raise SettingsError(f"{place}: needs two choices at least, each another; got {given!r}")
        return Choice(tuple(given))
    if not isinstance(given, Mapping):
        raise SettingsError(f"{place}: give bounds such as {EXAMPLE}, or a list of choices; got {given!r}")
    for key in given:
        if key not in BOUNDS:
            raise SettingsError(
                f"{place}: unknown {key!r}; allowed: {', '.join(BOUNDS)}{nearest(str(key), BOUNDS)} "
                "(parts of a setting are written with dots)"
            )
    for key in ("low", "high", "step"):
        if key not in given and key != "step":
            raise SettingsError(f"{place}.{key}: missing")
        if key in given and not _number(given[key]):
            raise SettingsError(f"{place}.{key}: must be a finite number, got {given[key]!r}")
    low, high, step = given["low"], given["high"], given.get("step")
    log = given.get("log", False)
    if problem := next(_problems(low, high, step, log), None):
        raise SettingsError(f"{place}: {problem}")
    whole = all(isinstance(value, int) for value in (low, high, *(() if step is None else (step,))))
    return Range(low, high, log, step, whole and not isinstance(usual, float))


def _problems(low: float, high: float, step: float | None, log: Any) -> Iterator[str]:
    if not isinstance(log, bool):
        yield f"log must be true or false, got {log!r}"
    if max(abs(low), abs(high)) > MOST:
        yield f"bounds must lie between ±{MOST:.2g}"
    if low >= high:
        yield f"low {low:g} must be below high {high:g}"
    if log and low <= 0:
        yield f"low {low:g} must be above 0 with log"
    if step is not None and log:
        yield "give step or log, not both"
    if step is not None and not 0 < step <= high - low:
        yield f"step {step:g} must be above 0, and at most high - low = {high - low:g}"


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
