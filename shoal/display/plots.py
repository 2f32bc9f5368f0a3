"""Plots of one run, of several runs side by side, and of the scores of an evaluation."""

from __future__ import annotations

import importlib.util
import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from shoal.core.errors import SettingsError, ShoalError, nearest
from shoal.core.types import Array
from shoal.display.console import readable
from shoal.display.statistics import band, describe, interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Rows: TypeAlias = Sequence[Mapping[str, Any]]
Line: TypeAlias = tuple[Array, Array]  # steps, values
Estimate: TypeAlias = tuple[float, float | None, float | None]  # with its interval, if there is one

WIDTH = 8.0  # inches
HIGH, LOW = 3.6, 1.75  # inches of the big panel and of a row of small ones
DPI = 150
COLOURS = 128  # of a saved picture
COLUMNS = 3  # of small panels
SMALL, USUAL = 8, 10  # points
FIRST = ("policy_loss", "value_loss", "entropy", "gradient_norm", "lag", "queue", "lr")  # the others follow
UNITS = {"lag": "policy versions", "queue": "fraction filled", "entropy": "nats"}
RATES = {"steps_per_s": ("speed", "steps per second"), "updates_per_s": ("updates", "updates per second")}
FEW = 30  # points that get a marker each


def curve(rows: Rows, path: str | Path, title: str, target: float | None = None) -> Path:
    """Draw one run, from the rows of its metrics: returns on top, everything else in small panels below."""
    training, evaluations = _kind(rows, "train"), _kind(rows, "evaluation")
    panels = _panels(training, evaluations)
    lines = math.ceil(len(panels) / COLUMNS)
    figure = _figure(title, HIGH + LOW * lines)
    grid = figure.add_gridspec(1 + lines, COLUMNS, height_ratios=[HIGH, *[LOW] * lines])
    end = max((row["steps"] for row in [*training, *evaluations]), default=0) or 1
    top = figure.add_subplot(grid[0, :])
    top.set_xlim(0, 1.02 * end)
    _returns(top, training, evaluations, target)
    for index, (name, (label, line)) in enumerate(panels.items()):
        axes = figure.add_subplot(grid[1 + index // COLUMNS, index % COLUMNS])
        axes.set_xlim(0, 1.02 * end)
        _plot(axes, *line, color="C0", linewidth=1)
        _dress(axes, label, SMALL)
        axes.set_title(name, fontsize=SMALL + 1, parse_math=False)
        if index + COLUMNS < len(panels):
            axes.set_xlabel("")  # the panel below says it
    return _save(figure, path)


def single(rows: Rows, path: str | Path, title: str, metric: str) -> Path:
    """Draw one metric of a run on its own: `return`, `length`, or any other by its name in metrics.jsonl."""
    training, evaluations = _kind(rows, "train"), _kind(rows, "evaluation")
    lines = {name: _line(training, name) for name in ("length", *RATES)}
    lines |= {name: _line(evaluations, "metrics", name) for name in _metric_names(evaluations, ())}
    lines |= {name: _line(training, "metrics", name) for name in _metric_names(training, FIRST)}
    if metric != "return" and metric not in lines:
        known = ["return", *lines]
        raise SettingsError(f"this run has no metric {metric!r}; it has {', '.join(known)}{nearest(metric, known)}")
    figure = _figure(title, HIGH)
    axes = figure.subplots()
    if metric == "return":
        _returns(axes, training, evaluations, None)
    else:
        _plot(axes, *lines[metric], color="C0", linewidth=1)
        _dress(axes, readable(metric), USUAL)
    axes.set_xlim(left=0)
    return _save(figure, path)


def comparison(groups: Mapping[str, Sequence[tuple[str, Rows]]], path: str | Path, title: str) -> Path:
    """Draw evaluation returns against steps: per group of (label, rows) the mean of its runs with its 95 % interval.

    A run without evaluations counts with its training returns. The runs of a group are drawn thinly as well,
    since the mean ends where the first of them does.
    """
    lines = {name: [line for _, rows in runs if (line := _outcome(rows))[0].size] for name, runs in groups.items()}
    if not any(lines.values()):
        tried = [label for runs in groups.values() for label, _ in runs]
        raise ShoalError(f"nothing to compare: no returns in {', '.join(tried) or 'an empty list of runs'}")
    figure = _figure(title, 4.8)
    axes = figure.subplots()
    for index, (name, group) in enumerate(lines.items()):
        _group(axes, f"{name} ({len(group)} run{'' if len(group) == 1 else 's'})", group, _colour(index, len(lines)))
    axes.set_xlim(left=0)
    _dress(axes, "return", USUAL)
    _legend(figure, axes)
    return _save(figure, path)


def distribution(scores: Sequence[float], path: str | Path, title: str) -> Path:
    """Draw a histogram of returns with their mean, its 95 % interval, and the median."""
    from matplotlib.ticker import MaxNLocator

    figure = _figure(title, 4.2)
    axes = figure.subplots()
    axes.set_xlabel("return")
    axes.set_ylabel("episodes")
    sample = _numbers(scores)
    sample = sample[np.isfinite(sample)]
    if not sample.size:
        _say_nothing(axes)
        return _save(figure, path)
    found = describe(sample)
    room = max(0.5, abs(found["mean"]) / 100) if found["min"] == found["max"] else 0.0  # a bar needs some width
    count = 1 if room else int(np.clip(math.sqrt(sample.size), 5, 50))
    edges = np.linspace(found["min"] - room, found["max"] + room, count + 1)
    axes.hist(sample, edges.tolist(), color="C0", alpha=0.6)
    between = f"95 % interval of the mean {found['low']:.4g} … {found['high']:.4g}"
    axes.axvspan(found["low"], found["high"], color="C3", alpha=0.2, label=between)
    axes.axvline(found["mean"], color="C3", label=f"mean {found['mean']:.4g}")
    axes.axvline(found["median"], color="0.2", linestyle="--", label=f"median {found['median']:.4g}")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    _legend(figure, axes)
    return _save(figure, path)


def search(trials: Rows, kinds: Mapping[str, tuple[str, Sequence[Any]]], path: Path, title: str, highest: bool) -> Path:
    """Draw the trials of a sweep: scores in their order with the best so far, and against each setting in small panels.

    Trials that were stopped early are hollow. `kinds` says of each setting how its axis runs, linear, log or choices,
    and from where to where, or over which values.
    """
    from matplotlib.ticker import MaxNLocator

    lines = math.ceil(len(kinds) / COLUMNS)
    figure = _figure(title, HIGH + 1.25 * LOW * lines)
    grid = figure.add_gridspec(1 + lines, COLUMNS, height_ratios=[HIGH, *[1.25 * LOW] * lines])
    top = figure.add_subplot(grid[0, :])
    shown = [trial for trial in trials if trial["score"] is not None]
    _scatter(top, [trial["trial"] for trial in shown], shown)
    whole = [trial for trial in shown if trial["state"] == "complete"]
    best = (np.maximum if highest else np.minimum).accumulate([trial["score"] for trial in whole])
    top.step([trial["trial"] for trial in whole], best, where="post", color="C3", linewidth=1.2, label="best so far")
    top.xaxis.set_major_locator(MaxNLocator(integer=True))
    _name(top, "trial", "score", USUAL)
    top.legend(fontsize=SMALL, loc="lower left", bbox_to_anchor=(0, 1), ncols=4, frameon=False)
    for index, (name, (kind, ends)) in enumerate(kinds.items()):
        axes = figure.add_subplot(grid[1 + index // COLUMNS, index % COLUMNS])
        values = [trial["values"].get(name) for trial in shown]
        if kind == "choices":
            known = [*map(str, ends)]
            axes.set_xticks(range(len(known)), [textwrap.shorten(one, 12) for one in known], parse_math=False)
            axes.set_xlim(-0.5, len(known) - 0.5)
            values = [known.index(str(value)) for value in values]
        else:
            axes.set_xscale("log" if kind == "log" else "linear")
            axes.set_xlim(ends[0], ends[1])
        _scatter(axes, values, shown)
        _name(axes, name, "score", SMALL)
    return _save(figure, path)


def estimates(panels: Mapping[str, Mapping[str, Estimate]], path: str | Path, title: str) -> Path:
    """Draw panels of estimates, a row for each name: a dot, and its 95 % interval where there is one."""
    heights = [0.55 + 0.3 * len(rows) for rows in panels.values()]
    figure = _figure(title, 0.6 + sum(heights))
    grid = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)
    for axes, (label, rows) in zip(grid[:, 0], panels.items(), strict=True):
        for index, (middle, low, high) in enumerate(rows.values()):
            colour = _colour(index, len(rows))
            if low is not None and high is not None:
                axes.barh(index, high - low, 0.5, low, color=colour, alpha=0.3)
            axes.plot([middle, middle], [index - 0.25, index + 0.25], color=colour, linewidth=2)
        axes.use_sticky_edges = False  # else the longest bar would touch the frame
        axes.set_yticks(range(len(rows)), [textwrap.shorten(name, 60) for name in rows], fontsize=SMALL)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_title(label, fontsize=SMALL + 1)
        axes.tick_params(labelsize=SMALL)
        axes.grid(axis="x", alpha=0.3)
        if label.startswith("probability"):
            axes.set_xlim(0, 1)
            axes.axvline(0.5, color="0.3", linestyle="--", linewidth=1)
    return _save(figure, path)


def _returns(axes: Axes, training: Rows, evaluations: Rows, target: float | None) -> None:
    """The big panel of one run."""
    steps, values = _line(training, "return")
    if np.isfinite(values).any():
        _plot(axes, steps, values, color="0.6", linewidth=0.8, label="training")
    steps, values = _line(evaluations, "mean")
    if seen := np.isfinite(values).any():
        samples = [_numbers(row.get("scores") or ()) for row in evaluations]
        finite = [sample[np.isfinite(sample)] for sample in samples]
        low, high = np.array([interval(sample) if sample.size else (np.nan, np.nan) for sample in finite]).T
        _fill(axes, steps, low, high, color="C0", label="95 % interval of the mean")
        _plot(axes, steps, values, color="C0", linewidth=1.6, label="evaluation")
    if not (seen or axes.lines):
        _say_nothing(axes)
    if target is not None:
        axes.axhline(target, color="0.3", linestyle="--", linewidth=1, label=f"target {target:g}")
    _dress(axes, "return", USUAL)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=SMALL, loc="lower left", bbox_to_anchor=(0, 1), ncols=4, frameon=False)


def _panels(training: Rows, evaluations: Rows) -> dict[str, tuple[str, Line]]:
    """The small panels: title → label of its axis and line."""
    panels: dict[str, tuple[str, Line]] = {}
    for name in _metric_names(training, FIRST):
        panels[readable(name)] = UNITS.get(name, ""), _line(training, "metrics", name)
    for name, (title, unit) in RATES.items():
        panels[title] = unit, _line(training, name)
    panels["episode length"] = "steps", _line(training, "length")
    for name in _metric_names(evaluations, ()):
        panels[f"evaluation: {readable(name)}"] = "", _line(evaluations, "metrics", name)
    return {title: panel for title, panel in panels.items() if np.isfinite(panel[1][1]).any()}


def _metric_names(rows: Rows, first: Sequence[str]) -> list[str]:
    found = dict.fromkeys(name for row in rows for name in row.get("metrics") or ())
    return [*(name for name in first if name in found), *(name for name in found if name not in first)]


def _group(axes: Axes, label: str, lines: list[Line], colour: Any) -> None:
    """The runs of one group: their mean and its band over thin lines; one alone, or any that never meet, as it is."""
    axes.plot([], [], color=colour, linewidth=1.6, label=label)  # one entry, however many lines
    meet = len(lines) > 1 and max(steps.min() for steps, _ in lines) <= min(steps.max() for steps, _ in lines)
    for line in lines:
        _plot(axes, *line, color=colour, linewidth=0.5 if meet else 1.6, alpha=0.4 if meet else 1.0)
    if meet:
        steps, mean, low, high = band(lines)
        _fill(axes, steps, low, high, color=colour)
        _plot(axes, steps, mean, color=colour, linewidth=1.6)


def _fill(axes: Axes, steps: Array, low: Array, high: Array, **style: Any) -> None:
    """Draw a band; at a single step, where it has no width, an upright line."""
    axes.fill_between(steps, low, high, alpha=0.25, linewidth=0, **style)
    if len(steps) == 1:
        axes.vlines(steps, low, high, color=style["color"], alpha=0.5)


def _outcome(rows: Rows) -> Line:
    """The evaluations of a run, or else its training returns, without those that are missing."""
    for kind, name in (("evaluation", "mean"), ("train", "return")):
        steps, values = _line(_kind(rows, kind), name)
        seen = np.isfinite(values)
        if seen.any():
            break
    return steps[seen], values[seen]


def _kind(rows: Rows, kind: str) -> Rows:
    return [row for row in rows if row.get("kind") == kind and row.get("steps") is not None]


def _line(rows: Rows, *keys: str) -> Line:
    """Steps and the values found under the keys; NaN where there is none."""
    found: list[Any] = list(rows)
    for key in keys:
        found = [(inner or {}).get(key) for inner in found]
    return _numbers([row["steps"] for row in rows]), _numbers(found)


def _numbers(values: Sequence[Any]) -> Array:
    """As floats, with NaN for what is missing or infinite."""
    numbers = np.array([np.nan if value is None else float(value) for value in values])
    return np.where(np.isfinite(numbers), numbers, np.nan)


def available() -> bool:
    """Whether the package that draws is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def _figure(title: str, height: float) -> Figure:
    if not available():
        raise ShoalError("a plot needs Matplotlib: pip install 'shoal[plots]'")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), dpi=DPI, layout="constrained")
    figure.suptitle(textwrap.fill(title, 70), fontsize=USUAL + 2, parse_math=False)
    return figure


def _plot(axes: Axes, steps: Any, values: Any, **style: Any) -> None:
    """Draw a line; where its points are few, or all alone, they are marked."""
    lonely = len(steps) <= FEW or not np.isfinite(np.diff(values)).any()
    axes.plot(steps, values, marker="o" if lonely else "", markersize=2 * style["linewidth"], **style)


def _dress(axes: Axes, label: str, size: int) -> None:
    """Labels, units and grid of a panel whose horizontal axis counts steps."""
    from matplotlib.ticker import EngFormatter, MaxNLocator

    axes.set_xlabel("environment steps", fontsize=size)
    axes.set_ylabel(label, fontsize=size)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.xaxis.set_major_locator(MaxNLocator(5 if size == SMALL else 9, steps=[1, 2, 2.5, 5, 10], integer=True))
    axes.tick_params(labelsize=size - 1)
    axes.yaxis.get_offset_text().set_fontsize(size - 1)
    axes.grid(alpha=0.3)


def _legend(figure: Figure, axes: Axes) -> None:
    """Name what is drawn below it, where it hides nothing."""
    handles, labels = axes.get_legend_handles_labels()
    columns = max(1, min(3, 90 // max(map(len, labels))))
    legend = figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=SMALL, frameon=False)
    for text in legend.get_texts():
        text.set_parse_math(False)


def _colour(index: int, count: int) -> Any:
    import matplotlib

    return matplotlib.colormaps["tab10" if count <= 10 else "tab20"](index % 20)


def _say_nothing(axes: Axes) -> None:
    axes.text(0.5, 0.5, "nothing to show yet", transform=axes.transAxes, ha="center", va="center", color="0.5")


def _save(figure: Figure, path: str | Path) -> Path:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    if path.suffix.lower() == ".png":
        from PIL import Image

        with Image.open(path) as picture:
            few = picture.convert("RGB").quantize(COLOURS)  # half the size or less, and no difference to be seen
        few.save(path, optimize=True)
    return path


def _scatter(axes: Axes, places: Sequence[Any], trials: Rows) -> None:
    """Scores as dots, hollow where a trial was stopped early."""
    for state, face, label in (("complete", "C0", "whole"), ("pruned", "none", "stopped early")):
        some = [index for index, trial in enumerate(trials) if trial["state"] == state]
        if some:
            across, up = [places[index] for index in some], [trials[index]["score"] for index in some]
            axes.scatter(across, up, s=18, facecolors=face, edgecolors="C0", label=label, zorder=3, clip_on=False)


def _name(axes: Axes, across: str, up: str, size: int) -> None:
    """Labels and grid of a panel whose horizontal axis does not count steps."""
    axes.set_xlabel(across, fontsize=size, parse_math=False)
    axes.set_ylabel(up, fontsize=size)
    axes.tick_params(which="both", labelsize=size - 1)
    axes.grid(alpha=0.3)
