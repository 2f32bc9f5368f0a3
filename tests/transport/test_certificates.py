"""Trust folders: what is in them, who may read them, and what is never done to them."""

from __future__ import annotations

import builtins
import importlib
import os
import re
import shutil
import ssl
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from shoal.core.errors import SettingsError, ShoalError
from shoal.transport import certificates
from shoal.transport.certificates import check_dates, expiry, initialise, issue
from shoal.transport.trust import Trust, fingerprint, parse_fingerprint, read_token


def names_in(folder: Path) -> set[str]:
    """The names and addresses that a folder's certificate holds for."""
    certificate = x509.load_pem_x509_certificate((folder / "node.pem").read_bytes())
    found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    addresses = {str(address) for address in found.get_values_for_type(x509.IPAddress)}
    return addresses | set(found.get_values_for_type(x509.DNSName))


def test_a_folder_has_five_files_that_only_the_owner_reads(tmp_path: Path) -> None:
    made = initialise(tmp_path / "deep" / "trust", ["node1", "10.0.0.1", "node1"])
    assert made.folder == tmp_path / "deep" / "trust"
    assert {path.name for path in made.folder.iterdir()} == {"ca.pem", "ca.key", "node.pem", "node.key", "token"}
    assert made.folder.stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in made.folder.iterdir())
    assert [path.name for path in made.folder.parent.iterdir()] == ["trust"]  # no draft is left
    assert made.names == ("node1", "10.0.0.1", "localhost", "127.0.0.1", "::1")
    assert names_in(made.folder) == set(made.names)
    assert re.fullmatch(r"[\w-]{43}", read_token(made.folder))


def test_tokens_keys_and_authorities_differ(tmp_path: Path) -> None:
    one, two = (initialise(tmp_path / name).folder for name in ("one", "two"))
    for name in ("token", "ca.key", "node.key", "ca.pem", "node.pem"):
        assert (one / name).read_bytes() != (two / name).read_bytes()


def test_the_default_folder_is_in_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert initialise().folder == tmp_path / ".shoal" / "trust"
    assert Trust.inside().key == tmp_path / ".shoal" / "trust" / "node.key"
    assert read_token()


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    folder = initialise(tmp_path / "trust").folder
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(SettingsError, match="already exists, and nothing in it is overwritten"):
        initialise(folder)
    with pytest.raises(SettingsError, match="already exists"):
        issue(folder, folder)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    (tmp_path / "file").write_text("mine")
    with pytest.raises(SettingsError, match="already exists"):
        initialise(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    (tmp_path / "trust").mkdir(mode=0o755)
    assert initialise(tmp_path / "trust").folder.stat().st_mode & 0o777 == 0o700


def test_a_failure_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written, real = [], os.fsync

    def full(descriptor: int) -> None:
        written.append(descriptor)
        if len(written) == 3:
            raise OSError(28, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(certificates.os, "fsync", full)
    with pytest.raises(ShoalError, match=r"cannot write .*trust: No space left on device"):
        initialise(tmp_path / "trust")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_appears_meanwhile_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = certificates.tempfile.mkdtemp

    def other(*words: Any) -> str:
        initialise_other()
        return real(*words)

    def initialise_other() -> None:
        (tmp_path / "trust").mkdir()
        (tmp_path / "trust" / "token").write_text("of another")

    monkeypatch.setattr(certificates.tempfile, "mkdtemp", other)
    with pytest.raises(SettingsError, match="already exists"):
        initialise(tmp_path / "trust")
    assert [path.name for path in tmp_path.iterdir()] == ["trust"]
    assert (tmp_path / "trust" / "token").read_text() == "of another"


def test_another_machine_gets_all_but_the_key_of_the_authority(folders: Path) -> None:
    here, there = folders / "here", folders / "there"
    assert {path.name for path in there.iterdir()} == {"ca.pem", "node.pem", "node.key", "token"}
    assert there.stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in there.iterdir())
    for name in ("ca.pem", "token"):
        assert (there / name).read_bytes() == (here / name).read_bytes()
    assert (there / "node.key").read_bytes() != (here / "node.key").read_bytes()
    secret = b"".join((here / "ca.key").read_bytes().splitlines()[1:-1])
    assert all(secret not in path.read_bytes().replace(b"\n", b"") for path in there.iterdir())
    assert names_in(there) == {"node2", "localhost", "127.0.0.1", "::1"}
    with pytest.raises(SettingsError, match=r"has no ca\.key: only the machine where the authority was created"):
        issue(there, folders / "further")


def test_a_certificate_does_not_outlive_its_authority(tmp_path: Path) -> None:
    made = initialise(tmp_path / "trust", days=100_000)
    assert made.expires == expiry(made.folder / "ca.pem") == expiry(made.folder / "node.pem")


def test_a_clock_may_be_a_little_behind(tmp_path: Path) -> None:
    folder = initialise(tmp_path / "trust", begin=datetime.now(UTC) + timedelta(minutes=50)).folder
    check_dates(folder / "node.pem")


def test_only_the_authority_signs_and_only_machines(folders: Path) -> None:
    limits = [
        x509.load_pem_x509_certificate((folders / "here" / name).read_bytes())
        .extensions.get_extension_for_class(x509.BasicConstraints)
        .value
        for name in ("ca.pem", "node.pem")
    ]
    assert [(limit.ca, limit.path_length) for limit in limits] == [(True, 0), (False, None)]


def test_an_expired_authority_issues_nothing(tmp_path: Path) -> None:
    begin = datetime.now(UTC) - timedelta(days=4000)
    folder = initialise(tmp_path / "trust", begin=begin).folder
    with pytest.raises(ShoalError, match=r"ca\.pem expired on 20\d\d-\d\d-\d\d"):
        issue(folder, tmp_path / "further")


def test_own_dates_are_checked(tmp_path: Path, folders: Path) -> None:
    when = expiry(folders / "expired" / "node.pem")
    with pytest.raises(ShoalError, match=rf"expired on {when:%Y-%m-%d %H:%M} UTC: issue another"):
        check_dates(folders / "expired" / "node.pem")
    early = initialise(tmp_path / "early", begin=datetime.now(UTC) + timedelta(days=2)).folder
    with pytest.raises(ShoalError, match="is only valid from"):
        check_dates(early / "node.pem")
    (tmp_path / "broken.pem").write_text("-----BEGIN CERTIFICATE-----\nno\n-----END CERTIFICATE-----\n")
    with pytest.raises(ShoalError, match=r"broken\.pem is not a certificate"):
        check_dates(tmp_path / "broken.pem")
    check_dates(folders / "here" / "node.pem")


@pytest.mark.parametrize(
    "name", ["", "a b", "http://node1", "node1:8443", "-a", "a..b", "*.example.org", "a" * 64, "é"]
)
def test_names_are_checked_before_anything_is_made(tmp_path: Path, name: str) -> None:
    with pytest.raises(SettingsError, match="is neither a host name nor an address"):
        initialise(tmp_path / "trust", [name])
    assert not list(tmp_path.iterdir())


def test_addresses_of_both_kinds_and_long_names_are_taken(tmp_path: Path) -> None:
    names = ["fe80::1", "192.168.0.7", "a." * 60 + "org", "under_score"]
    assert names_in(initialise(tmp_path / "trust", names).folder) >= set(names)


def test_a_missing_folder_says_what_makes_one(tmp_path: Path, folders: Path) -> None:
    with pytest.raises(SettingsError, match="create one with `shoal node --init`"):
        Trust.inside(tmp_path / "nowhere")
    with pytest.raises(SettingsError, match="create one with `shoal node --init`"):
        issue(tmp_path / "nowhere", tmp_path / "out")
    shutil.copytree(folders / "there", tmp_path / "torn")
    (tmp_path / "torn" / "node.key").unlink()
    with pytest.raises(SettingsError, match=r"has no node\.key"):
        Trust.inside(tmp_path / "torn")


def test_a_broken_authority_or_token_is_told(tmp_path: Path, folders: Path) -> None:
    shutil.copytree(folders / "here", tmp_path / "torn")
    (tmp_path / "torn" / "ca.key").write_text("no key")
    with pytest.raises(ShoalError, match="cannot be read"):
        issue(tmp_path / "torn", tmp_path / "out")
    (tmp_path / "torn" / "token").write_bytes(b"\xff\xfe")
    with pytest.raises(ShoalError, match="is not text"):
        read_token(tmp_path / "torn")


def test_fingerprints_are_those_of_the_first_certificate_in_pem_or_der(folders: Path) -> None:
    path = folders / "here" / "node.pem"
    text = path.read_text()
    expected = fingerprint(path)
    assert re.fullmatch(r"([0-9A-F]{2}:){31}[0-9A-F]{2}", expected)
    assert fingerprint(text.encode()) == expected
    assert fingerprint(ssl.PEM_cert_to_DER_cert(text)) == expected
    assert fingerprint((text + (folders / "here" / "ca.pem").read_text()).encode()) == expected
    assert fingerprint(folders / "there" / "node.pem") != expected
    from cryptography.hazmat.primitives import hashes

    certificate = x509.load_pem_x509_certificate(text.encode())
    assert parse_fingerprint(expected) == certificate.fingerprint(hashes.SHA256())


def test_fingerprints_are_read_with_colons_and_without() -> None:
    plain = "ab" * 32
    for text in (plain, plain.upper(), ":".join(["AB"] * 32), f" {plain}\n"):
        assert parse_fingerprint(text) == b"\xab" * 32
    for text in ("", "ab" * 31, "ab" * 33, "zz" * 32, "SHA1 " + "ab" * 20):
        with pytest.raises(SettingsError, match="64 hexadecimal digits"):
            parse_fingerprint(text)


def test_the_extra_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("cryptography"):
            raise ImportError(name)
        return real(name, *rest)

    for name in [name for name in sys.modules if name.startswith(("cryptography", "shoal.transport.certificates"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ShoalError, match=r"pip install 'shoal\[cluster\]'"):
        importlib.import_module("shoal.transport.certificates")
