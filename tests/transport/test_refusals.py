"""What a live node refuses, what both sides are told, and that whoever was there before goes on undisturbed."""

from __future__ import annotations

import itertools
import shutil
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.core import wire
from shoal.core.errors import Refused, ServiceLost, SettingsError, ShoalError
from shoal.engines import make
from shoal.engines.node import Node, listen
from shoal.engines.options import Machines, Network, Options
from shoal.transport import LIMIT, certificates, session, trust, websocket
from shoal.transport.certificates import expiry
from shoal.transport.session import FACTS, Gate, meet
from shoal.transport.trust import HELLO, MAGIC, Terms, fingerprint, handshake, read_token, split
from tests.pace import seconds
from tests.transport.conftest import Standing

OPEN = Terms("node"), Terms("head")  # plain text on loopback
Stand = Callable[..., Standing]
LOST = "its log says why"  # where the alert came while the request was still being written


@pytest.fixture
def terms(folders: Path) -> tuple[Terms, Terms]:
    """How a node and a head of one authority meet."""
    return Terms("node", str(folders / "here")), Terms("head", str(folders / "there"), role="head")


@pytest.fixture
def pins(folders: Path) -> dict[str, str]:
    """The fingerprint of each folder's certificate."""
    return {name: fingerprint(folders / name / "node.pem") for name in ("here", "there")}


# Who is let in.

STRANGERS = {
    "wrong token": ("there", "", "x" * 32, "the token is not the same", "the token is not the same"),
    "wrong authority": ("stranger", "", "", "not issued by the authority in ca.pem", "not issued by its authority"),
    "certificate of another authority": ("stranger", "here", "", "refused this machine's certificate", "not issued by"),
    "no certificate": ("", "here", "token", "requires a certificate of its authority", "sent no certificate"),
    "wrong pin": ("there", "there", "", "is not the pinned one", ""),
    "plain text": ("", "", "token", "TLS is on at this machine", "does not speak TLS"),
}


@pytest.mark.parametrize("case", [*STRANGERS])
def test_strangers_are_refused_and_both_sides_say_why(
    stand: Stand, terms: Any, folders: Path, pins: dict[str, str], case: str
) -> None:
    folder, pin, token, told, logged = STRANGERS[case]
    token = read_token(folders / "here") if token == "token" else token
    stranger = Terms("stranger", str(folders / folder) if folder else "", pins.get(pin, ""), token, role="head")
    standing = stand(*terms)
    with pytest.raises((Refused, ServiceLost)) as caught:
        standing.meet(stranger)
    standing.works()
    assert told in str(caught.value) or ("certificate" in case and LOST in str(caught.value))
    assert str(caught.value).startswith(standing.address)
    assert "\n" not in str(caught.value)
    if logged:
        assert standing.said(logged).startswith("refused 127.0.0.1:")
        assert len(standing.refusals()) == 1
    standing.meet(terms[1]).close()
    standing.works()


def test_a_head_without_a_token_does_not_even_knock(stand: Stand, terms: Any, folders: Path, tmp_path: Path) -> None:
    shutil.copytree(folders / "there", tmp_path / "blank")
    (tmp_path / "blank" / "token").write_text("\n")
    standing = stand(*terms)
    with pytest.raises(SettingsError, match="the token has 0 characters"):
        standing.meet(Terms("head", str(tmp_path / "blank"), role="head"))
    with pytest.raises(SettingsError, match="the token has 0 characters"):  # nor does a node open its gate
        listen(standing.node, "127.0.0.1:0", Terms("node", str(tmp_path / "blank")))
    assert standing.refusals() == []
    standing.works()


@pytest.mark.parametrize("token", ["", "anyone on this machine"])
def test_the_right_authority_without_the_token_is_refused(
    stand: Stand, terms: Any, folders: Path, monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    standing = stand(*terms)
    link = websocket.dial(standing.address, Terms("head", str(folders / "there"), role="head"))
    monkeypatch.setattr(trust, "TOKEN_LENGTH", 0)
    with pytest.raises(Refused, match="the other side says: the token is not the same on both sides"):
        session._greet(link, handshake("joiner", "head", token, FACTS, link.binding))
    link.close()
    assert "the token is not the same on both sides" in standing.said("refused 127.0.0.1:")
    standing.works()


def test_a_node_whose_certificate_has_expired_is_refused_with_the_day(
    stand: Stand, terms: Any, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certificates, "check_dates", lambda certificate: None)  # it expired while the node was running
    pinned = Terms("head", str(folders / "there"), fingerprint(folders / "expired" / "node.pem"), role="head")
    standing = stand(Terms("node", str(folders / "expired")), pinned)
    with pytest.raises(Refused) as caught:
        standing.meet(terms[1])
    assert f"expired on {expiry(folders / 'expired' / 'node.pem'):%Y-%m-%d %H:%M} UTC" in str(caught.value)
    assert standing.said("refused this machine's certificate: it has expired")
    standing.works()
    assert len(standing.refusals()) == 1


def test_a_head_whose_certificate_has_expired_is_refused(
    stand: Stand, terms: Any, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    standing = stand(*terms)
    with pytest.raises(ShoalError, match=r"expired on \d{4}-"):  # its own check says so
        standing.meet(Terms("head", str(folders / "expired"), role="head"))
    monkeypatch.setattr(certificates, "check_dates", lambda certificate: None)
    with pytest.raises((Refused, ServiceLost), match=f"refused this machine's certificate: it has expired|{LOST}"):
        standing.meet(Terms("head", str(folders / "expired"), role="head"))
    assert standing.said("the other side's certificate has expired")
    standing.works()


def test_tls_to_a_node_of_plain_text_is_refused_at_once(stand: Stand, terms: Any) -> None:
    standing = stand(*OPEN)
    with pytest.raises(Refused, match="does not speak TLS"):
        standing.meet(terms[1])
    assert standing.said("the other side speaks TLS").startswith("refused 127.0.0.1:")
    standing.works()


@pytest.mark.parametrize("address", ["192.0.2.7:7700", "0.0.0.0:0", "[2001:db8::1]:7700", "node1.example.org:7700"])
def test_plain_text_off_loopback_has_to_be_asked_for(address: str) -> None:
    with pytest.raises(SettingsError, match="nothing would be encrypted"):
        meet(address, Terms("head"), lambda *_: None)
    with pytest.raises(SettingsError, match="nothing would be encrypted"):
        make("cluster", Options(machines=Machines(nodes=(address,))))
    for alone in (Terms("node"), Terms("node", pin="00" * 32)):  # a pin is for those who join
        with pytest.raises(SettingsError, match="nothing would be encrypted"):
            Gate(address, alone, lambda _: lambda *_: None, lambda *_: None, lambda *_: None, certificates=True)
    Terms("head", insecure=True).check(address)


def test_plain_text_off_loopback_that_is_asked_for_works() -> None:
    node = Node(1, ("shoal",))
    gate = listen(node, "0.0.0.0:0", Terms("node", insecure=True))
    network = Network(insecure=True)
    cluster = make(
        "cluster", Options(machines=Machines(nodes=(f"127.0.0.1:{gate.address.rpartition(':')[2]}",), network=network))
    )
    try:
        with cluster.launcher._news:
            assert cluster.launcher._news.wait_for(lambda: cluster.launcher.stations, 20)
    finally:
        for one in (cluster, gate, node):
            one.close()


# Before they have shown who they are.


def knock(address: str) -> Any:
    """Open a websocket and nothing more."""
    return websocket.dial(address, OPEN[1])


def put(link: Any, data: str | bytes) -> None:
    """Send a message that is text or binary."""
    if isinstance(data, bytes):
        link.send(data)
    else:
        link.send_frame(websocket.TEXT, data.encode())


def last_of(link: Any) -> None:
    """Read until the other side has ended it."""
    while True:
        link.receive(20.0)


HELLO_THERE = HELLO.pack(MAGIC, 1, b"j", bytes(32)) + b"head"
BAD = {
    "garbage": (b"\x00\xff\xfe garbage", "it does not begin as Shoal's does"),
    "long": (b"[" * 60_000, "it does not begin as Shoal's does"),
    "JSON": (b'{"kind": "hello"}', "it does not begin as Shoal's does"),
    "empty": (b"", "it does not begin as Shoal's does"),
    "cut": (HELLO_THERE[:-5], "it does not begin as Shoal's does"),
    "nameless": (HELLO_THERE[:-4], "a role or a name that is not valid"),
    "escape": (HELLO_THERE + b"\x1b[31m", "a role or a name that is not valid"),
    "role": (HELLO.pack(MAGIC, 1, b"x", bytes(32)) + b"head", "a role or a name that is not valid"),
    "protocol": (HELLO.pack(MAGIC, 99, b"j", bytes(32)) + b"head", "protocol: here 1, there 99"),
    "oversized": (bytes((64 << 10) + 1), "65536"),
    "text": ("text", "text came where frames are binary"),
}


@pytest.mark.parametrize("case", [*BAD])
def test_a_bad_first_message_ends_the_connection_and_nothing_else(stand: Stand, case: str) -> None:
    frame, reason = BAD[case]
    standing, link = stand(*OPEN), None
    try:
        link = knock(standing.address)
        put(link, frame)
        line = standing.said("refused 127.0.0.1:")
        with pytest.raises(ServiceLost):
            last_of(link)
    finally:
        if link is not None:
            link.close()
    assert reason in line
    standing.works()


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("start", [b"", b"\x16\x03\x01", b"GET / HTTP/1.1\r\n"])
def test_who_says_nothing_is_dropped_in_time(
    stand: Stand, terms: Any, monkeypatch: pytest.MonkeyPatch, secure: bool, start: bytes
) -> None:
    monkeypatch.setattr(websocket, "OPENING", 0.2)
    standing = stand(*(terms if secure else OPEN))
    host, port = split(standing.address)
    with socket.create_connection((host, port), 20) as connection:
        connection.sendall(start)
        while connection.recv(1000):
            pass
    assert len(standing.said("refused 127.0.0.1:").splitlines()) == 1
    standing.works()


def test_who_opens_a_websocket_and_says_no_more_is_dropped_in_time(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    standing = stand(*OPEN)
    monkeypatch.setattr(session, "GREETING", 0.2)
    link = knock(standing.address)
    with pytest.raises(ServiceLost):
        link.receive(20.0)
    link.close()
    assert "nothing came in time" in standing.said("refused 127.0.0.1:")
    standing.works()


def test_many_who_say_nothing_keep_nobody_out(stand: Stand, terms: Any) -> None:
    standing = stand(*terms)
    place = split(standing.address)
    connections = [socket.create_connection(place, 20) for _ in range(200)]
    try:
        another = standing.meet(terms[1])
        assert another.call("describe", seconds=seconds(20))["slots"] == 2
        another.close()
        another.join()
        standing.works()
    finally:
        for connection in connections:
            connection.close()
    standing.works()
    assert standing.refusals() == []  # whoever goes away without a word is no news


def test_what_is_no_websocket_is_refused(stand: Stand) -> None:
    standing = stand(*OPEN)
    with socket.create_connection(split(standing.address), 20) as connection:
        connection.sendall(b"POST /\x1b[31m HTTP/1.1\r\n\r\n")
        while connection.recv(1000):
            pass
    assert "no websocket" in (line := standing.said("refused 127.0.0.1:"))
    assert line.isprintable()
    standing.works()


# After they have.


def tampered(standing: Standing, tamper: Callable[[Any, bytes], None]) -> str:
    """Meet a node, send a frame as `tamper` does, and return why the session ended."""
    other = standing.meet(OPEN[1])
    assert other.call("describe", seconds=seconds(20))["slots"] == 2
    tamper(other.link, message("call", 0, "describe", []))
    assert other.closed.wait(20)
    other.join()
    return other.lost


def announced(link: Any, frame: bytes) -> None:
    """The beginning of a frame that would be larger than any may be."""
    link.write(struct.pack(">BBQ", 0x82, 0xFF, LIMIT + 100) + bytes(4) + frame)


TAMPERED: dict[str, Callable[[Any, bytes], None]] = {
    "altered": lambda link, frame: link.send(bytes([frame[0] ^ 1]) + frame[1:]),
    "cut": lambda link, frame: link.send(frame[:-1]),
    "stub": lambda link, frame: link.send(frame[:5]),
    "empty": lambda link, frame: link.send(b""),
    "garbage": lambda link, frame: link.send(bytes(range(256))),
    "text": lambda link, frame: put(link, "text"),
    "announced": announced,
    "no mask": lambda link, frame: link.write(bytes([0x82, len(frame)]) + frame),
    "reserved bits": lambda link, frame: link.write(bytes([0xC2, 0x80, 0, 0, 0, 0])),
    "unknown kind": lambda link, frame: link.write(bytes([0x83, 0x80, 0, 0, 0, 0])),
    "continued nothing": lambda link, frame: link.write(bytes([0x80, 0x80, 0, 0, 0, 0])),
    "begun twice": lambda link, frame: link.write(2 * bytes([0x02, 0x80, 0, 0, 0, 0])),
    "long ping": lambda link, frame: link.write(bytes([0x89, 0xFE, 0, 126, 0, 0, 0, 0]) + bytes(126)),
    "no websocket": lambda link, frame: link.write(b"\xff" * 100),
}


@pytest.mark.parametrize("case", [*TAMPERED])
def test_a_frame_that_is_not_in_order_ends_its_session_only(stand: Stand, case: str) -> None:
    standing = stand(*OPEN)
    assert tampered(standing, TAMPERED[case])
    standing.works()


def masked(frame: bytes) -> bytes:
    key = b"\x01\x80\xff\x00"
    return key + bytes(byte ^ key[place % 4] for place, byte in enumerate(frame))


def test_frames_as_other_libraries_send_them_are_taken(stand: Stand) -> None:
    """With a mask, in parts, and with a ping between them."""
    standing = stand(*OPEN)
    other = standing.meet(OPEN[1])
    frame = message("call", 0, "describe", [])
    other.link.write(bytes([0x02, 0x80 | 11]), masked(frame[:11]))
    other.link.write(bytes([0x89, 0x84]), masked(b"ping"))
    other.link.write(bytes([0x00, 0x80]), masked(b""))
    other.link.write(bytes([0x80, 0x80 | len(frame[11:])]), masked(frame[11:]))
    assert other.call("describe", seconds=seconds(20))["slots"] == 2
    other.close()
    other.join()
    standing.works()


class Link:
    """A link whose frames come from an iterator."""

    resumable = True

    def __init__(self, frames: Any) -> None:
        self.frames, self.closed, self.sent = iter(frames), threading.Event(), []

    def receive(self, seconds: float | None = None) -> bytes:
        for frame in self.frames:
            return bytes(frame)
        self.closed.wait()
        raise ServiceLost("the link was closed")

    def send(self, *buffers: bytes) -> None:
        self.sent.append(b"".join(buffers))

    def close(self) -> None:
        self.closed.set()


def message(*parts: Any) -> bytes:
    return b"".join(wire.encode([*parts]))  # type: ignore[arg-type]


def ended(frames: Any, answer: Callable[..., Any]) -> session.Session:
    """A session after its frames have ended it."""
    made = session.Session(Link(frames), answer)
    assert made.closed.wait(20)
    return made


def test_too_many_frames_a_second_end_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "RATE", 1.0)
    monkeypatch.setattr(session, "BURST", 100.0)
    asked = itertools.count()
    made = ended(itertools.repeat(message("tell", -1, "beat", [])), lambda *_: next(asked))
    made.join()
    assert made.lost == "more than 1 frames per second"
    assert next(asked) <= 101


def test_too_many_calls_at_once_end_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "WAITING", 16)
    free = threading.Event()
    made = ended([message("call", number, "hang", []) for number in range(100)], lambda *_: free.wait(20))
    assert made.lost == "more than 16 calls at once"
    free.set()
    made.join()


def test_whatever_an_answer_raises_is_told_and_ends_no_thread() -> None:
    raised = [SystemExit(1), RecursionError(), ValueError("\ud800"), Refused("no"), MemoryError()]

    def answer(_: Any, kind: str, args: Any) -> Any:
        if kind == "raise":
            raise raised[args[0]]
        return object() if kind == "odd" else "good"

    frames = [message("call", number, "raise", [number % len(raised)]) for number in range(40)]
    made = session.Session(Link([*frames, message("call", 40, "odd", []), message("call", 41, "good", [])]), answer)
    limit = time.monotonic() + 20
    while len(made.link.sent) < 42 and time.monotonic() < limit:
        assert not made.closed.wait(0.01)
    answers = sorted(wire.decode(frame)[1:] for frame in made.link.sent)
    assert [went_well for _, went_well, _ in answers] == [False] * 41 + [True]
    assert "cannot send a object" in answers[40][2]
    made.close()
    made.join()
