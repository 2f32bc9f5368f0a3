"""Whole runs of gradient workers: learning to a threshold, one optimizer for all, deaths, the same bits everywhere."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shoal
from shoal import engines, topology
from shoal.core.errors import SettingsError
from shoal.runs import checkpoint
from shoal.training import fingerprint
from tests.kills import killed
from tests.pace import long
from tests.programs import LOCAL, outcome, small

CONFIGS = Path(__file__).parents[1] / "configs"
RECURRENT = {"hidden": [16], "lstm": 8, "normalise_observation": True, "normalise_reward": True}
SMALL = {"hidden": [16]}
KEPT = {"capacity": 60, "minimum": 10, "alpha": 0.6}
ALGORITHMS: dict[str, Any] = {
    "a3c": {"name": "a3c", "network": RECURRENT},
    "a3c-replay": {"name": "a3c", "rule": "adam", "replay": KEPT, "replay_ratio": 2, "network": SMALL},
    "ppo": {"name": "ppo", "unroll": 16, "network": SMALL},
    "impala": {"name": "impala", "unroll": 5, "batch": 4, "network": SMALL},
    "dqn": {
        "name": "dqn",
        "batch": 8,
        "n": 2,
        "target_every": 20,
        "replay": {"capacity": 300, "minimum": 40, "samples_per_insert": 4, "chunk": 4},
        "network": SMALL,
    },
}


def settings(algorithm: str, **more: Any) -> dict[str, Any]:
    """A small run of two workers."""
    return small(ALGORITHMS[algorithm], topology="gradient_workers", **more)


@pytest.mark.parametrize("engine", [long("inline"), long("threads"), "processes"])
def test_cartpole_is_solved(engine: str, tmp_path: Path) -> None:
    run = shoal.train(CONFIGS / "a3c_cartpole.yaml", tmp_path / "run", engine=engine)
    assert run.solved
    newest = checkpoint.read(checkpoint.find(run.directory, "newest"))
    assert fingerprint(newest["weights"]) == run.summary["weights_sha256"]
    assert run.evaluate(episodes=5).statistics["mean"] > 300  # of 500; the best policy can be loaded


@pytest.mark.long
def test_replay_learns_too(tmp_path: Path) -> None:
    kept = {"algorithm.replay": {"capacity": 2_000, "minimum": 50, "alpha": 0}, "algorithm.replay_ratio": 1}
    run = shoal.train(CONFIGS / "a3c_cartpole.yaml", tmp_path / "run", **kept)
    assert run.solved
    newest = checkpoint.read(checkpoint.find(run.directory, "newest"))["state"]
    assert newest["updates"] > 1.5 * newest["steps"] / (20 * 8)  # of 20 steps in 8 environments each, once fresh


@pytest.mark.long
def test_a_memory_is_learned(tmp_path: Path) -> None:
    assert shoal.train(CONFIGS / "a3c_memory.yaml", tmp_path / "run").solved  # without: tests/test_training.py


@pytest.mark.parametrize(("engine", "rule"), [("inline", "adam"), ("threads", "rmsprop"), ("processes", "adam")])
def test_all_workers_step_one_optimizer(engine: str, rule: str, tmp_path: Path) -> None:
    changes = {"algorithm.rule": rule, "algorithm.network": SMALL}
    experiment = shoal.configure(settings("a3c", engine=engine, actors=3, steps=4_000), **changes)
    made = engines.make(engine, topology.options(experiment))
    blocks: list[Any] = []
    share = made.share
    made.share = lambda name, tree: blocks.append(share(name, tree)) or blocks[-1]
    try:
        _, _, last = topology.start(experiment, made, tmp_path, {})
        made.wait(*last)
        block = {name: blocks[0][name].copy() for name in blocks[0]}
    finally:
        made.close()
        blocks.clear()
    assert (block["updates"] > 0).all()
    assert (block["steps"] > 0).all()
    saved = checkpoint.read(checkpoint.find(tmp_path, "newest"))
    updates = saved["state"]["updates"]
    assert saved["state"]["steps"] >= 4_000
    # Without a lock, two workers that count at once may count one; a step of another worker may be half done.
    steps = [array for name, array in saved["optimizer"].items() if name.endswith(".step")]
    np.testing.assert_allclose(steps, len(steps) * [updates], rtol=0.05, atol=3)
    assert max(block["updates"]) < 0.9 * updates  # so it was not one worker alone that counted
    moments = [array for name, array in saved["optimizer"].items() if not name.endswith(".step")]
    assert moments
    assert all(array.any() for array in moments)


@pytest.mark.parametrize("algorithm", [name if name == "a3c" else long(name) for name in ALGORITHMS])
def test_lockstep_gives_the_same_bits_on_every_engine_and_after_a_resume(algorithm: str, tmp_path: Path) -> None:
    base = settings(algorithm, lockstep=True)
    some = LOCAL if algorithm == "a3c" else ("inline", "processes")
    runs = {engine: shoal.train({**base, "engine": engine}, tmp_path / engine) for engine in some}
    whole = outcome(runs["inline"])
    assert whole[0][2] > 20  # updates
    assert all(outcome(run) == whole for run in runs.values())
    other = shoal.train({**base, "engine": "inline", "seed": 1}, tmp_path / "other")
    assert outcome(other) != whole
    saved = checkpoint.paths(runs["inline"].directory)
    assert len(saved) >= 3
    for number, engine in enumerate(LOCAL if algorithm == "a3c" else ["inline"]):
        part = tmp_path / f"part{number}"
        shutil.copytree(runs[engine].directory, part)
        for path in checkpoint.paths(part)[number % 2 + 1 :]:  # from the first, and from the second
            shutil.rmtree(path)
        assert outcome(shoal.resume(part)) == whole


@pytest.mark.long
def test_pictures_give_the_same_bits_on_every_engine(tmp_path: Path) -> None:
    pong = settings("a3c", environment={"id": "ALE/Pong-v5", "atari": {"max_frames": 400}}, lockstep=True, steps=100)
    pong |= {"algorithm": {"name": "a3c"}, "evaluation": {"episodes": 1, "every": 10**6}}
    hashes = {
        shoal.train({**pong, "engine": engine}, tmp_path / engine).summary["weights_sha256"]
        for engine in ("inline", "processes")
    }
    assert len(hashes) == 1


@pytest.mark.parametrize("victim", [long("gradient-0", id="worker"), pytest.param("gradient-1", id="chief")])
def test_a_killed_worker_is_replaced_and_the_run_ends_solved(command: Any, victim: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = command(
        "train",
        CONFIGS / "a3c_cartpole.yaml",
        "--run-dir",
        run,
        "log_every=0.1",
        "evaluation.every=8000",
        "evaluation.target=150",
    )
    summary, restarts, _ = killed(process, victim, run)
    assert summary["solved"]
    assert restarts.pop(victim) == 1
    assert not any(restarts.values())


@pytest.mark.parametrize("engine", [long("inline"), "threads", long("processes")])
def test_one_interrupt_saves_and_ends_the_run_and_it_goes_on(command: Any, engine: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = [f"engine={engine}", "log_every=0.1", "steps=10000000", "evaluation.target=null"]
    process = command("train", CONFIGS / "a3c_cartpole.yaml", "--run-dir", run, *words)
    for line in process.stderr:
        if "lag" in line:
            break
    process.send_signal(signal.SIGINT)
    _, log = process.communicate()
    assert process.returncode == 0, log
    summary = json.loads((run / "summary.json").read_text())
    assert summary["stopped_by"] == "interrupted"
    newest = checkpoint.find(run, "newest")
    assert newest.name == f"step_{summary['steps']}"
    again = shoal.resume(run, steps=summary["steps"] + 2_000)
    assert again.summary["steps"] >= summary["steps"] + 2_000
    assert again.summary["updates"] > summary["updates"]


def test_a3c_with_actors_and_a_learner_is_synchronous(tmp_path: Path) -> None:
    changes = {"topology": "actors_and_learner", "steps": 2_000, "algorithm": {"name": "a3c"}}
    run = shoal.train(settings("a3c", engine="inline"), tmp_path / "run", **changes)
    assert "learner" in run.summary["workers"]
    assert run.summary["metrics"]["lag"] == 0


def test_settings_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"topology: Input should be .*gradient_worker"):
        shoal.configure(settings("a3c"), topology="gradient_worker")
    with pytest.raises(SettingsError, match="gradient workers run on the CPU"):
        shoal.configure(settings("a3c"), device="cuda")
    with pytest.raises(SettingsError, match="replay_ratio applies to topology gradient_workers"):
        shoal.configure(settings("a3c-replay"), topology="actors_and_learner")
    lone = settings("a3c", engine="tests.programs:Lone")
    with pytest.raises(SettingsError, match=r"engine tests\.programs:Lone has no shared memory"):
        shoal.train(lone, tmp_path / "run")


def test_other_networks_do_not_take_the_weights(tmp_path: Path) -> None:
    run = shoal.train(settings("a3c", engine="inline"), tmp_path / "run")
    with pytest.raises(SettingsError, match=r"do not fit the network(.|\n)*size mismatch"):
        run.resume(steps=2000, **{"algorithm.network.hidden": [17]})
