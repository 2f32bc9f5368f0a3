"""`shoal node`: hold workers for a head on another machine, and manage the certificates that both trust."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Annotated

import typer

from shoal.core.errors import SettingsError, nearest


def node(
    file: Annotated[
        Path | None, typer.Argument(help="The YAML file that the head trains: join at its network.listen.")
    ] = None,
    init: Annotated[bool, typer.Option("--init", help="Create certificates and a token for machines to join.")] = False,
    folder: Annotated[Path | None, typer.Option(help="The trust folder; default: ~/.shoal/trust.")] = None,
    name: Annotated[
        list[str] | None,
        typer.Option(
            help="With --init and --rotate: a host name or address for the certificate; can be repeated. "
            "Otherwise: the name of this node."
        ),
    ] = None,
    for_: Annotated[
        Path | None,
        typer.Option("--for", help="With --init: a new folder to copy to another machine.", metavar="DIR"),
    ] = None,
    role: Annotated[str, typer.Option(help="With --init --for: node, head, or both as node,head.")] = "node",
    rotate: Annotated[
        bool,
        typer.Option(
            "--rotate", help="Replace the token and, with --name, this machine's certificate; needs ca.key here."
        ),
    ] = False,
    revoke: Annotated[
        str,
        typer.Option(help="Refuse this certificate from now on.", metavar="FINGERPRINT|DIR"),
    ] = "",
    listen: Annotated[str, typer.Option(help="Listen at this address for a head.", metavar="HOST:PORT")] = "",
    join: Annotated[str, typer.Option(help="Connect to the head at this address.", metavar="HOST:PORT")] = "",
    pin: Annotated[str, typer.Option(help="With --join: the fingerprint of the head's certificate.")] = "",
    token: Annotated[Path | None, typer.Option(help="With --pin or --insecure: a file with the token.")] = None,
    slots: Annotated[int, typer.Option(help="Number of workers to hold; 0: one per core.", min=0)] = 0,
    allow: Annotated[
        list[str] | None,
        typer.Option(help="A package besides shoal from which workers may be created; can be repeated."),
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Allow plain text beyond loopback.")] = False,
    link: Annotated[str, typer.Option(help="The transport: websocket, grpc or torchrpc.")] = "websocket",
    rank: Annotated[int, typer.Option(help="With --link torchrpc: the rank of this machine, from 1.", min=0)] = 0,
    world: Annotated[
        int, typer.Option(help="With --link torchrpc: the number of machines, including the head.", min=0)
    ] = 0,
) -> None:
    """Hold workers for runs on another machine; with FILE, for the run it describes."""
    from shoal.transport.trust import FOLDER

    if file:
        from shoal.experiment import load

        network = load(file).network
        join = join or ("" if listen else network.listen)
        link, world, insecure = network.link, network.world, insecure or network.insecure
        folder = folder or (Path(network.trust) if network.trust else None)
    if init + rotate + bool(revoke) + bool(listen) + bool(join) != 1:
        raise SettingsError(
            "choose what to do: --listen, --join or a file with network.listen to hold workers; --init to create "
            "certificates first; --rotate or --revoke to shut out a machine"
        )
    if init:
        make_trust(folder, name or [], for_, role)
    elif listen or join:
        from shoal import topology, transport
        from shoal.core.machine import cores
        from shoal.engines.node import work
        from shoal.transport.trust import Terms

        trust = "" if insecure or pin or not (folder or FOLDER.expanduser().is_dir()) else str(folder or FOLDER)
        secret = token.read_text().strip() if token else ""
        who = (name or [f"{socket.gethostname()}-{os.getpid()}"])[0]
        transport.find(link)
        terms = Terms(who, trust, pin, secret, insecure, link, rank, world)
        work(listen, join, terms, slots or cores(), ("shoal", *(allow or [])), topology.MODULES)
    else:
        shut_out(folder or FOLDER, name or [], revoke)


def shut_out(folder: Path, names: list[str], revoked: str) -> None:
    """Revoke a certificate; or replace the token and, under names, this machine's certificate."""
    from shoal.transport.certificates import revoke, rotate

    if revoked:
        typer.echo(f"revoked {revoke(folder, revoked)}")
        typer.echo(
            f"copy {folder / 'revoked'} to the trust folders of the other machines: it applies from the next "
            "connection\nthat machine still knows the token: replace it with shoal node --rotate"
        )
        return
    typer.echo(f"new token in {folder}; fingerprint: {rotate(folder, names)}")
    typer.echo(f"copy {folder / 'token'} to the trust folders of the remaining machines: the old one no longer works")


def make_trust(folder: Path | None, name: list[str], for_: Path | None, role: str) -> None:
    """Create a trust folder for this machine, or for another, and say what to do with it."""
    from shoal.transport.certificates import ROLES, initialise, issue
    from shoal.transport.trust import FOLDER

    roles = role.split(",")
    if unknown := [each for each in roles if each not in ROLES]:
        raise SettingsError(f"unknown role {unknown[0]!r}: choose from {', '.join(ROLES)}{nearest(unknown[0], ROLES)}")
    where, again = (folder, f" --folder {folder}") if folder else (FOLDER, "")
    made = issue(where, for_, name, roles=roles) if for_ else initialise(where, name or [socket.gethostname()])
    typer.echo(f"created {made.folder}: {', '.join(sorted(path.name for path in made.folder.iterdir()))}")
    typer.echo(f"for {', '.join(made.names)}; valid until {made.expires:%Y-%m-%d}\nfingerprint: {made.fingerprint}")
    if for_:
        typer.echo(f"copy this folder to {FOLDER} on the other machine over a secure channel, such as scp")
    else:
        typer.echo(
            f"for each other machine, create a folder to copy there: shoal node --init{again} --for DIR --name NAME\n"
            "or copy only the token and the fingerprint; ca.key stays here"
        )
