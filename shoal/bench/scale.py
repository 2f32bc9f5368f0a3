"""How many actors one head can serve: its store and weights against actors that only send recorded experience."""

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
from shoal.bench.engines import hosted, options_of
from shoal.bench.measuring import Row, core_seconds, library, timed
from shoal.core.errors import SettingsError
from shoal.core.settings import Replaying
from shoal.core.tree import map_tree, size_of
from shoal.core.types import Tree, Work
from shoal.services.parameters import Parameters
from shoal.services.queue import Queue
from shoal.services.replay import Replay
from shoal.services.shard import Shard
from shoal.workers.sharding import Shards, hold

ENVIRONMENTS = {"cartpole": "CartPole-v1", "pong": "ALE/Pong-v5"}
BATCH = 16
UPDATES = 10.0  # versions of the weights in a second
STARTING = 600.0  # seconds within which all actors must have started


class Meter:
    """At the head: when all actors begin, what each measured, and what the head's processes used meanwhile."""

    def __init__(self, actors: int, shards: int) -> None:
        """Wait for this number of actors, for the learner, and for the shards if there are any."""
        self.actors, self.started, self.others = actors, 0, 1 + shards
        self.found: list[Mapping[str, float]] = []
        self.processes = {"head": library().Process()}
        self.before: dict[str, float] = {}
        self.began = self.ended = 0.0
        self.used: dict[str, float] = {}

    def start(self, name: str = "", pid: int = 0) -> None:
        """Count an actor, or note the process of the learner or of a shard."""
        if name:
            self.processes[name] = library().Process(pid)
        else:
            self.started += 1

    def ready(self) -> bool:
        """Whether all have started; the first to ask after that starts the clock."""
        if self.started < self.actors or len(self.processes) <= self.others:
            return False
        if not self.began:
            self.began, self.before = time.monotonic(), self._spent()
        return True

    def report(self, found: Mapping[str, float]) -> None:
        """Keep what an actor measured; the first to finish stops the clock."""
        if not self.ended:
            self.ended = time.monotonic()
            self.used = {name: spent - self.before[name] for name, spent in self._spent().items()}
        self.found.append(found)

    def over(self) -> bool:
        """Whether all have reported."""
        return len(self.found) == self.actors

    def row(self) -> Row:
        """What the actors measured, and the cores and the memory of the head's processes."""
        seconds = self.ended - self.began
        used = {name: spent / seconds for name, spent in self.used.items()}
        cores = {f"{name}_cores": used.pop(name) for name in ("head", "learner")}
        cores["busiest_cores"] = max(*cores.values(), *used.values(), 0.0)
        held = {name: each.memory_full_info().pss / 1e6 for name, each in self.processes.items()}
        memory = {f"{name}_mb": held.pop(name) for name in ("head", "learner")}
        memory |= {"shards_mb": sum(held.values())} if held else {}
        waits = {key: float(np.median([one[key] for one in self.found])) for key in ("put_p50", "fetch_p50")}
        worst = {key: float(np.max([one[key] for one in self.found])) for key in ("put_p99", "fetch_p99")}
        rates = {key: sum(one[key] for one in self.found) for key in ("puts_per_s", "refused_per_s")}
        return {**rates, **{f"{key}_ms": 1e3 * value for key, value in (waits | worst).items()}, **cores, **memory}

    def _spent(self) -> dict[str, float]:
        return {name: core_seconds(each) for name, each in self.processes.items()}


def drain(store: Any, parameters: Any, meter: Any, weights: Tree, settings: Replaying | None) -> Work:
    """Be a learner that learns nothing: take batches, and publish weights at a fixed rate.

    A queue is emptied as fast as it fills; from a replay a batch is drawn for each version, and its priorities set.
    """
    meter.start("learner", os.getpid())
    if settings is not None and settings.shards > 1:
        store = Shards(store, settings, BATCH)
    version, due = 0, 0.0
    while True:
        late = time.monotonic() >= due
        if late:
            parameters.publish(version, 0, 0, False, weights)
            version, due = version + 1, time.monotonic() + 1 / UPDATES
        batch = store.get(BATCH, version) if late or settings is None else None
        if batch is not None and settings is not None:
            store.update(batch["key"], np.random.random_sample(BATCH))
        yield batch is not None


def keep(meter: Any, name: str) -> Work:
    """Be the worker that holds a shard."""
    meter.start(name, os.getpid())
    yield from hold()


def send(store: Any, parameters: Any, meter: Any, items: Any, rate: float, seconds: float) -> Work:
    """Be an actor that plays nothing: put the same items at a fixed rate, with the newest weights before each."""
    meter.start()
    while not meter.ready():
        time.sleep(0.1)
        yield False
    begin = time.monotonic()
    due = begin + random.random() / rate  # real actors do not all call at once
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
    meter.report({**percentiles, "puts_per_s": done / seconds, "refused_per_s": refused / seconds})
    while not meter.over():  # the others keep the neighbours that they began with
        time.sleep(0.1)
        yield False


def recorded(environment: str) -> tuple[Any, Tree]:
    """One item of real experience, and the weights of a network for it."""
    from shoal.workers.rollout import Rollout

    settings = {
        "environment": {"id": ENVIRONMENTS[environment]},
        "algorithm": {"name": "impala"},
        "envs": 1,
        "actors": 1,
    }
    plan = experiment.load(settings)
    vector = envs.make(plan.environment, 1, seed=0)
    try:
        net = plan.algorithm.build(vector.spec)
        stream = Rollout(plan, 0, vector, net, torch.device("cpu"))
        while (items := stream.act(plan.algorithm, 0)) is None:
            pass
        kept: Any = map_tree(np.array, items)
    finally:
        vector.close()
    return kept, {name: value.numpy() for name, value in net.state_dict().items()}


def measure(
    name: str, environment: str, actors: tuple[int, ...], rate: float, seconds: float, shards: int = 0
) -> Iterator[Row]:
    """A row for each number of actors, as it is done; with shards they fill a replay by priority, else a queue."""
    items, weights = recorded(environment)
    size = size_of(items)
    for count in actors:
        if shards > count:
            raise SettingsError(f"--shards {shards}: there are only {count} actors, and a shard needs at least one")
        row = against(name, count, items, weights, rate, seconds, shards)
        yield {"actors": count, "mb_per_s": row["puts_per_s"] * size / 1e6, **row}


def against(name: str, count: int, items: Any, weights: Tree, rate: float, seconds: float, shards: int = 0) -> Row:
    """The head against this number of actors."""
    names = [f"actor-{index}" for index in range(count)]
    capacity, parts = 4 * max(count, BATCH), [f"shard-{index}" for index in range(shards if shards > 1 else 0)]
    replay = Replaying(capacity=capacity, minimum=BATCH, shards=shards) if shards else None
    shape = (BATCH, 0, items["observation"].shape[2] if items["observation"].ndim > 3 else 1)
    with ExitStack() as stack:
        settings = stack.enter_context(hosted(name))
        homes = {"store": "learner", "parameters": "learner"} | {f"store-of-{part}": part for part in parts}
        limits: dict[str, Any] = dict.fromkeys(("deadline", "stall", "silence"), STARTING)
        options = options_of(settings, names, homes=homes, relays=frozenset({"parameters"}), **limits)
        loaded = engines.prepare(settings["engine"], (__name__,))  # once, for all actors
        engine = engines.make(settings["engine"], options, loaded)
        stack.callback(engine.close)
        meter = engine.serve("meter", Meter, count, len(parts))
        stores = [engine.serve(f"store-of-{part}", Shard, replay, *shape) for part in parts]
        for part in parts:
            engine.run(part, keep, meter, part)
        if not parts:
            stores = [engine.serve("store", *((Replay, replay, *shape) if replay else (Queue, capacity)))]
        parameters = engine.serve("parameters", Parameters)
        engine.run("learner", drain, stores if parts else stores[0], parameters, meter, weights, replay)
        for index, one in enumerate(names):
            engine.run(one, send, stores[index % len(stores)], parameters, meter, items, rate, seconds)
        engine.wait(*names)
        return dict(meter.row())
