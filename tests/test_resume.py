"""Stopping and going on: by request, by force, exactly, and with a disk that takes nothing."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import shoal
from shoal.core.errors import SettingsError, ShoalError
from shoal.runs import checkpoint, directory, metrics
from tests.pace import long, seconds
from tests.programs import QUICK, outcome, small

ROOT = Path(__file__).parents[1]
RECURRENT = {"hidden": [16], "lstm": 8, "normalise_observation": True, "normalise_reward": True}
ALGORITHMS = {
    "impala": {"name": "impala", "batch": 4, "unroll": 10, "network": RECURRENT},
    "impact": {"name": "impact", "batch": 4, "unroll": 10, "target_every": 5, "network": RECURRENT},
    "ppo": {"name": "ppo", "unroll": 16, "network": RECURRENT},
}


def settings(algorithm: str, **more: Any) -> dict[str, Any]:
    """A small run with a recurrent network and normalisers."""
    environment = {"id": "Pendulum-v1" if algorithm == "ppo" else "CartPole-v1"}
    return small(ALGORITHMS[algorithm], **{"environment": environment, "steps": 700, **more})


PAIRS = [*((engine, "impala") for engine in QUICK), ("inline", "ppo"), ("processes", "ppo"), ("inline", "impact")]
SHORT = [("inline", "ppo"), ("processes", "impala"), ("inline", "impact")]
PLAIN = [
    (pytest.param if (engine, name) in SHORT else long)(engine, name, {}, id=f"{engine}-{name}")
    for engine, name in PAIRS
]
CODED = [pytest.param("inline", "impala", {"kind": "int8", "delta": True}, id="inline-impala-int8-delta")]


@pytest.mark.parametrize(("engine", "algorithm", "codec"), PLAIN + CODED)
def test_lockstep_goes_on_with_the_same_bits(
    hosted: Any, engine: str, algorithm: str, codec: Any, tmp_path: Path
) -> None:
    config = settings(algorithm, lockstep=True, weights=codec, **hosted(engine))
    whole = shoal.train(config, tmp_path / "whole")
    saved = checkpoint.paths(whole.directory)
    assert len(saved) >= 4
    for number in (0, len(saved) // 2):
        part = tmp_path / str(number)
        shutil.copytree(whole.directory, part)
        for path in checkpoint.paths(part)[number + 1 :]:
            shutil.rmtree(path)
        assert outcome(shoal.resume(part)) == outcome(whole)


def start(command: Any, tmp_path: Path, config: dict[str, Any], run: Path) -> subprocess.Popen[str]:
    """Train in a folder, or go on there."""
    if (run / directory.CONFIG).exists():
        return command("resume", run)  # type: ignore[no-any-return]
    (tmp_path / "experiment.yaml").write_text(yaml.safe_dump(config))
    return command("train", "experiment.yaml", "--run-dir", run)  # type: ignore[no-any-return]


def shown(run: Path) -> list[int]:
    """The steps at which TensorBoard has a point of the learner."""
    accumulator = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    accumulator.Reload()
    return [event.step for event in accumulator.Scalars("learner/lag")]


@pytest.mark.parametrize(
    ("algorithm", "lockstep", "times"),
    [long("ppo", True, 2), ("impala", False, 2), long("ppo", True, 4), long("impala", False, 4)],
)
def test_stopped_at_random_moments_and_resumed(
    command: Any, algorithm: str, lockstep: bool, times: int, tmp_path: Path
) -> None:
    dice = random.Random(f"{algorithm}{lockstep}")
    engine = "inline" if lockstep else "processes"
    config = settings(algorithm, engine=engine, lockstep=lockstep, steps=1000 * times, log_every=0.05)
    run = tmp_path / "run"
    stops = [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGKILL][-times:]
    before = 0
    while stops:
        process = start(command, tmp_path, config, run)
        assert process.stderr is not None
        lines = dice.randrange(2, 12)
        for line in process.stderr:
            lines -= 1
            if lines <= 0:
                break
            if "resuming at step" in line:
                assert int(line.split("at step ")[1].split(":")[0].replace(",", "")) >= before
        number = stops.pop()
        process.send_signal(number)
        process.communicate()
        if number != signal.SIGKILL:
            assert process.returncode == 0
        if process.returncode == 0 and json.loads((run / "summary.json").read_text())["stopped_by"] == "steps":
            break  # it was faster than the dice
        found = checkpoint.resumable(run, lockstep)
        before = checkpoint.read(found)["state"]["steps"] if found else 0
        for path in checkpoint.paths(run):
            checkpoint.read(path)  # raises if anything is damaged
    process = start(command, tmp_path, config, run)
    _, log = process.communicate()
    assert process.returncode == 0 or "used up" in log, log
    steps = [row["steps"] for row in metrics.read(run) if row["kind"] == "train"]
    assert steps == sorted(set(steps))
    assert shown(run) == steps
    if lockstep:
        whole = shoal.train(config, tmp_path / "whole")
        assert outcome(shoal.Run(run)) == outcome(whole)


def test_a_stop_saves_where_it_is(command: Any, tmp_path: Path) -> None:
    config = settings("impala", engine="processes", steps=10**7, checkpoints={"every": 10**7}, log_every=0.05)
    process = start(command, tmp_path, config, tmp_path / "run")
    for line in process.stderr:
        if "lag" in line:
            break
    process.send_signal(signal.SIGINT)
    process.communicate()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["stopped_by"] == "interrupted"
    assert [path.name for path in checkpoint.paths(tmp_path / "run")] == ["step_0", f"step_{summary['steps']}"]
    assert summary["steps"] > 0


def test_the_clock_makes_a_checkpoint_due_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from shoal.workers import saving

    monkeypatch.setattr(saving, "LONGEST", 0.0)
    run = shoal.train(settings("ppo", engine="inline", checkpoints={"every": 10**6, "keep": 99}), tmp_path / "run")
    assert len(checkpoint.paths(run.directory)) > 10


def test_a_finished_run_goes_on_when_it_is_given_more_steps(tmp_path: Path) -> None:
    run = shoal.train(settings("ppo", engine="inline", steps=500), tmp_path / "run")
    with pytest.raises(SettingsError, match=r"used up its 512 steps.*steps=1024"):
        shoal.resume(run.directory)
    before = run.summary
    again = run.resume(steps=900)
    assert again.summary["steps"] >= 900
    assert again.summary["seconds"] > before["seconds"]
    assert again.summary["evaluations"][: len(before["evaluations"])] == before["evaluations"]
    assert shoal.configure(run.directory / "config.yaml").steps == 900


def test_other_networks_do_not_take_the_weights(tmp_path: Path) -> None:
    run = shoal.train(settings("ppo", engine="inline", steps=500), tmp_path / "run")
    with pytest.raises(ShoalError, match=r"do not fit the network(.|\n)*size mismatch"):
        run.resume(steps=1000, **{"algorithm.network.hidden": [17]})


def test_a_run_without_checkpoint_begins_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = shoal.train(settings("ppo", engine="inline", steps=300), tmp_path / "run")
    shutil.rmtree(run.directory / "checkpoints")
    again = run.resume()
    assert again.summary["steps"] >= 300
    assert "no checkpoint to resume from" in caplog.text
    steps = [row["steps"] for row in again.rows() if row["kind"] == "train"]
    assert steps == sorted(set(steps))


def test_a_folder_that_holds_a_run_is_not_taken_for_another(tmp_path: Path) -> None:
    run = shoal.train(settings("ppo", engine="inline", steps=100), tmp_path / "run")
    with pytest.raises(SettingsError, match="already holds a run: continue it with `shoal resume"):
        shoal.train(settings("ppo", engine="inline", steps=100), run.directory)


def test_a_folder_of_a_start_that_failed_can_be_used_again(tmp_path: Path) -> None:
    folder, config = tmp_path / "run", settings("ppo", engine="inline", steps=100)
    broken = {"id": "tests.programs:Faulty-v0", "arguments": {"healthy": 0}, "max_faults": 0}
    for _ in range(2):
        with pytest.raises(ShoalError, match="faults in a row") as caught:
            shoal.train({**config, "environment": broken}, folder)
        assert "resume" not in str(caught.value)
        (folder / "checkpoints" / "step_0").mkdir(parents=True, exist_ok=True)  # weights that learned nothing
    run = shoal.train(config, folder)
    assert run.summary["environment"] == "Pendulum-v1"
    assert not (folder / "checkpoints" / "step_0").exists() or checkpoint.read_state(folder / "checkpoints" / "step_0")
    for name in ("log-1.txt", "log-2.txt"):  # what went wrong can still be read
        assert "faults in a row" in (folder / name).read_text()
    assert "faults in a row" not in (folder / "log.txt").read_text()


def test_a_folder_of_a_run_that_has_just_begun_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with directory.locked(tmp_path / "run"), pytest.raises(SettingsError, match=r"is being trained by process \d+"):
        shoal.train(settings("ppo", engine="inline", steps=100), tmp_path / "run")


def test_two_cannot_train_the_same_run(tmp_path: Path) -> None:
    run = shoal.train(settings("ppo", engine="inline", steps=100), tmp_path / "run")
    with directory.locked(run.directory), pytest.raises(SettingsError, match=r"is being trained by process \d+"):
        run.resume(steps=200)
    assert run.resume(steps=200).summary["steps"] >= 200


SMALL_DISK = """
set -e
mount -t tmpfs -o size=300k tmpfs "$1"
"$2" -c 'from shoal.cli.main import main; main()' train "$3" --run-dir "$1/run"
cp -r "$1/run" "$4"
"""


def test_a_full_disk_is_told_and_training_goes_on(tmp_path: Path) -> None:
    config = settings("ppo", engine="inline", steps=1600, checkpoints={"every": 80, "keep": 99})
    (tmp_path / "experiment.yaml").write_text(yaml.safe_dump(config))
    (tmp_path / "disk").mkdir()
    words = [tmp_path / "disk", sys.executable, tmp_path / "experiment.yaml", tmp_path / "copy"]
    done = in_namespace(SMALL_DISK, *words)
    assert (
        "could not be saved: No space left on device; the previous one is kept, and training continues" in done.stderr
    )
    assert "1,6" in done.stdout  # hundred steps: it went on to the end
    saved = checkpoint.paths(tmp_path / "copy")
    assert len(saved) > 1
    for path in saved:
        assert checkpoint.read(path)["weights"]


READ_ONLY = """
set -e
"$2" -c 'from shoal.cli.main import main; main()' train "$3" --run-dir "$1/run" 2> >(tee "$4" >&2) &
pid=$!
trap 'kill -9 $pid 2> /dev/null || true' EXIT
until ls "$1"/run/checkpoints/step_* > /dev/null 2>&1; do sleep 0.05; done  # waits for a file, not for a time
mount --bind "$1/run/checkpoints" "$1/run/checkpoints"
mount -o remount,bind,ro "$1/run/checkpoints"
grep -q 'Read-only file system' <(tail -n +1 -f "$4")
kill -INT $pid
wait $pid
cp -r "$1/run" "$5"
"""


@pytest.mark.long
def test_a_disk_that_becomes_read_only_is_told_and_training_goes_on(tmp_path: Path) -> None:
    config = settings("ppo", engine="inline", steps=10**7, checkpoints={"every": 200})
    (tmp_path / "experiment.yaml").write_text(yaml.safe_dump(config))
    (tmp_path / "disk").mkdir()
    words = [tmp_path / "disk", sys.executable, tmp_path / "experiment.yaml", tmp_path / "log", tmp_path / "copy"]
    done = in_namespace(READ_ONLY, *words)
    assert "could not be saved: Read-only file system" in done.stderr
    assert "interrupted:" in done.stdout
    for path in checkpoint.paths(tmp_path / "copy"):
        assert checkpoint.read(path)["weights"]


def in_namespace(script: str, *words: object) -> subprocess.CompletedProcess[str]:
    """Run a shell script that may mount what it likes."""
    able = subprocess.run(["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True)
    if able.returncode:
        pytest.skip("this machine does not let tests mount a small disk")
    folder = Path(str(words[0])).parent  # no repository, whose changes would take room in the run's folder
    done = subprocess.run(
        ["unshare", "-rm", "bash", "-c", script, "shell", *map(str, words)],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin:/usr/sbin:/sbin"},
        timeout=seconds(100),
    )
    assert done.returncode == 0, done.stderr
    return done
