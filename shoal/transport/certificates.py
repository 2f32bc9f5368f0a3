"""Certificates and the token by which the machines of a run know each other.

A trust folder holds `ca.pem` and `ca.key` (the authority), `node.pem` and `node.key` (this machine) and `token` (the
secret that all machines share). A folder issued for another machine has no `ca.key`. What a machine may be, head or
node, stands in its certificate as organizational unit; `revoked`
lists the fingerprints of those that are let in no more.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import re
import secrets
import shutil
import ssl
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.core.errors import Refused, SettingsError, ShoalError

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

FOLDER = Path("~/.shoal/trust")
ROLES = ("head", "node")
REVOKED = "revoked"
LOCAL = ("localhost", "127.0.0.1", "::1")
DAYS = 825.0  # the longest that some systems accept for a certificate of a machine
AUTHORITY_DAYS = 3650.0
SKEW = timedelta(hours=1)  # clocks of other machines may be behind
HOST = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)(\.(?!-)[a-z0-9_-]{1,63}(?<!-))*", re.IGNORECASE)
BLOCK = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)


@dataclass(frozen=True)
class Trust:
    """Where the certificate of the authority and this machine's own certificate and key lie."""

    ca: Path
    certificate: Path
    key: Path

    @classmethod
    def inside(cls, folder: Path = FOLDER) -> Trust:
        """The three files of a trust folder."""
        folder = folder.expanduser()
        return cls(*(_present(folder, name) for name in ("ca.pem", "node.pem", "node.key")))

    def revoked(self) -> set[str]:
        """Fingerprints of the certificates that are let in no more."""
        return read_revoked(self.ca.parent)


@dataclass(frozen=True)
class Issued:
    """A new certificate: its folder, the names it holds for, its fingerprint and when it expires."""

    folder: Path
    names: tuple[str, ...]
    fingerprint: str
    expires: datetime


@contextmanager
def cluster_extra() -> Iterator[None]:
    """Turn a failed import into the command that mends it."""
    try:
        yield
    except ImportError:
        raise ShoalError(
            "machines over the network need packages that are not installed: pip install 'shoal[cluster]'"
        ) from None


def initialise(
    folder: Path = FOLDER, names: Sequence[str] = (), days: float = DAYS, begin: datetime | None = None
) -> Issued:
    """Make an authority, a certificate for this machine, which may be head and node, and a token, in a new folder."""
    with cluster_extra():
        from cryptography.hazmat.primitives.asymmetric import ec

    names = _checked(names)
    begin = begin or datetime.now(UTC)
    authority_key = ec.generate_private_key(ec.SECP256R1())  # every TLS library knows this curve
    # Authorities of the same name could not be told apart in messages.
    subject = _subject(f"Shoal {secrets.token_hex(4)}")
    authority = _sign(subject, (), authority_key, None, authority_key, begin, begin + _days(AUTHORITY_DAYS))
    files, certificate = _node(names, ROLES, authority, authority_key, begin, days)
    files["ca.key"] = _key_text(authority_key)
    files["token"] = _new_token()
    folder = _write_folder(folder, files)
    return Issued(folder, names, fingerprint(files["node.pem"]), certificate.not_valid_after_utc)


def issue(
    folder: Path,
    out: Path,
    names: Sequence[str] = (),
    days: float = DAYS,
    begin: datetime | None = None,
    roles: Sequence[str] = ("node",),
) -> Issued:
    """Make the trust folder of another machine, signed by the authority in `folder`; its key stays here."""
    names, folder = _checked(names), folder.expanduser()
    authority, key = _authority(folder)
    files, certificate = _node(names, roles, authority, key, begin or datetime.now(UTC), days)
    files["token"] = read_token(folder).encode() + b"\n"
    if (folder / REVOKED).is_file():
        files[REVOKED] = (folder / REVOKED).read_bytes()
    out = _write_folder(out, files)
    return Issued(out, names, fingerprint(files["node.pem"]), certificate.not_valid_after_utc)


def rotate(folder: Path = FOLDER, names: Sequence[str] = ()) -> str:
    """Replace the token and, where names are given, the certificate of this machine; return its fingerprint."""
    folder = folder.expanduser()
    authority, key = _authority(folder)
    if names:
        files, _ = _node(_checked(names), ROLES, authority, key, datetime.now(UTC), DAYS)
        for name in ("node.key", "node.pem"):
            _replace(folder / name, files[name])
    _replace(folder / "token", _new_token())
    return fingerprint(_present(folder, "node.pem"))


def revoke(folder: Path, which: str) -> str:
    """Let in no more who shows a certificate, given by its fingerprint, its file or its folder; return the former."""
    folder, path = folder.expanduser(), Path(which).expanduser()
    path = path / "node.pem" if path.is_dir() else path
    mark = fingerprint(path) if path.is_file() and _load(path) else parse_fingerprint(which).hex(":").upper()
    if mark == fingerprint(_present(folder, "node.pem")):
        raise SettingsError(f"{mark} is the certificate of {folder} itself: revoke it at the machines it goes to")
    _replace(folder / REVOKED, "".join(f"{each}\n" for each in sorted({*read_revoked(folder), mark})).encode())
    return mark


def read_revoked(folder: Path) -> set[str]:
    """The fingerprints that a trust folder lists as revoked, one on a line; what follows a # is a remark."""
    try:
        lines = (folder / REVOKED).read_text().splitlines()
    except FileNotFoundError:
        return set()
    except (OSError, ValueError) as error:
        raise ShoalError(f"{folder / REVOKED} cannot be read: {error}") from None
    try:
        marks = [mark for each in lines if (mark := each.partition("#")[0].strip())]
        return {parse_fingerprint(mark).hex(":").upper() for mark in marks}
    except SettingsError as error:  # rather nobody than one who was to be shut out
        raise ShoalError(f"{folder / REVOKED}: {error}") from None


def check_peer(certificate: bytes, trust: Trust, role: str) -> None:
    """Refuse a certificate of the authority that was revoked, or is not that of a head or of a node, as is wanted."""
    mark = fingerprint(certificate)
    if mark in trust.revoked():
        raise Refused(f"the certificate {mark} is revoked")
    roles = roles_in(certificate)
    if role not in roles:
        what = f"is for a {' and a '.join(sorted(roles))}" if roles else "says neither head nor node, as old ones do"
        raise Refused(
            f"the certificate {mark[:11]}... {what}; a {role} needs one of its own: shoal node --init --for DIR "
            f"--role {role}"
        )


def roles_in(certificate: Path | bytes) -> set[str]:
    """What the machine of a certificate may be."""
    with cluster_extra():
        from cryptography.x509.oid import NameOID

    units = _load(certificate).subject.get_attributes_for_oid(NameOID.ORGANIZATIONAL_UNIT_NAME)
    return {str(unit.value) for unit in units} & {*ROLES}


def _new_token() -> bytes:
    return secrets.token_urlsafe(32).encode() + b"\n"


def _authority(folder: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """The authority of a trust folder, with its key."""
    with cluster_extra():
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

    authority_path = _present(folder, "ca.pem")
    if not (folder / "ca.key").exists():
        raise SettingsError(f"{folder} has no ca.key: only the machine where the authority was made can issue")
    try:
        authority = x509.load_pem_x509_certificate(authority_path.read_bytes())
        key = load_pem_private_key((folder / "ca.key").read_bytes(), None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise TypeError("its key is of another kind than Shoal makes")
    except (ValueError, TypeError) as error:  # such as a key under a password
        raise ShoalError(f"the authority in {folder} cannot be read: {error}") from error
    _check_dates(authority, authority_path)
    return authority, key


def read_token(folder: Path = FOLDER) -> str:
    """The secret that the machines of a run share."""
    try:
        return _present(folder.expanduser(), "token").read_text("ascii").strip()
    except ValueError as error:
        raise ShoalError(f"the token in {folder} is no text: {error}") from error


def fingerprint(certificate: Path | bytes) -> str:
    """SHA-256 of a certificate, a file or bytes in PEM or DER, as `AB:CD:…`; of a chain, that of the first."""
    data = certificate.read_bytes() if isinstance(certificate, Path) else certificate
    if found := BLOCK.search(data.decode("ascii", "replace")):
        data = ssl.PEM_cert_to_DER_cert(found[0])
    return hashlib.sha256(data).digest().hex(":").upper()


def parse_fingerprint(text: str) -> bytes:
    """The 32 bytes of a fingerprint, which may be written with colons or without."""
    digits = text.strip().replace(":", "")
    if not re.fullmatch(r"[0-9a-fA-F]{64}", digits):
        raise SettingsError(f"{text!r} is no fingerprint: give 64 hexadecimal digits, with colons or without")
    return bytes.fromhex(digits)


def expiry(certificate: Path | bytes) -> datetime:
    """When a certificate, in PEM or DER, expires."""
    return _load(certificate).not_valid_after_utc


def check_own(certificate: Path) -> None:
    """Raise where this machine's own certificate cannot be read, has expired or is not valid yet."""
    _check_dates(_load(certificate), certificate)


def _load(certificate: Path | bytes) -> x509.Certificate:
    with cluster_extra():
        from cryptography import x509

    data = certificate.read_bytes() if isinstance(certificate, Path) else certificate
    try:
        return x509.load_pem_x509_certificate(data) if b"-----" in data else x509.load_der_x509_certificate(data)
    except ValueError as error:
        where = certificate if isinstance(certificate, Path) else "what came"
        raise ShoalError(f"{where} is no certificate: {str(error).splitlines()[0]}") from error


def _check_dates(certificate: x509.Certificate, path: Path) -> None:
    now = datetime.now(UTC)
    if now > certificate.not_valid_after_utc:
        raise ShoalError(
            f"the certificate {path} expired on {certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC: issue another, "
            "`shoal node --init --for DIR`"
        )
    if now < certificate.not_valid_before_utc:
        raise ShoalError(
            f"the certificate {path} is valid only from {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC on: "
            "is this machine's clock right?"
        )


def _present(folder: Path, name: str) -> Path:
    """A file of a trust folder that must be there."""
    if not folder.is_dir():
        raise SettingsError(
            f"there is no trust folder {folder}: make one with `shoal node --init`, or copy the one issued for this "
            "machine there"
        )
    if not (folder / name).is_file():
        raise SettingsError(f"{folder} has no {name}: it is no trust folder as `shoal node --init` makes it")
    return folder / name


def _checked(names: Sequence[str]) -> tuple[str, ...]:
    """The names with those of the machine for itself, each once."""
    for name in names:
        try:
            ipaddress.ip_address(name)
        except ValueError:
            if len(name) > 253 or not HOST.fullmatch(name):
                raise SettingsError(
                    f"{name!r} is neither a host name nor an address: give such as node1.example.org or 10.0.0.1, "
                    "without scheme and port"
                ) from None
    return tuple(dict.fromkeys([*names, *LOCAL]))


def _subject(title: str, roles: Sequence[str] = ()) -> x509.Name:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    units = [x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, role) for role in roles]
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, title), *units])


def _node(
    names: Sequence[str],
    roles: Sequence[str],
    authority: x509.Certificate,
    key: ec.EllipticCurvePrivateKey,
    begin: datetime,
    days: float,
) -> tuple[dict[str, bytes], x509.Certificate]:
    """The files that every machine has, except the token, and the certificate among them."""
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding

    own = ec.generate_private_key(ec.SECP256R1())
    end = min(begin + _days(days), authority.not_valid_after_utc)
    certificate = _sign(_subject(names[0][:64], roles), names, own, authority, key, begin, end)
    texts = {"ca.pem": authority.public_bytes(Encoding.PEM), "node.pem": certificate.public_bytes(Encoding.PEM)}
    return texts | {"node.key": _key_text(own)}, certificate


def _sign(
    subject: x509.Name,
    names: Sequence[str],
    key: ec.EllipticCurvePrivateKey,
    authority: x509.Certificate | None,
    authority_key: ec.EllipticCurvePrivateKey,
    begin: datetime,
    end: datetime,
) -> x509.Certificate:
    """A certificate of a key; without an authority, that of an authority itself (RFC 5280, section 4.2.1)."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.x509.oid import ExtendedKeyUsageOID

    public, signs = key.public_key(), authority is None
    uses = dict.fromkeys(
        ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only"), False
    )
    usage = x509.KeyUsage(digital_signature=not signs, key_cert_sign=signs, crl_sign=signs, decipher_only=False, **uses)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(authority.subject if authority else subject)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin - SKEW)
        .not_valid_after(end)
        .add_extension(x509.BasicConstraints(ca=signs, path_length=0 if signs else None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False)
    )
    if not signs:
        both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]  # a machine may listen and join
        builder = builder.add_extension(x509.ExtendedKeyUsage(both), critical=False)
        general = [_general(name) for name in names]
        builder = builder.add_extension(x509.SubjectAlternativeName(general), critical=False)
    return builder.sign(authority_key, hashes.SHA256())


def _general(name: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _days(count: float) -> timedelta:
    return timedelta(days=count)


def _key_text(key: ec.EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _replace(path: Path, data: bytes) -> None:
    """Write a file that only its owner can read, whole or not at all."""
    draft = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        _write(draft, data)
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise ShoalError(f"cannot write {path}: {error.strerror}") from error


def _write(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(descriptor)


def _write_folder(folder: Path, files: Mapping[str, bytes]) -> Path:
    """Write files that only their owner can read into a new folder, all of them or none."""
    folder = folder.expanduser().resolve()
    taken = SettingsError(
        f"{folder} is there already and nothing in it is overwritten: for another machine give a new folder, "
        "`--for DIR`; to begin anew, remove this one"
    )
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise taken
    draft = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))  # for its owner only
        for name, data in files.items():
            _write(draft / name, data)
        draft.rename(folder)  # only an empty folder gives way
    except BaseException as error:
        if draft is not None:
            shutil.rmtree(draft, ignore_errors=True)
        if isinstance(error, OSError):
            if folder.is_dir() and any(folder.iterdir()):
                raise taken from None
            raise ShoalError(f"cannot write {folder}: {error.strerror}") from error
        raise
    return folder
