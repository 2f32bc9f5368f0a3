"""The command that shows runs in a browser."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Annotated, Any

import typer

from shoal.cli.several import RUNS, stopped_in_order


def watch(
    runs: Annotated[list[str], typer.Argument(help=RUNS, metavar="RUN...")],
    port: Annotated[int, typer.Option(help="The port on this machine; 0: any that is free.", min=0, max=65535)] = 0,
    play: Annotated[bool, typer.Option(help="Let the newest policy play on the page while somebody looks.")] = True,
) -> None:
    """Show runs in a browser, while they train and afterwards: curves, who waits on whom, the policy playing.

    The page is for this machine only; its address has a token in it. Ctrl-C ends it.
    """
    from shoal.core.machine import give_way
    from shoal.display import advice
    from shoal.display.page.server import Page, Server
    from shoal.runs.directory import locate

    folders = [*dict.fromkeys(locate(run).resolve() for run in runs)]
    give_way(10)
    page = Page(folders, advice.lines, played if play else None)
    with stopped_in_order():
        try:
            with Server(page, port) as server:
                typer.echo(f"page: {server.address}")
                typer.echo(
                    f"from another machine: ssh -N -L {server.server_port}:127.0.0.1:{server.server_port} HOST, "
                    "then the same address",
                    err=True,
                )
                server.serve_forever()
        except KeyboardInterrupt:
            typer.echo("the page has ended", err=True)
        finally:
            page.close()


def played(folder: Path, policy: str) -> subprocess.Popen[bytes]:
    """Start the program that plays a policy of a run."""
    from shoal.runs.launching import launch

    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    code = "from shoal.playing import main; main()"
    return launch(str(folder), policy, code=code, text=False, start_new_session=True, **pipes)
