"""Whole runs on a mixture of stores: the same bits everywhere and after every stop, and all kinds of it learn."""

from __future__ import annotations

import json
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

import shoal
from shoal.bench.training import PROGRESS
from shoal.core.errors import SettingsError
from shoal.runs import checkpoint
from tests.pace import long
from tests.programs import LOCAL, outcome, small
from tests.test_resume import start

CONFIGS = Path(__file__).parents[1] / "configs"
ELITE = {"kind": "elite", "capacity": 12, "insertion": "elite", "contenders": 5, "strategy": 3, "distance": "kl"}
KINDS: dict[str, dict[str, Any]] = {
    "elite": ELITE,
    "attentive": {"kind": "attentive", "capacity": 12, "insertion": "elite", "strategy": 4, "distance": "cosine"},
    "prioritized": {"kind": "prioritized", "capacity": 12},
    "uniform": {"kind": "uniform", "capacity": 12},
}
RECURRENT = {"hidden": [16], "lstm": 8, "normalise_observation": True, "normalise_reward": True}


def settings(kind: str, when_full: str = "wait", **more: Any) -> dict[str, Any]:
    """A small run in lockstep, half of each batch old."""
    parts = {
        "fresh": {"kind": "queue", "fraction": 0.5, "when_full": when_full},
        "old": {"fraction": 0.5, **KINDS[kind]},
    }
    algorithm = {"name": "impala", "batch": 4, "unroll": 10, "mixture": parts, "network": RECURRENT}
    return small(algorithm, lockstep=True, **{"steps": 320, **more})


@pytest.mark.parametrize(
    ("kind", "when_full", "engines"),
    [
        ("elite", "wait", ("inline", "processes")),
        long("elite", "wait", LOCAL),
        long("elite", "alternate", LOCAL),
        *(long(kind, "keep_latest", LOCAL) for kind in KINDS),
    ],
)
def test_lockstep_gives_the_same_bits_on_every_engine_and_after_a_resume(
    hosted: Any, kind: str, when_full: str, engines: tuple[str, ...], tmp_path: Path
) -> None:
    runs = {
        engine: shoal.train(settings(kind, when_full, **hosted(engine, machines=2)), tmp_path / engine)
        for engine in engines
    }
    whole = outcome(runs["inline"])
    assert whole[0][2] > 10  # updates
    assert all(outcome(run) == whole for run in runs.values())
    part = tmp_path / "part"
    shutil.copytree(runs["inline"].directory, part)
    for path in checkpoint.paths(part)[2:]:
        shutil.rmtree(path)
    assert outcome(shoal.resume(part)) == whole  # the old items came back with the checkpoint, and their scores


@pytest.mark.long
@pytest.mark.parametrize("seed", [0])
def test_stopped_ten_times_and_resumed_it_forgets_nothing(command: Any, seed: int, tmp_path: Path) -> None:
    rare = {"evaluation": {"episodes": 2, "every": 2_000}, "checkpoints": {"every": 200}, "log_every": 0.05}
    config = settings("elite", "alternate", engine="inline", steps=4_000, seed=seed, **rare)
    run, dice, saved = tmp_path / "run", random.Random(seed), list[int]()
    for moment in sorted(dice.sample(range(100, 3_900), 10)):
        process = start(command, tmp_path, config, run)
        assert process.stderr is not None
        for line in process.stderr:
            if (told := PROGRESS.search(line)) and int(told[1].replace(",", "")) >= moment:
                break
        process.send_signal(dice.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT]))
        process.communicate()
        summary = run / "summary.json"
        assert not summary.exists() or json.loads(summary.read_text())["stopped_by"] == "interrupted"
        found = checkpoint.resumable(run, True)
        assert found is not None
        content = checkpoint.read(found)
        saved.append(content["state"]["steps"])
        assert not saved[-1] or int(content["store"]["old.counts"][1]) == ELITE["capacity"]  # items to be forgotten
    assert saved == sorted(saved)
    assert len({*saved}) > 5
    process = start(command, tmp_path, config, run)
    _, log = process.communicate()
    assert process.returncode == 0, log
    assert outcome(shoal.Run(run)) == outcome(shoal.train(config, tmp_path / "whole"))


@pytest.mark.parametrize(
    ("kind", "changes", "target"),
    [
        ("elite", {}, 0.3),  # a random policy has about -0.6
        long("elite", {"strategy": 3, "distance": "kl", "insertion": "elite"}, 0.9),
        *(long(kind, {}, 0.9) for kind in KINDS),
    ],
)
def test_catch_is_learned_with_every_kind(kind: str, changes: dict[str, Any], target: float, tmp_path: Path) -> None:
    old = {"algorithm.mixture.old": {"kind": kind, **changes}, "evaluation.target": target}
    assert shoal.train(CONFIGS / "impala_elite_catch.yaml", tmp_path / "run", **old).solved


@pytest.mark.parametrize(("name", "target"), [("laser", 0.3), long("laser", 0.95), long("clear", 0.95)])
def test_catch_is_learned_in_a_trust_region_and_with_cloning(name: str, target: float, tmp_path: Path) -> None:
    config = CONFIGS / f"impala_{name}_catch.yaml"
    assert shoal.train(config, tmp_path / "run", **{"evaluation.target": target}).solved


@pytest.mark.long
@pytest.mark.parametrize("when_full", ["keep_latest", "keep_oldest", "alternate"])
def test_catch_is_learned_though_experience_is_dropped(when_full: str, tmp_path: Path) -> None:
    changes = {"algorithm.mixture.fresh.when_full": when_full, "engine": "threads", "actors": 2}
    assert shoal.train(CONFIGS / "impala_elite_catch.yaml", tmp_path / "run", **changes).solved


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_cartpole_is_learned_with_every_kind(kind: str, tmp_path: Path) -> None:
    changes = {"algorithm.mixture.old.kind": kind, "evaluation.target": 400, "actors": 1}
    assert shoal.train(CONFIGS / "impala_mixture_cartpole.yaml", tmp_path / "run", **changes).solved


def test_a_mixture_of_nothing_but_a_queue_is_the_queue(tmp_path: Path) -> None:
    alone = {"fresh": {"kind": "queue", "fraction": 1.0}}
    config = settings("uniform", engine="inline", steps=250)
    hashes = {
        str(mixture): shoal.train(
            {**config, "algorithm": {**config["algorithm"], "mixture": mixture}}, tmp_path / str(bool(mixture))
        ).summary["weights_sha256"]
        for mixture in (None, alone)
    }
    assert len({*hashes.values()}) == 1


def test_a_mixture_that_cannot_fit_is_refused_with_the_sum(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"mixture\.old\.capacity: 100,000,000,000 items × .* GB, but .* would fit"):
        shoal.train(settings("elite"), tmp_path / "run", **{"algorithm.mixture.old.capacity": 10**11})
