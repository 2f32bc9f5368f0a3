"""A storm: workers, learner, evaluator and nodes are killed, stopped and asked to end by dice, while runs learn.

Every run must end solved or say why it did not.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from shoal.engines.ray import RayHost
from tests import pace
from tests.pace import long

ROOT = Path(__file__).parents[1]
SHOAL = [sys.executable, "-c", "from shoal.cli.main import main; main()"]
SIGNALS = {"-9": signal.SIGKILL, "STOP": signal.SIGSTOP, "TERM": signal.SIGTERM}
WORKERS = re.compile(r"^(actor-\d|learner|evaluator)$")
PAUSE = (0.5, 3.0)  # seconds between two blows


class Storm:
    """One run under fire, and what hit it."""

    def __init__(self, folder: Path, engine: str, seed: int, start: Callable[..., Any]) -> None:
        """Start the run, and its nodes where it has any."""
        self.folder, self.engine, self.start = folder, engine, start
        self.dice, self.blows = random.Random(seed), Counter[str]()
        self.nodes: list[subprocess.Popen[bytes]] = []
        self.log = folder / "head.log"
        self.environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "120"}
        words = [
            "actors=2",
            "steps=500_000",
            "limits.silence=5",
            "limits.restarts=50",
            "limits.stall=60",
            f"seed={seed}",
        ]
        if engine == "cluster":
            self.ports = [free_port() for _ in range(2)]
            self.nodes = [self._node(port) for port in self.ports]
            words += [f"nodes=[{','.join(f'127.0.0.1:{port}' for port in self.ports)}]", "network.away=4"]
        config = ROOT / "configs" / "impala_cartpole.yaml"
        self.head = self._run("train", config, f"engine={engine}", "--run-dir", folder / "run", *words, log=self.log)

    def _run(self, *words: object, log: Path) -> subprocess.Popen[bytes]:
        with log.open("ab") as file:
            return self.start([*SHOAL, *words], stdout=file, stderr=file, env=self.environment, cwd=self.folder)  # type: ignore[no-any-return]

    def _node(self, port: int) -> subprocess.Popen[bytes]:
        return self._run("node", "--listen", f"127.0.0.1:{port}", "--slots", "2", log=self.folder / f"{port}.log")

    def targets(self) -> dict[str, list[psutil.Process]]:
        """Who may be hit, by role."""
        found: dict[str, list[psutil.Process]] = {}
        for root in [self.head, *self.nodes]:
            with suppress(psutil.Error):
                for process in psutil.Process(root.pid).children(recursive=True):
                    name = process.name()
                    if WORKERS.match(name):
                        found.setdefault(name.split("-")[0], []).append(process)
                    elif name.startswith(f"ray::{RayHost.__name__}"):
                        found.setdefault("ray actor", []).append(process)
        if hosts := found.get("ray actor"):
            hosts.remove(min(hosts, key=psutil.Process.create_time))  # the head's, without which no run goes on
            if not hosts:
                del found["ray actor"]
        for node in self.nodes:
            with suppress(psutil.Error):
                found.setdefault("node", []).append(psutil.Process(node.pid))
        return found

    def blow(self) -> bool:
        """Hit somebody; False: nobody is there."""
        if not (targets := self.targets()):
            return False
        role = self.dice.choice(sorted(targets))
        process, (word, number) = self.dice.choice(targets[role]), self.dice.choice(sorted(SIGNALS.items()))
        with suppress(psutil.Error):
            process.send_signal(number)
            self.blows[f"{role} {word}"] += 1
        if role == "node" and number == signal.SIGSTOP:  # an operator would end it
            time.sleep(self.dice.uniform(*PAUSE))
            with suppress(psutil.Error):
                process.kill()
        for index, node in enumerate(self.nodes):  # and start it again
            if node.poll() is not None:
                self.nodes[index] = self._node(self.ports[index])
        return True

    def rage(self, most: int, limit: float) -> None:
        """Hit until the run is over, or enough was done to it; then see how it ends."""
        ends = time.monotonic() + limit
        while self.head.poll() is None and time.monotonic() < ends:
            if self._learns() and sum(self.blows.values()) < most:
                self.blow()
            with suppress(subprocess.TimeoutExpired):
                self.head.wait(self.dice.uniform(*PAUSE))

    def _learns(self) -> bool:
        return "steps/s" in self.log.read_text()

    def outcome(self) -> str:
        """How the run ended."""
        if self.head.poll() is None:
            return "HANGS"
        path = self.folder / "run" / "summary.json"
        if self.head.returncode == 0 and path.exists() and json.loads(path.read_text())["solved"]:
            return "solved"
        said = [line for line in self.log.read_text().splitlines() if line.startswith(("error:", "NOT solved"))]
        return f"said: {said[-1][:160]}" if said else f"SAID NOTHING, code {self.head.returncode}"


def free_port() -> int:
    """A port that nobody uses."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    ("engine", "blows", "seed"),
    [("processes", 3, 0), long("processes", 40, 1), long("cluster", 35, 2), long("ray", 25, 3)],
)
def test_runs_end_solved_or_say_why_whatever_is_killed(
    engine: str, blows: int, seed: int, start: Any, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    if engine == "ray":
        request.getfixturevalue("only_ray")
    total, ends, number = Counter[str](), list[str](), 0
    while sum(total.values()) < blows:
        folder = tmp_path / str(number)
        folder.mkdir()
        storm = Storm(folder, engine, 1000 * seed + number, start)
        storm.rage(min(blows - sum(total.values()), 10), pace.seconds(240))
        total, number = total + storm.blows, number + 1
        ends.append(storm.outcome())
        assert number < 5 or total, "nobody was there to be hit"
        for node in storm.nodes:
            node.kill()
    table = f"{engine}: {sum(total.values())} blows over {number} runs: {dict(sorted(total.items()))}\n{Counter(ends)}"
    request.node.user_properties.append(("table", table))
    print(table)
    assert not [end for end in ends if end.isupper() or end.startswith(("HANGS", "SAID"))], table
    assert "solved" in ends, table
