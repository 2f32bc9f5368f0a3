"""Figures: what is drawn, how it is labelled, and that odd input draws as well."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from shoal.core.errors import ShoalError
from shoal.display import plots
from shoal.display.statistics import describe, interval


def training(steps, value=None, **metrics):
    return {
        "kind": "train",
        "steps": steps,
        "seconds": 1.0,
        "updates": 2,
        "episodes": 3,
        "steps_per_s": 1000.0 + steps,
        "updates_per_s": 10.0,
        "return": value,
        "length": None,
        "metrics": metrics,
    }


def evaluation(steps, *scores, **metrics):
    mean = float(np.mean(scores))
    return {
        "kind": "evaluation",
        "steps": steps,
        "mean": mean,
        "scores": list(scores),
        "length": 9.0,
        "metrics": metrics,
    }


def run(steps=1_000_000, shift=0.0):
    """The rows of a whole run."""
    rows = []
    for index in range(1, 41):
        now = steps * index // 40
        metrics = dict.fromkeys(
            ("lag", "queue", "lr", "policy_loss", "own_thing", "value_loss", "entropy"), 1.0 / index
        )
        rows.append(training(now, index + shift, **metrics))
        if index % 8 == 0:
            rows.append(evaluation(now, index + shift, index + shift + 4))
    return rows


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were saved, newest last."""
    figures, save = [], plots._save
    monkeypatch.setattr(plots, "_save", lambda figure, path: (figures.append(figure), save(figure, path))[1])
    return figures


def lines(axes):
    """Label → points, for the lines of a panel that have a name."""
    return {line.get_label(): line.get_xydata().tolist() for line in axes.lines if line.get_label()[0] != "_"}


def legend(figure):
    """The entries of the figure's legend, or of its panels' ones."""
    parts = [*figure.legends, *(axes.get_legend() for axes in figure.axes if axes.get_legend())]
    return [text.get_text() for part in parts for text in part.get_texts()]


def overlaps(figure):
    """Pairs of panels and legends that cover each other, and those that leave the figure."""
    boxes = [part.get_tightbbox() for part in (*figure.axes, *figure.legends)]
    pairs = [
        (a, b) for i, a in enumerate(boxes) for b in boxes[:i] if a.shrunk(0.99, 0.99).overlaps(b.shrunk(0.99, 0.99))
    ]
    outside = [box for box in boxes if min(box.x0, box.y0) < 0 or box.x1 > figure.bbox.x1 or box.y1 > figure.bbox.y1]
    return pairs + outside


def test_curve_shows_returns_target_and_every_metric(tmp_path, drawn):
    rows = run()
    path = plots.curve(rows, tmp_path / "new" / "run.png", r"A run of $\run$", target=30)
    assert path == tmp_path / "new" / "run.png"
    assert path.read_bytes().startswith(b"\x89PNG")
    top, *small = drawn[0].axes
    assert legend(drawn[0]) == ["training", "95 % interval of the mean", "evaluation", "target 30"]
    shown = lines(top)
    assert shown["evaluation"] == [[row["steps"], row["mean"]] for row in rows if row["kind"] == "evaluation"]
    assert shown["training"] == [[row["steps"], row["return"]] for row in rows if row["kind"] == "train"]
    assert shown["target 30"] == [[0, 30], [1, 30]]  # from edge to edge
    target = next(line for line in top.lines if line.get_label() == "target 30")
    assert target.get_linestyle() == "--"
    first = next(row for row in rows if row["kind"] == "evaluation")
    heights = [y for x, y in top.collections[0].get_paths()[0].vertices if x == first["steps"]]
    assert (min(heights), max(heights)) == interval(first["scores"])
    assert (top.get_xlabel(), top.get_ylabel()) == ("environment steps", "return")
    ticks = [label.get_text() for label in top.get_xticklabels()]
    assert {"0", "200k", "1M"} <= set(ticks)
    assert [axes.get_title() for axes in small] == [
        *("policy loss", "value loss", "entropy", "policy lag", "queue", "learning rate", "own thing"),
        *("speed", "updates"),  # no row tells the length of an episode
    ]
    speed = small[7]
    assert (speed.get_xlabel(), speed.get_ylabel()) == ("environment steps", "steps per second")
    assert speed.lines[0].get_ydata()[0] == 26000
    assert drawn[0].get_suptitle() == r"A run of $\run$"  # which is no formula
    assert not overlaps(drawn[0])


def test_every_column_says_what_its_steps_are(tmp_path, drawn):
    plots.curve([training(5, 1.0, a=1, b=2)], tmp_path / "run.png", "")
    small = drawn[0].axes[1:]
    assert [axes.get_title() for axes in small] == ["a", "b", "speed", "updates"]
    assert [axes.get_xlabel() for axes in small] == ["", *["environment steps"] * 3]


def test_curve_shows_metrics_of_evaluations(tmp_path, drawn):
    plots.curve([evaluation(5, 1.0, flag_taken=0.5)], tmp_path / "run.png", "")
    assert drawn[0].axes[1].get_title() == "evaluation: flag taken"
    assert drawn[0].axes[1].lines[0].get_xydata().tolist() == [[5, 0.5]]


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [training(0)],
        [training(10, 1.0, loss=float("nan")), training(20, float("nan"), loss=None)],
        [training(10, 1.0, loss=float("inf")), training(20, 2.0, loss=float("inf")), training(30, loss=1.0)],
        [training(index, 1.0, loss=float("inf") if index > 3 else 1.0) for index in range(40)],
        [evaluation(10, 3.0)],
        [evaluation(10, 3.0, 3.0), evaluation(20, 3.0, 3.0)],
        [evaluation(10, 3.0, float("nan")), {**evaluation(20, 1.0), "mean": None, "scores": []}],
        [{"kind": "train", "steps": 5}, {"kind": "evaluation", "steps": 6}, {"kind": "other"}, {}],
        [training(index, float(index), **{f"metric_{name}": 1.0 for name in range(25)}) for index in range(3)],
    ],
    ids=["empty", "one", "nan", "inf", "diverged", "evaluation", "constant", "gaps", "bare", "many"],
)
def test_odd_rows_are_drawn(rows, tmp_path, drawn):
    assert plots.curve(rows, tmp_path / "run.png", "Odd", target=2.0).exists()
    assert not overlaps(drawn[0])


def test_a_single_evaluation_can_be_seen(tmp_path, drawn):
    plots.curve([evaluation(10, 1.0, 5.0)], tmp_path / "run.png", "")
    top = drawn[0].axes[0]
    mean = next(line for line in top.lines if line.get_label() == "evaluation")
    assert mean.get_marker() == "o"
    upright = top.collections[-1].get_segments()[0]
    assert upright.tolist() == [[10, 1], [10, 5]]


def test_nothing_yet_is_said(tmp_path, drawn):
    plots.curve([], tmp_path / "run.png", "")
    plots.distribution([], tmp_path / "scores.png", "")
    for figure in drawn:
        assert [text.get_text() for text in figure.axes[0].texts] == ["nothing to show yet"]


def test_comparison_shows_mean_and_band_of_each_group(tmp_path, drawn):
    groups = {r"$\PPO$": [("a", run()), ("b", run(shift=10.0))], "IMPALA": [("c", run(shift=-5.0))]}
    path = plots.comparison(groups, tmp_path / "new" / "both.png", "Both")
    assert path.exists()
    (axes,) = drawn[0].axes
    assert legend(drawn[0]) == [r"$\PPO$ (2 runs)", "IMPALA (1 run)"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("environment steps", "return")
    _, first, second, mean, _, alone = axes.lines
    assert first.get_ydata().tolist() == [10, 18, 26, 34, 42]
    assert second.get_ydata().tolist() == [20, 28, 36, 44, 52]
    assert first.get_linewidth() < mean.get_linewidth() == alone.get_linewidth()
    np.testing.assert_allclose(mean.get_ydata()[[0, -1]], [15, 47])
    assert alone.get_ydata().tolist() == [5, 13, 21, 29, 37]
    (band,) = axes.collections
    edge = [y for x, y in band.get_paths()[0].vertices if x == mean.get_xdata()[0]]
    assert (min(edge), max(edge)) == (10, 20)
    assert first.get_color() == mean.get_color() != alone.get_color()
    assert not overlaps(drawn[0])


def test_comparison_takes_training_returns_where_there_are_no_evaluations(tmp_path, drawn):
    trained = [row for row in run() if row["kind"] == "train"]
    plots.comparison({"only": [("a", trained)]}, tmp_path / "both.png", "")
    assert len(drawn[0].axes[0].lines[1].get_ydata()) == 40


def test_comparison_shows_runs_that_never_meet_as_they_are(tmp_path, drawn):
    runs = [("a", [training(1, 1.0), training(2, 2.0)]), ("b", [training(3, 1.0)])]
    plots.comparison({"apart": runs, "empty": [("c", [])]}, tmp_path / "both.png", "")
    assert legend(drawn[0]) == ["apart (2 runs)", "empty (0 runs)"]
    _, first, second, _ = drawn[0].axes[0].lines
    assert first.get_xdata().tolist() == [1, 2]
    assert second.get_marker() == "o"
    assert not drawn[0].axes[0].collections


def test_comparison_of_many_groups_stays_legible(tmp_path, drawn):
    groups = {f"a rather long label of a group, number {index}": [("a", run(shift=index))] for index in range(14)}
    plots.comparison(groups, tmp_path / "both.png", "Many")
    assert not overlaps(drawn[0])
    assert len({str(line.get_color()) for line in drawn[0].axes[0].lines}) == 14


def test_comparison_of_nothing_is_an_error(tmp_path):
    with pytest.raises(ShoalError, match="no returns in first, second"):
        plots.comparison({"a": [("first", [])], "b": [("second", [training(5)])]}, tmp_path / "both.png", "")
    with pytest.raises(ShoalError, match="an empty list of runs"):
        plots.comparison({}, tmp_path / "both.png", "")
    assert not [*tmp_path.iterdir()]


def test_distribution_marks_mean_median_and_interval(tmp_path, drawn):
    scores = [*np.random.default_rng(0).normal(100, 20, size=99), 400.0]
    assert plots.distribution(scores, tmp_path / "new" / "scores.png", "Scores").exists()
    told = describe(scores)
    (axes,) = drawn[0].axes
    assert sorted(legend(drawn[0])) == sorted(
        [
            f"mean {told['mean']:.4g}",
            f"median {told['median']:.4g}",
            f"95 % interval of the mean {told['low']:.4g} … {told['high']:.4g}",
        ]
    )
    *bars, span = axes.patches
    assert sum(bar.get_height() for bar in bars) == 100
    assert len(bars) == 10
    assert (span.get_x(), span.get_x() + span.get_width()) == pytest.approx((told["low"], told["high"]))
    assert [line.get_xdata()[0] for line in axes.lines] == [told["mean"], told["median"]]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("return", "episodes")
    assert not overlaps(drawn[0])


@pytest.mark.parametrize(
    ("scores", "count"),
    [
        ([5.0], 1),
        ([0.1] * 30, 30),
        ([1e20] * 3, 3),
        ([0, 1], 2),
        ([1.0, None], 1),
        ([1e15, 1e15 + 0.25], 2),
        ([0, float("nan"), 1], 2),
    ],
)
def test_odd_scores_are_drawn(scores, count, tmp_path, drawn):
    plots.distribution(scores, tmp_path / "scores.png", "")
    *bars, _ = drawn[0].axes[0].patches
    assert sum(bar.get_height() for bar in bars) == count
    assert sum(bar.get_width() for bar in bars) > 0
    assert len(bars) == (1 if len({*scores} - {None}) == 1 else 5)


def test_figures_are_alike_in_every_thread(tmp_path):
    rows = [evaluation(5, 1.0), evaluation(10, 2.0)]

    def draw(name):
        return plots.curve(rows, tmp_path / f"{name}.png", "A run").read_bytes()

    with ThreadPoolExecutor(3) as pool:
        assert len(set(pool.map(draw, range(6)))) == 1


def test_no_window_system_and_nothing_loaded_early(tmp_path):
    code = (
        "import sys, shoal.display.plots as plots; early = 'matplotlib' in sys.modules;"
        f"plots.curve([], {str(tmp_path / 'run.png')!r}, ''); print(early, 'matplotlib.pyplot' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
