"""How two machines meet: the link is opened, trust is established on it, and a session begins."""

from __future__ import annotations

import json
import logging
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from shoal import transport as links
from shoal.core.errors import DeadlineExceeded, Refused, ServiceLost, ShoalError
from shoal.core.wire import VERSION, Buffer
from shoal.transport import tls
from shoal.transport.certificates import fingerprint
from shoal.transport.guard import Unguarded
from shoal.transport.handshake import Handshake, refusal
from shoal.transport.session import Session
from shoal.transport.strangers import Refusals
from shoal.transport.terms import Terms

log = logging.getLogger("shoal")
BACK_OFF = (0.25, 10.0)  # seconds before a link is tried again: at first, and at most
GREETING = 20.0  # seconds for the handshake
LIMIT = 1 << 30  # bytes of the largest frame after it
try:
    INSTALLED = version("shoal")
except PackageNotFoundError:  # it runs from its source
    INSTALLED = "not installed"
FACTS: dict[str, str | int] = {"wire": VERSION, "shoal": INSTALLED}
Answer = Callable[[Session, str, list[Any]], Any]


def meet(address: str, terms: Terms, answer: Answer) -> tuple[str, Session]:
    """Connect to a machine that listens; return its name and the session."""
    terms.check(address)
    token = terms.secret()
    wire = links.find(terms.link).dial(address, terms)
    try:
        return _greet(wire, Handshake("joiner", terms.name, token, FACTS, wire.binding), answer)
    except (ShoalError, ssl.SSLError) as error:
        wire.close()
        told = tls.explain(error) if isinstance(error, ssl.SSLError) else str(error)
        raise (ServiceLost if isinstance(error, DeadlineExceeded) else Refused)(f"{address}: {told}") from error


def keep_meeting(
    address: str, terms: Terms, answer: Answer, stay: Callable[[str, Session], None], stopped: threading.Event
) -> None:
    """Connect, stay while the link lasts, and connect again, more and more rarely while that comes to nothing."""
    wait, told = BACK_OFF[0], ""
    while not stopped.is_set():
        try:
            stay(*meet(address, terms, answer))
        except ShoalError as error:  # nobody answers, or this machine is not wanted
            if str(error) != told:
                log.warning("%s; trying again", error)
            told = str(error)
            stopped.wait(wait)
            wait = min(2 * wait, BACK_OFF[1])
        else:
            wait, told = BACK_OFF[0], ""
            stopped.wait(wait)


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
        replace(terms, pin="").check(address)  # a pin is of the other's certificate, and encrypts nothing here
        trust = None if terms.insecure else terms.certificates()
        self.terms, self.binding = terms, fingerprint(trust.certificate) if trust else ""
        terms.secret()  # one that is missing or too short is told at once; it is read again for each who comes
        self._answer, self._welcome = answer, welcome
        self._refused = Refusals(refused)
        self.listener = links.find(terms.link).Listener(address, terms, certificates, self._take, self._refused)
        self.address = self.listener.address

    def _take(self, link: Any) -> None:
        peer = link.peer
        try:
            shake = Handshake("listener", self.terms.name, self.terms.secret(), FACTS, self.binding)
            name, session = _greet(link, shake, self._answer)
        except ShoalError as error:
            self._refused(peer, str(error))
            link.refuse(str(error))
            return
        self._welcome(name, session)

    def close(self) -> None:
        """Take no more connections."""
        self.listener.close()
        self._refused.flush()


def _greet(link: Any, shake: Handshake, answer: Any) -> tuple[str, Session]:
    """Carry the handshake over the link; what follows is guarded by what it agreed on."""
    limit = time.monotonic() + GREETING
    try:
        if (first := shake.begin()) is not None:
            link.send(json.dumps(first).encode())
        while not shake.done:
            reply = shake.receive(_read(link.receive(max(limit - time.monotonic(), 0.001))))
            if reply is not None:
                link.send(json.dumps(reply).encode())
        agreed = shake.session(LIMIT)
    except Refused as error:
        with suppress(ServiceLost):
            link.send(json.dumps(refusal(error)).encode())
        raise
    link.trust()
    guard = agreed.guard if link.guarded else Unguarded()
    return agreed.name, Session(link, guard, answer(agreed.name) if shake.role == "listener" else answer)


def _read(frame: Buffer) -> Any:
    try:
        return json.loads(bytes(frame))
    except (ValueError, RecursionError):
        raise Refused("malformed handshake: a message is no JSON") from None
