"""Weights that several workers of a node want: fetched once, and never older than a moment."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest

from shoal.core.errors import ServiceLost
from shoal.engines import Options, make, node
from shoal.engines.node import Node, Relay, listen
from shoal.engines.options import Machines
from shoal.services.parameters import Parameters
from shoal.transport.trust import Terms
from tests.engines import programs
from tests.pace import seconds


class Source:
    """Weights elsewhere, whose fetches are counted."""

    def __init__(self) -> None:
        self.version, self.asked, self.lost, self.coded = 0, [], False, False

    def fetch(self, newer_than: int) -> Any:
        self.asked.append(newer_than)
        if self.lost:
            raise ServiceLost("away")
        if self.version == newer_than:
            return None
        return {"version": self.version, **({"message": newer_than} if self.coded else {"weights": {}})}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Time that passes when a test says so."""
    now = [100.0]
    monkeypatch.setattr(node.time, "monotonic", lambda: now[0])

    def tick(seconds: float = 2 * node.FRESH) -> None:
        now[0] += seconds

    return tick


def test_one_fetches_for_all(clock: Any) -> None:
    source, shared = Source(), Relay()
    one = two = partial(shared.fetch, source.fetch)
    first = one(-1)
    assert first["version"] == 0
    assert two(-1) is first
    assert two(0) is None
    assert source.asked == [-1]
    source.version = 1
    assert one(0) is None  # for a moment
    clock()
    assert one(0)["version"] == 1
    assert two(0)["version"] == 1
    assert two(-1)["version"] == 1
    assert source.asked == [-1, 0]
    source.version = 0  # a learner went back to its checkpoint
    clock()
    assert two(1)["version"] == one(1)["version"] == 0
    assert one(0) is None


def test_what_is_lost_is_lost_for_who_asked(clock: Any) -> None:
    source, shared = Source(), Relay()
    one = two = partial(shared.fetch, source.fetch)
    source.lost = True
    with pytest.raises(ServiceLost):
        one(-1)
    source.lost = False
    assert two(-1)["version"] == 0


def test_a_codec_answers_everyone_by_what_he_holds(clock: Any) -> None:
    source, shared = Source(), Relay()
    source.version, source.coded = 7, True
    one = two = partial(shared.fetch, source.fetch)
    assert (one(3)["message"], two(5)["message"]) == (3, 5)


def test_callers_wait_for_the_one_who_fetches() -> None:
    source, shared, begun, go_on = Source(), Relay(), threading.Event(), threading.Event()
    fetch = source.fetch

    def slowly(newer_than: int) -> Any:
        begun.set()
        assert go_on.wait(seconds(20))
        return fetch(newer_than)

    source.fetch = slowly  # type: ignore[method-assign]
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(shared.fetch(source.fetch, -1))) for _ in range(5)]
    for thread in threads:
        thread.start()
    assert begun.wait(seconds(20))
    go_on.set()
    for thread in threads:
        thread.join()
    assert len({id(each) for each in found}) == len(source.asked) == 1


def test_a_node_fetches_each_version_once() -> None:
    machine = Node(2, ("shoal", "tests"))
    gate = listen(machine, "127.0.0.1:0", Terms("node"))
    readers = ["one", "two", "three"]
    machines = Machines(nodes=(gate.address,), remote=frozenset(readers))
    engine = make(
        "cluster",
        Options(stall=seconds(20.0), deadline=seconds(20.0), machines=machines, relays=frozenset({"parameters"})),
    )
    try:
        parameters, board = engine.serve("parameters", Parameters), engine.serve("board", programs.Shelf)
        engine.run("publisher", programs.publishes, parameters, board, readers, 4)
        for reader in readers:
            engine.run(reader, programs.follows, parameters, board, reader, 4)
        engine.wait("publisher", *readers)
        assert parameters.status()["fetches"] == 4
    finally:
        engine.close()
        gate.close()
        machine.close()
