"""The replay store: inserts, draws and updates per second, and bytes per item, beside cpprb and tianshou."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from shoal.core.settings import Replaying
from shoal.services.replay import Replay

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


def measure(kind: str, compress: bool, seconds: float, size: int) -> dict[str, Any]:
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


def peers(folder: Path, kind: str, seconds: float) -> list[dict[str, Any]]:
    """The same of other libraries, in an environment of their own."""
    found = []
    for name in PEERS:
        if name == "cpprb-stack" and kind == "cartpole":
            continue
        python = folder / "rb" / "bin" / "python"
        if not python.exists():
            print(f"{name}: skipped, there is no {python}")
            continue
        words = [str(python), str(folder / "replay.py"), "--lib", name, "--env", kind, "--seconds", str(seconds)]
        done = subprocess.run(words, capture_output=True, text=True, cwd=folder, check=False)
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if not lines:
            print(f"{name}: skipped, {done.stderr.strip().splitlines()[-1:]}")
            continue
        told = json.loads(lines[-1])
        found.append(
            {
                "store": name,
                "kind": kind,
                "inserts_per_s": round(told.get("insert_batched_per_s", 0)),
                "samples_per_s": round(told["sample_per_s"]),
                "updates_per_s": round(told.get("update_per_s", 0)),
                "cycles_per_s": round(told.get("sample_update_cycles_per_s", 0)),
                "bytes_per_item": None,
            }
        )
    return found


def measure_all(seconds: float, folder: Path | None, smallest: bool = False) -> list[dict[str, Any]]:
    """Measure ours, and others where they are."""
    rows = []
    for kind, size in SIZES.items():
        size = 2 * CHUNK if smallest else size
        rows.append(measure(kind, False, seconds, size))
        if kind == "atari":
            rows.append(measure(kind, True, seconds, size))
        if folder is not None:
            rows += peers(folder, kind, seconds)
    return rows
