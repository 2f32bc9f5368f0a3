"""All layers at once, over loopback: TLS by pin only, the handshake bound to it, and what an altered byte does."""

from __future__ import annotations

import socket
import ssl
import struct
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.core.errors import Refused, ServiceLost
from shoal.transport.session import Gate, Session, meet
from shoal.transport.trust import (
    Terms,
    Trust,
    check_pin,
    client_context,
    fingerprint,
    handshake,
    read_token,
    server_context,
    shown,
)
from tests.pace import seconds
from tests.transport.conftest import Cable

FACTS = {"wire": 1}


def shake(connection: Any, steps: Any) -> str:
    """Drive a handshake over a connection, the length before each message."""
    with connection.makefile("rwb") as file:
        message = next(steps)
        try:
            while True:
                if message is None:
                    message = steps.send(file.read(struct.unpack(">I", file.read(4))[0]))
                    continue
                file.write(struct.pack(">I", len(message)) + message)
                file.flush()
                message = next(steps)
        except StopIteration as end:
            return str(end.value)


def listen(listening: socket.socket, folder: Path, came: list[Any]) -> None:
    """Let one machine in and take what it sends, or keep the reason why not."""
    trust = Trust.inside(folder)
    connection, _ = listening.accept()
    connection.settimeout(20)
    try:
        with server_context(trust, require_certificate=False).wrap_socket(connection, server_side=True) as secure:
            came.append(
                shake(secure, handshake("listener", "head", read_token(folder), FACTS, fingerprint(trust.certificate)))
            )
            came.append(secure.recv(1000))
            secure.sendall(b"and back")
    except (OSError, Refused, struct.error) as error:
        came.append(error)
    finally:
        connection.close()


def join(port: int, pin: str, token: str, checked: bool = True) -> bytes:
    """Join with a pin and a token only, and send something."""
    context = client_context(pin=pin)
    with socket.create_connection(("127.0.0.1", port), 20) as plain, context.wrap_socket(plain) as secure:
        if checked:
            check_pin(shown(secure), pin)
        shake(secure, handshake("joiner", "node", token, FACTS, fingerprint(shown(secure))))
        secure.sendall(b"there")
        return secure.recv(1000)


def test_a_pin_and_a_token_are_enough(folders: Path) -> None:
    came: list[Any] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(20)
        thread = threading.Thread(target=listen, args=(listening, folders / "here", came))
        thread.start()
        try:
            pin, token = fingerprint(folders / "here" / "node.pem"), read_token(folders / "here")
            assert join(listening.getsockname()[1], pin, token) == b"and back"
        finally:
            thread.join()
    assert came == ["node", b"there"]


def relay(listening: socket.socket, folder: Path, port: int) -> None:
    """Stand in between with another certificate, and pass on everything, TLS taken off and put on again."""
    connection, _ = listening.accept()
    connection.settimeout(20)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    server = server_context(Trust.inside(folder), require_certificate=False)
    try:
        with (
            socket.create_connection(("127.0.0.1", port), 20) as plain,
            server.wrap_socket(connection, server_side=True) as joined,
            context.wrap_socket(plain) as head,
        ):
            while line := joined.recv(1000):  # each side speaks in turn
                head.sendall(line)
                if not (answer := head.recv(1000)):
                    break
                joined.sendall(answer)
    except OSError:
        pass  # one of both has ended it
    finally:
        connection.close()


@pytest.mark.parametrize("checked", [True, False])
def test_one_who_stands_in_between_is_found_out_by_the_pin_and_by_the_binding(folders: Path, checked: bool) -> None:
    came: list[Any] = []
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.create_server(("127.0.0.1", 0)) as between:
        for server in (listening, between):
            server.settimeout(20)
        threads = [
            threading.Thread(target=listen, args=(listening, folders / "here", came)),
            threading.Thread(target=relay, args=(between, folders / "stranger", listening.getsockname()[1])),
        ]
        for thread in threads:
            thread.start()
        pin, token = fingerprint(folders / "here" / "node.pem"), read_token(folders / "here")
        try:
            with pytest.raises((Refused, OSError, struct.error)) as caught:
                join(between.getsockname()[1], pin, token, checked)
        finally:
            for thread in threads:
                thread.join()
    if checked:
        assert "is not the pinned one" in str(caught.value)
    else:
        assert "somebody is intercepting the connection" in str(came[0])


class Alteration:
    """Alters one byte of what is sent next, or repeats or drops some."""

    change = ""

    def __call__(self, data: bytes) -> bytes:
        change, self.change = self.change, ""
        place = len(data) // 2
        if change == "altered":
            return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
        return {"repeated": 2 * data, "dropped": b"", "cut": data[:place]}.get(change, data)


@pytest.mark.parametrize("link", ["websocket", "grpc"])
@pytest.mark.parametrize("change", ["altered", "repeated", "dropped", "cut"])
def test_under_tls_no_byte_can_be_changed(folders: Path, link: str, change: str) -> None:
    taken: list[Any] = []
    ends: list[Session] = []
    joined = threading.Event()

    def answer(session: Session, kind: str, args: list[Any]) -> int:
        taken.append(args[0].tobytes())
        return len(taken)

    def stay(name: str, session: Session) -> None:
        ends.append(session)
        joined.set()
        session.closed.wait()
        session.join()

    terms = Terms("node", str(folders / "here"), link=link)
    gate = Gate("127.0.0.1:0", terms, lambda _: answer, stay, lambda *_: None, certificates=True)
    alteration = Alteration()
    tap = Cable(gate.address, alteration)
    try:
        _, session = meet(tap.address, Terms("head", str(folders / "there"), link=link, role="head"), lambda *_: None)
        sent = np.arange(1000)
        assert session.call("take", sent, seconds=seconds(20)) == 1
        assert joined.wait(seconds(20))  # the other side may answer before it has taken this one in
        session.silence = ends[0].silence = seconds(2)  # what was dropped may be noticed by silence only
        alteration.change = change
        with pytest.raises(ServiceLost):
            call_on(session, sent)
        assert ends[0].closed.wait(seconds(20))
        session.join()
        assert {*taken} == {sent.tobytes()}  # nothing else was ever taken for a message
    finally:
        tap.close()
        gate.close()


def call_on(session: Session, sent: Any) -> None:
    """Call again and again."""
    for _ in range(50):
        session.call("take", sent, seconds=seconds(20))
