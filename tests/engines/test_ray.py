"""The engine `ray`: what is special about it, and whole runs on two simulated nodes."""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest

import shoal
from shoal.core.errors import ServiceLost, SettingsError, ShoalError, WireError
from shoal.core.spans import Spans
from shoal.core.wire import sendable
from shoal.engines import Options, make
from shoal.engines.options import Room
from shoal.engines.ray import AGAIN, CLOCK, Ray, request, role_of
from shoal.services.parameters import Parameters
from tests.engines import programs
from tests.engines.simulated import Simulated
from tests.pace import seconds

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture
def build(ray_cluster: Simulated) -> Iterator[Any]:
    """Make engines on the shared cluster that are closed whatever happens."""
    made: list[Any] = []

    def build(room: dict[str, Any] | None = None, **options: Any) -> Any:
        known = {
            "stall": seconds(30.0),
            "deadline": seconds(20.0),
            "room": Room(address=ray_cluster.address, **(room or {})),
        }
        made.append(make("ray", Options(**{**known, **options})))
        return made[-1]

    yield build
    for one in made:
        one.close()


def objects(engine: Any) -> tuple[int, int]:
    """Megabytes and objects in the stores of all nodes."""
    from ray._private.internal_api import memory_summary

    text = memory_summary(engine.launcher.ray.get_runtime_context().gcs_address, stats_only=True)
    megabytes, count = re.findall(r"Plasma memory usage (\d+) MiB, (\d+) objects", text)[0]
    return int(megabytes), int(count)


def test_weights_are_put_once_per_version_and_nothing_stays(build: Any) -> None:
    engine = build(homes={"parameters": "host", "shelf": "host"})
    parameters, shelf = engine.serve("parameters", Parameters), engine.serve("shelf", programs.Shelf)
    engine.run("host", programs.idle)
    for version in range(60):
        weights = {"net": np.full(500_000, version, np.float32)}
        parameters.publish(version, 0, 0, False, weights)
        shelf.put("rollout", weights)
        first, second = (parameters.fetch(version - 1)["weights"]["net"] for _ in range(2))
        assert first[-1] == second[-1] == version
        assert first.ctypes.data == second.ctypes.data  # the same object, read in place
        assert not first.flags.writeable
        del first, second
    assert parameters.fetch(59) is None
    assert parameters.status()["fetches"] == 120
    while objects(engine) > (2, 1):  # of 240 MB only the newest version stays; Ray clears once a second
        engine.listen(0.05)


def test_what_no_wire_carries_is_refused(build: Any) -> None:
    assert sendable({"a": (1, np.float32(0.5), [None])}) == {"a": [1, 0.5, [None]]}
    for value in (object(), {"a": {1, 2}}, np.array(["text"]), np.array([object()])):
        with pytest.raises(WireError, match="cannot send"):
            sendable(value)
    shelf = build().serve("shelf", programs.Shelf)
    with pytest.raises(WireError, match="cannot send a object"):
        shelf.put("a", object())


def test_roles_ask_for_their_resources() -> None:
    room = Room(cpus={"learner": 2, "actor": 0.5}, gpus={"learner": 1}, custom={"gradient": {"near": 0.1}})
    assert request(room, "learner") == {"CPU": 2, "GPU": 1}
    assert request(room, "actor-12") == {"CPU": 0.5}
    assert request(room, "group-0/gradient-3") == {"CPU": 1, "near": 0.1}
    assert role_of("evaluator") == "evaluator"


@pytest.mark.parametrize(
    ("room", "complaint"),
    [
        ({"custom": {"one": {"magic": 1}}}, r"no machine of it has 1 CPU, 1 magic for one"),
        ({"cpus": {"one": 3, "two": 6}}, r"no machine of it has 6 CPU for two; 2 workers ask for 9 CPU .*, it has 8"),
        ({"gpus": {"two": 1}}, r"no machine of it has 1 CPU, 1 GPU for two"),
    ],
)
def test_what_the_cluster_does_not_have_is_said_at_once(build: Any, room: Any, complaint: str) -> None:
    engine = build(room)
    for name in ("one", "two"):
        engine.run(name, programs.idle)
    with pytest.raises(ShoalError, match=complaint):
        engine.wait("one")


def test_an_unknown_role_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"ray\.cpus: no worker is a 'actors': .*; did you mean 'actor'\?"):
        shoal.train(CONFIGS / "impala_cartpole.yaml", tmp_path / "run", engine="ray", **{"ray.cpus": {"actors": 1}})


def test_placement_spreads_workers_over_the_nodes(build: Any) -> None:
    from ray.util import placement_group_table

    engine = build({"placement": "SPREAD"}, homes={"shelf": "host"})
    shelf = engine.serve("shelf", programs.Shelf)
    for name in ("host", "one", "two"):
        engine.run(name, programs.until, shelf, "end", 1)
    shelf.put("end", 1)
    nodes = placement_group_table(engine.launcher.group)["bundles_to_node_id"]
    assert len({*nodes.values()}) == len(nodes) == 2  # the host stays here, for its services
    engine.wait("host", "one", "two")
    group = engine.launcher.group
    engine.close()
    assert engine.launcher.group is None
    again = build()
    assert placement_group_table(group)["state"] == "REMOVED"
    assert again.launcher.ray.is_initialized()


def test_nobody_at_the_address_is_said_at_once() -> None:
    with pytest.raises(ShoalError, match=r"no Ray cluster at 127\.0\.0\.1:9"):
        make("ray", Options(room=Room(address="127.0.0.1:9")))
    for address in ("nowhere", "ray://127.0.0.1:10001"):
        with pytest.raises(SettingsError, match="HOST:PORT"):
            make("ray", Options(room=Room(address=address)))


def test_without_ray_the_error_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ShoalError, match=r"pip install 'shoal\[ray\]'"):
        make("ray", Options())


@pytest.mark.long
def test_a_ray_of_ones_own_is_started_and_ended(only_ray: None) -> None:
    before = signal.getsignal(signal.SIGTERM)
    engine = make("ray", Options(room=Room(cpus={"one": 0.5})))
    try:
        assert signal.getsignal(signal.SIGTERM) is before
        shelf = engine.serve("shelf", programs.Shelf)
        engine.run("one", programs.answer, shelf, "a", 2)
        engine.wait("one")
        assert shelf.get("a") == 4
        assert os.environ["RAY_AUTH_MODE"] == "token"  # since it listens to the network
    finally:
        engine.close()
    assert not psutil.Process().children()
    assert not engine.launcher.ray.is_initialized()


@pytest.mark.long
def test_when_a_host_dies_everyone_begins_again(build: Any) -> None:
    engine = build(revivable=frozenset({"host"}), homes={"shelf": "host"})
    notes, shelf = engine.serve("notes", programs.Shelf), engine.serve("shelf", programs.Shelf)
    engine.run("host", programs.count_up, notes, "host")
    engine.run("caller", programs.count_up, shelf, "caller")
    engine.run("last", programs.until_longer, notes, "host pids", 2)
    while not (shelf.get("caller") and notes.get("host pids")):
        engine.listen(0.05)
    os.kill(notes.get("host pids")[0], signal.SIGKILL)
    engine.wait("last")
    assert [engine.report()[name]["restarts"] for name in ("host", "caller", "last")] == [1, 1, 1]
    while not shelf.get("caller"):  # the new one has a new shelf
        engine.listen(0.05)


def test_a_machine_that_does_not_say_what_its_clock_shows_is_not_waited_for_again_and_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine: Any = object.__new__(Ray)
    engine.options = Options()
    engine.node, engine.nodes, engine.ahead, engine.asking = (
        "a" * 56,
        {"one": "host a1b2c3", "two": "host aaaaaa"},
        {},
        {},
    )
    engine.handles = {"one": SimpleNamespace(clock=SimpleNamespace(remote=lambda: "question"))}
    asked, now, answers = list[float](), [1000.0], [ServiceLost("no answer"), 10.0]

    def get(reference: Any, limit: float) -> Any:
        asked.append(limit)
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    engine._get = get
    monkeypatch.setattr("shoal.engines.ray.time", SimpleNamespace(monotonic=lambda: now[0]))
    errors, spans = SimpleNamespace(GetTimeoutError=TimeoutError, RayError=OSError), Spans(10)
    spans.add("step", 1.0, 2.0)
    chunk = spans.drain()
    assert chunk is not None
    monkeypatch.setattr(engine, "_ask", lambda *_: None)
    for _ in range(5):
        state = {"number": 1, "node": "host a1b2c3", "spans": chunk, "failure": ""}
        engine.ray = SimpleNamespace(get=lambda *_, state=state, **__: state, exceptions=errors)
        heard = engine._hear("one", "beat", None)["spans"]
        assert (len(heard["which"]), heard["left_out"]) == (0, 1)
    assert asked == [CLOCK]
    assert engine._ahead("two") == 0.0  # of this machine
    now[0] += AGAIN
    assert engine._ahead("one") == engine._ahead("one") == 990.0 + AGAIN
    assert len(asked) == 2


@pytest.mark.long
def test_cartpole_is_solved_although_a_node_goes(
    ray_cluster: Simulated, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.engines.ray.ROOM", 4.0)
    ray_cluster.tell("add 2")
    run, ended = tmp_path / "run", threading.Event()

    def take_away() -> None:
        told = run / "log.txt"
        while not (told.exists() and "evaluation at step" in told.read_text()) and not ended.wait(0.02):
            pass
        ray_cluster.tell("remove")

    thief = threading.Thread(target=take_away)
    thief.start()
    try:
        with caplog.at_level(logging.WARNING, "shoal"):
            room = {"address": ray_cluster.address, "placement": "STRICT_SPREAD"}  # someone lives on each node
            settings = {"engine": "ray", "actors": 2, "threads": 1, "ray": room}
            result = shoal.train(CONFIGS / "impala_cartpole.yaml", run, **settings)
    finally:
        ended.set()
        thief.join()
    assert result.solved
    assert sum(worker["restarts"] for worker in result.summary["workers"].values()) >= 1
    assert "restarting it in 0.5 s (1 of 5)" in caplog.text
