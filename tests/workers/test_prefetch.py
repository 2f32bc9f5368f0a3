"""Batches that are prepared ahead: in order, with keys and versions that are true, by a thread that ends."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import shoal
from shoal.core.errors import Fatal, SettingsError
from shoal.experiment import configure
from shoal.runs import metrics
from shoal.services.queue import Queue
from shoal.services.replay import Replay
from shoal.workers import prefetch
from shoal.workers.prefetch import Ahead, Batches
from shoal.workers.progress import Progress
from tests.pace import long, seconds
from tests.programs import small
from tests.services.test_replay import items, names
from tests.test_learners import ALGORITHMS

DQN = {"name": "dqn", "batch": 4, "replay": {"capacity": 40, "minimum": 1, "alpha": 1.0}, "network": {"hidden": [8]}}
QUEUE = {"name": "impala", "batch": 4, "unroll": 1, "network": {"hidden": [8]}}
PARTS = {"fresh": {"kind": "queue", "fraction": 0.5}, "old": {"kind": "elite", "fraction": 0.5, "capacity": 10}}


def experiment(algorithm: Any = DQN, **more: Any) -> Any:
    return configure(small(algorithm, **more))


def batches(store: Any, number: int | str, algorithm: Any = DQN, device: str = "cpu") -> Batches:
    model: Any = SimpleNamespace(net=torch.nn.Linear(1, 1), device=torch.device(device))
    return Batches(experiment(algorithm, prefetch=number), store, model, Progress(version=5))


class Slow:
    """A store that notes for whom it draws, and in which thread, and waits to be let."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.let, self.versions, self.threads = threading.Semaphore(0), list[int](), list[str]()
        self.drawn = threading.Semaphore(0)

    def get(self, size: int, version: int, beta: float) -> Any:
        assert self.let.acquire(timeout=seconds(30))
        self.versions.append(version)
        self.threads.append(threading.current_thread().name)
        found = self.inner.get(size, version, beta)
        self.drawn.release()
        return found

    def status(self) -> Any:
        return self.inner.status()


def test_batches_come_in_order_each_once_and_know_the_version_that_they_change() -> None:
    queue = Queue(100, 4)
    queue.put(items(range(80), version=2))
    now, seen, own = Progress(version=5), [], threading.current_thread().name
    slow = Slow(queue)
    for _ in range(24):
        slow.let.release()
    with batches(slow, 3, QUEUE) as ahead:
        for _ in range(20):
            drawn = ahead.take(now)
            assert drawn is not None
            batch = drawn.batch
            seen += names(batch._asdict()).tolist()
            lag = float((now.version - batch.version).mean())
            assert drawn.metrics["age_of_weights"] + drawn.metrics["age_of_data"] == lag == now.version - 2
            assert drawn.metrics["prefetched"] == 3
            now.version += 1
        assert ahead.take(now) is None  # all are used
        queue.put(items(range(80, 84), version=2))
        slow.let.release(10)
        late = ahead.take(now)
        assert late is not None
    seen += late.batch.action[0].tolist()
    assert seen == [*range(84)]
    assert slow.versions[:20] == [*range(5, 25)]
    assert slow.threads[0] == own
    assert {*slow.threads[1:20]} == {"prefetch_0"}


def test_a_batch_is_prepared_while_the_learner_does_something_else_and_the_thread_ends() -> None:
    store = Replay(experiment().replay, 4)
    store.put(items(range(10)))
    slow = Slow(store)
    slow.let.release()
    with batches(slow, 1) as ahead:
        assert ahead.take(Progress(version=5)) is not None
        assert slow.drawn.acquire(timeout=seconds(30))
        slow.let.release()
        assert slow.drawn.acquire(timeout=seconds(30))  # and nobody asked for it yet
        assert any(thread.name == "prefetch_0" for thread in threading.enumerate())
        assert [*slow.versions] == [5, 6]
    assert not any(thread.name == "prefetch_0" for thread in threading.enumerate())


def test_without_prefetch_nothing_is_drawn_early_and_there_is_no_thread() -> None:
    store = Replay(experiment().replay, 4)
    store.put(items(range(10)))
    before = threading.active_count()
    with batches(store, 0) as none:
        for count in range(1, 4):
            none.take(Progress(version=5))
            assert store.drawn == 4 * count
        assert threading.active_count() == before


def test_priorities_go_to_the_items_that_they_are_of_however_late() -> None:
    np.random.seed(0)
    store, now, told = Replay(experiment().replay, 4), Progress(version=5), dict[int, int]()
    with batches(store, 2) as ahead:
        for number in range(30):
            store.put(items(range(4 * number, 4 * number + 4)))  # items of drawn batches are overwritten meanwhile
            drawn = ahead.take(now)
            assert drawn is not None
            now.version += 1
            names = drawn.batch.action[0].numpy()
            store.update(drawn.batch.key, names + 200.0)
            told |= zip(drawn.batch.key.tolist(), names.tolist(), strict=True)
    there = {slot: key for slot, key in enumerate(store.keys.tolist()) if key in told}
    assert len(there) > 5
    for slot, key in there.items():
        assert store.sums.get(np.array([slot]))[0] == pytest.approx(told[key] + 200)
        assert store.memory["action"][slot, 0] == told[key]


def test_an_error_in_the_thread_is_the_learner_s() -> None:
    class Lost(Replay):
        def get(self, *args: Any) -> Any:
            if self.drawn:
                raise OSError("gone")
            return super().get(*args)

    store = Lost(experiment().replay, 4)
    store.put(items(range(10)))
    with batches(store, 1) as ahead:
        ahead.take(Progress())
        with pytest.raises(OSError, match="gone"):
            ahead.take(Progress())


def test_what_chooses_ahead_is_the_network_as_it_was_when_the_batch_was_ordered() -> None:
    seen: list[float] = []
    go = threading.Event()

    class Chooser:
        metrics: ClassVar[dict[str, float]] = {}

        def draw(self, store: Any, net: Any, device: torch.device, now: Progress) -> Any:
            assert seen == [] or go.wait(seconds(30))
            seen.append(net.weight.item())
            return {**items(range(4)), "key": np.arange(4), "weight": np.ones(4, np.float32)}

    mixed = {**QUEUE, "mixture": PARTS}
    with batches(Queue(10), 2, mixed) as ahead:
        assert ahead.selection is not None
        ahead.selection = Chooser()  # type: ignore[assignment]
        weight = ahead.model.net.weight
        with torch.no_grad():
            weight.fill_(1.0)
            ahead.take(Progress())
            weight.fill_(2.0)  # an update, while two more are prepared
            go.set()
            ahead.take(Progress())
            ahead.take(Progress())
            ahead.take(Progress())
            ahead.take(Progress())
    assert seen[:5] == [1.0, 1.0, 1.0, 2.0, 2.0]


class Clock:
    """Seconds that pass when they are told to."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("waited", "spent", "spare", "begun", "then"),
    [
        (0.1, 0.1, False, 0, 1),  # a tenth of the time goes by in waiting
        (0.1, 0.1, False, 4, 4),  # but there is a limit
        (0.01, 0.01, False, 0, 0),  # it is not worth a thread
        (0.0, 0.01, False, 1, 0),
        (0.0, 0.5, False, 1, 1),  # as it should be
        (0.0, 0.5, True, 3, 2),  # more than needed
        (0.1, 0.01, False, 2, 1),  # the cores are busy with something else
    ],
)
def test_more_are_prepared_while_the_learner_waits_for_them_and_fewer_otherwise(
    monkeypatch: pytest.MonkeyPatch, waited: float, spent: float, spare: bool, begun: int, then: int
) -> None:
    clock = Clock()
    monkeypatch.setattr(prefetch, "time", clock)
    ahead = Ahead(0, 4)
    ahead.depth = begun
    for _ in range(prefetch.WINDOW):
        assert ahead.depth == begun
        clock.now += 1.0
        ahead.note(waited, spent, spare)
    assert ahead.depth == then
    fixed = Ahead(2, 2)
    for _ in range(3 * prefetch.WINDOW):
        clock.now += 1.0
        fixed.note(waited, spent, spare)
    assert fixed.depth == 2


@pytest.mark.parametrize(
    ("algorithm", "changes", "words"),
    [
        (DQN, {"lockstep": True}, "with lockstep, no batch"),
        (DQN, {"engine": "inline"}, "with engine inline, no batch"),
        (DQN, {"topology": "gradient_workers"}, "with topology gradient_workers, no batch"),
        ({**QUEUE, "max_lag": 3}, {}, r"with algorithm\.max_lag, no batch"),
        ({"name": "ppo"}, {}, r"with algorithm\.max_lag, no batch"),
        ({"name": "impact", "circular": {}}, {}, r"with algorithm\.circular, no batch"),
        ({**DQN, "replay": {"shards": 2}}, {}, r"with algorithm\.replay\.shards, no batch"),
    ],
)
def test_where_it_would_break_a_promise_it_is_refused_and_auto_is_none(
    algorithm: Any, changes: dict[str, Any], words: str
) -> None:
    assert experiment(algorithm, **changes).prefetched == (0, 0)
    assert experiment(algorithm, **changes, prefetch=0).prefetched == (0, 0)
    with pytest.raises(SettingsError, match=f"prefetch 2: {words} is prepared before it is needed"):
        experiment(algorithm, **changes, prefetch=2)
    assert experiment(DQN).prefetched == (0, 4)
    assert experiment(DQN, prefetch=7).prefetched == (7, 7)


def test_on_a_gpu_it_is_off_unless_a_number_is_given() -> None:
    store, mixed = Queue(10), {**QUEUE, "mixture": PARTS}
    assert batches(store, "auto", device="cuda").ahead.most == 0
    assert batches(store, 2, device="cuda").ahead.depth == 2
    with pytest.raises(Fatal, match="a mixture cannot choose by distance ahead"):
        batches(store, 2, mixed, device="cuda")


@pytest.mark.parametrize(
    ("kind", "engine", "learners"),
    [
        ("dqn", "threads", 1),
        ("elite", "threads", 1),
        ("dqn", "threads", 2),
        long("dqn", "processes", 1),
        long("elite", "processes", 1),
        long("dqn", "processes", 2),
        long("impala", "processes", 2),
    ],
)
def test_whole_runs_learn_from_batches_that_were_prepared_ahead(
    monkeypatch: pytest.MonkeyPatch, kind: str, engine: str, learners: int, tmp_path: Path
) -> None:
    algorithm = {"elite": {**QUEUE, "mixture": PARTS}}.get(kind) or {**ALGORITHMS[kind]}
    algorithm.pop("max_lag", None)
    config = small(algorithm, engine=engine, learners=learners, steps=600, prefetch=2, log_every=0.01)
    run = shoal.train(config, tmp_path / "run")
    rows = [row["metrics"] for row in metrics.read(run.directory) if row["kind"] == "train"]
    assert {row["prefetched"] for row in rows} == {2.0}
    assert run.summary["steps"] >= 600
    for row in rows:
        assert row["lag"] >= 0
        assert row["batch_ms"] >= 0
        assert kind == "elite" or row["lag"] == pytest.approx(row["age_of_weights"] + row["age_of_data"])
