"""How two machines meet: the link is opened, trust is established on it, and a session begins."""

from __future__ import annotations

import ipaddress
import json
import logging
import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shoal.core.errors import DeadlineExceeded, Refused, ServiceLost, SettingsError, ShoalError
from shoal.core.wire import VERSION, Buffer
from shoal.engines.links import tls, websocket
from shoal.engines.links.certificates import Trust, fingerprint, read_token
from shoal.engines.links.handshake import TOKEN_LENGTH, Handshake, refusal
from shoal.engines.links.session import Session

log = logging.getLogger("shoal")
BACK_OFF = (0.25, 10.0)  # seconds before a link is tried again: at first, and at most
GREETING = 10.0  # seconds for each message of the handshake
LIMIT = 1 << 30  # bytes of the largest frame after it
FACTS = {"wire": VERSION}
# On loopback without a trust folder anyone on the machine may connect, so there is no secret to keep.
OPEN = "anyone on this machine"

Answer = Callable[[Session, str, list[Any]], Any]


@dataclass(frozen=True)
class Terms:
    """On what terms this machine meets others."""

    name: str
    trust: str = ""  # folder of certificates and token; empty: none
    pin: str = ""  # fingerprint that the other's certificate must have, instead of the authority's word
    token: str = ""  # where there is no folder
    insecure: bool = False  # plain text off loopback


def check_terms(terms: Terms, address: str) -> None:
    """Refuse plain text off loopback unless it is asked for in so many words."""
    if not (terms.trust or terms.pin or terms.insecure or is_loopback(websocket.split(address)[0])):
        raise SettingsError(
            f"{address} is not on this machine, and nothing would be encrypted: make certificates with "
            "`shoal node --init` and name their folder, or say --insecure (network.insecure=true) if you mean it"
        )


def is_loopback(host: str) -> bool:
    """Whether a host is this machine itself."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def meet(address: str, terms: Terms, answer: Answer) -> tuple[str, Session]:
    """Connect to a machine that listens; return its name and the session."""
    check_terms(terms, address)
    secure = bool((terms.trust or terms.pin) and not terms.insecure)
    context = tls.client_context(_trust(terms), terms.pin or None) if secure else None
    token = _token(terms)
    try:
        link = websocket.dial(address, context)
    except ssl.SSLError as error:
        raise Refused(f"{address}: {tls.explain(error, _certificate(address, terms, error))}") from error
    try:
        if terms.pin and secure:
            tls.check_pin(link.connection, terms.pin)
        return _greet(link, Handshake("joiner", terms.name, token, FACTS, link.binding), answer)
    except (ShoalError, ssl.SSLError) as error:
        link.close()
        told = tls.explain(error) if isinstance(error, ssl.SSLError) else str(error)
        raise (ServiceLost if isinstance(error, DeadlineExceeded) else Refused)(f"{address}: {told}") from error


def keep_meeting(
    address: str, terms: Terms, answer: Answer, stay: Callable[[str, Session], None], stopped: threading.Event
) -> None:
    """Connect, stay while the link lasts, and connect again, more and more rarely while nobody answers."""
    wait, told = BACK_OFF[0], ""
    while not stopped.is_set():
        try:
            name, session = meet(address, terms, answer)
        except ShoalError as error:
            if str(error) != told:
                log.warning("%s; trying again", error)
            told = str(error)
            stopped.wait(wait)
            wait = min(2 * wait, BACK_OFF[1])
        else:
            wait, told = BACK_OFF[0], ""
            stay(name, session)


class Gate:
    """Listens, and hands over those who prove themselves; the others are refused and forgotten."""

    def __init__(
        self,
        address: str,
        terms: Terms,
        answer: Callable[[str], Answer],
        welcome: Callable[[str, Session], None],
        refused: Callable[[str, str], None],
        certificates: bool,
    ) -> None:
        """Begin to listen; `welcome` keeps a connection's thread until its session ends.

        Without `certificates`, those who join need none of the authority: they pin ours and prove the token.
        """
        check_terms(replace(terms, pin=""), address)  # a pin is of the other's certificate, and encrypts nothing here
        trust = None if terms.insecure else _trust(terms)
        context = tls.server_context(trust, certificates) if trust else None
        self.terms, self.binding = terms, fingerprint(trust.certificate) if trust else ""
        self._token = _token(terms)
        self._answer, self._welcome, self._refused = answer, welcome, refused
        self.listener = websocket.Listener(address, context, self._take, refused)
        self.address = self.listener.address

    def _take(self, link: websocket.Wire) -> None:
        peer = link.peer
        try:
            shake = Handshake("listener", self.terms.name, self._token, FACTS, self.binding)
            name, session = _greet(link, shake, self._answer)
        except ShoalError as error:
            self._refused(peer, str(error))
            link.refuse(str(error))
            return
        self._welcome(name, session)

    def close(self) -> None:
        """Take no more connections."""
        self.listener.close()


def _greet(link: websocket.Wire, shake: Handshake, answer: Any) -> tuple[str, Session]:
    """Carry the handshake over the link; what follows is guarded by what it agreed on."""
    try:
        if (first := shake.begin()) is not None:
            link.send(json.dumps(first).encode())
        while not shake.done:
            reply = shake.receive(_read(link.receive(GREETING)))
            if reply is not None:
                link.send(json.dumps(reply).encode())
        agreed = shake.session(LIMIT)
    except Refused as error:
        with suppress(ServiceLost):
            link.send(json.dumps(refusal(error)).encode())
        raise
    link.trust()
    return agreed.name, Session(link, agreed.guard, answer(agreed.name) if shake.role == "listener" else answer)


def _read(frame: Buffer) -> Any:
    try:
        return json.loads(bytes(frame))
    except (ValueError, RecursionError):
        raise Refused("malformed handshake: a message is no JSON") from None


def _trust(terms: Terms) -> Trust | None:
    return Trust.inside(Path(terms.trust)) if terms.trust else None


def _token(terms: Terms) -> str:
    token = terms.token or (read_token(Path(terms.trust)) if terms.trust else OPEN)
    if len(token) < TOKEN_LENGTH:
        raise SettingsError(f"the token has {len(token)} characters, and needs {TOKEN_LENGTH} or more")
    return token


def _certificate(address: str, terms: Terms, error: ssl.SSLError) -> str | None:
    """The certificate of a machine that has let it expire, asked for once more, since OpenSSL keeps it to itself."""
    if getattr(error, "verify_code", 0) != tls.EXPIRED:
        return None
    unasked = tls.client_context(_trust(terms), pin="00" * 32)  # whatever it shows: nothing is sent
    with (
        suppress(OSError),
        socket.create_connection(websocket.split(address), websocket.OPENING) as plain,
        unasked.wrap_socket(plain) as secure,
    ):
        return ssl.DER_cert_to_PEM_cert(secure.getpeercert(binary_form=True) or b"")
    return None
