"""Certificates by which machines know each other: created, issued for other machines, checked, rotated and revoked.

A trust folder holds `ca.pem` and `ca.key` (the authority), `node.pem` and `node.key` (this machine) and `token` (the
secret that all machines share). A folder issued for another machine has no `ca.key`. A certificate names what its
machine may be, head or node, as organizational units; `revoked` lists fingerprints that are no longer accepted.
"""

from __future__ import annotations

import ipaddress
import os
import re
import secrets
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from shoal.core.errors import Refused, SettingsError, ShoalError
from shoal.transport import trust
from shoal.transport.trust import FOLDER, REVOKED, Trust, fingerprint, present

try:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
except ImportError:
    raise ShoalError(trust.MISSING) from None

ROLES = ("head", "node")
LOCAL = ("localhost", "127.0.0.1", "::1")
PEM, CURVE = serialization.Encoding.PEM, ec.SECP256R1()  # every TLS library supports it
DAYS = 825.0  # the longest that some systems accept for a machine's certificate
AUTHORITY_DAYS = 3650.0
SKEW = timedelta(hours=1)  # clocks of other machines may be behind
HOST = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)(\.(?!-)[a-z0-9_-]{1,63}(?<!-))*", re.IGNORECASE)


@dataclass(frozen=True)
class Issued:
    """A new certificate: its folder, the names it is valid for, its fingerprint and when it expires."""

    folder: Path
    names: tuple[str, ...]
    fingerprint: str
    expires: datetime


@dataclass(frozen=True)
class Authority:
    """What signs certificates."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def initialise(
    folder: Path = FOLDER, names: Sequence[str] = (), days: float = DAYS, begin: datetime | None = None
) -> Issued:
    """Create a folder with an authority, a token and a certificate for this machine, which may be head and node."""
    names, begin, key = _checked(names), begin or datetime.now(UTC), ec.generate_private_key(CURVE)
    # Messages could not tell authorities of the same name apart.
    subject = _subject(f"Shoal {secrets.token_hex(4)}")
    authority = Authority(_sign(subject, key, begin, begin + timedelta(days=AUTHORITY_DAYS)), key)
    files = _machine(names, ROLES, authority, begin, days) | {"ca.key": _pem(key), "token": _new_token()}
    return _create(folder, names, files)


def issue(
    folder: Path,
    out: Path,
    names: Sequence[str] = (),
    days: float = DAYS,
    begin: datetime | None = None,
    roles: Sequence[str] = ("node",),
) -> Issued:
    """Create the trust folder of another machine, signed by the authority in `folder`, whose key stays there."""
    names, folder = _checked(names), folder.expanduser()
    files = _machine(names, roles, _authority(folder), begin or datetime.now(UTC), days)
    files["token"] = trust.read_token(folder).encode() + b"\n"
    if (folder / REVOKED).is_file():
        files[REVOKED] = (folder / REVOKED).read_bytes()
    return _create(out, names, files)


def rotate(folder: Path = FOLDER, names: Sequence[str] = ()) -> str:
    """Replace the token and, where names are given, this machine's certificate; return its fingerprint."""
    folder = folder.expanduser()
    authority = _authority(folder)
    if names:
        files = _machine(_checked(names), ROLES, authority, datetime.now(UTC), DAYS)
        for name in ("node.key", "node.pem"):
            _replace(folder / name, files[name])
    _replace(folder / "token", _new_token())
    return fingerprint(present(folder, "node.pem"))


def revoke(folder: Path, which: str) -> str:
    """No longer accept a certificate, given by its fingerprint, its file or its folder; return its fingerprint."""
    folder, path = folder.expanduser(), Path(which).expanduser()
    path = path / "node.pem" if path.is_dir() else path
    mark = fingerprint(path) if path.is_file() and _load(path) else trust.parse_fingerprint(which).hex(":").upper()
    if mark == fingerprint(present(folder, "node.pem")):
        raise SettingsError(f"{mark} is the certificate of {folder} itself: revoke it on the machines it connects to")
    _replace(folder / REVOKED, "".join(f"{each}\n" for each in sorted({*trust.read_revoked(folder), mark})).encode())
    return mark


def check_peer(certificate: bytes, files: Trust, role: str) -> None:
    """Refuse a certificate of the authority that was revoked or is for another role."""
    mark = fingerprint(certificate)
    if mark in files.revoked():
        raise Refused(f"the certificate {mark} is revoked")
    if role not in (roles := roles_in(certificate)):
        what = f"is for a {' and a '.join(sorted(roles))}" if roles else "names neither head nor node"
        raise Refused(
            f"the certificate {mark[:11]}... {what}; a {role} needs one of its own: shoal node --init --for DIR "
            f"--role {role}"
        )


def roles_in(certificate: Path | bytes) -> set[str]:
    """What the machine of a certificate may be."""
    units = _load(certificate).subject.get_attributes_for_oid(NameOID.ORGANIZATIONAL_UNIT_NAME)
    return {str(unit.value) for unit in units} & {*ROLES}


def name_in(certificate: bytes) -> str:
    """A name or address for which a certificate is valid."""
    try:
        names = _load(certificate).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        raise Refused("the other side's certificate is valid for no name") from None
    addresses = [str(address) for address in names.get_values_for_type(x509.IPAddress)]
    return [*names.get_values_for_type(x509.DNSName), *addresses][0]


def expiry(certificate: Path | bytes) -> datetime:
    """When a certificate, in PEM or DER, expires."""
    return _load(certificate).not_valid_after_utc


def check_dates(path: Path) -> None:
    """Raise where a certificate of this machine's own cannot be read, has expired or is not valid yet."""
    certificate, now = _load(path), datetime.now(UTC)
    if now > certificate.not_valid_after_utc:
        raise ShoalError(
            f"the certificate {path} expired on {certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC: issue another, "
            "`shoal node --init --for DIR`"
        )
    if now < certificate.not_valid_before_utc:
        raise ShoalError(
            f"the certificate {path} is only valid from {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC: is this "
            "machine's clock right?"
        )


def _load(certificate: Path | bytes) -> x509.Certificate:
    """A certificate in PEM or DER."""
    data = certificate.read_bytes() if isinstance(certificate, Path) else certificate
    try:
        return x509.load_pem_x509_certificate(data) if b"-----" in data else x509.load_der_x509_certificate(data)
    except ValueError as error:
        where = certificate if isinstance(certificate, Path) else "what the other side sent"
        raise ShoalError(f"{where} is not a certificate: {str(error).splitlines()[0]}") from error


def _authority(folder: Path) -> Authority:
    """The authority of a trust folder."""
    path = present(folder, "ca.pem")
    if not (folder / "ca.key").exists():
        raise SettingsError(f"{folder} has no ca.key: only the machine where the authority was created can issue")
    check_dates(path)
    try:
        key = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
    except (ValueError, TypeError) as error:  # such as a key under a password
        raise ShoalError(f"the key of the authority in {folder} cannot be read: {error}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ShoalError(f"the key of the authority in {folder} cannot be read: it is of another kind than Shoal's")
    return Authority(_load(path), key)


def _checked(names: Sequence[str]) -> tuple[str, ...]:
    """The names together with those by which a machine calls itself, each once."""
    for name in names:
        try:
            ipaddress.ip_address(name)
        except ValueError:
            if len(name) > 253 or not HOST.fullmatch(name):
                raise SettingsError(
                    f"{name!r} is neither a host name nor an address: write it like node1.example.org or 10.0.0.1, "
                    "without scheme and port"
                ) from None
    return tuple(dict.fromkeys([*names, *LOCAL]))


def _machine(
    names: Sequence[str], roles: Sequence[str], authority: Authority, begin: datetime, days: float
) -> dict[str, bytes]:
    """The files that every machine has, except the token."""
    key = ec.generate_private_key(CURVE)
    end = min(begin + timedelta(days=days), authority.certificate.not_valid_after_utc)
    certificate = _sign(_subject(names[0][:64], roles), key, begin, end, authority, names)
    pems = {"ca.pem": authority.certificate, "node.pem": certificate}
    return {name: each.public_bytes(PEM) for name, each in pems.items()} | {"node.key": _pem(key)}


def _subject(title: str, roles: Sequence[str] = ()) -> x509.Name:
    units = [x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, role) for role in roles]
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, title), *units])


def _sign(
    subject: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    begin: datetime,
    end: datetime,
    authority: Authority | None = None,
    names: Sequence[str] = (),
) -> x509.Certificate:
    """A certificate of a key; without an authority, that of an authority itself (RFC 5280, section 4.2.1)."""
    signs, public = authority is None, key.public_key()
    signing = authority.key if authority else key
    uses = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only")
    usage = x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        decipher_only=False,
        **dict.fromkeys(uses, False),
    )
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(authority.certificate.subject if authority else subject)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin - SKEW)
        .not_valid_after(end)
        .add_extension(x509.BasicConstraints(ca=signs, path_length=0 if signs else None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signing.public_key()), critical=False)
    )
    if not signs:
        both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]  # a machine may listen and join
        builder = builder.add_extension(x509.ExtendedKeyUsage(both), critical=False)
        general = x509.SubjectAlternativeName([_general(name) for name in names])
        builder = builder.add_extension(general, critical=False)
    return builder.sign(signing, hashes.SHA256())


def _general(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())


def _new_token() -> bytes:
    return secrets.token_urlsafe(32).encode() + b"\n"


def _write(path: Path, data: bytes) -> None:
    """Write a new file that only its owner can read."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(descriptor)


def _replace(path: Path, data: bytes) -> None:
    """Replace a file as a whole or not at all."""
    draft = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        _write(draft, data)
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise ShoalError(f"cannot write {path}: {error.strerror}") from error


def _create(folder: Path, names: tuple[str, ...], files: Mapping[str, bytes]) -> Issued:
    """Write the files of a new trust folder, all of them or none."""
    folder = folder.expanduser().resolve()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as draft:
            (new := Path(draft) / "new").mkdir(mode=0o700)
            for name, data in files.items():
                _write(new / name, data)
            new.rename(folder)  # replaces an empty folder and nothing else
    except OSError as error:
        if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
            raise SettingsError(
                f"{folder} already exists, and nothing in it is overwritten: for another machine give a new folder, "
                "`--for DIR`; to start over, remove this one"
            ) from None
        raise ShoalError(f"cannot write {folder}: {error.strerror}") from error
    return Issued(folder, names, fingerprint(files["node.pem"]), expiry(files["node.pem"]))
