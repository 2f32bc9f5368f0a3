"""Calls between two processes: the process engine beside a bare pipe and a bare block of shared memory."""

from __future__ import annotations

import ctypes
import multiprocessing
import struct
import time
from functools import partial
from typing import Any

import numpy as np

from shoal import engines
from shoal.core.tree import map_tree, size_of
from shoal.core.types import Tree, Work
from shoal.engines.options import Options

ROUNDS = 9  # contestants take turns so often: what disturbs the machine disturbs all of them
ORDER = struct.Struct("<8sQ")  # what to do, with how many bytes: 16 bytes, the small message
NATURE = (
    (32, 4, 8, 8),
    (64, 32, 4, 4),
    (64, 64, 3, 3),
    (512, 3136),
    (7, 512),
)  # weights of a network for Atari


class Shelf:
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


def idle() -> Work:
    """Wait for ever, as a learner without a batch does; calls may wake it."""
    while True:
        yield False


def serve_bare(connection: Any, shared: Any) -> None:
    """Be the other end of the bare pipe and of the bare block."""
    block = np.frombuffer(shared, np.uint8)
    kept = np.zeros_like(block)
    while True:
        order = connection.recv_bytes()
        verb, count = ORDER.unpack(order)
        if verb.startswith(b"send"):
            connection.recv_bytes_into(kept)
        elif verb.startswith(b"copy"):
            kept[:count] = block[:count]
        connection.send_bytes(order)


class Bare:
    """The least that a transport does: bytes come to lie in the other process, and it says so."""

    def __init__(self, size: int) -> None:
        """Start the other end."""
        context = multiprocessing.get_context("spawn")
        shared = context.RawArray(ctypes.c_uint8, size)
        self.block: Any = np.frombuffer(memoryview(shared), np.uint8)
        self.mine: Any = np.ones_like(self.block)
        self.connection, end = context.Pipe()
        self.process = context.Process(target=serve_bare, args=(end, shared), daemon=True)
        self.process.start()

    def call(self, verb: bytes, count: int = 0) -> None:
        """Send `count` bytes after the order, or copy them into the block before it; wait for the answer."""
        if verb == b"copy":
            self.block[:count] = self.mine[:count]
        self.connection.send_bytes(ORDER.pack(verb, count))
        if verb == b"send":
            self.connection.send_bytes(self.mine[:count])
        self.connection.recv_bytes()


def calls(seconds: float) -> dict[str, list[dict[str, Any]]]:
    """Time of small and large calls, and as multiples of what the bare pipe and the bare block need."""
    random = np.random.default_rng(0)
    weights = {str(index): random.standard_normal(shape, np.float32) for index, shape in enumerate(NATURE)}
    rollout = {"observation": random.integers(0, 256, (20, 1, 4, 84, 84), np.uint8)}
    heavy, light = size_of(weights), size_of(rollout)
    homes = {"weights": "resting", "rollouts": "resting", "woken": "waiting"}
    engine, bare = engines.make("processes", Options(homes=homes)), Bare(heavy)
    try:
        shelf, queue, woken = (engine.serve(name, Shelf) for name in homes)
        engine.run("resting", rest)
        engine.run("waiting", idle)
        shelf.put(weights)
        ours: dict[int, dict[str, Any]] = {
            ORDER.size: {
                "small": partial(shelf.same, 7),
                "small, to a waiting worker": partial(woken.same, 7),
            },
            heavy: {"weights put": partial(shelf.put, weights), "weights fetched": shelf.get},
            light: {"rollout put": partial(queue.put, rollout)},
        }
        rows = []
        for size, rivals in ours.items():
            verbs = {"pipe": b"send", "block": b"copy"} if size > ORDER.size else {"pipe": b"same"}
            rivals |= {name: partial(bare.call, verb, size) for name, verb in verbs.items()}
            rows += contest(rivals, size, seconds / len(ours))
    finally:
        bare.process.kill()
        engine.close()
    return {"calls": rows}


def contest(rivals: dict[str, Any], size: int, seconds: float) -> list[dict[str, Any]]:
    """Medians over the rounds; a round before the first warms up."""
    taken: dict[str, Any] = {name: [] for name in rivals}
    for _ in range(ROUNDS + 1):
        for name, call in rivals.items():
            times: list[float] = []
            until = time.perf_counter() + seconds / ROUNDS / len(rivals)
            while (now := time.perf_counter()) < until or len(times) < 5:
                call()
                times.append(time.perf_counter() - now)
            taken[name].append(1e6 * np.percentile(times, [50, 99]))
    p50, p99 = ({name: np.array(rounds[1:])[:, part] for name, rounds in taken.items()} for part in (0, 1))
    return [
        {
            "call": name,
            "bytes": size,
            "p50_us": np.median(p50[name]),
            "p99_us": np.median(p99[name]),
            "mb_s": np.median(size / p50[name]),
            **{f"x_{who}": np.median(p50[name] / p50[who]) for who in ("pipe", "block", "bare") if who in p50},
        }
        for name in rivals
    ]
