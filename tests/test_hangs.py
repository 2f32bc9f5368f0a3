"""Environments that hang and episodes that never end: said in words, and ended in a bounded time."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch._dynamo  # noqa: F401 - which the first update loads, and takes its time
import yaml

import shoal
from shoal.core.errors import Stalled
from shoal.engines.supervisor import Patience
from shoal.workers import evaluator
from tests.pace import long, seconds

BASE: dict[str, Any] = {
    "algorithm": {"name": "ppo", "unroll": 16, "network": {"hidden": [8]}},
    "engine": "inline",
    "actors": 1,
    "envs": 2,
    "threads": 1,
    "device": "cpu",  # a GPU takes seconds to wake
    "steps": 10**8,
    "log_every": 0.2,
    "evaluation": {"episodes": 2, "every": 10**8},
}


@pytest.fixture
def start(command: Any, tmp_path: Path) -> Any:
    """Start a run as a user does, with these settings beside the usual ones."""

    def start(environment: str, arguments: dict[str, Any], **more: Any) -> subprocess.Popen[str]:
        world = {"id": f"tests.programs:{environment}", "arguments": arguments}
        (tmp_path / "config.yaml").write_text(yaml.safe_dump({**BASE, "environment": world, **more}))
        return command("train", tmp_path / "config.yaml", "--run-dir", tmp_path / "run")  # type: ignore[no-any-return]

    return start


def until(fact: Any, process: subprocess.Popen[str]) -> None:
    """Wait for something that a process does."""
    limit = time.monotonic() + seconds(60)
    while not fact():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < limit, "it did not come in time"
        time.sleep(0.02)


def test_who_is_stuck_is_named_whichever_limit_is_reached_first() -> None:
    reports = {
        "learner": {"busy": 0.0},
        "actor-0": {"busy": 40.0, "doing": "a step"},
        "actor-1": {"busy": 3.0, "doing": "a step"},
    }
    patience = Patience(0.0)
    assert patience.look(1, False, lambda: reports, lambda: "stacks")
    patience.seconds, patience._since = 50.0, patience._since - 60.0
    with pytest.raises(Stalled) as caught:
        patience.look(1, False, lambda: reports, lambda: "stacks")
    assert str(caught.value).splitlines() == [
        "no worker made progress for 50 s",
        "actor-0 has been inside a step for 40 s",
        "stacks",
    ]


@pytest.mark.parametrize("engine", ["inline", long("threads"), long("processes")])
def test_a_step_that_hangs_ends_the_run_and_says_where(hosted: Any, engine: str, tmp_path: Path) -> None:
    marker = tmp_path / "hangs"
    world = {"id": "tests.programs:Hanging-v0", "arguments": {"marker": str(marker)}}
    over = threading.Event()

    def let_go() -> None:  # a thread cannot be ended
        while not (marker.exists() or over.is_set()):
            over.wait(0.02)
        over.wait(seconds(5))
        marker.with_suffix(".released").touch()

    letting_go = threading.Thread(target=let_go)
    letting_go.start()
    try:
        with pytest.raises(Stalled) as caught:
            shoal.train({**BASE, "environment": world, "engine": engine, "limits": {"stall": seconds(3)}},
                        tmp_path / "run")  # fmt: skip
    finally:
        over.set()
        letting_go.join()
    told = str(caught.value)
    assert "actor-0 has been inside a step of environment 0 of 2 (tests.programs:Hanging-v0) for" in told
    assert "while not self.marker" in told or "time.sleep(0.01)" in told  # where it stands
    assert "actor-0 has been inside" in (tmp_path / "run" / "log.txt").read_text()


@pytest.mark.parametrize("engine", ["inline", long("threads")])
def test_one_signal_ends_a_run_that_hangs(start: Any, engine: str, tmp_path: Path) -> None:
    process = start("Hanging-v0", {"marker": str(tmp_path / "hangs")}, engine=engine, limits={"stall": seconds(40)})
    until((tmp_path / "hangs").exists, process)
    process.send_signal(signal.SIGTERM)
    _, told = process.communicate(timeout=seconds(30))
    assert process.returncode == 0, told
    assert "SIGTERM: saving a checkpoint and stopping" in told
    assert "actor-0" in told.partition("the run ends without")[0].partition("SIGTERM")[2]  # and why
    assert "in step" in told  # where it stands
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["stopped_by"] == "interrupted"
    assert [*(tmp_path / "run" / "checkpoints").glob("step_*")]


def test_the_others_go_on_and_the_run_can_end_during_an_endless_evaluation(start: Any, tmp_path: Path) -> None:
    evaluation = {"episodes": 2, "every": 64, "max_steps": None}
    process = start("Endless-v0", {}, evaluation=evaluation)
    killer = threading.Timer(seconds(60), process.kill)
    killer.start()
    assert process.stderr is not None
    steps = (line.partition("step ")[2].partition(" ")[0].replace(",", "") for line in process.stderr if "lag" in line)
    assert any(int(number) > 2000 for number in steps), "training stood still"
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=seconds(60))
    killer.cancel()
    killer.join()
    assert process.returncode == 0, told
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["stopped_by"] == "interrupted"


@pytest.mark.parametrize("lockstep", [False, True], ids=["free", "lockstep"])
def test_episodes_without_end_are_cut_and_counted(
    lockstep: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(evaluator, "FIRST", 0.0)
    world = {"id": "tests.programs:Endless-v0"}
    scored = {"episodes": 3, "every": 500, "max_steps": 450}
    run = shoal.train({**BASE, "environment": world, "steps": 500, "evaluation": scored, "lockstep": lockstep},
                      tmp_path / "run")  # fmt: skip
    assert run.summary["evaluations"]
    for result in run.summary["evaluations"]:
        assert (result["mean"], result["length"], result["cut"]) == (450.0, 450.0, 3)
    assert "mean return 450.0 over 3 episodes (3 cut off by evaluation.max_steps)" in caplog.text
    assert "0 of 3 episodes have ended; evaluation.max_steps cuts an episode after 450 steps" in caplog.text
    assert caplog.text.count("evaluator: this evaluation has taken") == 1  # and not again so soon
    score = run.evaluate(episodes=2, checkpoint="newest")
    assert score.scores == [450.0, 450.0]
    assert "over 2 episodes (2 cut off by evaluation.max_steps)" in str(score)


def test_a_game_is_cut_by_the_same_limit(tmp_path: Path) -> None:
    from shoal.envs import Environment, make

    worlds = make(Environment(id="ALE/Pong-v5"), 1, seed=0, evaluation=True, limit=60)
    step, lengths = worlds.reset(), []
    for _ in range(130):
        step = worlds.step(step.first.astype("int64"))
        lengths += [(episode.length, episode.cut) for episode in worlds.episodes()]
    worlds.close()
    assert len(lengths) >= 2
    assert all(length <= 60 and cut for length, cut in lengths)
