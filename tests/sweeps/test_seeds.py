"""One experiment with several seeds: `shoal train CONFIG --seeds 3`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from shoal import seeds
from shoal.cli.main import main
from tests.pace import seconds
from tests.pretended import Killed

WORDS = ("train", "catch.yaml", "steps=500", "--run-dir", "runs/both")
CATCH = """
environment: {id: Catch}
algorithm: {name: ppo, unroll: 16, network: {hidden: [16]}}
engine: inline
actors: 1
threads: 1
envs: auto
evaluation: {every: 100, episodes: 5}
"""


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Any:
    """Run a command in a folder with a config; returns its exit code, output and errors."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "catch.yaml").write_text(CATCH)

    def run(*words: object) -> tuple[Any, str, str]:
        monkeypatch.setattr(sys, "argv", ["shoal", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        told = capsys.readouterr()
        return ended.value.code or 0, told.out, told.err

    return run


def by_seed(settings: dict[str, Any], steps: int) -> float | None:
    """Steps, and a number for the seed."""
    return steps + 10.0 * settings["seed"]


def test_each_seed_is_a_run_and_together_they_have_a_mean(shell: Any, pretend: Any, tmp_path: Path) -> None:
    log = pretend(by_seed)
    code, told, problems = shell(*WORDS, "--seeds", "0,1,5", "--at-once", 2)
    assert code == 0, problems
    assert log == [("train", "seed-0"), ("train", "seed-1"), ("train", "seed-5")]
    assert "last evaluation: mean 520 (95 % interval 500 to 550); best evaluation: mean 520" in told
    assert "over 3 seeds" in told
    assert (tmp_path / "runs" / "both" / "comparison.png").read_bytes().startswith(b"\x89PNG")
    assert shell(*WORDS, "--seeds", "0,1,5")[1] == told  # nothing is left to be done
    assert len(log) == 3


def test_seeds_go_on_where_they_were(shell: Any, pretend: Any) -> None:
    pretend(by_seed, killed_after=7)
    with pytest.raises(Killed):
        shell(*WORDS, "--seeds", "3")
    log = pretend(by_seed)
    assert shell(*WORDS, "--seeds", "3")[0] == 0
    assert log == [("resume", "seed-1"), ("train", "seed-2")]


def test_a_seed_that_fails_is_told_with_its_log(shell: Any, pretend: Any) -> None:
    pretend(lambda settings, steps: None if settings["seed"] == 1 else 1.0)
    code, told, _ = shell(*WORDS, "--seeds", "2")
    assert code == 1
    assert "failed: see runs/both/seed-1.log" in told


MISTAKES = {
    ("--seeds", "x"): "give a number of seeds such as 3",
    ("--seeds", "0"): "give a number of seeds such as 3",
    ("--seeds", "1,1"): "different seeds",
    ("--seeds=-1,2",): "different seeds",
    ("--seeds", "2", "seed=1"): "give the seeds by --seeds, or one by seed=",
    ("--seeds", "2", "stesp=1"): "did you mean 'steps'",
    ("--seeds", "2", "environment.id=CartPole-v11"): "CartPole-v1",
    ("--seeds", "2", "algorithm.epochs=2"): "was begun with algorithm.epochs=",
    ("--seeds", "2", "--run-dir", "runs/both/seed-1"): "is a run itself",
}


@pytest.mark.parametrize("words", MISTAKES, ids=" ".join)
def test_mistakes_are_refused_before_anything_starts(
    words: tuple[str, ...], shell: Any, pretend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seeds, "plot", lambda folders: None)
    pretend(by_seed)
    shell(*WORDS, "--seeds", "1,")
    log = pretend(by_seed)
    code, _, problems = shell(*WORDS, *words)
    assert code == 2
    assert MISTAKES[words] in problems
    assert not log


@pytest.mark.long
def test_seeds_are_trained_for_real(command: Any, tmp_path: Path) -> None:
    (tmp_path / "catch.yaml").write_text(CATCH)
    process = command(*WORDS, "--seeds", "2", "--at-once", "2")
    told, problems = process.communicate(timeout=seconds(120))
    assert process.returncode == 0, problems
    assert "over 2 seeds" in told
    for seed in (0, 1):
        assert f"\nseed: {seed} " in (tmp_path / "runs" / "both" / f"seed-{seed}" / "config.yaml").read_text()
