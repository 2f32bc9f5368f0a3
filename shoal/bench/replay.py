"""The replay store: inserts, draws and updates per second, and bytes per item, beside cpprb and tianshou."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from shoal.bench import peers
from shoal.bench.measuring import Effort, Row, Tables
from shoal.core.errors import ShoalError
from shoal.core.settings import Replaying
from shoal.services.replay import Replay

log = logging.getLogger("shoal")
BATCH = 256
CHUNK = 256  # items per put
SIZES = {"cartpole": 1_000_000, "atari": 100_000}
PEERS = ("cpprb", "cpprb-stack", "tianshou")


def cartpole(random: np.random.Generator) -> Iterator[Any]:
    """Observations [2, n, 4] of one-step items."""
    while True:
        yield random.random((2, CHUNK, 4), np.float32)


def atari(random: np.random.Generator) -> Iterator[Any]:
    """Observations [2, n, 4, 84, 84] of one-step items, along a stream of frames that are never the same.

    A frame is a plain ground with a few moving blocks, as games have; noise would defeat any compression.
    """
    frames = np.zeros((CHUNK + 4, 84, 84), np.uint8)
    frames[:] = 87
    count = 0
    while True:
        frames[:4] = frames[-4:]
        for frame in frames[4:]:
            frame[:] = 87
            for row, column in random.integers(0, 76, (12, 2)):
                frame[row : row + 8, column : column + 8] = random.integers(0, 256)
            frame[0, :8] = np.frombuffer(count.to_bytes(8, "little"), np.uint8)
            count += 1
        stacks = np.lib.stride_tricks.sliding_window_view(frames, 4, axis=0).transpose(0, 3, 1, 2)
        yield np.stack([stacks[:CHUNK], stacks[1 : CHUNK + 1]])


def items(observation: Any) -> dict[str, Any]:
    """One-step items around observations."""
    count = observation.shape[1]
    return {
        "observation": observation,
        "first": np.zeros((2, count), bool),
        "action": np.ones((1, count), np.int64),
        "reward": np.ones((1, count), np.float32),
        "discount": np.ones((1, count), np.float32),
        "record": {},
        "version": np.zeros(count, np.int64),
    }


def rate(work: Callable[[], Any], seconds: float) -> float:
    """Calls per second."""
    work()
    calls, begin = 0, time.perf_counter()
    while (spent := time.perf_counter() - begin) < seconds:
        work()
        calls += 1
    return calls / spent


def measure(kind: str, compress: bool, seconds: float, size: int) -> Row:
    """Fill our replay, then time it."""
    random = np.random.default_rng(0)
    stream = {"cartpole": cartpole, "atari": atari}[kind](random)
    settings = Replaying(capacity=size, minimum=1, alpha=0.6, compress=compress)
    store = Replay(settings, BATCH, stack=4 if kind == "atari" else 1)
    spent = puts = 0.0
    while store.filled < store.capacity:
        content = items(next(stream))
        begin = time.perf_counter()
        store.put(content)
        spent += time.perf_counter() - begin
        puts += 1
    priorities = [np.abs(random.standard_normal(BATCH)) + 0.01 for _ in range(17)]
    keys: list[Any] = [store.get(BATCH)["key"] for _ in range(16)]  # type: ignore[index]
    turn = iter(range(10**9))

    def update() -> None:
        at = next(turn)
        store.update(keys[at % 16], priorities[at % 17])

    def cycle() -> None:
        batch: Any = store.get(BATCH, beta=0.4)
        store.update(batch["key"], priorities[next(turn) % 17])

    return {
        "store": f"shoal{' lz4' if compress else ''}",
        "kind": kind,
        "inserts_per_s": round(puts * CHUNK / spent),
        "samples_per_s": round(rate(lambda: store.get(BATCH, beta=0.4), seconds)),
        "updates_per_s": round(rate(update, seconds)),
        "cycles_per_s": round(rate(cycle, seconds)),
        "bytes_per_item": round(store.nbytes() / store.filled),
    }


def others(folder: Path, kind: str, seconds: float) -> Iterator[Row]:
    """The same of other libraries, in a virtual environment of their own."""
    for name in PEERS:
        if name == "cpprb-stack" and kind == "cartpole":
            continue
        try:
            words = ["replay.py", "--lib", name, "--env", kind, "--seconds", str(seconds)]
            found = peers.drive(folder, "rb", words)
        except ShoalError as error:
            log.warning("%s: skipped: %s", name, error)
            continue
        yield {
            "store": name,
            "kind": kind,
            "inserts_per_s": round(found.get("insert_batched_per_s", 0)),
            "samples_per_s": round(found["sample_per_s"]),
            "updates_per_s": round(found.get("update_per_s", 0)),
            "cycles_per_s": round(found.get("sample_update_cycles_per_s", 0)),
            "bytes_per_item": None,
        }


def replay(effort: Effort) -> Tables:
    """Measure ours, and the peers' where there is a folder of them."""
    rows, seconds = [], min(effort.seconds, 3.0)
    for kind, size in SIZES.items():
        for compress in (False, True)[: 1 + (kind == "atari")]:
            rows.append(measure(kind, compress, seconds, 2 * CHUNK if effort.smallest else size))
        if effort.peers is not None:
            rows += others(effort.peers, kind, seconds)
    return {"replay": rows}
