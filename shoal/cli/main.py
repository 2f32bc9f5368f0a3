"""The command line."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from shoal.cli import bench, several
from shoal.cli.explain import explain
from shoal.cli.node import node
from shoal.cli.watch import watch
from shoal.core.errors import SettingsError, ShoalError

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Distributed deep reinforcement learning: train policies, evaluate them, watch them play.",
)


def known_configs(begun: str) -> list[str]:
    """Names of experiments that come with Shoal, for the shell to complete."""
    from shoal import configs

    return [name for name in configs.names() if name.startswith(begun)]


def known_runs(begun: str) -> list[str]:
    """Names of runs in runs/, for the shell to complete."""
    from shoal.runs.directory import CONFIG, RUNS

    return [
        name for name in ("latest", *(path.parent.name for path in RUNS.glob(f"*/{CONFIG}"))) if name.startswith(begun)
    ]


Config = Annotated[
    Path,
    typer.Argument(
        help="The experiment: a YAML file, or the name of one that comes with Shoal: impala_cartpole.",
        autocompletion=known_configs,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Settings to override, as dotted keys: algorithm.lr=1e-3 actors=4 engine=threads."),
]
RUN = "A run: its folder, its name in runs/, or `latest`."
RunName = Annotated[str, typer.Argument(help=RUN, metavar="RUN", autocompletion=known_runs)]
Checkpoint = Annotated[str, typer.Option(help="Which policy: `best`, `newest`, or a number of steps.")]
Watch = Annotated[bool, typer.Option("--watch", help="Show the run in a browser; the address is printed.")]
Trace = Annotated[
    bool, typer.Option("--trace", help="Write who did what when to the run's trace.json, a timeline for Perfetto.")
]
Seed = Annotated[int, typer.Option(help="Seed of the episodes.", min=0)]


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
    run_dir: Annotated[Path | None, typer.Option(help="The run's folder; default: a new one in runs/.")] = None,
    seeds: Annotated[
        str | None, typer.Option(help="Train with several seeds, in folders below: a number of them, or such as 0,1,2.")
    ] = None,
    at_once: Annotated[int, typer.Option(help="With --seeds: runs at a time.", min=1)] = 1,
    watch: Watch = False,
    trace: Trace = False,
) -> None:
    """Train and show progress; exits with 1 if a target is set and was not reached.

    The first Ctrl-C saves a checkpoint and stops the run, the second stops it at once; `shoal resume` continues it.
    """
    from shoal.configs import parse_overrides
    from shoal.training import train

    if seeds is not None and watch:
        raise SettingsError("--watch shows one run: with --seeds use `shoal watch` on the runs' folders")
    if seeds is not None:
        if trace:
            raise SettingsError("--trace is for one run: give the seed as seed=0 and leave out --seeds")
        several.train_seeds(config, overrides or [], seeds, run_dir, at_once)
        return
    words, named = overrides or [], "=" not in str(config)  # else it is all overrides: environment=… algorithm=ppo
    changes = parse_overrides(words if named else [str(config), *words])
    conclude(train(config if named else None, run_dir, watch=watch, trace=trace, **changes))


@app.command()
def resume(run: RunName, overrides: Overrides = None, watch: Watch = False, trace: Trace = False) -> None:
    """Continue a run from its newest checkpoint."""
    from shoal.configs import parse_overrides
    from shoal.training import resume

    conclude(resume(run, watch=watch, trace=trace, **parse_overrides(overrides or [])))


def conclude(run: Any) -> None:
    """Print the result of a run."""
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
    episodes: Annotated[int, typer.Option(help="Number of episodes to play.", min=1)] = 100,
    checkpoint: Checkpoint = "best",
    seed: Seed = 0,
    stage: Annotated[
        int | None, typer.Option(help="Stage of the curriculum, counted from 0; default: the last.", min=0)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the statistics and every score as JSON.")] = False,
) -> None:
    """Play a policy without exploration: mean, median, 95 % bootstrap interval, and a histogram of the returns."""
    from shoal.display.console import progress
    from shoal.run import Run
    from shoal.runs.directory import locate

    with progress("episodes", episodes) as report:
        score = Run(locate(run)).evaluate(episodes, checkpoint, seed, report, stage)
    if as_json:
        parts = {
            **score.statistics,
            "metrics": dict(score.metrics),
            "cut": score.cut,
            "scores": score.scores,
            "picture": score.picture and str(score.picture),
        }
        typer.echo(json.dumps({"checkpoint": score.checkpoint, **parts}, indent=2))
    else:
        drawn = score.picture or "not drawn: pip install 'shoal[plots]'"
        typer.echo(f"{score}\nhistogram: {drawn}")


@app.command()
def play(
    run: RunName,
    video: Annotated[Path | None, typer.Option(help="The mp4 to write; default: one in the run's videos/.")] = None,
    episodes: Annotated[int, typer.Option(help="Number of episodes to film.", min=1)] = 1,
    checkpoint: Checkpoint = "best",
    seed: Seed = 0,
    seconds: Annotated[float, typer.Option(help="Maximum length of the video.", min=0.1)] = 120.0,
    record: Annotated[
        Path | None,
        typer.Option(help="Instead: a folder for a video and a JSON of actions, rewards and values per episode."),
    ] = None,
) -> None:
    """Film a policy playing without exploration."""
    from shoal.display.console import progress
    from shoal.run import Run
    from shoal.runs.directory import locate

    if record is not None:
        for path in Run(locate(run)).record(record, episodes, checkpoint, seed):
            typer.echo(f"recorded: {path}")
        return
    with progress("frames", None) as report:
        path = Run(locate(run)).play(video, episodes, checkpoint, seed, seconds, report)
    typer.echo(f"video: {path}")


@app.command()
def export(
    run: RunName,
    onnx: Annotated[bool, typer.Option("--onnx", help="For ONNX Runtime and whatever else reads ONNX.")] = False,
    torch: Annotated[bool, typer.Option("--torch", help="For `torch.export.load`.")] = False,
    checkpoint: Checkpoint = "best",
    out: Annotated[Path | None, typer.Option(help="The file to write; default: one in the run's exports/.")] = None,
) -> None:
    """Write a policy as a file that runs without Shoal, with a JSON that describes it, and check the file."""
    from shoal.run import Run
    from shoal.runs.directory import locate

    if onnx == torch:
        raise SettingsError("give either --onnx or --torch")
    typer.echo(Run(locate(run)).export("onnx" if onnx else "torch", checkpoint, out))


@app.command()
def plot(
    runs: Annotated[list[str], typer.Argument(help=RUN, metavar="RUN...", autocompletion=known_runs)],
    out: Annotated[
        Path | None, typer.Option(help="The PNG to write; default: the run's plots/curve.png, or comparison.png.")
    ] = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(help="Of one run, draw only this: return, length, value_loss, q, …; may be repeated."),
    ] = None,
) -> None:
    """Plot one run, or compare several: runs that differ only in their seed become a mean with an interval."""
    from shoal.run import Run, compare
    from shoal.runs.directory import locate

    found = [Run(locate(run)) for run in runs]
    if metric and (len(found) > 1 or (out and len(metric) > 1)):
        raise SettingsError("--metric is for one run, and each metric becomes a file: leave out --out, or give one")
    if metric:
        for name in metric:
            typer.echo(f"plot: {found[0].plot_metric(name, out)}")
        return
    picture = found[0].plot(out) if len(found) == 1 else compare(found, out or Path("comparison.png"))
    typer.echo(f"plot: {picture}")


@app.command()
def table(
    run: RunName,
    every: Annotated[
        int | None, typer.Option(help="Episodes between two rows; default: as many as give 20 rows.", min=1)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON for each row instead.")] = False,
) -> None:
    """Print how a run went: returns, lengths, losses and values as means over the last 100 episodes."""
    from shoal.bench.tables import show
    from shoal.run import Run
    from shoal.runs.directory import locate

    found = Run(locate(run))
    show(found.title, found.table(every), as_json)


@app.command()
def config(
    file: Annotated[Path | None, typer.Argument(help="A YAML file, or the name of one that comes with Shoal.")] = None,
    overrides: Overrides = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print a JSON schema for editors instead.")] = False,
) -> None:
    """Print the full configuration of an experiment, each setting with its description."""
    from shoal import configs, experiment, writing

    if schema:
        typer.echo(json.dumps(writing.schema(), indent=2))
    elif file is None:
        raise SettingsError("give a YAML file, or --schema")
    else:
        typer.echo(writing.as_yaml(experiment.load(file, configs.parse_overrides(overrides or []))), nl=False)


@app.command("list")
def list_(
    what: Annotated[
        str | None, typer.Argument(help="algorithms, engines, stores, environments or configs; default: all.")
    ] = None,
) -> None:
    """List the algorithms, engines, stores, environments and configs that come with Shoal."""
    from shoal.cli.listing import catalogue

    for line in catalogue(what):
        typer.echo(line)


app.command()(several.sweep)
app.command()(several.compare)
app.command()(watch)
app.command()(explain)
app.command()(node)
app.add_typer(bench.app, name="bench")


@app.command()
def doctor() -> None:
    """Check this machine: what is missing, and the command to fix it."""
    from shoal.cli.doctor import check, exit_code, show

    findings = check()
    show(findings)
    raise typer.Exit(exit_code(findings))


def main() -> None:
    """Run the command line; an error that a user can fix is one message, without a traceback."""
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
