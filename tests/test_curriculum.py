"""Curricula: evaluations change the environment for everyone, and a run that goes back goes back in that too."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shoal
from shoal.core.errors import SettingsError
from shoal.runs import checkpoint
from shoal.services.checkpoints import Checkpoints
from shoal.services.journal import Journal
from tests.pace import long
from tests.programs import outcome, small

ALWAYS = -2.0  # a target that every score reaches
STAGES = [
    {"arguments": {"length": 1}, "target": ALWAYS},
    {"arguments": {"length": 2}, "target": ALWAYS},
    {"arguments": {"length": 4}},
]
ALGORITHMS = {
    "impala": {"name": "impala", "batch": 4, "unroll": 5},
    "dqn": {"name": "dqn", "batch": 8, "replay": {"minimum": 20, "capacity": 1000, "chunk": 4}},
    "a3c": {"name": "a3c"},
}


def settings(algorithm: str = "impala", **more: Any) -> dict[str, Any]:
    """Three stages, whose episodes have 2, 3 and 5 steps."""
    memory = {"id": "Memory", "arguments": {"cues": 3}}
    run = small(ALGORITHMS[algorithm], environment=memory, curriculum=STAGES)
    return {**run, "engine": "inline", "lockstep": True, "steps": 700, **more}


@pytest.mark.parametrize(
    ("algorithm", "engine", "learners"),
    [
        ("impala", "inline", 1),
        long("impala", "processes", 1),
        long("impala", "threads", 1),
        long("dqn", "inline", 1),
        long("a3c", "inline", 1),
        long("impala", "processes", 2),
        long("dqn", "inline", 2),
    ],
)
def test_stages_follow_scores_and_resume_with_the_same_bits(
    algorithm: str, engine: str, learners: int, tmp_path: Path
) -> None:
    whole = shoal.train(settings(algorithm, engine=engine, learners=learners), tmp_path / "whole")
    scores = [(row["stage"], row["length"]) for row in whole.rows() if row["kind"] == "evaluation"]
    assert scores[:3] == [(0, 2.0), (1, 3.0), (2, 5.0)]
    assert {*scores[3:]} <= {(2, 5.0)}
    saved = checkpoint.paths(whole.directory)
    for number in range(0, len(saved) - 1, 2):
        part = tmp_path / str(number)
        shutil.copytree(whole.directory, part)
        for path in checkpoint.paths(part)[number + 1 :]:
            shutil.rmtree(path)
        assert outcome(shoal.resume(part)) == outcome(whole)
    if engine != "inline":
        assert outcome(whole) == outcome(shoal.train(settings(algorithm, learners=learners), tmp_path / "inline"))


def test_stages_follow_scores_with_several_learners(tmp_path: Path) -> None:
    run = shoal.train(settings(learners=2, steps=500), tmp_path / "run")
    scores = [(row["stage"], row["length"]) for row in run.rows() if row["kind"] == "evaluation"]
    assert scores[:3] == [(0, 2.0), (1, 3.0), (2, 5.0)]


def test_actors_play_the_stage(tmp_path: Path) -> None:
    run = shoal.train(settings(lockstep=False), tmp_path / "run")
    assert [row["length"] for row in run.rows() if row["kind"] == "train"][-1] == pytest.approx(5.0, abs=1.5)
    assert run.evaluate(3).statistics["mean"] >= -1
    assert run.experiment.environment_in().arguments == {"cues": 3, "length": 4}


def test_a_score_of_a_later_stage_is_the_better_one(tmp_path: Path) -> None:
    checkpoints, weights = Checkpoints(str(tmp_path), 1), {"w": np.zeros(1, np.float32)}
    for stage, mean in ((0, 0.9), (1, 0.1), (0, 1.0), (1, 0.05)):
        state = {"steps": 1, "mean": mean, "stage": stage}
        assert checkpoints.save_best({"weights": weights, "state": state}) == ""
    best = checkpoint.read_state(checkpoint.folder(tmp_path) / "best")
    assert (best["stage"], best["mean"]) == (1, 0.1)


def test_the_target_of_a_run_counts_in_the_last_stage_only() -> None:
    journal = Journal(target=0.5, stages=[0.2])
    assert not journal.evaluated({"steps": 1, "mean": 0.1, "stage": 0})
    assert journal.stage() == 0
    assert not journal.evaluated({"steps": 2, "mean": 0.9, "stage": 0})
    assert journal.stage() == 1
    journal.went_back(1)
    assert journal.stage() == 0
    journal.evaluated({"steps": 2, "mean": 0.9, "stage": 0})
    assert journal.evaluated({"steps": 3, "mean": 0.6, "stage": 1})


@pytest.mark.parametrize(
    ("stages", "complaint"),
    [
        ([{}, {}], "stage 1 of 2: it needs a target"),
        ([{"target": 1.0}], "stage 1 of 1: the last stage has no target"),
        ([{"target": 1.0}, {"arguments": {"cues": 5}}], "stage 2 shows or takes"),
        ([{"target": 1.0, "argument": {}}, {}], "did you mean 'arguments'"),
    ],
)
def test_mistakes_are_refused_in_words(stages: Any, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=complaint):
        shoal.train(settings(curriculum=stages), tmp_path / "run")
