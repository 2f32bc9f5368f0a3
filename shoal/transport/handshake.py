"""How two machines prove to each other that they know the same token, without ever sending it.

    joiner → listener   hello   protocol, role, name, nonce
    listener → joiner   hello
    joiner → listener   proof
    listener → joiner   facts, with a proof over them
    joiner → listener   facts, with a proof over them

All proofs and the keys of the session are HMAC-SHA256 under one secret, itself an HMAC of both hellos and the channel's
binding under the token. Nonces make it new each time, so nothing recorded is worth anything later; roles stand in every
proof, so none can be sent back; the binding ties it to one TLS certificate, so none can be passed on by a third. Facts
are sent only to those who have proved the token: a stranger learns nothing but a name.
"""

from __future__ import annotations

import hmac
import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from shoal.core.errors import Refused, SettingsError
from shoal.transport.guard import LIMIT, Guard

Message: TypeAlias = dict[str, Any]
Facts: TypeAlias = Mapping[str, str | int]
Role: TypeAlias = Literal["joiner", "listener"]

PROTOCOL: Final = 1
MESSAGE_LIMIT: Final = 8 << 10  # bytes of JSON that no message of a handshake passes
TOKEN_LENGTH: Final = 16  # shorter ones could be found by trying
NAME_LENGTH, REASON_LENGTH = 64, 256
FACTS, FACT_LENGTH = 16, 128
INTEGERS: Final = range(-(1 << 63), 1 << 63)
HEX: Final = re.compile(r"[0-9a-f]{64}")
KEY: Final = re.compile(r"[A-Za-z][A-Za-z0-9_ -]{0,31}")
FIELDS: Final = {
    "hello": {"kind", "protocol", "role", "name", "nonce"},
    "proof": {"kind", "proof"},
    "facts": {"kind", "facts", "proof"},
}


@dataclass(frozen=True)
class Session:
    """What a handshake comes to: the other machine's name, and the guard over what follows."""

    name: str
    guard: Guard


class Handshake:
    """One side of one handshake; it takes and returns messages, which any transport may carry.

    Send what `begin` returns, then answer every message with what `receive` returns, where that is not None, until
    `done`; then ask for the `session`. What raises `Refused` ends it; the other side is told by `refusal`.
    """

    def __init__(self, role: Role, name: str, token: str, facts: Facts, binding: str = "") -> None:
        """Take this side's part; `binding` is the fingerprint of the listener's TLS certificate, empty without TLS."""
        if len(token) < TOKEN_LENGTH:
            raise SettingsError(f"the token has {len(token)} characters, and needs {TOKEN_LENGTH} or more")
        if not _is_text(name, NAME_LENGTH):
            raise SettingsError(f"{name!r} is no name of a machine: give 1 to {NAME_LENGTH} ASCII characters")
        try:
            self._facts = _read_facts(dict(facts))
        except Refused as error:
            raise SettingsError(str(error)) from None
        self.role, self.other = role, "listener" if role == "joiner" else "joiner"
        self.done = False
        self._hello = {
            "kind": "hello",
            "protocol": PROTOCOL,
            "role": role,
            "name": name,
            "nonce": secrets.token_hex(32),
        }
        self._token, self._binding = token.encode(), binding
        self._due: str | None = "hello"
        self._secret = b""
        self._name = ""
        self._theirs: Facts = {}

    def begin(self) -> Message | None:
        """The first message of the side that joins; the one that listens has none."""
        return dict(self._hello) if self.role == "joiner" else None

    def receive(self, message: object) -> Message | None:
        """Take the other side's next message, and return the answer to it if there is one."""
        due, self._due = self._due, None  # a failure ends the handshake
        if due is None:
            raise Refused("the handshake is over")
        fields = _read(message, due)
        if due == "hello":
            return self._take_hello(fields)
        claimed = bytes.fromhex(fields["proof"])
        expected = self._derive(f"{due} {self.other}", fields.get("facts"))
        if not hmac.compare_digest(claimed, expected):
            raise Refused("the token is not the same on both sides, or a third is listening in between")
        if due == "proof":
            self._due = "facts"
            return self._tell_facts()
        self._theirs, self.done = fields["facts"], True
        return self._tell_facts() if self.role == "joiner" else None

    def session(self, limit: int = LIMIT) -> Session:
        """The session, if the facts of both sides are the same; payloads of its frames have at most `limit` bytes."""
        if not self.done:
            raise Refused("the handshake is not done")
        if self._facts != self._theirs:
            raise Refused(_differences(self._facts, self._theirs))
        return Session(
            self._name, Guard(self._derive(f"frames {self.role}"), self._derive(f"frames {self.other}"), limit)
        )

    def _take_hello(self, theirs: Message) -> Message:
        if theirs["role"] != self.other:
            raise Refused(f"both sides are {self.role}s: one has to listen, the other to join")
        self._name = theirs["name"]
        hellos = [self._hello, theirs] if self.role == "joiner" else [theirs, self._hello]
        self._secret = hmac.digest(self._token, b"shoal handshake\0" + _canonical([*hellos, self._binding]), "sha256")
        if self.role == "listener":
            self._due = "proof"
            return dict(self._hello)
        self._due = "facts"
        return {"kind": "proof", "proof": self._derive("proof joiner").hex()}

    def _tell_facts(self) -> Message:
        proof = self._derive(f"facts {self.role}", self._facts)
        return {"kind": "facts", "facts": dict(self._facts), "proof": proof.hex()}

    def _derive(self, label: str, facts: Facts | None = None) -> bytes:
        """A proof or a key for one purpose, the same on both sides."""
        return hmac.digest(self._secret, _canonical([label, facts]), "sha256")


def refusal(error: Refused) -> Message:
    """The message that tells the other side why it was refused."""
    reason = str(error).replace("…", "...")[:REASON_LENGTH].encode("ascii", "replace").decode()
    return {"kind": "refused", "reason": reason if _is_text(reason, REASON_LENGTH) else "no reason"}


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _is_text(value: object, length: int) -> bool:
    """Whether a value is text that may be shown on a terminal."""
    return type(value) is str and 0 < len(value) <= length and value.isascii() and value.isprintable()


def _is_integer(value: object) -> bool:
    return type(value) is int and value in INTEGERS  # larger ones cannot even be printed


def _read(message: object, due: str) -> Message:
    """A message of the kind that is due, every field of it checked; nothing in it is believed yet."""
    if type(message) is not dict:
        raise Refused("malformed handshake: a message is no mapping")
    kind = message.get("kind")
    if type(kind) is str and kind == "refused":
        reason = message.get("reason")
        raise Refused(f"the other side says: {reason if _is_text(reason, REASON_LENGTH) else 'refused'}")
    if type(kind) is not str or kind != due:
        raise Refused(f"malformed handshake: {due} was due")
    if due == "hello":  # before its fields, which another protocol may have others of
        protocol = message.get("protocol")
        if not _is_integer(protocol):
            raise Refused("malformed handshake: protocol is no number")
        if protocol != PROTOCOL:
            raise Refused(f"protocol: here {PROTOCOL}, there {protocol}: use the same version of Shoal on both sides")
    if set(message) != FIELDS[due]:
        raise Refused(f"malformed handshake: {due} has other fields than {', '.join(sorted(FIELDS[due]))}")
    for name in {"nonce", "proof"} & FIELDS[due]:
        if type(message[name]) is not str or not HEX.fullmatch(message[name]):
            raise Refused(f"malformed handshake: {name} is not 32 bytes in hexadecimal digits")
    if due == "hello":
        if not _is_text(message["name"], NAME_LENGTH):
            raise Refused(f"malformed handshake: name is not 1 to {NAME_LENGTH} ASCII characters")
        if type(message["role"]) is not str or message["role"] not in ("joiner", "listener"):
            raise Refused("malformed handshake: role is neither joiner nor listener")
    if due == "facts":
        _read_facts(message["facts"])
    return message


def _read_facts(facts: object) -> Facts:
    if type(facts) is not dict or len(facts) > FACTS:
        raise Refused(f"malformed facts: no mapping of at most {FACTS}")
    for name, value in facts.items():
        if type(name) is not str or not KEY.fullmatch(name):
            raise Refused("malformed facts: a name is not a letter and up to 31 letters, digits, spaces, _ or -")
        if not _is_integer(value) and not _is_text(value, FACT_LENGTH):
            raise Refused(f"malformed facts: {name} is no number and not 1 to {FACT_LENGTH} ASCII characters")
    return facts


def _differences(here: Facts, there: Facts) -> str:
    """Which facts differ, with both values."""
    parts = []
    for name in sorted({*here, *there}):
        ours, theirs = (str(facts.get(name, "nothing")) for facts in (here, there))
        if here.get(name) == there.get(name):
            continue
        short = [value if len(value) <= 16 else f"{value[:12]}…" for value in (ours, theirs)]
        ours, theirs = short if short[0] != short[1] else (ours, theirs)
        parts.append(f"{name}: here {ours}, there {theirs}")
    return "; ".join(parts)
