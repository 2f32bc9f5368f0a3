"""All layers at once, over loopback: TLS by pin only, the handshake bound to it, and guarded frames."""

from __future__ import annotations

import json
import socket
import ssl
import threading
from pathlib import Path
from typing import Any

import pytest

from shoal.core.errors import Refused
from shoal.transport.certificates import Trust, fingerprint, read_token
from shoal.transport.handshake import Handshake, Session
from shoal.transport.tls import check_pin, client_context, peer_fingerprint, server_context


def shake(connection: Any, handshake: Handshake) -> Session:
    """Drive a handshake over a connection, a line of JSON per message."""
    with connection.makefile("rwb") as file:
        message = handshake.begin()
        while True:
            if message is not None:
                file.write(json.dumps(message).encode() + b"\n")
                file.flush()
            if handshake.done:
                return handshake.session()
            message = handshake.receive(json.loads(file.readline()))


def listen(listening: socket.socket, folder: Path, came: list[Any]) -> None:
    """Let one machine in and echo a frame, or keep the reason why not."""
    trust = Trust.inside(folder)
    connection, _ = listening.accept()
    connection.settimeout(20)
    try:
        with server_context(trust, require_certificate=False).wrap_socket(connection, server_side=True) as secure:
            facts = {"wire": 1}
            handshake = Handshake("listener", "head", read_token(folder), facts, fingerprint(trust.certificate))
            session = shake(secure, handshake)
            came.append(bytes(session.guard.open(secure.recv(1000))))
            secure.sendall(session.guard.seal(b"and back"))
    except (OSError, Refused, ValueError) as error:
        came.append(error)
    finally:
        connection.close()


def join(port: int, pin: str, token: str, checked: bool = True) -> bytes:
    """Join with a pin and a token only, and send a frame."""
    context = client_context(pin=pin)
    with socket.create_connection(("127.0.0.1", port), 20) as plain, context.wrap_socket(plain) as secure:
        if checked:
            check_pin(secure, pin)
        session = shake(secure, Handshake("joiner", "node", token, {"wire": 1}, peer_fingerprint(secure)))
        secure.sendall(session.guard.seal(b"there"))
        return bytes(session.guard.open(secure.recv(1000)))


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
    assert came == [b"there"]


def relay(listening: socket.socket, folder: Path, port: int) -> None:
    """Stand in between with another certificate, and pass on every line, TLS taken off and put on again."""
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
            joined.makefile("rwb") as left,
            head.makefile("rwb") as right,
        ):
            source, target = left, right
            while line := source.readline():
                target.write(line)
                target.flush()
                source, target = target, source
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
            with pytest.raises((Refused, OSError, ValueError)) as caught:
                join(between.getsockname()[1], pin, token, checked)
        finally:
            for thread in threads:
                thread.join()
    if checked:
        assert "is not the pinned one" in str(caught.value)
    else:
        assert "a third is listening in between" in str(came[0])
