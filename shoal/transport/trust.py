"""How machines come to trust each other: the terms on which they meet, TLS between them, and the proof of a token.

Both sides prove, without sending it, that they know the token of the trust folder:

    joiner → listener   hello: protocol, role, nonce, name
    listener → joiner   hello
    joiner → listener   proof
    listener → joiner   proof and facts
    joiner → listener   proof and facts

A proof is an HMAC-SHA256 under a secret derived from the token, both hellos and the listener's TLS certificate. Nonces
make each one new, so a recording is worthless; it names the role of its sender, so it cannot be sent back; it is bound
to the certificate, so nobody in between can pass it on. Facts, which have to be the same on both sides, are sent only
to those who have proved the token: a stranger learns no more than a name.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import logging
import re
import secrets
import socket
import ssl
import struct
from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

from shoal.core.errors import Refused, SettingsError, ShoalError

log = logging.getLogger("shoal")
Facts: TypeAlias = dict[str, str | int]
Role: TypeAlias = Literal["joiner", "listener"]

MISSING: Final = "machines over the network need packages that are not installed: pip install 'shoal[cluster]'"
FOLDER: Final = Path("~/.shoal/trust")
REVOKED: Final = "revoked"
CERTIFICATE: Final = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
TOKEN_LENGTH: Final = 16  # shorter ones could be guessed
OPEN: Final = "anyone on this machine"  # the token on loopback without a trust folder: there is no secret
OPENING: Final = 10.0  # seconds in which a connection has to be established


# Addresses and text of others.


def split(address: str) -> tuple[str, int]:
    """Host and port of `host:port` or `[v6]:port`."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ShoalError(f"{address!r} is not an address: write HOST:PORT, such as 192.0.2.7:7700")
    return host.strip("[]"), int(port)


def joined(host: str, port: int) -> str:
    """The address of a host and a port."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether a host is this machine itself."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def line(text: str) -> str:
    """Text from another machine as one short line that is safe to print."""
    return "".join(letter if letter.isascii() and letter.isprintable() else " " for letter in text[:200]).strip()


# The trust folder.


@dataclass(frozen=True)
class Trust:
    """The files of the authority's certificate and of this machine's own certificate and key."""

    ca: Path
    certificate: Path
    key: Path

    @classmethod
    def inside(cls, folder: Path = FOLDER) -> Trust:
        """The three files of a trust folder."""
        return cls(*(present(folder.expanduser(), name) for name in ("ca.pem", "node.pem", "node.key")))

    def revoked(self) -> set[str]:
        """Fingerprints of the certificates that are no longer accepted."""
        return read_revoked(self.ca.parent)


def present(folder: Path, name: str) -> Path:
    """A file that a trust folder must have."""
    if not folder.is_dir():
        raise SettingsError(
            f"there is no trust folder {folder}: create one with `shoal node --init`, or copy the one issued for this "
            "machine there"
        )
    if not (folder / name).is_file():
        raise SettingsError(f"{folder} has no {name}: it is not a trust folder as created by `shoal node --init`")
    return folder / name


def read_token(folder: Path = FOLDER) -> str:
    """The secret that the machines of a run share."""
    try:
        return present(folder.expanduser(), "token").read_text("ascii").strip()
    except ValueError as error:
        raise ShoalError(f"the token in {folder} is not text: {error}") from error


def read_revoked(folder: Path) -> set[str]:
    """The fingerprints that a trust folder lists as revoked, one per line; a # starts a comment."""
    try:
        lines = (folder / REVOKED).read_text().splitlines()
        marks = [mark for each in lines if (mark := each.partition("#")[0].strip())]
        return {parse_fingerprint(mark).hex(":").upper() for mark in marks}
    except FileNotFoundError:
        return set()
    except (OSError, ValueError, SettingsError) as error:  # accept nobody rather than one who was revoked
        raise ShoalError(f"cannot read {folder / REVOKED}: {error}") from None


def fingerprint(certificate: Path | bytes) -> str:
    """SHA-256 of a certificate, a file or bytes in PEM or DER, as `AB:CD:…`; of a chain, that of the first."""
    data = certificate.read_bytes() if isinstance(certificate, Path) else certificate
    if found := CERTIFICATE.search(data.decode("ascii", "replace")):
        data = ssl.PEM_cert_to_DER_cert(found[0])
    return hashlib.sha256(data).digest().hex(":").upper()


def parse_fingerprint(text: str) -> bytes:
    """The 32 bytes of a fingerprint, written with or without colons."""
    digits = text.strip().replace(":", "")
    if not re.fullmatch(r"[0-9a-fA-F]{64}", digits):
        raise SettingsError(f"{text!r} is not a fingerprint: give 64 hexadecimal digits, with or without colons")
    return bytes.fromhex(digits)


def check_token(token: str) -> str:
    """Refuse a token that could be guessed."""
    if len(token) < TOKEN_LENGTH:
        raise SettingsError(f"the token has {len(token)} characters, but needs at least {TOKEN_LENGTH}")
    return token


@dataclass(frozen=True)
class Terms:
    """On what terms this machine meets others."""

    name: str
    trust: str = ""  # folder of certificates and token; empty: none
    pin: str = ""  # fingerprint that the other's certificate must have, instead of the authority's signature
    token: str = ""  # where there is no folder
    insecure: bool = False  # plain text off loopback
    link: str = "websocket"
    rank: int = 0  # of this machine among `world`, for links that number machines
    world: int = 0
    role: Literal["head", "node"] = "node"  # of this machine; the other one must have the other role

    def __post_init__(self) -> None:
        """Refuse settings that contradict each other."""
        if self.insecure and self.pin:
            raise SettingsError("--insecure turns TLS off, so there is no certificate to pin: leave out one of the two")

    def warn(self) -> None:
        """Log what is not protected because the user asked for it."""
        if self.insecure:
            others = "" if self.token or self.trust else "; without a token, anyone who reaches the port can take part"
            log.warning(
                "insecure: nothing is encrypted, and anyone on the network path can read and change it%s", others
            )

    @property
    def secure(self) -> bool:
        """Whether this machine, when it connects, uses TLS."""
        return bool((self.trust or self.pin) and not self.insecure)

    @property
    def other(self) -> str:
        """The role that the other side must have."""
        return "node" if self.role == "head" else "head"

    def certificates(self) -> Trust | None:
        """The files of the trust folder, if TLS is on and there is one."""
        return Trust.inside(Path(self.trust)) if self.trust and not self.insecure else None

    def secret(self) -> str:
        """The token that both sides must know."""
        return check_token(self.token or (read_token(Path(self.trust)) if self.trust else OPEN))

    def check(self, address: str) -> None:
        """Refuse plain text off loopback unless it was asked for explicitly."""
        if not (self.trust or self.pin or self.insecure or is_loopback(split(address)[0])):
            raise SettingsError(
                f"{address} is not on this machine, and nothing would be encrypted: create certificates with "
                "`shoal node --init` and name their folder, or say --insecure (network.insecure=true) if you mean it"
            )


# TLS.

# Numbers of OpenSSL's X509_verify_cert_error_string.
NOT_YET_VALID, EXPIRED, HOST_MISMATCH, ADDRESS_MISMATCH = 9, 10, 62, 64
WRONG_AUTHORITY: Final = (2, 7, 18, 19, 20, 21, 30)
REJECTED: Final = "the other side refused this machine's certificate"
ALERTS: Final = {
    "CERTIFICATE_REQUIRED": "the other side requires a certificate of its authority, and this one sent none",
    "ALERT_UNKNOWN_CA": f"{REJECTED}: it was not issued by its authority",
    "ALERT_DECRYPT_ERROR": f"{REJECTED}: it was not issued by its authority",
    "ALERT_CERTIFICATE_EXPIRED": f"{REJECTED}: it has expired",
    "ALERT_BAD_CERTIFICATE": REJECTED,
    "ALERT_CERTIFICATE_UNKNOWN": REJECTED,
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "the other side sent no certificate, and one of this authority is required",
    "PROTOCOL_VERSION": "the other side does not speak TLS 1.3",
    "UNSUPPORTED_PROTOCOL": "the other side does not speak TLS 1.3",
    "WRONG_VERSION_NUMBER": "the other side does not speak TLS: is it the right port, and is TLS on there?",
    "HTTP_REQUEST": "the other side does not speak TLS: is TLS on there?",
    "KEY_VALUES_MISMATCH": "the private key does not belong to the certificate",
    "UNEXPECTED_EOF": "the other side ended the connection during the TLS handshake",
}


def server_context(trust: Trust, require_certificate: bool = True) -> ssl.SSLContext:
    """TLS for the side that listens; without `require_certificate`, a joiner may show none and prove only the token."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # nobody resumes a session
    _load_own(context, trust)
    _load_authority(context, trust)
    context.verify_mode = ssl.CERT_REQUIRED if require_certificate else ssl.CERT_OPTIONAL
    return context


def client_context(trust: Trust | None = None, pin: str | None = None) -> ssl.SSLContext:
    """TLS for the side that joins: the authority vouches for the other's host name, or else `check_pin` must follow.

    With a pin the authority is not asked, and the certificate of `trust`, if given, is only shown.
    """
    if trust is None and pin is None:
        raise SettingsError("nothing to verify the other side by: give a trust folder or the fingerprint to pin")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if trust is not None:
        _load_own(context, trust)
    if pin is not None:
        parse_fingerprint(pin)  # a typing error is found before anything is sent
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    elif trust is not None:
        _load_authority(context, trust)
    return context


def _load_own(context: ssl.SSLContext, trust: Trust) -> None:
    """Load the certificate that this machine shows."""
    from shoal.transport import certificates

    try:
        certificates.check_dates(trust.certificate)
        context.load_cert_chain(trust.certificate, trust.key, password="")  # or it would ask on the terminal
    except ssl.SSLError as error:
        raise ShoalError(f"cannot use {trust.certificate} with {trust.key}: {explain(error)}") from error
    except OSError as error:
        raise ShoalError(f"cannot read {error.filename or trust.key}: {error.strerror}") from error


def _load_authority(context: ssl.SSLContext, trust: Trust) -> None:
    """Trust what the authority signed, and nobody else."""
    try:
        context.load_verify_locations(trust.ca)
    except ssl.SSLError as error:
        raise ShoalError(f"{trust.ca} is not a certificate of an authority: {explain(error)}") from error
    except OSError as error:
        raise ShoalError(f"cannot read {trust.ca}: {error.strerror}") from error


def shown(connection: ssl.SSLSocket | ssl.SSLObject) -> bytes:
    """The certificate, in DER, that the other side of a TLS connection showed."""
    if not (certificate := connection.getpeercert(binary_form=True)):
        raise Refused("the other side showed no certificate")
    return certificate


def check_pin(certificate: bytes, pin: str) -> None:
    """Refuse any certificate but the pinned one; call it before anything is sent."""
    found = fingerprint(certificate)
    if not hmac.compare_digest(parse_fingerprint(found), parse_fingerprint(pin)):
        raise Refused(f"the other side's certificate is not the pinned one: its fingerprint is {found}")


def connect(address: str, terms: Terms, protocols: tuple[str, ...] = ()) -> ssl.SSLSocket:
    """Connect by TLS to a machine that proves itself by its certificate, or by being the pinned one."""
    from shoal.transport.certificates import check_peer

    trust, (host, port) = terms.certificates(), split(address)
    context = client_context(trust, terms.pin or None)
    if protocols:
        context.set_alpn_protocols([*protocols])
    plain = socket.create_connection((host, port), OPENING)
    try:
        secure = context.wrap_socket(plain, server_hostname=host)
    except ssl.SSLError as error:
        raise Refused(f"{address}: {explain(error, _expired(address, trust, error))}") from error
    finally:
        plain.close()  # it is empty once it was wrapped
    try:
        if terms.pin:
            check_pin(shown(secure), terms.pin)
        elif trust is not None:
            check_peer(shown(secure), trust, terms.other)
    except ShoalError as error:
        secure.close()
        raise Refused(f"{address}: {error}") from None
    return secure


def _expired(address: str, trust: Trust | None, error: ssl.SSLError) -> bytes:
    """An expired certificate of another machine, fetched once more because OpenSSL keeps it to itself."""
    if getattr(error, "verify_code", 0) != EXPIRED:
        return b""
    unchecked = client_context(trust, pin="00" * 32)  # nothing is sent, so it does not matter who answers
    with (
        suppress(OSError, Refused),
        socket.create_connection(split(address), OPENING) as plain,
        unchecked.wrap_socket(plain) as secure,
    ):
        return shown(secure)
    return b""


def explain(error: BaseException, certificate: bytes = b"") -> str:
    """One line on what went wrong with TLS; the other's certificate, if known, tells when it expired."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the other side's certificate {_flaw(error, certificate)}"
    if isinstance(error, ssl.SSLError):
        for mark, words in ALERTS.items():
            if mark in (error.reason or ""):
                return words
        if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
            return ALERTS["UNEXPECTED_EOF"]
    return " ".join(str(error).split()) or type(error).__name__


def _flaw(error: ssl.SSLCertVerificationError, certificate: bytes) -> str:
    """What is wrong with a certificate."""
    if error.verify_code == EXPIRED:
        when = ""
        with suppress(ShoalError):  # it came from a stranger and may be anything
            from shoal.transport.certificates import expiry

            when = f" on {expiry(certificate):%Y-%m-%d %H:%M} UTC"
        return f"has expired{when}: issue another, `shoal node --init --for DIR`"
    if error.verify_code == NOT_YET_VALID:
        return "is not valid yet: are both clocks right?"
    if error.verify_code in (HOST_MISMATCH, ADDRESS_MISMATCH):
        return f"is not for this name: {line(error.verify_message)}"
    if error.verify_code in WRONG_AUTHORITY:
        return "was not issued by the authority in ca.pem: both need the same one"
    return f"was refused: {line(error.verify_message)}"


# The proof of the token.

MAGIC, PROTOCOL = b"shoal", 1
HELLO: Final = struct.Struct(">5sHc32s")  # magic, protocol, first letter of the role, nonce; the name follows
REFUSED: Final = b"refused: "
NAME_LENGTH: Final = 64
DIGEST: Final = 32


def handshake(
    role: Role, name: str, token: str, facts: Facts, binding: str = ""
) -> Generator[bytes | None, bytes, str]:
    """One side of a handshake: yields each message to send, or None to be given one, and returns the other's name.

    `binding` is the fingerprint of the listener's TLS certificate, empty without TLS.
    """
    if not _is_name(name):
        raise SettingsError(f"{name!r} is not a name for a machine: give 1 to {NAME_LENGTH} ASCII characters")
    other = "listener" if role == "joiner" else "joiner"
    ours = HELLO.pack(MAGIC, PROTOCOL, role[0].encode(), secrets.token_bytes(32)) + name.encode()
    content = json.dumps(facts, sort_keys=True).encode()
    if role == "joiner":
        yield ours
    theirs = yield None
    their_name = _read_hello(theirs, role)
    parts = (ours, theirs, binding.encode()) if role == "joiner" else (theirs, ours, binding.encode())
    key = b"shoal handshake" + b"".join(hashlib.sha256(part).digest() for part in parts)
    secret = hmac.digest(check_token(token).encode(), key, "sha256")

    def prove(content: bytes, sender: str = role) -> bytes:
        return hmac.digest(secret, f"{sender}:".encode() + content, "sha256") + content

    def check(message: bytes) -> bytes:
        _check_refusal(message)
        if not hmac.compare_digest(message, prove(message[DIGEST:], other)):
            raise Refused("the token is not the same on both sides, or somebody is intercepting the connection")
        return message[DIGEST:]

    if role == "joiner":
        yield prove(b"")
        found = check((yield None))
        yield prove(content)
    else:
        yield ours
        if check((yield None)):
            raise Refused("malformed handshake: facts came before they were due")
        yield prove(content)
        found = check((yield None))
    if found != content:
        raise Refused(_differences(facts, found))
    return their_name


def refusal(reason: str) -> bytes:
    """The message that says why the other side was refused."""
    return REFUSED + line(reason.replace("…", "...")).encode()


def _check_refusal(message: bytes) -> None:
    if message.startswith(REFUSED):
        raise Refused(f"the other side says: {line(message.removeprefix(REFUSED).decode('ascii', 'replace'))}")


def _is_name(name: str) -> bool:
    return 0 < len(name) <= NAME_LENGTH and name == line(name)


def _read_hello(message: bytes, role: Role) -> str:
    """The name in the other side's hello; nothing in it is believed yet."""
    _check_refusal(message)
    if len(message) < HELLO.size or not message.startswith(MAGIC):
        raise Refused("malformed handshake: it does not begin as Shoal's does")
    _, protocol, letter, _ = HELLO.unpack_from(message)
    if protocol != PROTOCOL:
        raise Refused(f"protocol: here {PROTOCOL}, there {protocol}: use the same version of Shoal on both sides")
    if letter == role[0].encode():
        raise Refused(f"both sides are {role}s: one has to listen, the other to join")
    name = message[HELLO.size :].decode("ascii", "replace")
    if letter not in (b"j", b"l") or not _is_name(name):
        raise Refused("malformed handshake: a role or a name that is not valid")
    return name


def _differences(here: Facts, received: bytes) -> str:
    """Which facts differ, with both values."""
    try:
        there = {str(name): line(str(value)) for name, value in json.loads(received).items()}
    except (ValueError, AttributeError, RecursionError):
        return "malformed handshake: the other side's facts cannot be read"
    parts = []
    for name in sorted({*here, *there}):
        values = str(here.get(name, "nothing")), there.get(name, "nothing")
        short = [value if len(value) <= 16 else f"{value[:12]}…" for value in values]
        if values[0] != values[1]:
            parts.append("{}: here {}, there {}".format(line(name), *(short if short[0] != short[1] else values)))
    return "; ".join(parts)[:500]
