"""Real TLS handshakes between two threads: who is let in, who is not, and what both are told."""

from __future__ import annotations

import re
import shutil
import socket
import ssl
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from shoal.core.errors import Refused, SettingsError, ShoalError
from shoal.transport.certificates import expiry
from shoal.transport.trust import Trust, check_pin, client_context, explain, fingerprint, server_context, shown

HOST = "node1.example.org"
WELCOME = "welcome"


def meet(
    server: ssl.SSLContext,
    client: ssl.SSLContext,
    host: str = HOST,
    check: Callable[[ssl.SSLSocket], object] = lambda connection: None,
) -> tuple[str, str]:
    """What came of a connection for the listener and for the joiner: a welcome, or the error in one line."""
    listening, joining = socket.socketpair()
    told = []

    def listen() -> None:
        try:
            with server.wrap_socket(listening, server_side=True) as connection:
                connection.sendall(WELCOME.encode())
                told.append(WELCOME)
        except OSError as error:
            told.append(explain(error))

    thread = threading.Thread(target=listen)
    for end in (listening, joining):
        end.settimeout(20)
    thread.start()
    try:
        with client.wrap_socket(joining, server_hostname=host) as connection:
            check(connection)
            joined = connection.recv(100).decode()  # only now is it known whether its certificate was taken
    except (OSError, ShoalError) as error:
        joined = explain(error)
    finally:
        joining.close()
        thread.join()
        listening.close()
    return told[0], joined


def trust(folders: Path, name: str) -> Trust:
    """The trust in one of the folders."""
    return Trust.inside(folders / name)


def unchecked(folders: Path, name: str) -> ssl.SSLContext:
    """A joiner that shows a certificate which this machine itself would not load."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(folders / "here" / "ca.pem")
    context.load_cert_chain(folders / name / "node.pem", folders / name / "node.key")
    return context


@pytest.mark.parametrize("host", [HOST, "10.0.0.1", "localhost", "127.0.0.1", "::1"])
def test_machines_of_one_authority_meet(folders: Path, host: str) -> None:
    server, client = server_context(trust(folders, "here")), client_context(trust(folders, "there"))
    versions = []
    assert meet(server, client, host, lambda connection: versions.append(connection.version())) == (WELCOME, WELCOME)
    assert versions == ["TLSv1.3"]


def test_the_certificates_pass_the_strictest_check(folders: Path) -> None:
    server, client = server_context(trust(folders, "here")), client_context(trust(folders, "there"))
    for context in (server, client):
        context.verify_flags |= ssl.VERIFY_X509_STRICT
    assert meet(server, client) == (WELCOME, WELCOME)


def test_a_wrong_host_name_is_refused(folders: Path) -> None:
    server, client = server_context(trust(folders, "here")), client_context(trust(folders, "there"))
    for host in ("node3.example.org", "10.0.0.2"):
        listened, joined = meet(server, client, host)
        assert listened == "the other side refused this machine's certificate"
        assert joined.startswith("the other side's certificate is not for this name: ")
        assert host in joined


def test_a_listener_of_another_authority_is_refused(folders: Path) -> None:
    listened, joined = meet(server_context(trust(folders, "stranger")), client_context(trust(folders, "there")))
    assert listened == "the other side refused this machine's certificate: it was not issued by its authority"
    assert joined == "the other side's certificate was not issued by the authority in ca.pem: both need the same one"


def test_a_joiner_of_another_authority_is_refused(folders: Path) -> None:
    pin = fingerprint(folders / "here" / "node.pem")
    listened, joined = meet(server_context(trust(folders, "here")), client_context(trust(folders, "stranger"), pin))
    assert listened == "the other side's certificate was not issued by the authority in ca.pem: both need the same one"
    assert joined == "the other side refused this machine's certificate: it was not issued by its authority"


def test_a_joiner_without_a_certificate_is_refused_unless_the_listener_says_otherwise(folders: Path) -> None:
    pin = fingerprint(folders / "here" / "node.pem")
    listened, joined = meet(server_context(trust(folders, "here")), client_context(pin=pin))
    assert listened == "the other side sent no certificate, and one of this authority is required"
    assert joined == "the other side requires a certificate of its authority, and this one sent none"
    server = server_context(trust(folders, "here"), require_certificate=False)
    check = lambda connection: check_pin(shown(connection), pin)  # noqa: E731
    assert meet(server, client_context(pin=pin), "any.name", check) == (WELCOME, WELCOME)


def test_only_the_pinned_certificate_is_taken(folders: Path) -> None:
    server = server_context(trust(folders, "here"), require_certificate=False)
    right = fingerprint(folders / "here" / "node.pem")
    seen = []
    for pin in (right, right.replace(":", "").lower()):
        meet(server, client_context(pin=pin), check=lambda found, pin=pin: seen.append(check_pin(shown(found), pin)))
    assert seen == [None, None]
    wrong = fingerprint(folders / "there" / "node.pem")  # of the same authority, but not the one
    _, joined = meet(server, client_context(pin=wrong), check=lambda connection: check_pin(shown(connection), wrong))
    assert joined == f"the other side's certificate is not the pinned one: its fingerprint is {right}"


def test_a_peer_that_showed_nothing_has_no_fingerprint() -> None:
    nobody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).wrap_bio(ssl.MemoryBIO(), ssl.MemoryBIO(), server_hostname=HOST)
    nobody.getpeercert = lambda binary_form: None  # type: ignore[method-assign, misc, assignment]
    with pytest.raises(Refused, match="showed no certificate"):
        shown(nobody)


def test_an_expired_certificate_is_not_loaded(folders: Path) -> None:
    when = expiry(folders / "expired" / "node.pem")
    for make in (server_context, client_context):
        with pytest.raises(ShoalError, match=rf"expired on {when:%Y-%m-%d %H:%M} UTC"):
            make(trust(folders, "expired"))


def test_an_expired_listener_is_refused(folders: Path) -> None:
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folders / "expired" / "node.pem", folders / "expired" / "node.key")
    listened, joined = meet(server, client_context(trust(folders, "there")))
    assert listened == "the other side refused this machine's certificate: it has expired"
    assert joined.startswith("the other side's certificate has expired: issue another")


def test_an_expired_joiner_is_refused(folders: Path) -> None:
    listened, joined = meet(server_context(trust(folders, "here")), unchecked(folders, "expired"))
    assert listened.startswith("the other side's certificate has expired: issue another")
    assert joined == "the other side refused this machine's certificate: it has expired"


def test_a_second_look_tells_when_the_other_expired(folders: Path) -> None:
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folders / "expired" / "node.pem", folders / "expired" / "node.key")
    server.load_verify_locations(folders / "here" / "ca.pem")
    server.verify_mode = ssl.CERT_REQUIRED  # it shows its certificate all the same
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(20)

        def listen() -> None:
            connection, _ = listening.accept()
            with connection, pytest.raises(ssl.SSLError):
                server.wrap_socket(connection, server_side=True)

        thread = threading.Thread(target=listen)
        thread.start()
        text = ssl.get_server_certificate(listening.getsockname(), timeout=20)
        thread.join()
    error = ssl.SSLCertVerificationError(1, "certificate verify failed")
    error.verify_code = 10
    when = expiry(folders / "expired" / "node.pem")
    assert f"has expired on {when:%Y-%m-%d %H:%M} UTC" in explain(error, text.encode())
    assert "has expired: issue another" in explain(error, b"anything at all")


def test_plain_text_is_told_from_tls(folders: Path) -> None:
    for noise in (b"GET / HTTP/1.1\r\n\r\n", b"SHOL\x01\x00\x00\x00 and then some"):
        listening, joining = socket.socketpair()
        with listening, joining:
            joining.sendall(noise)
            with pytest.raises(ssl.SSLError) as caught:
                server_context(trust(folders, "here")).wrap_socket(listening, server_side=True)
        assert explain(caught.value).startswith("the other side does not speak TLS")


def test_older_tls_is_refused(folders: Path) -> None:
    old = unchecked(folders, "there")
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    assert meet(server_context(trust(folders, "here")), old) == ("the other side does not speak TLS 1.3",) * 2


def test_a_connection_that_ends_is_told(folders: Path) -> None:
    listening, joining = socket.socketpair()
    with listening:
        joining.close()
        with pytest.raises(OSError, match=r".") as caught:
            server_context(trust(folders, "here")).wrap_socket(listening, server_side=True)
    assert explain(caught.value) == "the other side ended the connection during the TLS handshake"


def test_something_must_vouch_for_the_other_side() -> None:
    with pytest.raises(SettingsError, match="nothing to verify the other side by"):
        client_context()
    with pytest.raises(SettingsError, match="is not a fingerprint"):
        client_context(pin="AB:CD")


def test_files_that_do_not_fit_are_told_in_one_line(folders: Path, tmp_path: Path) -> None:
    here, there = trust(folders, "here"), trust(folders, "there")
    (tmp_path / "empty").write_text("")
    for broken, words in (
        (replace(here, key=there.key), "the private key does not belong to the certificate"),
        (replace(here, key=tmp_path / "nowhere"), "cannot read .*No such file"),
        (replace(here, certificate=tmp_path / "nowhere"), "cannot read .*nowhere: No such file"),
        (replace(here, certificate=tmp_path / "empty"), "is not a certificate"),
        (replace(here, ca=tmp_path / "empty"), "is not a certificate of an authority"),
        (replace(here, ca=tmp_path / "nowhere"), "cannot read .*nowhere: No such file"),
    ):
        with pytest.raises(ShoalError, match=words) as caught:
            server_context(broken)
        assert "\n" not in str(caught.value)


def test_a_key_under_a_password_does_not_ask_for_it(folders: Path, tmp_path: Path) -> None:
    here = trust(folders, "here")
    key = load_pem_private_key(here.key.read_bytes(), None)
    locked = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"word"))
    (tmp_path / "locked.key").write_bytes(locked)
    with pytest.raises(ShoalError, match=re.escape(f"cannot use {here.certificate} with {tmp_path}/locked.key")):
        server_context(replace(here, key=tmp_path / "locked.key"))


def test_certificates_of_ones_own_work_under_any_name(folders: Path, tmp_path: Path) -> None:
    for source, name in (("ca.pem", "company.crt"), ("node.pem", "mine.crt"), ("node.key", "mine.key")):
        shutil.copy(folders / "here" / source, tmp_path / name)
    own = Trust(tmp_path / "company.crt", tmp_path / "mine.crt", tmp_path / "mine.key")
    assert meet(server_context(own), client_context(trust(folders, "there"))) == (WELCOME, WELCOME)


def test_any_error_is_one_line() -> None:
    assert explain(OSError("a\nb")) == "a b"
    assert explain(TimeoutError()) == "TimeoutError"
    assert explain(Refused("why")) == "why"


def test_no_tickets_are_sent_that_nobody_uses(folders: Path) -> None:
    assert server_context(trust(folders, "here")).num_tickets == 0
