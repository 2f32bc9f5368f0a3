"""A sweep as a user runs it: killed in the middle, interrupted, continued, and shown."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from shoal.experiment import load
from shoal.runs import metrics
from tests.pace import seconds

SEARCH = {
    "algorithm.lr.start": {"low": 1e-4, "high": 1e-2, "log": True},
    "algorithm.gae_lambda": {"low": 0.7, "high": 1},
    "algorithm.unroll": {"low": 16, "high": 128, "step": 16},
    "algorithm.minibatches": [1, 2, 4],
}


def write(tmp_path: Path, trials: int, steps: int, **more: Any) -> None:
    """Write a sweep of PPO's settings on CartPole."""
    overrides = {"steps": steps, "evaluation": {"every": 500, "episodes": 5}, "checkpoints.every": 500}
    tree = {"config": "ppo_cartpole", "overrides": overrides, "search": SEARCH, "trials": trials, **more}
    (tmp_path / "cartpole.yaml").write_text(yaml.safe_dump(tree))


def until(condition: Callable[[], bool], process: Any) -> None:
    """Wait for something that a program does."""
    limit = time.monotonic() + seconds(100)
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < limit
        time.sleep(0.05)


def in_the_middle(run: Path) -> bool:
    """Whether a run has learned something, and not everything."""
    return any(path.name != "step_0" for path in (run / "checkpoints").glob("step_*"))


def listed(command: Any) -> list[dict[str, Any]]:
    """The trials as `--show` prints them."""
    process = command("sweep", "cartpole.yaml", "--show", "--json")
    told, problems = process.communicate(timeout=seconds(60))
    assert process.returncode == 0, problems
    return [json.loads(line) for line in told.splitlines()]


@pytest.mark.long
def test_a_sweep_survives_kill_9_and_continues(command: Any, tmp_path: Path) -> None:
    write(tmp_path, 20, 2_000, prune="median", at_once=1)
    folder = tmp_path / "sweeps" / "cartpole"
    first = command("sweep", "cartpole.yaml")
    until(lambda: in_the_middle(folder / "trial-004"), first)
    first.kill()
    first.wait()
    before = {row["trial"]: row for row in listed(command)}
    running = [number for number, row in before.items() if row["state"] == "running"]
    assert running
    again = command("sweep", "cartpole.yaml")
    told, problems = again.communicate(timeout=seconds(600))
    assert again.returncode == 0, problems
    rows = {row["trial"]: row for row in listed(command)}
    assert [*sorted(rows)] == [*range(20)]
    assert {row["state"] for row in rows.values()} <= {"complete", "pruned"}
    for number, row in before.items():
        assert all(rows[number][name] == row[name] for name in SEARCH if name in row)  # none was drawn anew
        starts = json.loads((folder / f"trial-{number:03d}" / "provenance.json").read_text())
        assert len(starts) <= (2 if number in running else 1)
        if row["state"] == "complete":
            assert rows[number] == row
    logs = [(folder / f"trial-{number:03d}.log").read_text() for number in running]
    assert any("resuming at step" in log for log in logs)
    best = max((row for row in rows.values() if row["state"] == "complete"), key=lambda row: row["score"])
    assert load(folder / "best.yaml").algorithm.unroll == best["algorithm.unroll"]  # type: ignore[attr-defined]
    assert "best settings: sweeps/cartpole/best.yaml" in told
    assert (folder / "sweep.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
def test_ctrl_c_stops_the_trials_in_order(command: Any, tmp_path: Path) -> None:
    write(tmp_path, 1, 30_000, at_once=1)
    run = tmp_path / "sweeps" / "cartpole" / "trial-000"
    process = command("sweep", "cartpole.yaml")
    until(lambda: in_the_middle(run), process)
    process.send_signal(signal.SIGINT)
    _, problems = process.communicate(timeout=seconds(60))
    assert process.returncode == 130, problems
    assert json.loads((run / "summary.json").read_text())["stopped_by"] == "interrupted"
    assert [row["state"] for row in listed(command)] == ["running"]
    seen = metrics.evaluations(run)
    again = command("sweep", "cartpole.yaml")
    until(lambda: len(metrics.evaluations(run)) > len(seen) + 2, again)
    assert "resuming at step" in (run.parent / "trial-000.log").read_text()
    again.send_signal(signal.SIGTERM)
    _, problems = again.communicate(timeout=seconds(60))
    assert again.returncode == 130, problems
