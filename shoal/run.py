"""A run on disk: its results, and what can be done with it."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.algorithms import ALGORITHMS
from shoal.configs import read
from shoal.core.errors import SettingsError
from shoal.core.types import INTERRUPTED
from shoal.display import console
from shoal.experiment import Experiment, load_of
from shoal.runs import checkpoint, directory, files, metrics
from shoal.runs.directory import locate

if TYPE_CHECKING:
    from shoal.envs import Environment, Envs
    from shoal.export import Export
    from shoal.policy import Policy

log = logging.getLogger("shoal")


@dataclass(frozen=True)
class Picture:
    """A PNG; a notebook shows it, everything else takes it as a path."""

    path: Path

    def __fspath__(self) -> str:
        """Where it is."""
        return str(self.path)

    def __str__(self) -> str:
        """Where it is."""
        return str(self.path)

    def _repr_png_(self) -> bytes:
        return self.path.read_bytes()


@dataclass(frozen=True)
class Score:
    """The returns of whole episodes of one policy, and their statistics."""

    scores: list[float]
    statistics: Mapping[str, float]
    metrics: Mapping[str, float]
    checkpoint: str
    picture: Picture | None = None
    cut: int = 0  # episodes that evaluation.max_steps ended
    sticky: float | None = None  # of a game

    def __str__(self) -> str:
        """The statistics as a sentence."""
        figures = self.statistics
        cut = f" ({self.cut} cut off by evaluation.max_steps)" if self.cut else ""
        cut += with_sticky(self.sticky)
        extra = "".join(f", {name} {value:.4g}" for name, value in self.metrics.items())
        return (
            f"{self.checkpoint}: mean return {figures['mean']:.2f} "
            f"(95 % interval {figures['low']:.2f} to {figures['high']:.2f}), median {figures['median']:.2f}, "
            f"from {figures['min']:.2f} to {figures['max']:.2f} over {len(self.scores)} episodes{cut}{extra}"
        )


class Run:
    """A run, finished or not."""

    def __init__(self, directory: str | Path) -> None:
        """Look at a folder."""
        self.directory = Path(directory) if Path(directory).is_dir() else locate(directory)
        self._summary: Mapping[str, Any] = {}

    @property
    def summary(self) -> Mapping[str, Any]:
        """Its results; empty while it has not ended."""
        return self._summary or directory.read_summary(self.directory)

    @property
    def solved(self) -> bool | None:
        """Whether the target was reached; None: there was none."""
        return self.summary.get("solved")

    @cached_property
    def experiment(self) -> Experiment:
        """Its settings; code that they name is imported."""
        return load_of(self.directory)

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """Its settings as written in the file; nothing is imported for them."""
        return read(self.directory / directory.CONFIG)

    @property
    def environment(self) -> str:
        """The id of its environment."""
        return str(part(self.settings, "environment").get("id"))

    @property
    def title(self) -> str:
        """Algorithm, environment and engine, in a few words."""
        name = str(part(self.settings, "algorithm").get("name"))
        algorithm_name = ALGORITHMS.get(name, name).rpartition(":")[2].lower()
        return f"{algorithm_name} on {self.environment} · {self.settings.get('engine')}"

    def rows(self) -> list[dict[str, Any]]:
        """Its metrics over time, as in metrics.jsonl."""
        return metrics.read(self.directory)

    def policy(self, checkpoint: str | int = "best") -> Policy:
        """The policy of one of its checkpoints: `best`, `newest`, or a number of steps."""
        from shoal.policy import load

        return load(self.directory, checkpoint)

    def evaluate(
        self,
        episodes: int = 100,
        checkpoint: str | int = "best",
        seed: int = 0,
        progress: Callable[[int], None] = lambda done: None,
        stage: int | None = None,
    ) -> Score:
        """Play whole episodes without exploration; `progress` is called with the number of those that ended.

        `stage` is one of the curriculum, counted from 0; by default the last.
        """
        from shoal.core.randomness import derive, seed_everything
        from shoal.display.plots import available, distribution
        from shoal.display.statistics import describe
        from shoal.envs import Episode, make
        from shoal.workers.evaluator import WIDEST, play, summarise

        directory.check_links(self.directory)
        policy = self.policy(checkpoint)
        seed_everything(derive(seed, "evaluation"))
        limit, environment = self.experiment.evaluation.max_steps, self._environment(stage)
        envs = make(environment, min(episodes, WIDEST), derive(seed, "worlds"), evaluation=True, limit=limit)
        ended: list[Episode] = []
        try:
            for ended in play(self.experiment.algorithm, policy.follower, envs, episodes, pulls=policy.pulls):
                progress(len(ended))
        finally:
            envs.close()
        result = summarise(policy.steps, ended)
        name = f"{self.title} · {policy.path.name}"
        path = self.directory / "plots" / f"returns_{policy.path.name}.png"
        picture = Picture(distribution(result["scores"], path, name)) if available() else None
        statistics = describe(result["scores"])
        return Score(
            result["scores"],
            statistics,
            result["metrics"],
            policy.path.name,
            picture,
            result["cut"],
            environment.sticky,
        )

    def _environment(self, stage: int | None) -> Environment:
        """The environment in a stage of the curriculum; one that does not exist is refused."""
        count = len(self.experiment.curriculum)
        if stage is not None and not 0 <= stage < count:
            there = f"0 to {count - 1}" if count else "none, since there is no curriculum"
            raise SettingsError(f"stage {stage}: the stages of this run are {there}")
        return self.experiment.environment_in(-1 if stage is None else stage)

    def play(
        self,
        video: str | Path | None = None,
        episodes: int = 1,
        checkpoint: str | int = "best",
        seed: int = 0,
        seconds: float = 120.0,
        progress: Callable[[int], None] = lambda frames: None,
    ) -> Path:
        """Film whole episodes without exploration; `progress` is called with the number of frames."""
        from shoal.core.randomness import derive, seed_everything
        from shoal.display.video import Video
        from shoal.workers.evaluator import play

        directory.check_links(self.directory)
        policy = self.policy(checkpoint)
        path = Path(video) if video else self.directory / "videos" / f"{policy.path.name}.mp4"
        seed_everything(derive(seed, "play"))
        envs = self.filmed(seed)
        try:
            with Video(path, envs.fps) as film:
                playing = play(self.experiment.algorithm, policy.follower, envs, episodes, pulls=policy.pulls)
                for frames, _ in enumerate(playing, 1):
                    film.add(envs.render())
                    progress(frames)
                    if frames >= seconds * envs.fps:
                        log.warning("the video was cut after %g s, before its episodes ended", seconds)
                        break
        finally:
            envs.close()
        return path

    def record(
        self, folder: str | Path, episodes: int = 1, checkpoint: str | int = "best", seed: int = 0
    ) -> list[Path]:
        """Write a video and a JSON of every episode: actions, rewards, and the values behind each choice."""
        from shoal.core.randomness import derive, seed_everything
        from shoal.workers.evaluator import play
        from shoal.workers.filming import EpisodeWriter

        policy, algorithm = self.policy(checkpoint), self.experiment.algorithm
        seed_everything(derive(seed, "play"))
        envs = self.filmed(seed)
        try:
            with EpisodeWriter(Path(folder), envs, algorithm, policy.follower.net) as writer:
                for ended in play(algorithm, policy.follower, envs, episodes, writer.chosen, policy.pulls):
                    writer.show(envs.render(), ended)
        finally:
            envs.close()
        return writer.written

    def export(self, form: str, checkpoint: str | int = "best", out: str | Path | None = None) -> Export:
        """Write the policy of a checkpoint as a file that runs without Shoal, `onnx` or `torch`, and check it."""
        from shoal.export import SUFFIXES

        directory.check_links(self.directory)
        policy = self.policy(checkpoint)
        default = self.directory / "exports" / f"{policy.path.name}{SUFFIXES.get(form, '')}"
        return policy.export(form, out or default)

    def filmed(self, seed: int) -> Envs:
        """Its environment, once, as it is evaluated in and with pictures."""
        from shoal.core.randomness import derive
        from shoal.envs import make

        limit, environment = self.experiment.evaluation.max_steps, self.experiment.environment_in()
        return make(environment, 1, derive(seed, "film"), evaluation=True, render=True, limit=limit)

    def plot(self, path: str | Path | None = None) -> Picture:
        """Draw its learning curve and its metrics over time."""
        from shoal.display.plots import curve

        directory.check_links(self.directory)
        path = Path(path) if path else self.directory / "plots" / "curve.png"
        target = part(self.settings, "evaluation").get("target")
        target = target if isinstance(target, int | float) else None
        return Picture(curve(self.rows(), path, self.title, target))

    def plot_metric(self, metric: str, path: str | Path | None = None) -> Picture:
        """Draw one of its metrics over time: `return`, `length`, or a name that metrics.jsonl has."""
        from shoal.display.plots import single

        directory.check_links(self.directory)
        return Picture(single(self.rows(), path or self.directory / "plots" / f"{metric}.png", self.title, metric))

    def table(self, every: int | None = None) -> list[dict[str, Any]]:
        """How it stood after each `every` episodes, as means over the last 100; null: in about 20 rows."""
        from shoal.display.table import table

        return table(self.rows(), every)

    def resume(self, **overrides: Any) -> Run:
        """Continue from its newest checkpoint; settings may be overridden."""
        from shoal.training import resume

        return resume(self.directory, **overrides)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write its results; a disk that refuses them is logged."""
        from shoal.display.plots import available

        self._summary = summary
        try:
            files.write(self.directory / directory.SUMMARY, json.dumps(summary, indent=2) + "\n")
            files.write(self.directory / "summary.txt", summary_text(self.directory, summary) + "\n")
            if any(row["kind"] == "evaluation" or row["return"] is not None for row in self.rows()):
                if available():
                    self.plot()
                else:
                    log.info("no learning curve: plots need Matplotlib, pip install 'shoal[plots]'")
        except OSError as error:
            log.error("cannot write all results of the run: %s", error)

    def _repr_html_(self) -> str:
        from shoal.display.notebook import summary_html

        return summary_html(repr(self), self.directory / "plots" / "curve.png")

    def __repr__(self) -> str:
        """The run in a few lines."""
        summary = self.summary
        if summary:
            return summary_text(self.directory, summary)
        saved = checkpoint.paths(self.directory)
        at = saved[-1].name if saved else "no checkpoint"
        return f"{self.title}: not finished, {at}\nfolder: {self.directory}"


def part(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A section of settings as they were read; empty where there is none."""
    found = settings.get(name)
    return found if isinstance(found, Mapping) else {}


def with_sticky(sticky: float | None) -> str:
    """What belongs to every score of a game: of Atari, Gymnasium's `-v5` has sticky actions of 0.25, older ids of 0."""
    return "" if sticky is None else f" (sticky actions {sticky:g})"


def outcome(summary: Mapping[str, Any]) -> str:
    """The outcome of a run in a word."""
    if summary["stopped_by"] == INTERRUPTED:
        return "interrupted"
    return {None: "done", True: "solved", False: "NOT solved"}[summary["solved"]]


def headline(run: Path, summary: Mapping[str, Any]) -> str:
    """The outcome of a run in one line."""
    best = "none" if summary["best_evaluation"] is None else console.number(summary["best_evaluation"])
    requested = summary.get("steps_requested", summary["steps"])
    more = f" ({requested:,} requested, rounded up to whole batches)" if summary["steps"] > requested else ""
    return (
        f"{outcome(summary)}: {summary['steps']:,} steps{more} in {console.duration(summary['seconds'])}, "
        f"best evaluation {best}{with_sticky(summary.get('sticky'))}, results in {run}"
    )


def summary_text(run: Path, summary: Mapping[str, Any]) -> str:
    """A summary for people."""
    lines = [
        headline(run, summary),
        f"{summary['algorithm']} on {summary['environment']}, engine {summary['engine']}",
        f"{summary['updates']:,} updates, {summary['episodes']:,} episodes, {summary['faults']:,} faults, "
        f"{summary['steps_per_s']:,.0f} steps/s on average",
    ]
    if summary["evaluations"]:
        last = summary["evaluations"][-1]
        lines.append(f"last evaluation: mean return {last['mean']:.2f} at step {last['steps']:,}")
    for name, worker in summary["workers"].items():
        waits = sorted(worker["waits"].items(), key=lambda item: -item[1])[:1]
        waiting = "".join(f", waiting {share:.0%} for {service}" for service, share in waits)
        where = f" on {node}" if (node := worker.get("node")) else ""
        lines.append(f"{name}{where}: busy {worker['working']:.0%} of the time{waiting}")
    for node in dict.fromkeys(worker["node"] for worker in summary["workers"].values() if worker.get("node")):
        there = [worker for worker in summary["workers"].values() if worker.get("node") == node]
        moves = sum(worker["moves_per_s"] for worker in there)
        away = ", disconnected at the end" if there[0]["away"] else ""
        workers = f"{len(there)} worker{'s' if len(there) > 1 else ''}"
        lines.append(f"node {node}: {workers}, {moves:,.1f} moves/s{away}")
    return "\n".join(lines)


def compare(runs: list[Run], path: Path) -> Picture:
    """Plot several runs side by side; runs whose settings differ only in the seed become one mean with an interval."""
    from shoal.display.plots import comparison

    groups = {label: [(run.directory.name, run.rows()) for run in group] for label, group in grouped(runs).items()}
    return Picture(comparison(groups, path, "evaluation return"))


def grouped(runs: Iterable[Run], across: bool = False) -> dict[str, list[Run]]:
    """Runs whose settings differ only in the seed, or also in the environment where that is asked for, by a label."""
    alike: dict[str, list[Run]] = {}
    for run in runs:
        settings = {key: value for key, value in run.settings.items() if key != "seed"}
        if across:
            settings["environment"] = {**part(settings, "environment"), "id": None}
        alike.setdefault(json.dumps(settings, sort_keys=True, default=str), []).append(run)
    titles = [group[0].title.replace(f" on {group[0].environment}", "") if across else group[0].title
              for group in alike.values()]  # fmt: skip
    groups: dict[str, list[Run]] = {}
    for title, group in zip(titles, alike.values(), strict=True):
        label = title if titles.count(title) == 1 else _folder(group[0])
        groups[label if label not in groups else group[0].directory.name] = group
    return groups


def _folder(run: Run) -> str:
    """What the folder of a run is called, without the number of its seed."""
    name = run.directory.name
    if re.fullmatch(r"seed-\d+", name):
        return run.directory.resolve().parent.name
    return re.sub(r"[-_](seed[-_]?)?\d{1,4}$", "", name)
