"""How many actors a head bears: its store, weights and journal against actors that only send recorded experience."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch

from shoal import engines, envs, experiment
from shoal.benchmarks import library
from shoal.benchmarks.engines import hosted
from shoal.core.tree import map_tree, size_of
from shoal.core.types import Tree, Work
from shoal.engines.options import Machines, Network, Options
from shoal.services.parameters import Parameters
from shoal.services.queue import Queue

ACTORS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
WORLDS = {"cartpole": "CartPole-v1", "pong": "ALE/Pong-v5"}
BATCH = 16
UPDATES = 10.0  # versions of the weights in a second
STARTING = 600.0  # seconds in which all actors must have begun


class Board:
    """At the head: when all begin, what each has found, and what the head's processes used meanwhile."""

    def __init__(self, actors: int) -> None:
        """Wait for so many actors."""
        psutil = library()

        self.actors, self.here = actors, 0
        self.found: list[Mapping[str, float]] = []
        self.processes = {"head": psutil.Process()}
        self.begun: dict[str, float] = {}
        self.began = self.ended = 0.0
        self.used: dict[str, float] = {}

    def arrive(self, pid: int = 0) -> None:
        """Take note of an actor, or of the process of the learner."""
        psutil = library()

        if pid:
            self.processes["learner"] = psutil.Process(pid)
        else:
            self.here += 1

    def started(self) -> bool:
        """Whether all are here; the first to hear it starts the clock."""
        if self.here < self.actors or "learner" not in self.processes:
            return False
        if not self.began:
            self.began, self.begun = time.monotonic(), self._spent()
        return True

    def tell(self, found: Mapping[str, float]) -> None:
        """Keep what an actor has found; the first to end stops the clock."""
        if not self.ended:
            self.ended = time.monotonic()
            self.used = {name: spent - self.begun[name] for name, spent in self._spent().items()}
        self.found.append(found)

    def over(self) -> bool:
        """Whether all have told."""
        return len(self.found) == self.actors

    def row(self) -> dict[str, Any]:
        """What the actors found, and the cores and the memory of the head's processes."""
        seconds = self.ended - self.began
        cores = {f"{name}_cores": used / seconds for name, used in self.used.items()}
        memory = {f"{name}_mb": each.memory_full_info().pss / 1e6 for name, each in self.processes.items()}
        waits = {key: float(np.median([one[key] for one in self.found])) for key in ("put_p50", "fetch_p50")}
        worst = {key: float(np.max([one[key] for one in self.found])) for key in ("put_p99", "fetch_p99")}
        rates = {key: sum(one[key] for one in self.found) for key in ("puts_per_s", "refused_per_s")}
        return {**rates, **{f"{key}_ms": 1e3 * value for key, value in (waits | worst).items()}, **cores, **memory}

    def _spent(self) -> dict[str, float]:
        times = {name: each.cpu_times() for name, each in self.processes.items()}
        return {name: each.user + each.system for name, each in times.items()}


def drain(store: Any, parameters: Any, board: Any, weights: Tree) -> Work:
    """Be a learner that learns nothing: take batches, and publish weights so often."""
    board.arrive(os.getpid())
    version, due = 0, 0.0
    while True:
        if time.monotonic() >= due:
            parameters.publish(version, 0, 0, False, weights)
            version, due = version + 1, time.monotonic() + 1 / UPDATES
        yield store.get(BATCH) is not None


def send(store: Any, parameters: Any, board: Any, items: Any, rate: float, seconds: float) -> Work:
    """Be an actor that plays nothing: put the same items so often, with the newest weights before each."""
    board.arrive()
    while not board.started():
        time.sleep(0.1)
        yield False
    begin = time.monotonic()
    due = begin + random.random() / rate  # real actors do not speak all at once
    waits: dict[str, list[float]] = {"put": [], "fetch": []}
    version, refused = -1, 0
    while (now := time.monotonic()) - begin < seconds:
        if now < due:
            time.sleep(min(due - now, 0.05))
            yield False
            continue
        newest = timed(waits["fetch"], parameters.fetch, version)
        version = version if newest is None else newest["version"]
        if timed(waits["put"], store.put, items):
            due += 1 / rate
            yield True
        else:
            refused += 1
            yield False
    percentiles = {
        f"{name}_p{mark}": float(np.percentile(times, mark)) for name, times in waits.items() for mark in (50, 99)
    }
    done = len(waits["put"]) - refused
    board.tell({**percentiles, "puts_per_s": done / seconds, "refused_per_s": refused / seconds})
    while not board.over():  # the others go on with as many neighbours as they began with
        time.sleep(0.1)
        yield False


def timed(times: list[float], call: Any, *args: Any) -> Any:
    """Call, and note how long it took."""
    start = time.perf_counter()
    value = call(*args)
    times.append(time.perf_counter() - start)
    return value


def recorded(world: str) -> tuple[Any, Tree]:
    """One item of real experience, and the weights of a network for it."""
    from shoal.workers.rollout import Rollout

    settings = {"environment": {"id": WORLDS[world]}, "algorithm": {"name": "impala"}, "envs": 1, "actors": 1}
    plan = experiment.load(settings)
    worlds = envs.make(plan.environment, 1, seed=0)
    try:
        net = plan.algorithm.build(worlds.spec)
        stream = Rollout(plan, 0, worlds, net, torch.device("cpu"))
        while (items := stream.act(plan.algorithm, 0)) is None:
            pass
        kept: Any = map_tree(np.array, items)
    finally:
        worlds.close()
    return kept, {name: value.numpy() for name, value in net.state_dict().items()}


def measure(name: str, world: str, actors: tuple[int, ...], rate: float, seconds: float) -> Iterator[dict[str, Any]]:
    """A row for each number of actors, as it is done."""
    items, weights = recorded(world)
    size = size_of(items)
    for count in actors:
        row = against(name, count, items, weights, rate, seconds)
        yield {"actors": count, "mb_per_s": row["puts_per_s"] * size / 1e6, **row}


def against(name: str, count: int, items: Any, weights: Tree, rate: float, seconds: float) -> dict[str, Any]:
    """The head against so many actors."""
    names = [f"actor-{index}" for index in range(count)]
    with ExitStack() as stack:
        settings = stack.enter_context(hosted(name))
        network = Network(**settings.get("network", {}))
        machines = Machines(network=network, remote=frozenset(names)) if settings["engine"] == "cluster" else None
        homes = {"store": "learner", "parameters": "learner"}
        limits: dict[str, Any] = dict.fromkeys(("deadline", "stall", "silence"), STARTING)
        options = Options(homes=homes, machines=machines, relays=frozenset({"parameters"}), **limits)
        loaded = engines.prepare(settings["engine"], (__name__,))  # once, for all actors
        engine = engines.make(settings["engine"], options, loaded)
        stack.callback(engine.close)
        board = engine.serve("board", Board, count)
        store = engine.serve("store", Queue, 4 * max(count, BATCH))
        parameters = engine.serve("parameters", Parameters)
        engine.run("learner", drain, store, parameters, board, weights)
        for one in names:
            engine.run(one, send, store, parameters, board, items, rate, seconds)
        engine.wait(*names)
        return dict(board.row())
