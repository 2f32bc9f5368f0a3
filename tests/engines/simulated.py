"""A Ray cluster of simulated nodes on this machine, in a process apart: `python simulated.py CPUS CPUS…`, one per node.

It is nobody's child, so that a test which starts processes can tell its own; it ends when its standard input does.
Orders come as lines: `remove` takes the last node away by force, `add CPUS` brings one more.
"""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

LOOPBACK = "127.0.0.2"  # Ray takes 127.0.0.1 for any address of this machine
LOCK = Path(tempfile.gettempdir(), f"shoal-tests-{os.getuid()}-ray.lock")


@contextmanager
def alone() -> Iterator[None]:
    """Be the only one on this machine whose tests have a Ray; the wait does not count as a test's time."""
    with LOCK.open("w") as file:
        left, _ = signal.setitimer(signal.ITIMER_REAL, 0)
        fcntl.flock(file, fcntl.LOCK_EX)
        signal.setitimer(signal.ITIMER_REAL, left)
        yield


class Simulated:
    """The other side, for tests."""

    def __init__(self, orders: IO[str], answers: IO[str]) -> None:
        """Wait until it is there."""
        self.orders, self.answers = orders, answers
        self.address = answers.readline().strip()

    def tell(self, order: str) -> None:
        """Have an order carried out."""
        self.orders.write(f"{order}\n")
        self.orders.flush()
        assert self.answers.readline() == "done\n"


@contextmanager
def simulated(*cpus: int, environment: dict[str, str] | None = None) -> Iterator[Simulated]:
    """A cluster with a node for each number of CPUs."""
    launcher = subprocess.Popen(
        [sys.executable, __file__, *map(str, cpus)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    )
    assert launcher.stdin is not None
    assert launcher.stdout is not None
    launcher.wait()
    with launcher.stdout:
        try:
            yield Simulated(launcher.stdin, launcher.stdout)
        finally:
            launcher.stdin.close()
            launcher.stdout.read()  # which ends when it has


def main(*cpus: str) -> None:
    """Be the cluster."""
    if os.fork():
        os._exit(0)
    os.setsid()
    os.environ |= {"RAY_prestart_worker_first_driver": "0"}
    os.environ |= {"RAY_health_check_period_ms": "500", "RAY_health_check_failure_threshold": "10"}  # 15 s otherwise
    from ray.cluster_utils import Cluster

    logging.disable()
    told = os.dup(1)
    os.dup2(2, 1)  # what Ray says is not for whoever reads the answers, nor are they for its processes
    os.set_inheritable(told, False)
    cluster = Cluster()
    room = {"object_store_memory": 200 << 20, "include_dashboard": False, "node_ip_address": LOOPBACK}
    nodes = [cluster.add_node(num_cpus=int(count), **room) for count in cpus]
    os.write(told, f"{cluster.address}\n".encode())
    for line in sys.stdin:
        order, *words = line.split()
        if order == "remove":
            cluster.remove_node(nodes.pop(), allow_graceful=False)
        else:
            nodes.append(cluster.add_node(num_cpus=int(words[0]), **room))
        os.write(told, b"done\n")
    cluster.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
