"""What a head believes of a node that has proved itself, and what it can tell it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from shoal.core.errors import ServiceFailed, ShoalError
from shoal.engines import make
from shoal.engines.cluster import SENSELESS
from shoal.engines.node import Node, listen
from shoal.engines.options import Machines, Network, Options
from shoal.transport import session as sessions
from shoal.transport.session import Session, meet
from shoal.transport.trust import Terms
from tests.engines import programs
from tests.pace import seconds
from tests.transport.test_reconnects import until

RUN, TOLD = "run", {"moves": 3, "seconds": 1.5, "working": 0.5, "waits": {"shelf.get": 0.25}, "restarts": 0, "pid": 7}
GOOD: list[Any] = [RUN, {"one": TOLD}, {"one": "one: 3 moves"}, [], {}, False]


def changed(place: int, value: Any) -> list[Any]:
    """A report with something else in it."""
    return [*GOOD[:place], value, *GOOD[place + 1 :]]


def spent(**other: Any) -> list[Any]:
    """A report of a worker that has spent its time otherwise."""
    return changed(1, {"one": {**TOLD, **other}})


BAD: dict[str, tuple[Any, str]] = {
    "nothing": ([], "workers|run"),
    "too much": ([*GOOD, 1], "its form"),
    "no run": (changed(0, 5), "run"),
    "workers that are a list": (changed(1, []), "workers"),
    "stranger": (changed(1, {"learner": TOLD}), "learner is no worker of this run"),
    "stranger that ended": (changed(3, ["learner"]), "learner is no worker of this run"),
    "stranger that failed": (changed(4, {"learner": "x"}), "learner is no worker of this run"),
    "name with a newline": (changed(3, ["one\n"]), "ended"),
    "negative moves": (spent(moves=-1), "moves"),
    "huge moves": (spent(moves=2**70), "moves"),
    "moves that are no whole number": (spent(moves=0.5), "moves"),
    "moves that are true": (spent(moves=True), "moves"),
    "seconds that are no number": (spent(seconds=float("nan")), "seconds"),
    "endless seconds": (spent(seconds=float("inf")), "seconds"),
    "negative work": (spent(working=-0.1), "working"),
    "waits that are text": (spent(waits={"shelf.get": "long"}), "waits"),
    "waits without end": (spent(waits={f"service.{number}": 0.0 for number in range(1001)}), "waits"),
    "something else": (spent(node="elsewhere"), "node"),
    "an array": (spent(moves=np.zeros(3)), "moves"),
    "long line": (changed(2, {"one": "x" * 10_000}), "lines"),
    "long text": (changed(4, {"one": "x" * 1_000_000}), "failures"),
    "starting that is text": (changed(5, "soon"), "starting"),
}


@pytest.fixture
def joined() -> Iterator[tuple[Any, Session]]:
    """A head with one worker to give away, and the session of a node that joins and does nothing."""
    network = Network(listen="127.0.0.1:0")
    cluster = make("cluster", Options(machines=Machines(network=network, remote=frozenset({"one"})), stall=seconds(60)))
    session = None

    def answer(session: Session, kind: str, args: list[Any]) -> Any:
        return {"slots": 1, "life": "0123456789abcdef", "busy": 0.0, "clock": 5.0} if kind == "describe" else None

    try:
        cluster.launcher.run_name = RUN
        cluster.run("one", programs.idle)
        assert cluster.launcher.gate is not None
        _, session = meet(cluster.launcher.gate.address, Terms("badger"), answer)
        with cluster.launcher._news:
            assert cluster.launcher._news.wait_for(lambda: cluster.launcher.stations, seconds(20))
        yield cluster, session
    finally:
        cluster.close()
        if session is not None:
            session.close()
            session.join()


def test_a_report_is_believed_if_it_makes_sense(joined: tuple[Any, Session], caplog: pytest.LogCaptureFixture) -> None:
    cluster, session = joined
    cluster.watch(0.0)
    session.call("report", *GOOD, seconds=seconds(20))
    cluster.watch(0.0)
    good = cluster.report()
    assert {key: good["one"][key] for key in TOLD} == TOLD
    assert good["one"]["node"] == "badger"
    for case, (report, told) in BAD.items():
        with pytest.raises(ServiceFailed) as caught:
            session.call("report", *report, seconds=seconds(20))
        assert any(part in str(caught.value) for part in told.split("|")), (case, str(caught.value))
        assert "\n" not in str(caught.value), case
        cluster.watch(0.0)
        assert cluster.report() == good, case
        session.call("report", *GOOD, seconds=seconds(20))
    session.call("report", *changed(0, "another"), seconds=seconds(20))  # of a run before this one
    cluster.watch(0.0)
    assert cluster.report() == good
    lines = [record.getMessage() for record in caplog.records if "refused a report" in record.getMessage()]
    assert [line.partition(":")[0] for line in lines] == [
        f"refused a report of node badger, number {count} of them" for count in (1, 2, 4, 8, 16)
    ]


def test_a_node_whose_reports_make_no_sense_is_done_without(joined: tuple[Any, Session]) -> None:
    """Else nobody would ever hear that its workers have ended."""
    cluster, session = joined
    cluster.launcher.network = Network()  # nobody else can join
    for _ in range(SENSELESS):
        with pytest.raises(ServiceFailed):
            session.call("report", *spent(moves=-1), seconds=seconds(20))
    with pytest.raises(ShoalError, match=r"node badger sends reports that make no sense: workers\.one\.moves"):
        cluster.wait("one")


def test_what_a_node_says_of_workers_elsewhere_ends_nothing(joined: tuple[Any, Session]) -> None:
    cluster, session = joined
    cluster.launcher.machines = Machines(network=cluster.launcher.network, remote=None)
    cluster.run("two", programs.idle)
    cluster.watch(0.0)
    station = cluster.launcher.stations["badger"]
    until(lambda: not station.ordering, "it is never ordered its work")
    station.ordered, cluster.launcher.places["two"] = ["one"], "another"
    session.call("report", *changed(3, ["two"])[:4], {"two": "broke"}, False, seconds=seconds(20))
    assert not cluster.launcher.stations["badger"].ended
    assert not cluster.launcher.stations["badger"].failures
    session.call("report", *changed(3, ["one"]), seconds=seconds(20))
    cluster.wait("one")


def test_what_a_worker_failed_of_changes_no_terminal(joined: tuple[Any, Session]) -> None:
    cluster, session = joined
    cluster.watch(0.0)
    session.call("report", *changed(4, {"one": "Traceback:\n\tit \x1b[2J broke"}), seconds=seconds(20))
    with pytest.raises(ShoalError, match=r"one on node badger: Traceback:\n\tit \?\[2J broke$"):
        cluster.wait("one")


def test_work_that_fits_in_no_frame_ends_the_run_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "LIMIT", 100_000)
    node = Node(1, ("shoal", "tests"))
    gate = listen(node, "127.0.0.1:0", Terms("node"))
    cluster = make(
        "cluster", Options(machines=Machines(nodes=(gate.address,)), deadline=seconds(20), stall=seconds(60))
    )
    told: list[str] = []
    try:
        block = cluster.share("group/numbers", {"cells": np.zeros(100_000, np.float32)})
        cluster.run("group/one", programs.write_block, block, 0, 1.5)

        def wait() -> None:
            try:
                cluster.wait("group/one")
            except ShoalError as error:
                told.append(str(error))

        waiting = threading.Thread(target=wait, daemon=True)
        waiting.start()
        until(lambda: bool(told), "the run goes on without a word")
    finally:
        cluster.launcher.failure = ShoalError("the test is over")
        for one in (cluster, gate, node):
            one.close()
        waiting.join()
    (message,) = told
    assert message.startswith(f"node {gate.address} cannot be sent its work: message too large: 400")
    assert message.endswith("the limit is 100000 B")
