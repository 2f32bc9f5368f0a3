"""Commands over several runs: sweeps, comparisons, and one experiment with several seeds."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from shoal.core.errors import SettingsError

log = logging.getLogger("shoal")
RUNS = "Runs: their folders, or their names in runs/."


@contextmanager
def stopped_in_order() -> Iterator[None]:
    """Let SIGTERM end what was started, as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def sweep(
    file: Annotated[Path, typer.Argument(help="The sweep: a YAML file with an experiment and settings to search.")],
    folder: Annotated[
        Path | None, typer.Option(help="Where its trials are; default: sweeps/ and the file's name.")
    ] = None,
    show: Annotated[bool, typer.Option("--show", help="Only show what came of it so far.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON for each trial instead.")] = False,
) -> None:
    """Search for the best settings: many runs of one experiment, several at once, by Optuna.

    Started again, it continues: trials that have ended stay, and those that were running go on. Ctrl-C stops it in
    order.
    """
    from shoal.bench.tables import show as show_table
    from shoal.display.console import progress
    from shoal.sweeps import results, running
    from shoal.sweeps.plan import read_plan

    plan = read_plan(file)
    place = folder or Path("sweeps") / file.stem
    if not show:
        with stopped_in_order(), progress("trials", plan.trials) as report:
            running.sweep(plan, place, report)
    trials = results.opened(plan, place).trials()
    rows = results.table(plan, place, trials)
    show_table(place.name, rows if as_json else results.readable(rows, plan), as_json)
    for path in results.write(plan, place, trials):
        typer.echo(f"{'best settings' if path.suffix == '.yaml' else 'plot'}: {path}", err=as_json)
    if not show and not any(trial.state == "complete" for trial in trials):
        raise typer.Exit(1)


def compare(
    runs: Annotated[list[str], typer.Argument(help=RUNS, metavar="RUN...")],
    out: Annotated[Path, typer.Option(help="The PNG to write.")] = Path("compare.png"),
    low: Annotated[
        list[str] | None, typer.Option(help="The return that counts as 0: a number, or ENVIRONMENT=NUMBER.")
    ] = None,
    high: Annotated[list[str] | None, typer.Option(help="The return that counts as 1, likewise.")] = None,
    normalise: Annotated[
        bool, typer.Option("--normalise", help="Count the lowest and highest return on each environment as 0 and 1.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON for each row instead.")] = False,
) -> None:
    """Compare groups of runs: interquartile mean, mean and probability of improvement, with 95 % intervals.

    Runs that differ only in their seed are one group.
    """
    from shoal.bench.tables import show
    from shoal.comparison import compared
    from shoal.display.plots import available
    from shoal.run import Run
    from shoal.runs.directory import locate

    result = compared([Run(locate(run)) for run in runs], low or (), high or (), normalise)
    show("evaluation returns", result.scores, as_json)
    show("probability of improvement", result.pairs, as_json)
    for note in result.notes:
        typer.echo(note, err=True)
    drawn = result.plot(out) if available() else "not drawn: pip install 'shoal[plots]'"
    typer.echo(f"plot: {drawn}", err=as_json)


def parse_seeds(text: str) -> list[int]:
    """Read `3`, which means 0, 1 and 2, or `0,4,7`."""
    try:
        numbers = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        numbers = []
    seeds = [*range(numbers[0])] if len(numbers) == 1 and "," not in text else numbers
    if not seeds or min(seeds) < 0 or len({*seeds}) < len(seeds):
        raise SettingsError(f"--seeds {text}: give a number of seeds such as 3, or different seeds such as 0,1,2")
    return seeds


def train_seeds(config: Path, overrides: Sequence[str], text: str, run_dir: Path | None, at_once: int) -> None:
    """Train one experiment with several seeds, each a run of its own, and show them together."""
    from shoal.bench.tables import show
    from shoal.display.console import progress
    from shoal.runs.launching import carry_out
    from shoal.seeds import jobs, plot, row, together

    seeds = parse_seeds(text)
    wanted = jobs(config, overrides, seeds, run_dir)
    rows: dict[int, dict[str, Any]] = {}
    finishing = closing(carry_out(wanted, at_once))
    with stopped_in_order(), progress("runs", len(seeds)) as report, finishing as finished:
        for job, complete in finished:
            found = row(job, wanted[job], complete)
            log.info("%s: %s, last evaluation %s", job.folder, found["outcome"], found["last"])
            rows[found["seed"]] = found
            report(len(rows))
    show("seeds", [rows[seed] for seed in seeds], False)
    typer.echo(together([*rows.values()]))
    if picture := plot([job.folder for job in wanted]):
        typer.echo(f"plot: {picture}")
    if any(one["outcome"] not in ("done", "solved") for one in rows.values()):
        raise typer.Exit(1)
