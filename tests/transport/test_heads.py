"""Whom a node obeys: one head at a time, which may come back, and no other before its time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from shoal.core.errors import ServiceFailed
from shoal.engines import Options, make
from shoal.engines import node as nodes
from shoal.engines.options import Machines
from shoal.transport.session import Session, meet
from shoal.transport.trust import Terms
from tests.engines import programs
from tests.pace import seconds
from tests.transport.conftest import Standing

OPEN = Terms("node"), Terms("head")
SECRET, OTHER = "a" * 32, "b" * 32
SHELF = {"shelf": {"make": "tests.engines.programs:Shelf", "args": [], "seed": 0}}
WORKERS = {"worker": ["tests.engines.programs:idle", [], SHELF, {}]}
Stand = Callable[..., Standing]


def hold(session: Session, run: str, workers: Any) -> None:
    session.call("hold", run, {"deadline": 20.0, "stall": 20.0}, [], [], workers, {}, seconds=seconds(60))


def pid(session: Session) -> Any:
    return session.call("service", "shelf", "pid", [], seconds=seconds(20))


ORDERS: dict[str, list[Any]] = {
    "hold": [OTHER, {}, [], [], {}, {}],
    "turn": ["worker", 1],
    "service": ["shelf", "pid", []],
    "stacks": [],
    "release": [OTHER],
}


def test_another_head_is_refused_while_a_run_lasts(stand: Stand) -> None:
    standing = stand(*OPEN)
    heard: list[Any] = []
    hold(standing.session, SECRET, WORKERS)
    before = pid(standing.session)
    _, other = meet(standing.address, OPEN[1], lambda _, kind, args: heard.append((kind, args)))
    try:
        for kind, args in ORDERS.items():
            with pytest.raises(ServiceFailed) as caught:
                other.call(kind, *args, seconds=seconds(20))
            assert str(caught.value) == "this node works for another head"
        limit = time.monotonic() + seconds(20)
        while not heard and time.monotonic() < limit:  # it gives signs of life, and says nothing of the run
            threading.Event().wait(0.01)
        assert heard[0] == ("report", ["", {}, {}, [], {}, False])
        assert SECRET not in str([heard, other.call("describe", seconds=seconds(20))])
        assert pid(standing.session) == before
    finally:
        other.close()
        other.join()
    standing.session.call("release", SECRET, seconds=seconds(20))
    standing.works()


def test_a_head_whose_link_was_lost_may_come_back_and_another_only_later(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    standing = stand(*OPEN)
    _, lost = meet(standing.address, OPEN[1], lambda *_: None)
    hold(lost, SECRET, WORKERS)
    before = pid(lost)
    lost.close()
    lost.join()
    standing.said("the link to the head was lost")
    with pytest.raises(
        ServiceFailed, match=r"works for another head, which is disconnected and may come back for 1\d\d s"
    ):
        hold(standing.session, OTHER, {})
    with pytest.raises(ServiceFailed, match="works for another head"):
        standing.session.call("release", OTHER, seconds=seconds(20))
    assert standing.session.call("describe", seconds=seconds(20))["busy"] > 100
    _, back = meet(standing.address, OPEN[1], lambda *_: None)
    hold(back, SECRET, WORKERS)
    assert pid(back) == before  # its worker went on meanwhile
    back.close()
    back.join()
    monkeypatch.setattr(nodes, "PATIENCE", 0.2)
    standing.said("its workers are ended")
    limit = time.monotonic() + seconds(20)
    while standing.session.call("describe", seconds=seconds(20))["busy"] and time.monotonic() < limit:
        threading.Event().wait(0.01)
    hold(standing.session, OTHER, WORKERS)
    assert pid(standing.session) != before
    standing.session.call("release", OTHER, seconds=seconds(20))
    standing.works()


def test_a_run_waits_for_a_node_that_waits_for_its_former_head(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    standing = stand(*OPEN)
    _, lost = meet(standing.address, OPEN[1], lambda *_: None)
    hold(lost, SECRET, WORKERS)
    lost.close()
    lost.join()
    standing.said("the link to the head was lost")
    cluster = make(
        "cluster", Options(machines=Machines(nodes=(standing.address,)), stall=seconds(20), deadline=seconds(20))
    )
    try:
        shelf = cluster.serve("shelf", programs.Shelf)
        cluster.run("one", programs.answer, shelf, "a", 2)
        standing.said("is kept for another head, which is disconnected, for 1")
        monkeypatch.setattr(nodes, "PATIENCE", 0.2)
        cluster.wait("one")
        assert shelf.get("a") == 4
    finally:
        cluster.close()
    standing.works()


def test_one_node_under_two_addresses_is_taken_once(stand: Stand) -> None:
    standing = stand(*OPEN)
    port = standing.address.rpartition(":")[2]
    both = (f"127.0.0.1:{port}", f"localhost:{port}")
    cluster = make("cluster", Options(machines=Machines(nodes=both), stall=seconds(20), deadline=seconds(20)))
    try:
        shelf = cluster.serve("shelf", programs.Shelf)
        standing.said("this node is already connected, under the name")
        cluster.run("one", programs.answer, shelf, "a", 2)
        cluster.wait("one")
        assert shelf.get("a") == 4
    finally:
        cluster.close()
    assert not [each for each in standing.caplog.records if "took its place" in each.getMessage()]
