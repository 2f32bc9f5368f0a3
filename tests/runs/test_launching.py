"""Runs as programs: what counts as ended, who holds a run, and programs that end with whoever started them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from shoal.runs import directory
from shoal.runs.launching import Job, carry_out, ended, stop
from tests.pace import seconds


def test_a_run_has_ended_when_its_steps_are_used_up(tmp_path: Path) -> None:
    assert not ended(tmp_path / "nothing")
    (tmp_path / "config.yaml").write_text("steps: 300\n")
    assert not ended(tmp_path)
    for why, wanted in (("steps", True), ("target", True), ("interrupted", False)):
        (tmp_path / "summary.json").write_text(json.dumps({"stopped_by": why}))
        assert ended(tmp_path) == wanted
    (tmp_path / "summary.json").unlink()
    for steps, wanted in ((0, False), (200, False), (304, True)):  # killed before it could write its results
        (tmp_path / "checkpoints" / f"step_{steps}").mkdir(parents=True)
        assert ended(tmp_path) == wanted


def test_a_run_is_held_while_a_process_trains_it(tmp_path: Path) -> None:
    assert not directory.held(tmp_path)
    with directory.locked(tmp_path):
        assert directory.held(tmp_path)
    assert not directory.held(tmp_path)


def test_a_program_ends_with_the_one_that_started_it(start: Any) -> None:
    code = "from shoal.runs.launching import tie; tie(); import signal; print(1, flush=True); signal.pause()"
    process = start([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"1\n"
    process.stdin.close()  # as the system does for whoever dies
    assert process.wait(timeout=seconds(20)) == -signal.SIGTERM


class Impatient:
    """A program that does not want to end, and somebody who presses Ctrl-C meanwhile."""

    stdin = None

    def __init__(self) -> None:
        self.told: list[int] = []

    def poll(self) -> None:
        return None

    def send_signal(self, number: int) -> None:
        self.told.append(number)

    def wait(self) -> None:
        if signal.SIGKILL not in self.told:
            raise KeyboardInterrupt


def test_who_presses_again_and_again_is_obeyed() -> None:
    programs: list[Any] = [Impatient(), Impatient()]
    stop(programs)
    assert [program.told for program in programs] == [[signal.SIGINT, signal.SIGINT, signal.SIGKILL]] * 2


def test_what_has_ended_is_not_started_again(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text(json.dumps({"stopped_by": "steps"}))
    job = Job(tmp_path, "no such config")
    assert [*carry_out([job], 1)] == [(job, True)]
