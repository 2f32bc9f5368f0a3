"""The command line."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Annotated, Optional

import typer

from shoal.core.errors import SettingsError, ShoalError
from shoal.core.types import INTERRUPTED

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Distributed deep reinforcement learning: train, and see what came of it.",
)

Config = Annotated[Path, typer.Argument(help="The experiment: a YAML file such as configs/impala_cartpole.yaml.")]
Overrides = Annotated[
    Optional[list[str]],  # noqa: UP045 - typer reads this form on every Python we support
    typer.Argument(help="Settings to change, as dotted keys: algorithm.lr=1e-3 actors=4 engine=threads."),
]


@app.callback()
def prepare() -> None:
    """Send the log to the terminal."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr)


@app.command()
def train(
    config: Config,
    overrides: Overrides = None,
    run_dir: Annotated[Optional[Path], typer.Option(help="The run's folder; otherwise a new one in runs/.")] = None,  # noqa: UP045
) -> None:
    """Train, showing progress; ends non-zero when a target is set and not reached."""
    from shoal.experiment import parse_overrides
    from shoal.training import train

    run = train(config, run_dir, **parse_overrides(overrides or []))
    summary = run.summary
    best = "none" if summary["best_evaluation"] is None else f"{summary['best_evaluation']:.1f}"
    line = (
        f"{summary['steps']:,} steps in {summary['seconds']:.1f} s, best evaluation {best}, results in {run.directory}"
    )
    if summary["stopped_by"] == INTERRUPTED:
        typer.echo(f"interrupted: {line}")
    elif run.solved is None:
        typer.echo(f"done: {line}")
    elif run.solved:
        typer.echo(f"solved: {line}")
    else:
        typer.echo(f"NOT solved: {line}", err=True)
        raise typer.Exit(1)


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


def main() -> None:
    """Run the command line; an error that a user can mend is told in one message, without a traceback."""
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
