"""On what terms machines meet: names, addresses, and by what they know each other."""

from __future__ import annotations

import ipaddress
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shoal.core.errors import SettingsError, ShoalError
from shoal.transport.certificates import Trust, read_token
from shoal.transport.handshake import TOKEN_LENGTH

log = logging.getLogger("shoal")
# On loopback without a trust folder anyone on the machine may connect, so there is no secret to keep.
OPEN = "anyone on this machine"


@dataclass(frozen=True)
class Terms:
    """On what terms this machine meets others."""

    name: str
    trust: str = ""  # folder of certificates and token; empty: none
    pin: str = ""  # fingerprint that the other's certificate must have, instead of the authority's word
    token: str = ""  # where there is no folder
    insecure: bool = False  # plain text off loopback
    link: str = "websocket"
    rank: int = 0  # of this machine among `world`, for links that count machines
    world: int = 0
    role: Literal["head", "node"] = "node"  # what this machine is, and so what the other one has to be

    def __post_init__(self) -> None:
        """Refuse what contradicts itself."""
        if self.insecure and self.pin:
            raise SettingsError(
                "--insecure sends plain text, in which nobody shows the certificate that --pin names: leave out one "
                "of the two"
            )

    def warn(self) -> None:
        """Say where nothing is encrypted because somebody wished so."""
        if self.insecure:
            others = "" if self.token or self.trust else "; without a token, whoever reaches the port can take part"
            log.warning("insecure: nothing is encrypted, and whoever is on the way can read along%s", others)

    @property
    def secure(self) -> bool:
        """Whether this machine, when it connects, wants TLS."""
        return bool((self.trust or self.pin) and not self.insecure)

    @property
    def other(self) -> str:
        """What the other side has to be."""
        return "node" if self.role == "head" else "head"

    def certificates(self) -> Trust | None:
        """The files of the trust folder, if there is one."""
        return Trust.inside(Path(self.trust)) if self.trust else None

    def secret(self) -> str:
        """The token that both sides must know."""
        token = self.token or (read_token(Path(self.trust)) if self.trust else OPEN)
        if len(token) < TOKEN_LENGTH:
            raise SettingsError(f"the token has {len(token)} characters, and needs {TOKEN_LENGTH} or more")
        return token

    def check(self, address: str) -> None:
        """Refuse plain text off loopback unless it is asked for in so many words."""
        if not (self.trust or self.pin or self.insecure or is_loopback(split(address)[0])):
            raise SettingsError(
                f"{address} is not on this machine, and nothing would be encrypted: make certificates with "
                "`shoal node --init` and name their folder, or say --insecure (network.insecure=true) if you mean it"
            )


def split(address: str) -> tuple[str, int]:
    """Host and port of `host:port` or `[v6]:port`."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ShoalError(f"{address!r} is not an address: write HOST:PORT, such as 192.0.2.7:7700")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Whether a host is this machine itself."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def line(text: str) -> str:
    """What a stranger says, as a line that may be shown."""
    return "".join(letter if letter.isascii() and letter.isprintable() else " " for letter in text[:200]).strip()
