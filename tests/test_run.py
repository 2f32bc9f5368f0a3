"""The summary of a run as people read it."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.run import Score, headline, summary_text

COUNTS = dict.fromkeys(("steps", "updates", "episodes", "faults", "seconds", "steps_per_s"), 10)
ABOUT = {"algorithm": "a3c", "environment": "CartPole-v1", "engine": "cluster", "solved": None, "evaluations": []}
REST = {"best_evaluation": None, "last_evaluation": None, "stopped_by": "steps", "target": None}


def summary(**workers: object) -> dict[str, object]:
    return {**COUNTS, **ABOUT, **REST, "workers": workers}


def test_nodes_are_listed_with_their_workers_and_their_rates() -> None:
    there = {"working": 0.9, "waits": {}, "moves_per_s": 20.25, "node": "one:7700", "away": False}
    text = summary_text(
        Path("run"),
        summary(
            learner={"working": 0.5, "waits": {"store.get": 0.4}, "moves_per_s": 3.0},
            first=there,
            second=there,
            third={**there, "node": "two:7700", "away": True},
        ),
    )
    lines = text.splitlines()
    assert "learner: busy 50% of the time, waiting 40% for store.get" in lines
    assert "first on one:7700: busy 90% of the time" in lines
    assert lines[-2:] == [
        "node one:7700: 2 workers, 40.5 moves/s",
        "node two:7700: 1 worker, 20.2 moves/s, disconnected at the end",
    ]


def test_without_nodes_none_are_listed() -> None:
    text = summary_text(Path("run"), summary(learner={"working": 0.5, "waits": {}, "moves_per_s": 3.0}))
    assert "node" not in text


def test_steps_beyond_those_requested_are_explained() -> None:
    worker = {"working": 0.5, "waits": {}, "moves_per_s": 3.0}
    beyond = summary_text(Path("run"), {**summary(learner=worker), "steps": 7877, "steps_requested": 6000})
    assert "7,877 steps (6,000 requested, rounded up to whole batches) in" in beyond
    assert "requested" not in summary_text(
        Path("run"), {**summary(learner=worker), "steps": 6000, "steps_requested": 6000}
    )


@pytest.mark.parametrize(("sticky", "said"), [(None, "475.0, results"), (0.25, "475.0 (sticky actions 0.25), results")])
def test_a_score_of_a_game_says_whether_actions_stick(sticky: float | None, said: str, tmp_path: Path) -> None:
    facts = {"steps": 1, "seconds": 1.0, "best_evaluation": 475.0, "solved": None, "stopped_by": "steps"}
    assert said in headline(tmp_path, {**facts, "sticky": sticky})
    figures = dict.fromkeys(("mean", "low", "high", "median", "min", "max"), 1.0)
    assert ("sticky actions" in str(Score([1.0], figures, {}, "best", sticky=sticky))) == (sticky is not None)
