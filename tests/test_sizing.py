"""`auto`: numbers of actors and environments that suit the machine."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

import shoal
from shoal import sizing
from shoal.core.errors import SettingsError
from shoal.envs import toy
from shoal.experiment import Experiment
from shoal.run import Run

RUN: dict[str, Any] = {
    "environment": {"id": "Catch"},
    "algorithm": {"name": "impala", "batch": 16, "unroll": 5},
    "engine": "inline",
    "actors": 1,
    "steps": 300,
    "evaluation": {"episodes": 1},
}


def experiment(**changes: Any) -> Experiment:
    return shoal.configure(RUN, **changes)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Environments that take 1 ms each beside a network that takes 10 ms; the numbers that were tried."""
    sizes: list[int] = []

    def speed(experiment: Experiment, size: int) -> float:
        sizes.append(size)
        return size / (0.010 + 0.001 * size)

    monkeypatch.setattr(sizing, "speed", speed)
    return sizes


def test_as_many_environments_as_make_an_actor_faster(asked: list[int], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "shoal")
    found = sizing.sized(experiment(**{"algorithm.batch": 64}))
    assert (found.actors, found.envs) == (1, 32)
    assert asked == [4, 8, 16, 32, 64]  # 64 have 1.13 times the speed of 32
    assert "auto: actors=1 envs=32; an actor with 4: 286 steps/s" in caplog.text


def test_numbers_that_are_given_are_kept(asked: list[int]) -> None:
    assert sizing.sized(experiment(envs=3)).envs == 3
    assert not asked


@pytest.mark.parametrize(
    ("changes", "most"),
    [
        ({"algorithm.batch": 2, "queue": 40}, 32),  # 16 batches of two
        ({"algorithm": {"name": "ppo", "unroll": 10}, "steps": 20_000}, 8),  # 200 batches of 10 steps from each
        ({"algorithm": {"name": "ppo", "unroll": 10}, "steps": 20}, 4),  # never fewer
        ({"algorithm": {"name": "ppo", "unroll": 10, "batch": 2}}, 2),  # unless whole rollouts must fill a batch
    ],
)
def test_a_run_has_batches_enough_and_none_is_old(asked: list[int], changes: dict[str, Any], most: int) -> None:
    assert sizing.sized(experiment(**changes)).envs == most


def test_lockstep_does_not_depend_on_the_machines_mood(asked: list[int]) -> None:
    assert sizing.sized(experiment(lockstep=True)).envs == 8
    assert not asked


@pytest.mark.parametrize(
    ("changes", "actors"),
    [
        ({"engine": "processes"}, 4),
        ({"engine": "processes", "algorithm": {"name": "ppo"}}, 5),  # its actors wait while it learns
        ({"engine": "processes", "algorithm": {"name": "a3c"}}, 5),
        ({"lockstep": True, "engine": "processes"}, 5),
    ],
)
def test_the_learner_gets_a_core(
    monkeypatch: pytest.MonkeyPatch, asked: list[int], changes: dict[str, Any], actors: int
) -> None:
    monkeypatch.setattr("shoal.experiment.cores", lambda: 5)
    assert sizing.sized(experiment(**{"actors": "auto", **changes})).actors == actors


def test_an_environment_that_does_not_answer_is_left_to_the_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    release = threading.Event()
    monkeypatch.setattr(sizing, "PATIENCE", 0.1)
    monkeypatch.setattr(sizing, "speed", lambda experiment, size: release.wait() and 1.0)
    try:
        assert sizing.sized(experiment()).envs == 8
        assert "could not be tried: it does not answer" in caplog.text
    finally:
        release.set()


def test_an_environment_that_fails_is_left_to_the_run(caplog: pytest.LogCaptureFixture) -> None:
    assert sizing.sized(experiment(**{"environment.arguments": {"rows": -1}})).envs == 8
    assert "could not be tried" in caplog.text


def test_the_numbers_are_written_down_and_kept(tmp_path: Path) -> None:
    run = shoal.train({**RUN, "envs": "auto"}, tmp_path / "run")
    written = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert written["envs"] in sizing.SIZES
    assert "auto: actors=1 envs=" in (tmp_path / "run" / "log.txt").read_text()
    shoal.resume(run.directory, steps=600)
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["envs"] == written["envs"]
    assert (tmp_path / "run" / "log.txt").read_text().count("auto:") == 1
    assert Run(tmp_path / "run").summary["steps"] >= 600


def test_the_speed_is_that_of_environments_and_network(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slowly(toy.Catch):
        def step(self, action: int) -> toy.Outcome:
            time.sleep(0.005)
            return super().step(action)

    monkeypatch.setitem(toy.ENVS, "Catch", Slowly)
    assert 0 < sizing.speed(experiment(), 4) < 200  # without the environments it would be thousands


@pytest.mark.parametrize("value", [0, -1, 1.5, "many", True])
@pytest.mark.parametrize("name", ["actors", "envs"])
def test_what_is_no_number_is_refused_in_words(name: str, value: Any) -> None:
    with pytest.raises(SettingsError, match=rf"{name}: a whole number ≥ 1, or auto; got {value!r}"):
        experiment(**{name: value})
