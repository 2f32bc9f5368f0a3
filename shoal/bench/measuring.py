"""What the benchmarks share: a service to call, the arrays that travel, and clocks."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shoal.core.errors import ShoalError
from shoal.core.tree import map_tree
from shoal.core.types import Tree, Work

Row = dict[str, Any]
Tables = dict[str, list[Row]]  # title → rows

ROUNDS = 9  # contestants take turns this often: what disturbs the machine disturbs all of them
ORDER = struct.Struct("<8sQ")  # what to do, with how many bytes: 16 bytes, the small message
NATURE = ((32, 4, 8, 8), (64, 32, 4, 4), (64, 64, 3, 3), (512, 3136), (7, 512))  # weights of a network for Atari


@dataclass(frozen=True)
class Effort:
    """How long to measure, and against whom."""

    seconds: float = 30.0  # of each measured window
    rounds: int = 1  # of training, ours and the peers' in turn
    peers: Path | None = None  # folder of their drivers and virtual environments
    smallest: bool = False  # just enough to see that everything runs


def library() -> Any:
    """The library that measures processes, or an error that names the extra."""
    try:
        import psutil
    except ImportError as error:
        raise ShoalError("benchmarks need psutil: pip install 'shoal[bench]'") from error
    return psutil


def core_seconds(process: Any) -> float:
    """CPU time that a process has used."""
    times = process.cpu_times()
    return float(times.user + times.system)


def payloads() -> dict[str, Any]:
    """The large arguments of calls: the weights of a network for Atari, and a rollout of 20 stacked frames."""
    random = np.random.default_rng(0)
    weights = {str(index): random.standard_normal(shape, np.float32) for index, shape in enumerate(NATURE)}
    return {"weights": weights, "rollout": {"observation": random.integers(0, 256, (20, 1, 4, 84, 84), np.uint8)}}


class Slot:
    """A service that keeps one tree in memory of its own, as stores do."""

    kept: Any = None

    def same(self, number: int) -> int:
        """Give back a number."""
        return number

    def put(self, tree: Tree) -> bool:
        """Copy a tree in."""
        self.kept = self.kept or map_tree(np.empty_like, tree)
        map_tree(lambda mine, theirs: mine.__setitem__(..., theirs), self.kept, tree)
        return True

    def get(self) -> Any:
        """Give back the tree."""
        return self.kept


def rest() -> Work:
    """End at once: the process goes on answering calls and does nothing else."""
    yield True


def timed(times: list[float], call: Callable[..., Any], *args: Any) -> Any:
    """Call, and note how long it took."""
    start = time.perf_counter()
    value = call(*args)
    times.append(time.perf_counter() - start)
    return value


def contest(rivals: dict[str, Callable[[], Any]], size: int, seconds: float, beside: Sequence[str]) -> list[Row]:
    """Time calls in turn: medians over the rounds, and ratios to the calls named in `beside`."""
    taken: dict[str, list[Any]] = {name: [] for name in rivals}
    for _ in range(ROUNDS + 1):  # the first round only warms up
        for name, call in rivals.items():
            times: list[float] = []
            until = time.perf_counter() + seconds / ROUNDS / len(rivals)
            while time.perf_counter() < until or len(times) < 5:
                timed(times, call)
            taken[name].append(1e6 * np.percentile(times, [50, 99]))
    p50, p99 = ({name: np.array(rounds[1:])[:, part] for name, rounds in taken.items()} for part in (0, 1))
    return [
        {
            "call": name,
            "bytes": size,
            "p50_us": float(np.median(p50[name])),
            "p99_us": float(np.median(p99[name])),
            "mb_s": float(np.median(size / p50[name])),
            **{f"x_{who}": float(np.median(p50[name] / p50[who])) for who in beside if who in p50},
        }
        for name in rivals
    ]
