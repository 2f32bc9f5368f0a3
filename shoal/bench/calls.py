"""Calls between two processes: the process engine beside a bare pipe and a bare block of shared memory."""

from __future__ import annotations

import ctypes
import multiprocessing
from functools import partial
from typing import Any

import numpy as np

from shoal import engines
from shoal.bench.measuring import ORDER, Effort, Slot, Tables, contest, payloads, rest
from shoal.core.tree import size_of
from shoal.core.types import Work
from shoal.engines.options import Options


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


def calls(effort: Effort) -> Tables:
    """Time of small and large calls, and as multiples of what the bare pipe and the bare block need."""
    weights, rollout = payloads().values()
    heavy, light = size_of(weights), size_of(rollout)
    homes = {"weights": "resting", "rollouts": "resting", "woken": "waiting"}
    engine, bare = engines.make("processes", Options(homes=homes)), Bare(heavy)
    try:
        slot, queue, woken = (engine.serve(name, Slot) for name in homes)
        engine.run("resting", rest)
        engine.run("waiting", idle)
        slot.put(weights)
        ours: dict[int, dict[str, Any]] = {
            ORDER.size: {
                "small": partial(slot.same, 7),
                "small, to a waiting worker": partial(woken.same, 7),
            },
            heavy: {"weights put": partial(slot.put, weights), "weights fetched": slot.get},
            light: {"rollout put": partial(queue.put, rollout)},
        }
        rows = []
        for size, rivals in ours.items():
            verbs = {"pipe": b"send", "block": b"copy"} if size > ORDER.size else {"pipe": b"same"}
            rivals |= {name: partial(bare.call, verb, size) for name, verb in verbs.items()}
            rows += contest(rivals, size, effort.seconds / len(ours), ("pipe", "block"))
    finally:
        bare.process.kill()
        engine.close()
    return {"calls": rows}
