"""Comparisons of groups of runs: who belongs together, what is measured, and what is refused as nonsense."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from shoal.comparison import compared
from shoal.core.errors import SettingsError
from shoal.run import Run, grouped


@pytest.fixture
def made(tmp_path: Path) -> Any:
    """Make a run of an algorithm on an environment, with the means of its evaluations."""

    def make(algorithm: str, seed: int, means: list[float], environment: str = "CartPole-v1", **summary: Any) -> Run:
        folder = tmp_path / f"{algorithm}-{environment}-{seed}"
        folder.mkdir()
        settings = {"environment": {"id": environment}, "algorithm": {"name": algorithm}, "seed": seed}
        (folder / "config.yaml").write_text(json.dumps({**settings, "engine": "inline"}))
        rows = [{"kind": "evaluation", "steps": 100 * at, "mean": mean} for at, mean in enumerate(means)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "summary.json").write_text(json.dumps({"stopped_by": "steps", **summary}))
        return Run(folder)

    return make


def several(made: Any, environment: str = "CartPole-v1", seeds: int = 5) -> list[Run]:
    """Runs of two algorithms, whose best evaluation is not their last."""
    source = np.random.default_rng(len(environment))
    return [
        made(name, seed, [0.0, base + 5.0, base + float(source.normal())], environment)
        for name, base in (("ppo", 10.0), ("impala", 11.0))
        for seed in range(seeds)
    ]


def test_groups_are_measured_by_their_final_and_best_evaluations(made: Any, tmp_path: Path) -> None:
    result = compared(runs := several(made))
    finals = {"ppo": [], "impala": []}  # type: ignore[var-annotated]
    for run in runs:
        finals[run.directory.name.split("-")[0]].append(run.rows()[-1]["mean"])
    assert [(row["group"].split()[0], row["evaluation"], row["runs"]) for row in result.scores] == [
        *(("ppo", "final", 5), ("impala", "final", 5), ("ppo", "best", 5), ("impala", "best", 5))
    ]
    for row, name in zip(result.scores, ("ppo", "impala"), strict=False):
        assert row["mean"] == pytest.approx(np.mean(finals[name]))
        assert row["IQM"] == pytest.approx(np.mean(sorted(finals[name])[1:4]))
        for measure in ("mean", "IQM"):
            assert row[f"{measure} low"] < row[measure] < row[f"{measure} high"]
    assert [row["mean"] for row in result.scores[2:]] == [15, 16]
    final, best = result.pairs
    wins = np.mean([own > their for own in finals["ppo"] for their in finals["impala"]])
    assert final["probability"] == pytest.approx(wins)
    assert final["low"] <= final["probability"] <= final["high"]
    assert (best["probability"], best["low"], best["high"]) == (0, 0, 0)
    assert not result.notes
    assert Path(result.plot(tmp_path / "compare.png")).read_bytes().startswith(b"\x89PNG")


def test_one_seed_has_a_score_but_no_interval(made: Any) -> None:
    result = compared(several(made, seeds=1))
    assert all(row["mean low"] is None and row["mean"] is not None for row in result.scores)
    assert all(row["low"] is None for row in result.pairs)
    assert len(result.notes) == 2
    assert all("no interval can be had" in note for note in result.notes)


def test_returns_of_several_environments_are_averaged_only_on_a_common_scale(made: Any) -> None:
    runs = several(made) + several(made, "Acrobot-v1")
    apart = compared(runs)
    assert len(apart.scores) == 8
    assert "no common scale" in apart.notes[0]
    assert len(apart.pairs) == 2  # ranks need no scale
    scaled = compared(runs, ["0", "Acrobot-v1=5"], ["20", "Acrobot-v1=25"])
    assert [row["runs"] for row in scaled.scores] == [10] * 4
    assert scaled.scores[2]["group"] == "ppo · inline"
    assert scaled.scores[2]["mean"] == pytest.approx((15 / 20 + 10 / 20) / 2)
    assert not scaled.notes
    by_extremes = compared(runs, normalise=True)
    assert [row["mean"] for row in by_extremes.scores[2:]] == [0, 1]  # 15 and 16 on both environments
    assert [*grouped(runs)] == [f"{name} on {env} · inline" for env in ("CartPole-v1", "Acrobot-v1")
                                for name in ("ppo", "impala")]  # fmt: skip


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "one side": ({"low": ["0"]}, "--high is missing for Acrobot-v1"),
    "turned round": ({"low": ["3"], "high": ["Acrobot-v1=5", "CartPole-v1=2"]}, "CartPole-v1: --low 3 must be below"),
    "no number": ({"low": ["x"], "high": ["1"]}, "--low x: give a number"),
    "infinite": ({"low": ["0"], "high": ["inf"]}, "--high inf: give a number"),
    "unknown": ({"low": ["CartPole-v0=1"], "high": ["1"]}, "did you mean 'CartPole-v1'"),
    "both": ({"low": ["0"], "high": ["1"], "normalise": True}, "not both"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_nonsense_is_refused(case: str, made: Any) -> None:
    options, words = REFUSED[case]
    runs = [made("ppo", 0, [1.0], "Acrobot-v1"), made("ppo", 0, [1.0])]
    with pytest.raises(SettingsError, match=words):
        compared(runs, **options)


def test_runs_that_cannot_be_compared_are_refused(made: Any, caplog: pytest.LogCaptureFixture) -> None:
    run, empty, spoilt = made("ppo", 0, [1.0]), made("ppo", 1, []), made("ppo", 2, [float("nan")])
    other, more = made("ppo", 0, [1.0], "Acrobot-v1"), made("ppo", 3, [1.0])
    for runs, words in (
        ([run, run], "given twice"),
        ([run, empty], "no evaluation to compare"),
        ([run, spoilt], "not a finite number"),
        ([run, more, other], "as many runs on each environment are needed, not 2 on CartPole-v1, 1 on Acrobot-v1"),
    ):
        with pytest.raises(SettingsError, match=words):
            compared(runs)
    with pytest.raises(SettingsError, match="all scores on CartPole-v1 are 1"):
        compared([run, more], normalise=True)
    assert not caplog.messages
    compared([run, made("ppo", 7, [1.0], stopped_by="interrupted")])
    assert "has not ended" in caplog.text


def test_groups_of_one_title_are_called_by_their_folders(tmp_path: Path) -> None:
    runs = []
    for gamma, name in ((0.1, "elite-0"), (0.1, "elite-1"), (0.2, "queue-0"), (0.3, "uniform/seed-0")):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        algorithm = {"name": "ppo", "gamma": gamma}
        settings = {"algorithm": algorithm, "environment": {"id": "Catch"}, "engine": "inline"}
        (folder / "config.yaml").write_text(yaml.safe_dump(settings))
        runs.append(Run(folder))
    assert {label: len(group) for label, group in grouped(runs).items()} == {"elite": 2, "queue": 1, "uniform": 1}
    assert [*grouped(runs[:2])] == ["ppo on Catch · inline"]
