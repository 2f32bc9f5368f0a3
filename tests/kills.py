"""Workers that are killed in the middle of a run which a program of its own carries out."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest


def until_learning(process: subprocess.Popen[str]) -> None:
    """Read the log until the learner has made progress."""
    assert process.stderr is not None
    for line in process.stderr:
        if "lag" in line:
            return
    pytest.fail("the run ended before it learned anything")


def worker_process(head: subprocess.Popen[str], name: str) -> psutil.Process:
    """The process of a worker, which carries its name."""
    return next(child for child in psutil.Process(head.pid).children(recursive=True) if child.name() == name)


def killed(process: subprocess.Popen[str], victim: str, run: Path) -> tuple[dict[str, Any], dict[str, int], str]:
    """Kill a worker of a run that learns; once that has ended well: its summary, the restarts of each, and its log."""
    until_learning(process)
    worker_process(process, victim).kill()
    _, log = process.communicate()
    assert process.returncode == 0, log
    assert f"{victim} was killed by SIGKILL" in log
    summary = json.loads((run / "summary.json").read_text())
    workers = summary["workers"].items()
    return summary, {name: worker["restarts"] for name, worker in workers if "restarts" in worker}, log
