"""Metrics: rows and TensorBoard events in chunks, continuous over a resumed run, whole on a full disk."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from shoal.runs import metrics
from shoal.runs.loggers import TensorBoard
from shoal.runs.metrics import Metrics


def with_events(run: Path, steps: int) -> Metrics:
    """Metrics that go to TensorBoard too, without a thread between them."""
    return Metrics(run, steps, [TensorBoard(run, {}, steps)])


def row(steps: int, loss: float = 1.0) -> dict[str, Any]:
    counts = {"updates": 1, "episodes": 0, "faults": 0, "return": None, "length": None}
    rates = {"steps_per_s": 5.0, "updates_per_s": 1.0}
    return {
        "kind": "train",
        "time": 1e9 + steps,
        "seconds": 1.0,
        "steps": steps,
        **counts,
        **rates,
        "metrics": {"loss": loss},
    }


def score(steps: int, mean: float) -> dict[str, Any]:
    return {
        "kind": "evaluation",
        "time": 1e9,
        "steps": steps,
        "mean": mean,
        "scores": [mean],
        "length": 3.0,
        "metrics": {"coins": 2.0},
    }


def events(run: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    accumulator.Reload()
    tags = accumulator.Tags()["scalars"]
    return {tag: [(event.step, event.value) for event in accumulator.Scalars(tag)] for tag in tags}


def test_rows_reach_the_disk_at_a_flush(tmp_path: Path) -> None:
    writer = with_events(tmp_path, 0)
    writer.add(row(1))
    writer.add(score(1, 7.5))
    assert metrics.read(tmp_path) == []
    writer.flush()
    assert metrics.read(tmp_path) == [row(1), score(1, 7.5)]
    writer.add(row(2, 3.0))
    writer.flush()
    writer.flush()
    assert [line["steps"] for line in metrics.read(tmp_path)] == [1, 1, 2]
    shown = events(tmp_path)
    assert shown["learner/loss"] == [(1, 1.0), (2, 3.0)]
    assert shown["evaluation/return"] == [(1, 7.5)]
    assert shown["evaluation/coins"] == [(1, 2.0)]
    assert "train/return" not in shown


def test_a_resumed_run_is_continuous(tmp_path: Path) -> None:
    first = with_events(tmp_path, 0)
    for steps in (10, 20, 30):
        first.add(row(steps))
    first.flush()
    with metrics.file_of(tmp_path).open("a") as file:
        file.write('{"kind": "train", "st')  # cut off by a crash
    second = with_events(tmp_path, 20)
    second.add(row(25, 2.0))
    second.add(row(35, 2.0))
    second.flush()
    assert [(line["steps"], line["metrics"]["loss"]) for line in metrics.read(tmp_path)] == [
        (10, 1.0),
        (20, 1.0),
        (25, 2.0),
        (35, 2.0),
    ]
    assert events(tmp_path)["learner/loss"] == [(10, 1.0), (20, 1.0), (25, 2.0), (35, 2.0)]


def test_a_learner_that_goes_back_is_continuous_too(tmp_path: Path) -> None:
    writer = with_events(tmp_path, 0)
    writer.add(row(10))
    writer.flush()
    writer.add(row(20))
    writer.add(row(30))
    writer.rewind(20)
    writer.add(row(25))
    writer.flush()
    assert [line["steps"] for line in metrics.read(tmp_path)] == [10, 20, 25]
    assert [step for step, _ in events(tmp_path)["learner/loss"]] == [10, 20, 25]


def test_what_a_full_disk_refuses_waits_and_comes_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = with_events(tmp_path, 0)
    writer.add(row(1))
    writer.flush()
    write = os.write

    def half(descriptor: int, data: Any) -> int:
        write(descriptor, bytes(data)[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", half)
    writer.add(row(2))
    with pytest.raises(OSError, match="No space"):
        writer.flush()
    monkeypatch.undo()
    assert [line["steps"] for line in metrics.read(tmp_path)] == [1]
    writer.flush()
    assert [line["steps"] for line in metrics.read(tmp_path)] == [1, 2]


def test_damage_in_the_middle_is_not_overlooked(tmp_path: Path) -> None:
    metrics.file_of(tmp_path).write_text('{"steps": 1}\nnonsense\n{"steps": 2}\n')
    with pytest.raises(ValueError, match="Expecting value"):
        metrics.read(tmp_path)
