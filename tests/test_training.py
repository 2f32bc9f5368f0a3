"""Whole runs: learning to a threshold, the same bits on every engine, and what happens when things break."""

from __future__ import annotations

import json
import signal
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.numpy import load_file

import shoal
from shoal.core.errors import ShoalError
from shoal.runs import checkpoint
from shoal.services.journal import Journal
from shoal.training import fingerprint
from tests.kills import killed, until_learning
from tests.pace import long, seconds
from tests.programs import LOCAL, QUICK

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "configs"
EASY = ("evaluation.every=10000", "evaluation.target=150")  # of 500: what breaks breaks before, what learns gets there


@pytest.fixture
def training(command: Any, tmp_path: Path) -> Any:
    """Start `shoal train` in a folder of its own, with frequent lines."""
    return lambda config, *words: command(
        "train", CONFIGS / config, "--run-dir", tmp_path / "run", "log_every=0.2", *words
    )


def newest(run: Path) -> Path:
    """The folder of a run's last checkpoint."""
    return checkpoint.find(run, "newest")


@pytest.mark.parametrize(
    ("algorithm", "engine"),
    [
        ("impala", "processes"),
        long("ppo", "inline"),
        *(long("impala", name) for name in QUICK if name != "processes"),
        long("ppo", "processes"),
    ],
)
def test_cartpole_is_solved(hosted: Any, engine: str, algorithm: str, tmp_path: Path) -> None:
    two = {"actors": 2, "envs": 4} if algorithm == "ppo" else {}
    run = shoal.train(CONFIGS / f"{algorithm}_cartpole.yaml", tmp_path / "run", **hosted(engine), **two)
    assert run.solved
    assert run.summary["last_evaluation"] >= 475  # nothing is scored after the score that ended the run
    written = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert written == json.loads(json.dumps(run.summary))
    assert written["steps"] > 0
    assert written["updates"] > 0
    assert fingerprint(load_file(newest(run.directory) / "weights.safetensors")) == written["weights_sha256"]
    assert shoal.configure(tmp_path / "run" / "config.yaml").engine == engine


@pytest.mark.long
def test_continuous_control_is_learned(tmp_path: Path) -> None:
    run = shoal.train(CONFIGS / "ppo_pendulum.yaml", tmp_path / "run")
    assert run.solved  # a mean of -200; a random policy has about -1200


@pytest.mark.long
@pytest.mark.parametrize("algorithm", ["impala", "ppo"])
def test_memory_needs_the_lstm(algorithm: str, tmp_path: Path) -> None:
    config = CONFIGS / f"{algorithm}_memory.yaml"
    assert shoal.train(config, tmp_path / "with").solved
    without = shoal.train(config, tmp_path / "without", steps=60_000, **{"algorithm.network.lstm": 0})
    assert without.summary["best_evaluation"] < 0.6  # guessing gives 0 ± 0.16 over 40 episodes


RECURRENT = {"hidden": [16], "lstm": 8, "normalise_observation": True, "normalise_reward": True}


@pytest.mark.parametrize(
    ("algorithm", "world"),
    [
        pytest.param(
            {"name": "impala", "batch": 4, "unroll": 10, "network": RECURRENT}, {"id": "CartPole-v1"}, id="impala-lstm"
        ),
        long({"name": "ppo", "unroll": 16, "network": RECURRENT}, {"id": "Pendulum-v1"}, id="ppo-lstm-continuous"),
        long({"name": "ppo", "unroll": 4, "minibatches": 2}, {"id": "ALE/Pong-v5"}, id="ppo-pong"),
    ],
)
def test_lockstep_gives_the_same_bits_on_every_engine(hosted: Any, algorithm: Any, world: Any, tmp_path: Path) -> None:
    steps = 64 if world["id"].startswith("ALE/") else 480
    base = {"environment": world, "algorithm": algorithm, "actors": 2, "envs": 2, "steps": steps, "lockstep": True}
    base["threads"] = 1  # several would wait for each other on a busy machine
    quick = (
        {"evaluation": {"episodes": 1, "every": 10**9}}
        if steps == 64
        else {"evaluation": {"episodes": 3, "every": 160}}
    )
    some: Any = LOCAL  # on the others: tests/test_engines_alike.py
    if steps == 64:  # a game takes seconds to start
        world["atari"] = {"max_frames": 400}
        some = ("inline", "processes")
    runs = {
        (engine, seed): shoal.train(
            {**base, **quick, **hosted(engine, machines=2), "seed": seed}, tmp_path / f"{engine}{seed}"
        ).summary
        for engine, seed in [*((engine, 0) for engine in some), ("inline", 1)]
    }
    hashes = {key: summary["weights_sha256"] for key, summary in runs.items()}
    assert all(hashes[engine, 0] == hashes["inline", 0] for engine in some)
    assert hashes["inline", 0] != hashes["inline", 1]
    assert fingerprint(load_file(newest(tmp_path / "inline1") / "weights.safetensors")) == hashes["inline", 1]
    scores = [[item["mean"] for item in summary["evaluations"]] for key, summary in runs.items() if key[1] == 0]
    assert scores[0]
    assert all(score == scores[0] for score in scores)


@pytest.mark.long
def test_lockstep_gives_the_same_bits_on_every_engine_however_weights_travel(hosted: Any, tmp_path: Path) -> None:
    base = {
        "environment": {"id": "CartPole-v1"},
        "algorithm": {"name": "impala", "batch": 4, "unroll": 10, "network": RECURRENT},
        "actors": 2,
        "envs": 2,
        "threads": 1,
        "steps": 1200,
        "lockstep": True,
        "evaluation": {"episodes": 2, "every": 200},
    }
    chain = {"kind": "int8", "delta": True, "anchor": 7}
    runs: list[Any] = [(engine, chain) for engine in ("inline", "processes", "cluster")]
    runs += [("inline", {}), ("inline", {"delta": True})]
    told = [
        shoal.train({**base, **hosted(engine, machines=2), "weights": codec}, tmp_path / str(index)).summary
        for index, (engine, codec) in enumerate(runs)
    ]
    hashes = [summary["weights_sha256"] for summary in told]
    scores = [[item["mean"] for item in summary["evaluations"]] for summary in told]
    sent = [summary["metrics"]["weights_mb"] for summary in told]
    for numbers in (hashes, scores, sent):
        assert all(number == numbers[0] for number in numbers[:-2])
    assert 0 < sent[0] < sent[-2]
    assert hashes[-2] == hashes[-1] != hashes[0]  # a float32 delta is exact
    assert fingerprint(load_file(newest(tmp_path / "0") / "weights.safetensors")) == hashes[0]


ENDINGS, KINDS = ("termination", "truncation"), ("sequence", "padded", "nstep")
CUTS = [("inline", ending, kind) for ending in ENDINGS for kind in KINDS]


@pytest.mark.parametrize(
    ("engine", "ending", "kind"),
    [
        *CUTS,
        *((engine, "termination", "sequence") for engine in QUICK[1:]),
        *(long(engine, "truncation", "nstep") for engine in QUICK[1:]),
    ],
)
def test_time_is_aligned_through_every_engine(hosted: Any, engine: str, ending: str, kind: str, tmp_path: Path) -> None:
    config = {
        "environment": {"id": "Counting", "arguments": {"length": 5, "ending": ending}},
        "algorithm": {"name": "tests.programs:Checker", "truncates": ending == "truncation", "kind": kind},
        **hosted(engine),
        "actors": 2,
        "envs": 2,
        "queue": 4,
        "steps": 800,
        "evaluation": {"episodes": 1},
    }
    run = shoal.train(config, tmp_path / "run")
    assert run.summary["steps"] >= 800


def test_a_killed_actor_is_replaced_and_the_run_ends_solved(training: Any, tmp_path: Path) -> None:
    process = training("impala_cartpole.yaml", *EASY)
    summary, restarts, _ = killed(process, "actor-0", tmp_path / "run")
    assert summary["solved"]
    assert restarts["actor-0"] == 1


@pytest.mark.parametrize(("config", "engine"), [("impala", "processes"), long("ppo", "cluster")])
def test_a_killed_learner_goes_on_from_its_checkpoint(
    training: Any, hosted: Any, config: str, engine: str, tmp_path: Path
) -> None:
    # On a cluster the actors live on: their weights are of a later version than the learner's, and PPO's wait for it.
    words = [f"{key}={value}" for key, value in hosted(engine).items()]
    process = training(f"{config}_cartpole.yaml", *words, "actors=2", "envs=4", "checkpoints.every=2000", *EASY)
    summary, restarts, _ = killed(process, "learner", tmp_path / "run")
    assert summary["solved"]
    assert restarts["learner"] == 1
    steps = [json.loads(line)["steps"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
             if '"train"' in line]  # fmt: skip
    assert steps == sorted(steps)  # what was learned twice stands there once


def test_a_learner_that_raises_ends_the_run_with_its_traceback(training: Any) -> None:
    process = training("impala_cartpole.yaml", "algorithm.name=tests.programs:Checker", "environment.id=Identity")
    _, log = process.communicate()
    assert process.returncode == 1
    assert "Traceback" in log
    assert "Misaligned" in log or "IndexError" in log


def test_nothing_survives_a_killed_head(training: Any) -> None:
    process = training("impala_cartpole.yaml", "evaluation.target=null")
    until_learning(process)
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) >= 3
    process.kill()
    _, alive = psutil.wait_procs(family, timeout=seconds(10))
    assert not alive


@pytest.mark.parametrize(
    ("engine", "number"),
    [
        ("processes", signal.SIGINT),
        long("processes", signal.SIGTERM),
        ("cluster", signal.SIGINT),
        long("inline", signal.SIGINT),
        long("threads", signal.SIGINT),
    ],
)
def test_one_interrupt_ends_the_run_in_order(
    training: Any, hosted: Any, engine: str, number: int, tmp_path: Path
) -> None:
    process = training(
        "impala_cartpole.yaml", "evaluation.target=null", *(f"{key}={value}" for key, value in hosted(engine).items())
    )
    until_learning(process)
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    _, log = process.communicate()
    assert process.returncode == 0, log
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["stopped_by"] == "interrupted"
    assert not psutil.wait_procs(family, timeout=seconds(10))[1]


def test_a_budget_that_ends_unsolved_says_so(training: Any) -> None:
    process = training("ppo_cartpole.yaml", "steps=500", "evaluation.every=500")
    _, log = process.communicate()
    assert process.returncode == 1
    assert "NOT solved" in log


@pytest.mark.parametrize(("engine", "how"), [("inline", "raise"), long("cluster", "raise"), ("inline", "nan")])
def test_a_faulty_environment_is_restarted_and_counted(hosted: Any, engine: str, how: str, tmp_path: Path) -> None:
    config = {
        "environment": {
            "id": "tests.programs:Faulty-v0",
            "arguments": {"healthy": 120, "how": how},
            "metrics": {"coins": "last", "speed": "average"},
        },
        "algorithm": {"name": "ppo", "unroll": 16},
        **hosted(engine),
        "actors": 1,
        "envs": 2,
        "steps": 1000,
        "evaluation": {"episodes": 2},
    }
    run = shoal.train(config, tmp_path / "run")
    assert run.summary["faults"] >= 6
    assert run.summary["evaluations"][0]["metrics"]["speed"] == 2.0
    assert run.summary["evaluations"][0]["metrics"]["coins"] >= 10


@pytest.mark.parametrize("engine", ["inline", "processes", long("threads"), long("cluster")])
def test_an_environment_that_only_fails_ends_the_run_with_its_report(hosted: Any, engine: str, tmp_path: Path) -> None:
    config = {
        "environment": {"id": "tests.programs:Faulty-v0", "arguments": {"healthy": 3}},
        "algorithm": {"name": "ppo", "unroll": 16},
        **hosted(engine),
        "actors": 1,
        "envs": 2,
        "steps": 1000,
    }
    with pytest.raises(ShoalError, match=r"faults in a row.*Faulty-v0, seed \d+.*failed at step 4") as caught:
        shoal.train(config, tmp_path / "run")
    assert "the simulator crashed" in str(caught.value)


@pytest.mark.parametrize("engine", ["inline", long("processes")])
def test_mappings_of_images_vectors_and_symbols_are_learned_from(hosted: Any, engine: str, tmp_path: Path) -> None:
    config = {
        "environment": {"id": "tests.programs:Mixed-v0"},
        "algorithm": {"name": "ppo", "unroll": 16, "lr": 1e-3, "network": {"hidden": [16]}},
        **hosted(engine),
        "actors": 1,
        "envs": 8,
        "threads": 1,
        "steps": 20_000,
        "evaluation": {"episodes": 8, "every": 1_000, "target": 9.5},  # of 10; guessing gives 5
    }
    assert shoal.train(config, tmp_path / "run").solved


def test_a_folder_that_cannot_be_made_leaves_nothing_running(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ShoalError, match="file"):
        shoal.train(CONFIGS / "impala_cartpole.yaml", tmp_path / "file" / "run")


def test_overrides_apply_to_an_experiment_too(tmp_path: Path) -> None:
    experiment = shoal.configure(CONFIGS / "ppo_cartpole.yaml", **{"evaluation.target": None})
    run = shoal.train(experiment, tmp_path / "run", steps=300, **{"algorithm.unroll": 16})
    assert 300 <= run.summary["steps"] < 600


def test_a_run_in_a_thread_of_a_notebook_works(tmp_path: Path) -> None:
    config = {"environment": {"id": "Identity"}, "algorithm": {"name": "ppo", "unroll": 8}, "engine": "inline"}
    runs: list[Any] = []
    thread = threading.Thread(
        target=lambda: runs.append(shoal.train({**config, "actors": 1, "steps": 500}, tmp_path / "run"))
    )
    thread.start()
    thread.join()
    assert runs[0].summary["steps"] >= 500


def test_the_first_reason_to_stop_stays() -> None:
    journal = Journal(target=1.0)
    journal.evaluated({"steps": 1, "mean": 2.0, "scores": [2.0], "metrics": {}})
    journal.stop("interrupted")
    assert journal.stopping() == "target"
