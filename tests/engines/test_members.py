"""What a node may do at the head: a scripted one that breaks the rules is refused in words and spoils nothing."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.core.errors import Refused, ServiceFailed, ServiceLost
from shoal.core.rights import Rights, calls
from shoal.core.types import Work
from shoal.engines import Options, make, once
from shoal.engines.node import Node, join
from shoal.engines.once import Once
from shoal.engines.options import Machines, Network
from shoal.services.checkpoints import Checkpoints
from shoal.transport.session import Session, meet
from shoal.transport.trust import Terms
from tests.engines import programs
from tests.pace import seconds

LIVES = "0123456789abcdef"


@calls(shelf=("append", "put"), checkpoints=())
def honest(shelf: Any, checkpoints: Any) -> Work:
    yield True
    shelf.append("calls", 1)


def until(true: Callable[[], Any], what: str) -> None:
    limit = time.monotonic() + seconds(20)
    while not true():
        assert time.monotonic() < limit, what
        threading.Event().wait(0.01)


class Scripted:
    """A node that says what a test has it say."""

    def __init__(self, address: str, life: str = LIVES, name: str = "node", slots: int = 1, **about: Any) -> None:
        """Join a head."""
        self.about = {"slots": slots, "life": life, "busy": 0.0, "clock": 5.0, **about}
        self.orders: list[tuple[str, list[Any]]] = []
        self.session: Session = meet(address, Terms(name), self._answer)[1]

    def _answer(self, _: Session, kind: str, args: list[Any]) -> Any:
        self.orders.append((kind, args))
        return self.about if kind == "describe" else None

    def told(self, kind: str) -> list[list[Any]]:
        return [args for each, args in [*self.orders] if each == kind]

    def held(self) -> None:
        """Wait until it was told to hold a worker."""
        until(lambda: any(args[4] for args in self.told("hold")), "it was told to hold nothing")

    def call(self, service: Any, method: Any, *args: Any, number: Any = 0, channel: Any = "worker-a") -> Any:
        return self.session.call("call", channel, number, service, method, [*args], seconds=seconds(20))

    def close(self) -> None:
        self.session.close("the test ends")
        self.session.join()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


class Run:
    """A head with services and one worker, at which nodes may join."""

    def __init__(self, stack: ExitStack, folder: Path, **network: Any) -> None:
        """Begin to listen."""
        options = Options(
            machines=Machines(network=Network(listen="127.0.0.1:0", **network)),
            deadline=seconds(20),
            silence=seconds(20),
        )
        self.cluster = make("cluster", options)
        stack.callback(self.cluster.close)
        self.stack, self.folder = stack, folder
        assert self.cluster.launcher.gate is not None
        self.address = self.cluster.launcher.gate.address
        self.shelf = self.cluster.serve("shelf", programs.Shelf)
        self.checkpoints = self.cluster.serve("checkpoints", Checkpoints, str(folder / "runs" / "one"), 3)
        self.cluster.run("worker", honest, self.shelf, self.checkpoints)
        self.stopped = threading.Event()
        self.watching = threading.Thread(target=self._watch)
        self.watching.start()
        stack.callback(self.watching.join)
        stack.callback(self.stopped.set)

    def _watch(self) -> None:
        while not self.stopped.wait(0.02):
            self.cluster.listen(0.0)

    def node(self, **about: Any) -> Scripted:
        made = Scripted(self.address, **about)
        self.stack.callback(made.close)
        return made


@pytest.fixture
def run(stack: ExitStack, tmp_path: Path) -> Run:
    return Run(stack, tmp_path)


# What a worker of a node may call.


def test_a_node_cannot_call_what_its_workers_do_not(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    outside = run.folder / "x"
    outside.mkdir()
    (outside / "precious").write_text("mine")
    state = {"weights": {"w": np.zeros(2, np.float32)}, "optimizer": {}, "state": {"steps": "../../../x"}}
    node = run.node()
    node.held()
    attempts = [
        ("checkpoints", "save"),
        ("checkpoints", "load"),
        ("checkpoints", "_prune"),
        ("shelf", "get"),
        ("shelf", "_target"),
        ("shelf", "__init__"),
        ("nowhere", "put"),
        ("", ""),
    ]
    for service, method in attempts:
        with pytest.raises(ServiceFailed) as caught:
            node.call(service, method, state)
        told = "its recipe names shelf.append, shelf.put"
        assert str(caught.value) == f"worker may not call {service}.{method}: {told}"
    assert [path.name for path in outside.iterdir()] == ["precious"]
    assert not (run.folder / "runs").exists()
    assert node.call("shelf", "append", "calls", 7, number=1) == 1  # the session goes on
    assert run.shelf.get("calls") == [7]
    node.session.tell("report", node.told("hold")[-1][0], {"worker": {"moves": 1}}, {}, [], {}, False)
    until(lambda: run.cluster.report().get("worker"), "no report was taken")
    assert run.cluster.report()["worker"]["refused"] == len(attempts)
    assert len([record for record in caplog.records if "may not call" in record.getMessage()]) == 1


def test_a_call_of_no_form_or_of_a_worker_elsewhere_is_refused_in_words(run: Run) -> None:
    node = run.node()
    node.held()
    for changes in (
        {"number": "0"},
        {"number": True},
        {"number": 0.5},
        {"channel": 5},
        {"channel": ["worker-a"]},
    ):
        with pytest.raises(ServiceFailed, match="call: a channel, a number, a service"):
            node.call("shelf", "put", "a", 1, **changes)
    for channel in ("host-a", "-", "", "worker"):
        with pytest.raises(ServiceFailed, match="does not live on node node"):
            node.call("shelf", "put", "a", 1, channel=channel)
    for service, method in (([], "put"), ("shelf", {}), (None, None)):
        with pytest.raises(ServiceFailed, match="call: a channel, a number, a service"):
            node.call(service, method, "a", 1)
    with pytest.raises(ServiceFailed, match="the head does not know 'fly'"):
        node.session.call("fly", seconds=seconds(20))
    assert run.shelf.get("a") is None


def test_a_check_of_rights_costs_less_than_a_microsecond() -> None:
    rights = Rights("actor-0", {"store": ["put"], "parameters": ["fetch", "status"], "shelf": None}, {})
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        for _ in range(20_000):
            rights.check("store", "put")
        times.append((time.perf_counter() - begin) / 20_000)
    assert min(times) < seconds(1e-6)


def test_a_declaration_names_parameters_that_are_there() -> None:
    with pytest.raises(TypeError, match="honest has no parameter 'shelve': shelf, checkpoints"):
        calls(shelve=("put",))(honest)


# Who a node is.


def test_a_second_node_of_a_name_is_refused_in_words_while_the_first_is_there(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    first = run.node()
    first.held()
    for _ in range(3):
        second = run.node(life=LIVES[::-1])
        with pytest.raises((ServiceFailed, ServiceLost)):  # nor does it speak for the first while it is refused
            second.call("shelf", "append", "calls", 2)
        assert second.session.closed.wait(seconds(20))
        assert second.told("refused") == [["another node is connected under the name node: choose another with --name"]]
        assert not second.told("hold")
    assert first.call("shelf", "append", "calls", 1) == 1
    assert not first.session.closed.is_set()
    assert len([each for each in caplog.records if "another node is connected" in each.getMessage()]) == 1


def test_the_same_node_may_take_the_place_of_its_own_link(run: Run) -> None:
    first = run.node()
    first.held()
    assert first.call("shelf", "append", "calls", 1) == 1
    again = run.node()
    again.held()
    assert first.session.closed.wait(seconds(20))
    assert again.call("shelf", "append", "calls", 1) == 1  # asked again over another link, done once
    assert again.call("shelf", "append", "calls", 1, number=1) == 2


def test_a_node_whose_name_is_taken_says_so_once_and_comes_back_more_rarely(
    run: Run, stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "shoal")
    first = run.node(name="twin")
    first.held()
    node, stopped = Node(1, ("shoal", "tests")), threading.Event()
    thread = threading.Thread(target=join, args=(node, run.address, Terms("twin"), stopped))
    stack.callback(thread.join)
    stack.callback(node.close)
    stack.callback(stopped.set)
    thread.start()
    until(lambda: any("the head says: another node" in each.getMessage() for each in caplog.records), "nothing is said")
    begin = time.monotonic()
    until(lambda: time.monotonic() - begin > 2.0, "")
    lines = [each.getMessage() for each in caplog.records]
    assert len([each for each in lines if "the head says: another node" in each]) == 1
    assert len([each for each in lines if each.startswith("refused twin at ")]) == 1
    assert len([each for each in lines if each.startswith("joined ")]) == 1
    assert not first.session.closed.is_set()
    first.close()
    until(lambda: any(each.getMessage().startswith("holds worker") for each in caplog.records), "it is never let in")


ODD: dict[str, dict[str, Any]] = {
    "slots": {"slots": -1},
    "many slots": {"slots": 1 << 40},
    "no number": {"slots": float("nan")},
    "a truth": {"slots": True},
    "life": {"life": "x"},
    "another life": {"life": 5},
    "busy": {"busy": float("inf")},
}


@pytest.mark.parametrize("case", [*ODD])
def test_a_node_that_describes_itself_out_of_order_is_refused(run: Run, case: str) -> None:
    node = run.node(**ODD[case])
    assert node.session.closed.wait(seconds(20))
    assert "describes itself wrongly" in node.told("refused")[0][0]
    good = run.node()
    good.held()


def test_a_run_whose_last_node_has_left_waits_for_another(stack: ExitStack, tmp_path: Path) -> None:
    """Were it to count as a standstill, machines that are taken away for minutes would end the run."""
    run = Run(stack, tmp_path, away=0.05)
    node = run.node()
    node.held()
    node.session.tell("report", node.told("hold")[-1][0], {"worker": {"moves": 1}}, {}, [], {}, False)
    until(lambda: not run.cluster.starting(), "the worker is not known to be at work")
    node.close()
    until(run.cluster.starting, "nobody waits for a node")


# Asked twice, done once.


def test_an_older_call_is_never_done_again(run: Run) -> None:
    node = run.node()
    node.held()
    for number in (0, 1, 5):
        node.call("shelf", "append", "calls", number, number=number)
    assert node.call("shelf", "append", "calls", 5, number=5) == 3
    for number in (0, 1, 4, -1):
        with pytest.raises(ServiceFailed, match=f"call {number} of worker came after its call 5: it is not done again"):
            node.call("shelf", "append", "calls", number, number=number)
    assert run.shelf.get("calls") == [0, 1, 5]


def test_what_an_ended_life_asked_is_forgotten_and_not_done_again(run: Run) -> None:
    node = run.node()
    node.held()
    secret = node.told("hold")[-1][0]
    node.call("shelf", "append", "calls", "first")
    node.call("shelf", "append", "calls", "second", channel="worker-b")  # it was started again
    with pytest.raises(ServiceFailed, match="this life of worker is over"):
        node.call("shelf", "append", "calls", "first")
    assert len(run.cluster.launcher.answers) == 1
    node.session.call("report", secret, {"worker": {"moves": 1}}, {}, ["worker"], {}, False, seconds=seconds(20))
    with pytest.raises(ServiceFailed, match="this life of worker is over"):
        node.call("shelf", "append", "calls", "second", channel="worker-b")
    assert len(run.cluster.launcher.answers) == 0
    assert run.shelf.get("calls") == ["first", "second"]


def test_answers_are_kept_up_to_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(once, "KEPT", 10_000)
    answers, done = Once(), []

    def do(name: str) -> Any:
        done.append(name)
        return {"deep": [np.zeros(4096, np.uint8)]}

    for number in range(100):
        for name in "abcd":
            answers.ask(name, "life", number, lambda name=name: do(name))
            assert answers.size() <= 10_000
    assert answers.ask("d", "life", 99, lambda: do("d"))["deep"][0].size == 4096  # the newest are there
    with pytest.raises(Refused, match="the answer to call 99 of a is not kept any more"):
        answers.ask("a", "life", 99, lambda: do("a"))
    assert len(done) == 400
    answers.ask("a", "life", 100, lambda: do("a"))  # which loses nothing but that answer
    for name in "abcd":
        answers.forget(name)
    assert (len(answers), answers.size()) == (0, 0)
