"""Those who are not known: how many there may be, what is said of them, and what outlasts them."""

from __future__ import annotations

import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from shoal.core.errors import Refused, ServiceLost, ShoalError
from shoal.engines import make
from shoal.engines.options import Machines, Network, Options
from shoal.transport import find, grpc, session, strangers, websocket
from shoal.transport.session import FACTS, Session
from shoal.transport.trust import OPEN, Terms, Trust, client_context, handshake, split
from tests.pace import seconds
from tests.transport.conftest import Standing

Stand = Callable[..., Standing]
LINKS = pytest.mark.parametrize("link", ["websocket", "grpc"])


@LINKS
@pytest.mark.parametrize("name", ["connection", "answers", "grpc"])
def test_a_thread_that_cannot_be_started_deafens_nobody(
    stand: Stand, monkeypatch: pytest.MonkeyPatch, link: str, name: str
) -> None:
    # Nobody answers where there is no thread for it; less than the silence after which the standing link would end.
    monkeypatch.setattr(session, "GREETING", min(seconds(1), 8.0))
    terms = Terms("node", link=link), Terms("head", link=link)
    standing = stand(*terms)
    start, failed = threading.Thread.start, threading.Event()

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith(name) and not failed.is_set():
            failed.set()
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with suppress(ShoalError):
        standing.meet(terms[1]).close()
    assert failed.is_set() == (name != "grpc" or link == "grpc")
    failed.set()
    other = standing.meet(terms[1])
    assert other.call("describe", seconds=seconds(20))["slots"] == 2
    other.close()
    other.join()
    standing.works()


@LINKS
def test_strangers_who_stay_make_way_for_those_who_come(
    stand: Stand, monkeypatch: pytest.MonkeyPatch, link: str
) -> None:
    monkeypatch.setattr(strangers, "PLACES", 4)
    terms = Terms("node", link=link), Terms("head", link=link)
    standing, wires = stand(*terms), []
    try:
        for _ in range(12):  # who know how to knock, and then say nothing
            with suppress(ShoalError):
                wires.append(find(link).dial(standing.address, terms[1]))
        # One is known, and one who has given up his place may be about to end.
        assert sum(thread.name == "connection" for thread in threading.enumerate()) <= 6
        other = let_in(standing, terms[1])
        assert other.call("describe", seconds=seconds(20))["slots"] == 2
        other.close()
        other.join()
    finally:
        for wire in wires:
            wire.close()
    standing.works()


def let_in(standing: Standing, terms: Terms) -> Session:
    """Meet a node, again where strangers who had knocked before are still coming in."""
    limit = time.monotonic() + seconds(20)
    while True:
        try:
            return standing.meet(terms)
        except ShoalError:
            if time.monotonic() > limit:
                raise


def test_the_one_who_comes_most_often_makes_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strangers, "PLACES", 3)
    room, gone = strangers.Lobby(), []
    places: dict[str, Any] = {}

    def enter(name: str, host: str) -> None:
        places[name] = room.enter(host, lambda: (gone.append(name), places[name].leave()))

    for name, host in [("first", "a"), ("second", "b"), ("third", "b"), ("fourth", "b"), ("fifth", "b")]:
        enter(name, host)
    assert gone == ["second", "third"]
    assert places["third"].displaced
    assert not places["first"].displaced


def test_who_does_not_go_keeps_his_place_and_the_next_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strangers, "PLACES", 1)
    monkeypatch.setattr(strangers, "LEAVING", 0.01)
    room = strangers.Lobby()
    place = room.enter("a", lambda: None)
    assert room.enter("b", lambda: None) is None
    assert place is not None
    place.leave()
    place.leave()
    assert room.enter("b", lambda: None) is not None


def test_refusals_are_told_in_full_at_first_and_then_counted(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    window = min(seconds(3), 15)  # a link that is idle for longer than `limits.silence` is closed
    monkeypatch.setattr(strangers, "WINDOW", window)
    standing = stand(Terms("node"), Terms("head"))
    for _ in range(strangers.IN_FULL + 25):
        with socket.create_connection(split(standing.address), 20) as connection:
            connection.sendall(b"\x16nothing")
            while connection.recv(1000):
                pass
    line = standing.said(" more in the last ")
    assert line.startswith(f"refused 25 more in the last {window:g} s: the last one 127.0.0.1:")
    assert line.endswith("the other side speaks TLS")
    assert len(standing.refusals()) == strangers.IN_FULL + 1
    standing.works()


@pytest.mark.parametrize("certificates", [False, True])
def test_grpc_takes_tls_1_3_only(folders: Path, certificates: bool) -> None:
    terms = Terms("node", str(folders / "here"), link="grpc")
    listener = grpc.listen("127.0.0.1:0", terms, certificates, lambda wire: None, lambda *_: None)
    trust = Trust.inside(folders / "there")
    found = {}
    try:
        for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
            context = client_context(trust)
            context.minimum_version = context.maximum_version = version
            with (
                socket.create_connection(split(listener.address), 20) as plain,
                suppress(OSError),
                context.wrap_socket(plain, server_hostname="localhost") as secure,
            ):
                found[version] = secure.version()
    finally:
        listener.close()
    assert found == {ssl.TLSVersion.TLSv1_3: "TLSv1.3"}


EARLY = """
import sys
import grpc  # before anybody could say which ciphers
from shoal.core.errors import ShoalError
from shoal.transport.grpc import listen
from shoal.transport.trust import Terms
try:
    listen("127.0.0.1:0", Terms("node", sys.argv[1], link="grpc"), True, print, print)
except ShoalError as error:
    print(error)
"""


def test_grpc_that_would_take_tls_1_2_all_the_same_is_not_listened_with(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GRPC_SSL_CIPHER_SUITES")
    words = [sys.executable, "-c", EARLY, str(folders / "here")]
    root = Path(__file__).parents[3]
    told = subprocess.run(words, capture_output=True, text=True, timeout=seconds(60), cwd=root, check=True).stdout
    assert told.startswith("gRPC would accept TLS 1.2 here")
    assert "choose the link websocket" in told


def test_another_version_of_shoal_is_refused_and_both_are_named(stand: Stand) -> None:
    standing = stand(Terms("node"), Terms("head"))
    link = websocket.dial(standing.address, Terms("head"))
    here = FACTS["shoal"]
    with pytest.raises((Refused, ServiceLost), match=rf"shoal: here 99\.0, there {here}"):
        session._greet(link, handshake("joiner", "head", OPEN, {**FACTS, "shoal": "99.0"}, link.binding))
    link.close()
    assert f"shoal: here {here}, there 99.0" in standing.said("refused 127.0.0.1:")
    standing.works()


def test_plain_text_is_warned_of_on_both_sides(command: Any, caplog: pytest.LogCaptureFixture) -> None:
    cluster = make("cluster", Options(machines=Machines(network=Network(insecure=True, listen="127.0.0.1:0"))))
    cluster.close()
    warned = [record.getMessage() for record in caplog.records if "insecure" in record.getMessage()]
    assert len(warned) == 1
    assert "nothing is encrypted" in warned[0]
    node = command("node", "--listen", "127.0.0.1:0", "--insecure", "--slots", 1)
    said = ""
    while "listens at" not in said:
        said += (line := node.stderr.readline())
        assert line, said
    node.terminate()
    assert said.count("insecure: nothing is encrypted") == 1
    assert "anyone who reaches the port can take part" in said
