"""The command line."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from shoal.core.errors import SettingsError, ShoalError, nearest

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Distributed deep reinforcement learning: train, and see what came of it.",
)

# typer reads Optional on every Python we support.
Config = Annotated[Path, typer.Argument(help="The experiment: a YAML file such as configs/impala_cartpole.yaml.")]
Overrides = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Argument(help="Settings to change, as dotted keys: algorithm.lr=1e-3 actors=4 engine=threads."),
]
RUN = "A run: its folder, its name in runs/, or `latest`."
RunName = Annotated[str, typer.Argument(help=RUN, metavar="RUN")]
Checkpoint = Annotated[str, typer.Option(help="Which policy: `best`, `newest`, or a number of steps.")]
Seed = Annotated[int, typer.Option(help="Another seed plays other episodes.", min=0)]


@app.callback()
def prepare() -> None:
    """Send the log to the terminal."""
    from shoal.display.console import FORMAT, Terminal

    handler = Terminal()
    handler.setFormatter(FORMAT)
    logging.basicConfig(level=logging.INFO, handlers=[handler])


@app.command()
def train(
    config: Config,
    overrides: Overrides = None,
    run_dir: Annotated[Optional[Path], typer.Option(help="The run's folder; otherwise a new one in runs/.")] = None,  # noqa: UP045
) -> None:
    """Train, showing progress; ends with code 1 when a target is set and not reached.

    The first Ctrl-C saves and ends the run, the second ends it at once; `shoal resume` goes on.
    """
    from shoal.experiment import parse_overrides
    from shoal.training import train

    conclude(train(config, run_dir, **parse_overrides(overrides or [])))


@app.command()
def resume(run: RunName, overrides: Overrides = None) -> None:
    """Go on with a run where its newest checkpoint stands."""
    from shoal.experiment import parse_overrides
    from shoal.training import resume

    conclude(resume(run, **parse_overrides(overrides or [])))


def conclude(run: Any) -> None:
    """Say what came of a run."""
    from shoal.run import headline
    from shoal.runs import checkpoint

    typer.echo(headline(run.directory, run.summary), err=run.solved is False)
    curve = run.directory / "plots" / "curve.png"
    if curve.exists():
        typer.echo(f"learning curve: {curve}")
    if saved := checkpoint.paths(run.directory):
        typer.echo(f"checkpoint: {saved[-1]}")
    if run.solved is False and run.summary["stopped_by"] == "steps":
        raise typer.Exit(1)


@app.command()
def evaluate(
    run: RunName,
    episodes: Annotated[int, typer.Option(help="Whole episodes to play.", min=1)] = 100,
    checkpoint: Checkpoint = "best",
    seed: Seed = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures and every score as JSON.")] = False,
) -> None:
    """Play a policy without exploration: mean, median, a 95 % bootstrap interval, and a picture of the returns."""
    from shoal.run import Run
    from shoal.runs.directory import locate

    with progress("episodes", episodes) as told:
        score = Run(locate(run)).evaluate(episodes, checkpoint, seed, told)
    if as_json:
        parts = {
            **score.statistics,
            "metrics": dict(score.metrics),
            "cut": score.cut,
            "scores": score.scores,
            "picture": str(score.picture),
        }
        typer.echo(json.dumps({"checkpoint": score.checkpoint, **parts}, indent=2))
    else:
        typer.echo(f"{score}\nreturns: {score.picture}")


@app.command()
def play(
    run: RunName,
    video: Annotated[Optional[Path], typer.Option(help="The mp4 to write; otherwise one in the run's videos/.")] = None,  # noqa: UP045
    episodes: Annotated[int, typer.Option(help="Whole episodes to film.", min=1)] = 1,
    checkpoint: Checkpoint = "best",
    seed: Seed = 0,
    seconds: Annotated[float, typer.Option(help="The film's greatest length.", min=0.1)] = 120.0,
    record: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="A folder for one film and one JSON of actions, rewards and values per episode instead."),
    ] = None,
) -> None:
    """Film a policy as it plays without exploration."""
    from shoal.run import Run
    from shoal.runs.directory import locate

    if record is not None:
        for path in Run(locate(run)).record(record, episodes, checkpoint, seed):
            typer.echo(f"recorded: {path}")
        return
    with progress("frames", None) as told:
        path = Run(locate(run)).play(video, episodes, checkpoint, seed, seconds, told)
    typer.echo(f"video: {path}")


@app.command()
def plot(
    runs: Annotated[list[str], typer.Argument(help=RUN, metavar="RUN...")],
    out: Annotated[Optional[Path], typer.Option(help="The PNG to write.")] = None,  # noqa: UP045
) -> None:
    """Draw one run's curves; or compare several: those that differ in their seed only become mean and interval."""
    from shoal.run import Run, compare
    from shoal.runs.directory import locate

    found = [Run(locate(run)) for run in runs]
    picture = found[0].plot(out) if len(found) == 1 else compare(found, out or Path("comparison.png"))
    typer.echo(f"plot: {picture}")


@app.command()
def config(
    file: Annotated[Optional[Path], typer.Argument(help="A YAML file.")] = None,  # noqa: UP045
    overrides: Overrides = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print a JSON schema for editors instead.")] = False,
) -> None:
    """Print the whole configuration of an experiment, each setting with its sentence."""
    from shoal import experiment

    if schema:
        typer.echo(json.dumps(experiment.schema(), indent=2))
    elif file is None:
        raise SettingsError("name a YAML file, or ask for --schema")
    else:
        typer.echo(experiment.as_yaml(experiment.load(file, experiment.parse_overrides(overrides or []))), nl=False)


@app.command("list")
def list_(
    what: Annotated[Optional[str], typer.Argument(help="algorithms, engines, stores or environments; or all.")] = None,  # noqa: UP045
) -> None:
    """List what comes with Shoal: algorithms, engines, stores and environments."""
    from shoal.cli.listing import catalogue

    for line in catalogue(what):
        typer.echo(line)


@app.command()
def node(
    file: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Argument(help="The head's YAML: join where its `network` listens, by the same link."),
    ] = None,
    init: Annotated[bool, typer.Option("--init", help="Make certificates and a token for machines that join.")] = False,
    folder: Annotated[Optional[Path], typer.Option(help="The trust folder; otherwise ~/.shoal/trust.")] = None,  # noqa: UP045
    name: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(help="A host name or address of the machine, for its certificate; may be given several times."),
    ] = None,
    for_: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--for", help="With --init: a new folder for another machine, to be copied there.", metavar="DIR"),
    ] = None,
    role: Annotated[
        str, typer.Option(help="With --init --for: what that machine may be, node or head; or both: node,head.")
    ] = "node",
    rotate: Annotated[
        bool,
        typer.Option(
            "--rotate", help="Replace the token and, with --name, this machine's certificate, where ca.key is."
        ),
    ] = False,
    revoke: Annotated[
        str,
        typer.Option(help="Let in no more who shows this certificate.", metavar="FINGERPRINT|DIR"),
    ] = "",
    listen: Annotated[str, typer.Option(help="Wait at this address for a head to come.", metavar="HOST:PORT")] = "",
    join: Annotated[str, typer.Option(help="Go to the head at this address.", metavar="HOST:PORT")] = "",
    pin: Annotated[str, typer.Option(help="With --join: the fingerprint of the head's certificate.")] = "",
    token: Annotated[Optional[Path], typer.Option(help="With --pin: a file with the token.")] = None,  # noqa: UP045
    slots: Annotated[int, typer.Option(help="Workers to take; 0: one per core.", min=0)] = 0,
    allow: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(help="A package beside shoal from which workers may be made; may be given several times."),
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Send plain text, off loopback too.")] = False,
    link: Annotated[str, typer.Option(help="How frames travel: websocket, grpc or torchrpc.")] = "websocket",
    rank: Annotated[int, typer.Option(help="With --link torchrpc: which of the machines this is, from 1.", min=0)] = 0,
    world: Annotated[int, typer.Option(help="With --link torchrpc: machines in all, with the head.", min=0)] = 0,
) -> None:
    """Let this machine take part in runs over the network; with a FILE, in the run that it describes."""
    from shoal.transport.trust import FOLDER

    if file:
        from shoal.experiment import load

        network = load(file).network
        join = join or ("" if listen else network.listen)
        link, world, insecure = network.link, network.world, insecure or network.insecure
        folder = folder or (Path(network.trust) if network.trust else None)
    if init + rotate + bool(revoke) + bool(listen) + bool(join) != 1:
        raise SettingsError(
            "say what this machine shall do: --listen, --join or a file with network.listen, or --init before the "
            "first time; --rotate or --revoke to shut out a machine that was lost"
        )
    if listen or join:
        from shoal import topology
        from shoal import transport as links
        from shoal.engines import node as nodes
        from shoal.runs.provenance import usable_cores
        from shoal.transport.trust import Terms

        trust = "" if insecure or pin or not (folder or FOLDER.expanduser().is_dir()) else str(folder or FOLDER)
        secret = token.read_text().strip() if token else ""
        who = (name or [f"{socket.gethostname()}-{os.getpid()}"])[0]
        links.find(link)
        terms = Terms(who, trust, pin, secret, insecure, link, rank, world)
        nodes.work(listen, join, terms, slots or int(usable_cores()), ("shoal", *(allow or [])), topology.MODULES)
        return
    if init:
        make_trust(folder, name or [], for_, role)
    else:
        shut_out(folder or FOLDER, name or [], revoke)


def shut_out(folder: Path, names: list[str], revoked: str) -> None:
    """Revoke a certificate; or replace the token and, under names, this machine's certificate."""
    from shoal.transport.certificates import revoke, rotate

    if revoked:
        typer.echo(f"revoked {revoke(folder, revoked)}")
        typer.echo(
            f"copy {folder / 'revoked'} to the trust folders of the other machines: it counts from the next connection "
            "on\nthat machine knows the token as well: replace it with shoal node --rotate"
        )
        return
    typer.echo(f"new token in {folder}; fingerprint: {rotate(folder, names)}")
    typer.echo(f"copy {folder / 'token'} to the trust folders of the machines that stay: it counts from now on")


def make_trust(folder: Path | None, name: list[str], for_: Path | None, role: str) -> None:
    """Make a trust folder of this machine, or of another, and say what to do with it."""
    from shoal.transport.certificates import ROLES, initialise, issue
    from shoal.transport.trust import FOLDER

    roles = role.split(",")
    if unknown := [each for each in roles if each not in ROLES]:
        raise SettingsError(
            f"there is no role {unknown[0]!r}: choose of {', '.join(ROLES)}{nearest(unknown[0], ROLES)}"
        )
    where, again = (folder, f" --folder {folder}") if folder else (FOLDER, "")
    made = issue(where, for_, name, roles=roles) if for_ else initialise(where, name or [socket.gethostname()])
    typer.echo(f"made {made.folder}: {', '.join(sorted(path.name for path in made.folder.iterdir()))}")
    typer.echo(f"for {', '.join(made.names)}; until {made.expires:%Y-%m-%d}\nfingerprint: {made.fingerprint}")
    if for_:
        typer.echo(f"copy this folder to {FOLDER} on the other machine, by a way as safe as scp")
    else:
        typer.echo(
            f"for each further machine, make a folder to copy there: shoal node --init{again} --for DIR --name NAME\n"
            "or take there only the token and the fingerprint; ca.key stays here"
        )


benchmarks = typer.Typer(help="Measure engines on this machine.", no_args_is_help=True)
app.add_typer(benchmarks, name="bench")


@benchmarks.command("engines")
def bench_engines(
    names: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Argument(help="Engines, such as processes or cluster/grpc; otherwise all that can run here."),
    ] = None,
    seconds: Annotated[float, typer.Option(help="Seconds for each kind of call.", min=0.1)] = 3.0,
    json_: Annotated[bool, typer.Option("--json", help="One line of JSON for each engine instead of a table.")] = False,
) -> None:
    """Measure calls, arrays and a small training on every engine, with the same work on each."""
    from shoal.benchmarks import engines
    from shoal.benchmarks.tables import show

    chosen = engines.chosen(names or [])
    show("engines", engines.measure(chosen, seconds), len(chosen), json_)


@benchmarks.command("scale")
def bench_scale(
    engine: Annotated[str, typer.Option(help="The engine, such as processes or cluster/grpc.")] = "processes",
    world: Annotated[str, typer.Option(help="Whose experience is sent: cartpole or pong.")] = "cartpole",
    actors: Annotated[str, typer.Option(help="Numbers of actors.")] = "1,2,4,8,16,32,64,128,256",
    rate: Annotated[float, typer.Option(help="Items that each actor sends in a second.", min=0.01)] = 5.0,
    seconds: Annotated[float, typer.Option(help="Seconds for each number of actors.", min=0.1)] = 10.0,
    json_: Annotated[bool, typer.Option("--json", help="One line of JSON for each row instead of a table.")] = False,
) -> None:
    """Measure the head against more and more actors, which send recorded experience and play nothing."""
    from shoal.benchmarks import engines, scale
    from shoal.benchmarks.tables import show

    (name,) = engines.chosen([engine])
    if world not in scale.WORLDS:
        raise SettingsError(f"there is no world {world!r}: choose one of {', '.join(scale.WORLDS)}")
    try:
        counts = tuple(int(part) for part in actors.split(","))
    except ValueError:
        counts = (0,)
    if min(counts) < 1:
        raise SettingsError(f"--actors {actors}: give numbers from 1 on, with commas between them")
    show(f"{world} on {name}", scale.measure(name, world, counts, rate, seconds), len(counts), json_)


@app.command()
def doctor() -> None:
    """Look over this machine: what is missing, and the command that mends it."""
    from shoal.cli.doctor import check, exit_code, show

    findings = check()
    show(findings)
    raise typer.Exit(exit_code(findings))


@contextmanager
def progress(what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """A bar on the terminal that hears how much is done; nothing where there is no terminal."""
    if not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done)


def main() -> None:
    """Run the command line; an error that a user can mend is told in one message, without a traceback."""
    # A user's own environments and algorithms are found where they are, but last: nothing here replaces a library.
    sys.path[:] = [*filter(None, sys.path)]
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what is in the background without it
    try:
        app()
    except SettingsError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)
    except ShoalError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        sys.exit(130)
