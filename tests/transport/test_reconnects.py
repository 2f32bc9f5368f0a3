"""A link that breaks again and again, and strangers without number: nothing piles up on any side."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any

import psutil
import pytest

from shoal.engines import make
from shoal.engines.node import Node, listen
from shoal.engines.options import Machines, Network, Options
from shoal.transport import strangers
from shoal.transport.trust import Terms, split
from tests.engines import programs
from tests.pace import seconds
from tests.transport.conftest import Cable, Standing

SLACK = 10  # descriptors and threads more than before that are no leak: as many as calls at a time


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    """Close what was made, whatever happens."""
    with ExitStack() as stack:
        yield stack


def until(what: Callable[[], bool], told: str) -> None:
    """Wait for something to be so."""
    limit = time.monotonic() + seconds(30)
    while not what():
        assert time.monotonic() < limit, told
        threading.Event().wait(0.01)


def counts(*pids: int) -> list[int]:
    """Descriptors and threads of this process, and of others."""
    processes = [psutil.Process(), *(psutil.Process(pid) for pid in pids)]
    return [count for process in processes for count in (process.num_fds(), process.num_threads())]


@pytest.mark.parametrize("link", ["websocket", pytest.param("grpc", marks=pytest.mark.long)])
@pytest.mark.parametrize("times", [8, pytest.param(300, marks=pytest.mark.long)])
def test_reconnecting_leaves_nothing_behind(closing: ExitStack, link: str, times: int) -> None:
    node = Node(4, ("shoal", "tests"))
    closing.callback(node.close)
    gate = listen(node, "127.0.0.1:0", Terms("node", link=link))
    closing.callback(gate.close)
    cable = Cable(gate.address)
    closing.callback(cable.close)
    names = [f"counter-{number}" for number in range(4)]
    machines = Machines(nodes=(cable.address,), network=Network(link=link), remote=frozenset(names))
    engine = make(
        "cluster", Options(homes={"shelf": "keeper"}, machines=machines, deadline=seconds(30), stall=seconds(60))
    )
    closing.callback(engine.close)
    shelf = engine.serve("shelf", programs.Shelf)
    engine.run("keeper", programs.idle)
    for name in names:
        engine.run(name, programs.count_up, shelf, name)
    engine.run("end", programs.until, shelf, "end", True)
    ended = threading.Event()

    def wait() -> None:
        engine.wait("end")
        ended.set()

    waiting = threading.Thread(target=wait)
    waiting.start()
    try:
        before: list[int] = []
        for number in range(times + 5):
            seen = [shelf.get(name) or 0 for name in names]
            cable.cut()
            until(
                lambda seen=seen: all((shelf.get(name) or 0) > was + 10 for name, was in zip(names, seen, strict=True)),
                f"nothing moves after cut {number}",
            )
            if number == 4:
                before = counts(shelf.pid())
        after: list[int] = []

        def flat() -> bool:
            after[:] = counts(shelf.pid())
            return all(now <= was + SLACK for now, was in zip(after, before, strict=True))

        until(flat, "more and more")
    except AssertionError as error:
        raise AssertionError(f"{error}: {before} became {after}") from None
    finally:
        shelf.put("end", True)
        waiting.join()
    assert ended.is_set()


STRANGERS: list[Callable[[socket.socket], Any]] = [
    lambda connection: None,  # says nothing
    lambda connection: connection.sendall(b"\x16\x03\x01\x00"),
    lambda connection: connection.sendall(os.urandom(500)),
    lambda connection: connection.sendall(b"GET / HTTP/1.1\r\n"),
    lambda connection: connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)),
]


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.long)])
def test_strangers_take_up_no_more_than_their_places(
    stand: Callable[..., Standing], monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    places = min(strangers.PLACES, count // 6)
    monkeypatch.setattr(strangers, "PLACES", places)
    standing = stand(Terms("node"), Terms("head"))
    begin, before, most = time.monotonic(), counts(), 0
    connections: list[socket.socket] = []
    try:
        for number in range(count):
            connections.append(socket.create_connection(split(standing.address), 20))
            with suppress(OSError):
                STRANGERS[number % len(STRANGERS)](connections[-1])
            if number % 10 == 9:
                standing.works()
                most = max(most, counts()[1])
            if len(connections) > 3 * places:
                connections.pop(0).close()
        assert most <= before[1] + places + 6  # one for what is told of those who were refused; others are ending
        other = standing.meet(Terms("head"))  # who knows the token is let in all the same
        assert other.call("describe", seconds=seconds(20))["slots"] == 2
        other.close()
        other.join()
    finally:
        for connection in connections:
            connection.close()
    until(lambda: all(now <= was + 2 for now, was in zip(counts(), before, strict=True)), f"not {before} any more")
    standing.works()
    windows = 1 + (time.monotonic() - begin) // strangers.WINDOW
    assert 1 <= len(standing.refusals()) <= windows * (strangers.IN_FULL + 1)
