"""TLS between machines: contexts for both sides, pinned certificates, and errors in plain words."""

from __future__ import annotations

import hmac
import socket
import ssl
from contextlib import suppress
from typing import Any

from shoal.core.errors import Refused, SettingsError, ShoalError
from shoal.transport.certificates import (
    Trust,
    check_own,
    check_peer,
    cluster_extra,
    expiry,
    fingerprint,
    parse_fingerprint,
)
from shoal.transport.terms import Terms, split

OPENING = 10.0  # seconds in which a connection must be made
# Numbers of OpenSSL's X509_verify_cert_error_string.
NOT_YET_VALID, EXPIRED, HOST_MISMATCH, ADDRESS_MISMATCH = 9, 10, 62, 64
WRONG_AUTHORITY = (2, 7, 18, 19, 20, 21, 30)

ALERTS = {
    "CERTIFICATE_REQUIRED": "the other side wants a certificate of its authority, and this one sent none",
    "ALERT_UNKNOWN_CA": "the other side refused this machine's certificate: it was not issued by its authority",
    "ALERT_CERTIFICATE_EXPIRED": "the other side refused this machine's certificate: it has expired",
    "ALERT_BAD_CERTIFICATE": "the other side refused this machine's certificate",
    "ALERT_CERTIFICATE_UNKNOWN": "the other side refused this machine's certificate",
    "ALERT_DECRYPT_ERROR": "the other side refused this machine's certificate: it was not issued by its authority",
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "the other side sent no certificate, and this one wants one of its authority",
    "PROTOCOL_VERSION": "the other side does not speak TLS 1.3",
    "UNSUPPORTED_PROTOCOL": "the other side does not speak TLS 1.3",
    "WRONG_VERSION_NUMBER": "the other side does not speak TLS: is it the right port, and is TLS on there?",
    "HTTP_REQUEST": "the other side does not speak TLS: is TLS on there?",
    "KEY_VALUES_MISMATCH": "the private key does not belong to the certificate",
    "UNEXPECTED_EOF": "the other side ended the connection during the TLS handshake",
}


def server_context(trust: Trust, require_certificate: bool = True) -> ssl.SSLContext:
    """TLS for the side that listens; without `require_certificate`, those who show none prove the token only."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # nobody resumes a session
    _show(context, trust)
    _believe(context, trust)
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
        _show(context, trust)
    if pin is not None:
        parse_fingerprint(pin)  # a slip is told before anything is sent
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    elif trust is not None:
        _believe(context, trust)
    return context


def peer_fingerprint(connection: Any) -> str:
    """The fingerprint of the certificate that the other side of a TLS connection showed."""
    certificate = connection.getpeercert(binary_form=True)
    if not certificate:
        raise Refused("the other side showed no certificate")
    return fingerprint(certificate)


def name_in(certificate: bytes) -> str:
    """A name or address for which a certificate, in DER, holds."""
    with cluster_extra():
        from cryptography import x509

    found = x509.load_der_x509_certificate(certificate)
    try:
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        raise Refused("the other side's certificate holds for no name") from None
    hosts = names.get_values_for_type(x509.DNSName)
    return [*hosts, *(str(address) for address in names.get_values_for_type(x509.IPAddress))][0]


def check_pin(connection: ssl.SSLSocket | ssl.SSLObject, pin: str) -> None:
    """Refuse a peer whose certificate is not exactly the pinned one; call it before anything is sent."""
    there = peer_fingerprint(connection)
    if not hmac.compare_digest(parse_fingerprint(there), parse_fingerprint(pin)):
        raise Refused(f"the other side's certificate is not the pinned one: its fingerprint is {there}")


def connect(address: str, terms: Terms, protocols: tuple[str, ...] = ()) -> ssl.SSLSocket:
    """Connect by TLS to a machine that proves itself by its certificate, or by being the one that is pinned."""
    context = client_context(terms.certificates(), terms.pin or None)
    if protocols:
        context.set_alpn_protocols([*protocols])
    host, port = split(address)
    plain = socket.create_connection((host, port), OPENING)
    try:
        secure = context.wrap_socket(plain, server_hostname=host)
    except ssl.SSLError as error:
        raise Refused(f"{address}: {explain(error, _certificate(address, terms, error))}") from error
    finally:
        plain.close()  # nothing is left of it where it was wrapped
    try:
        if terms.pin:
            check_pin(secure, terms.pin)
        elif (trust := terms.certificates()) is not None:
            check_peer(secure.getpeercert(binary_form=True) or b"", trust, terms.other)
    except ShoalError as error:
        secure.close()
        raise Refused(f"{address}: {error}") from None
    return secure


def _certificate(address: str, terms: Terms, error: ssl.SSLError) -> str | None:
    """The certificate of a machine that has let it expire, asked for once more, since OpenSSL keeps it to itself."""
    if getattr(error, "verify_code", 0) != EXPIRED:
        return None
    unasked = client_context(terms.certificates(), pin="00" * 32)  # whatever it shows: nothing is sent
    with (
        suppress(OSError),
        socket.create_connection(split(address), OPENING) as plain,
        unasked.wrap_socket(plain) as secure,
    ):
        return ssl.DER_cert_to_PEM_cert(secure.getpeercert(binary_form=True) or b"")
    return None


def explain(error: BaseException, certificate: str | None = None) -> str:
    """One line for what went wrong with TLS; the other's certificate in PEM, if known, tells when it expired.

    OpenSSL keeps a certificate that failed to itself: `ssl.get_server_certificate` can fetch it for the message.
    """
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code == EXPIRED:
            when = ""
            with suppress(ShoalError):  # fetched from a stranger: it may be anything
                when = f" on {expiry(certificate.encode()):%Y-%m-%d %H:%M} UTC" if certificate else ""
            return f"the other side's certificate has expired{when}: issue another, `shoal node --init --for DIR`"
        if error.verify_code == NOT_YET_VALID:
            return "the other side's certificate is not valid yet: are both clocks right?"
        if error.verify_code in (HOST_MISMATCH, ADDRESS_MISMATCH):
            return f"the other side's certificate is not for this name: {_line(error.verify_message)}"
        if error.verify_code in WRONG_AUTHORITY:
            return "the other side's certificate was not issued by the authority in ca.pem: both need the same one"
        return f"the other side's certificate was refused: {_line(error.verify_message)}"
    if isinstance(error, ssl.SSLError):
        for mark, words in ALERTS.items():
            if mark in (error.reason or ""):
                return words
        if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
            return ALERTS["UNEXPECTED_EOF"]
    return _line(str(error) or type(error).__name__)


def _show(context: ssl.SSLContext, trust: Trust) -> None:
    """Load this machine's own certificate."""
    try:
        check_own(trust.certificate)
        context.load_cert_chain(trust.certificate, trust.key, password="")  # or it would ask on the terminal
    except ssl.SSLError as error:
        raise ShoalError(f"cannot use {trust.certificate} with {trust.key}: {explain(error)}") from error
    except OSError as error:
        raise ShoalError(f"cannot read {error.filename or trust.key}: {error.strerror}") from error


def _believe(context: ssl.SSLContext, trust: Trust) -> None:
    """Trust what the authority signed, and nobody else."""
    try:
        context.load_verify_locations(trust.ca)
    except ssl.SSLError as error:
        raise ShoalError(f"{trust.ca} is no certificate of an authority: {explain(error)}") from error
    except OSError as error:
        raise ShoalError(f"cannot read {trust.ca}: {error.strerror}") from error


def _line(text: str) -> str:
    return " ".join(text.split())
