"""Trust folders, made once: two of one authority, one of another, and one that has expired; and live nodes."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest

from shoal.engines.node import Node, listen
from shoal.transport.certificates import initialise, issue
from shoal.transport.session import ANSWERING, Session, meet
from shoal.transport.trust import Terms, split
from tests.pace import seconds


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds `here` and `there` of one authority, `stranger` of another, and `expired`, of `here` as well."""
    root = tmp_path_factory.mktemp("trust")
    initialise(root / "here", ["node1.example.org", "10.0.0.1"])
    issue(root / "here", root / "there", ["node2"], roles=("head",))
    initialise(root / "stranger", ["node1.example.org"])
    past = datetime.now(UTC) - timedelta(days=3)
    issue(root / "here", root / "expired", ["node1.example.org"], days=1, begin=past, roles=("head", "node"))
    return root


def answering() -> int:
    """Threads of sessions in this process that answer calls."""
    return sum(thread.name == "answers" for thread in threading.enumerate())


@dataclass
class Standing:
    """A live node, a head's session with it that must go on whatever happens, and what the node has logged."""

    node: Node
    address: str
    session: Session
    caplog: pytest.LogCaptureFixture

    def works(self) -> None:
        """Make calls on the session that was there before."""
        assert not self.session.closed.is_set(), self.session.lost
        about = self.session.call("describe", seconds=seconds(20))
        assert about == {"slots": 2, "life": self.node.life, "busy": 0.0, "clock": ANY}

    def said(self, text: str) -> str:
        """Wait until the node has logged a line with a text, and return the line."""
        limit = time.monotonic() + seconds(20)
        while time.monotonic() < limit:
            for record in [*self.caplog.records]:
                if text in record.getMessage():
                    return str(record.getMessage())
            threading.Event().wait(0.01)
        raise AssertionError(f"{text!r} is not in {[record.getMessage() for record in self.caplog.records]}")

    def refusals(self) -> list[str]:
        """The lines about those who were refused."""
        return [line for record in [*self.caplog.records] if (line := record.getMessage()).startswith("refused ")]

    def meet(self, terms: Terms) -> Session:
        """Come as another head."""
        return meet(self.address, terms, lambda *_: None)[1]


@pytest.fixture
def stand(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[..., Standing]]:
    """Make nodes, each with a good session, that are closed whatever happens."""
    caplog.set_level("INFO", "shoal")
    with ExitStack() as stack:

        def stand(
            node: Terms, head: Terms, packages: tuple[str, ...] = ("shoal", "tests"), modules: tuple[str, ...] = ()
        ) -> Standing:
            before = answering()
            made = Node(2, packages, modules)
            stack.callback(made.close)
            gate = listen(made, "127.0.0.1:0", node)
            stack.callback(gate.close)
            _, session = meet(gate.address, head, lambda *_: None)
            stack.callback(session.join)
            stack.callback(session.close)
            standing = Standing(made, gate.address, session, caplog)
            standing.works()
            limit = time.monotonic() + seconds(20)
            while answering() < before + 2 * ANSWERING:  # the other side may still be starting its own
                assert time.monotonic() < limit
                threading.Event().wait(0.005)
            return standing

        yield stand


def carry(source: Any, target: Any, alter: Callable[[bytes], bytes] = bytes) -> None:
    """Pass on what comes from one side to the other."""
    with suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(alter(data))
    with suppress(OSError):
        target.shutdown(socket.SHUT_RDWR)


class Cable:
    """Stands between two machines, and can be cut; who connects again gets a new one.

    What the one who connects sends passes through `alter`.
    """

    def __init__(self, target: str, alter: Callable[[bytes], bytes] = bytes) -> None:
        self.target, self.alter = split(target), alter
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listening.getsockname()[1]}"
        self.ends: list[socket.socket] = []
        self.threads = [threading.Thread(target=self._accept)]
        self.threads[0].start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                ends = [self.listening.accept()[0], socket.create_connection(self.target)]
                self.threads = [thread for thread in self.threads if thread.is_alive()]
                for args in ((*ends, self.alter), (*ends[::-1], bytes)):
                    self.threads.append(threading.Thread(target=carry, args=args))
                    self.threads[-1].start()
                self.ends += ends

    def cut(self) -> None:
        """End what is connected."""
        ends, self.ends = self.ends, []
        for end in ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def close(self) -> None:
        """Let nobody through any more."""
        with suppress(OSError):
            self.listening.shutdown(socket.SHUT_RDWR)
        self.listening.close()
        self.cut()
        for thread in self.threads:
            thread.join()
