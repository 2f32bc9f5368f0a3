"""Whole runs with several learners: equal to one, alike on every engine, resumed exactly, killed and revived."""

from __future__ import annotations

import itertools
import json
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from safetensors.numpy import load_file

import shoal
from shoal.core.errors import SettingsError
from shoal.experiment import load
from shoal.runs import checkpoint
from tests.kills import killed, worker_process
from tests.pace import long, seconds
from tests.programs import outcome, small

CONFIGS = Path(__file__).parents[1] / "configs"
NETWORK = {"hidden": [16]}
KEPT = {"capacity": 300, "minimum": 40, "samples_per_insert": 4, "alpha": 0.6, "chunk": 4}
MIXTURE = {"fresh": {"kind": "queue", "fraction": 0.5}, "old": {"kind": "uniform", "fraction": 0.5}}
ALGORITHMS: dict[str, Any] = {
    # Actors wait for the learners, so that neither number nor order of workers changes what they play.
    "impala": {"name": "impala", "batch": 4, "unroll": 5, "max_lag": 0, "network": NETWORK},
    "ppo": {"name": "ppo", "unroll": 16, "epochs": 3, "minibatches": 2, "target_kl": 0.02, "network": NETWORK},
    "dqn": {"name": "dqn", "batch": 8, "n": 2, "target_every": 20, "replay": KEPT, "network": NETWORK},
}


def settings(algorithm: str, **more: Any) -> dict[str, Any]:
    return small(ALGORITHMS[algorithm], lockstep=True, learners=2, **more)


def weights(run: shoal.Run) -> dict[str, Any]:
    return load_file(checkpoint.find(run.directory, "newest") / "weights.safetensors")


@pytest.mark.parametrize("engine", ["inline", long("processes")])
def test_two_learners_learn_what_one_learns(engine: str, tmp_path: Path) -> None:
    runs = [
        shoal.train(settings("impala", engine=engine, steps=250), tmp_path / str(learners), learners=learners)
        for learners in (1, 2)
    ]
    assert runs[0].summary["updates"] > 10
    assert outcome(runs[0])[0][1:] == outcome(runs[1])[0][1:]
    assert outcome(runs[0])[1] == outcome(runs[1])[1]
    one, two = map(weights, runs)
    for name, array in one.items():
        np.testing.assert_allclose(two[name], array, atol=1e-5)  # but for the order in which gradients are summed


@pytest.mark.parametrize(
    ("algorithm", "engines"),
    [
        ("dqn", []),
        ("ppo", []),
        long("ppo", ["processes"]),
        long("impala", ["threads", "processes", "cluster", "ray"]),
        long("dqn", ["threads", "processes", "cluster", "ray"]),
    ],
)
def test_lockstep_gives_the_same_bits_and_resumes_exactly(
    hosted: Any, algorithm: str, engines: list[str], tmp_path: Path
) -> None:
    whole = shoal.train(settings(algorithm, engine="inline", steps=300), tmp_path / "inline")
    for engine in engines:
        assert outcome(shoal.train(settings(algorithm, **hosted(engine), steps=300), tmp_path / engine)) == outcome(
            whole
        )
    part = tmp_path / "part"
    shutil.copytree(whole.directory, part)
    for path in checkpoint.paths(part)[2:]:  # all but the beginning and the first with anything learned
        shutil.rmtree(path)
    assert outcome(shoal.resume(part)) == outcome(whole)


@pytest.mark.long  # tests/services/test_reduction.py and tests/engines/test_conformance.py have its two halves
@pytest.mark.parametrize("victim", ["learner-1", "learner"])
def test_when_a_learner_is_killed_all_go_back_to_the_same_checkpoint(command: Any, victim: str, tmp_path: Path) -> None:
    changes = ("actors=2", "envs=2", "learners=2", "algorithm.batch=8", "steps=6000", "evaluation.target=null",
               "evaluation.every=6000", "evaluation.episodes=1", "checkpoints.every=500", "log_every=0.1")  # fmt: skip
    process = command("train", CONFIGS / "impala_cartpole.yaml", "--run-dir", tmp_path / "run", *changes)
    summary, restarts, _ = killed(process, victim, tmp_path / "run")
    assert summary["steps"] >= 6_000
    assert [restarts[name] for name in ("learner", "learner-1")] == [1, 1]


@pytest.mark.long  # tests/workers/test_joint.py gives an update up without a run
def test_one_interrupt_ends_a_run_in_which_learners_wait_for_each_other(command: Any, tmp_path: Path) -> None:
    changes = ("actors=2", "envs=2", "learners=2", "algorithm.batch=8", "evaluation.target=null", "log_every=0.1",
               "evaluation.episodes=1", f"limits.silence={seconds(300)}", f"limits.stall={seconds(300)}")  # fmt: skip
    process = command("train", CONFIGS / "impala_cartpole.yaml", "--run-dir", tmp_path / "run", *changes)
    assert any("lag" in line for line in process.stderr)
    family = psutil.Process(process.pid).children(recursive=True)
    worker_process(process, "actor-1").suspend()  # so learner-1 has nothing to bring
    steps = (line.partition("step ")[2].partition(" ")[0] for line in process.stderr if "lag" in line)
    assert any(one == two for one, two in itertools.pairwise(steps))  # the leader waits, since nothing is learned
    process.send_signal(signal.SIGINT)
    _, log = process.communicate(timeout=seconds(60))
    assert process.returncode == 0, log
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["stopped_by"] == "interrupted"
    assert summary["steps"] == checkpoint.read_state(checkpoint.find(tmp_path / "run", "newest"))["steps"] > 0
    assert not psutil.wait_procs(family, timeout=seconds(10))[1]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"learners": 3}, "learners 3: there are only 2 actors"),
        ({"algorithm.batch": 5, "queue": 9}, "a batch of 5 items cannot be shared equally"),
        ({"algorithm": {**ALGORITHMS["dqn"], "replay": {**KEPT, "shards": 2}}}, "replay.shards must be 1"),
        ({"algorithm.mixture": MIXTURE}, r"learners 2: .*so algorithm\.mixture needs learners: 1"),
        ({"algorithm": {"name": "impact", "circular": {}}}, r"learners 2: .*so algorithm\.circular needs learners: 1"),
        ({"topology": "gradient_workers"}, "topology gradient_workers has none; allowed here: 1"),
        ({"topology": "federated"}, "topology federated has none; allowed here: 1"),
        ({"algorithm": {"name": "a3c"}}, "topology gradient_workers has none; allowed here: 1"),
        ({"learners": 0}, "learners: Input should be greater than or equal to 1"),
        ({"algorithm.batch": 2}, "batch 2 among 2 learners, 1 each: the 2 items of one actor fill several batches"),
    ],
)
def test_learners_that_do_not_fit_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        load(settings("impala"), changes)


@pytest.mark.parametrize(("available", "actors", "waiting", "threads"), [(8, 6, 8, 4), (2, 2, 2, 1), (1, 2, 2, 1)])
def test_learners_share_the_cores(
    available: int, actors: int, waiting: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.experiment.cores", lambda: available)
    changes = {"lockstep": False, "engine": "processes", "actors": "auto", "threads": None}
    exact = load(settings("impala"), changes)
    assert (exact.actor_count, exact.learner_threads) == (waiting, threads)  # the others wait while one works
    free = load(settings("impala"), {**changes, "algorithm.max_lag": None})
    assert (free.actor_count, free.learner_threads) == (actors, 1)
