"""Signals: whoever sends them, how often, and whatever was set before."""

from __future__ import annotations

import json
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from shoal import training
from shoal.cli import main as cli
from tests.pace import seconds

CONFIGS = Path(__file__).parents[1] / "configs"


@pytest.fixture(autouse=True)
def restored() -> Any:
    """Leave the handlers of signals as they were."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_signals_within_a_second_count_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "ONE", 3600.0)
    asked = threading.Semaphore(0)
    with training.interrupts(asked.release):
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)  # as `timeout` does: to the process, and to its group
        signal.raise_signal(signal.SIGINT)
        assert asked.acquire(timeout=seconds(10))
        monkeypatch.setattr(training, "ONE", 0.0)  # as if a second had passed
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    assert not asked.acquire(blocking=False)  # asked once


def test_what_a_shell_has_ignored_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as for a job in the background

    def app() -> None:
        signal.raise_signal(signal.SIGINT)
        pytest.fail("nobody heard it")

    monkeypatch.setattr(cli, "app", app)
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 130


def test_a_run_that_waits_for_machines_ends_when_asked(command: Any, tmp_path: Path) -> None:
    words = ["engine=cluster", "network.listen=127.0.0.1:0", "lockstep=true", "actors=1", "log_every=0.2"]
    process = command(
        "train", CONFIGS / "impala_cartpole.yaml", "--run-dir", tmp_path / "run", *words, "limits.stall=3600"
    )
    killer = threading.Timer(seconds(100), process.kill)
    killer.start()
    lines = (line for line in process.stderr or () if "step 0" in line)
    assert [line for line, _ in zip(lines, range(3), strict=False)]  # by then it waits
    process.send_signal(signal.SIGTERM)
    _, told = process.communicate()
    killer.cancel()
    killer.join()
    assert process.returncode == 0, told
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["stopped_by"] == "interrupted"
