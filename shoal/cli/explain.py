"""The command that says what limits a run, and what to change."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from shoal.display.facts import Facts


def explain(
    run: Annotated[str, typer.Argument(help="A run: its folder, its name in runs/, or `latest`.", metavar="RUN")],
    as_json: Annotated[bool, typer.Option("--json", help="Print what was found as JSON.")] = False,
) -> None:
    """Say what limits a run's speed, what its learning lacks, and which setting to change.

    It reads the run's folder only, while the run trains or afterwards.
    """
    from shoal.display import advice
    from shoal.display.facts import Facts
    from shoal.runs import directory

    folder = directory.locate(run)
    facts = Facts.of(folder)
    found = advice.advise(facts)
    if as_json:
        typer.echo(json.dumps([each.as_dict() for each in found], indent=2))
        return
    show_workers(facts)
    if not found:
        typer.echo(f"\n{advice.enough(facts) or 'nothing to change: no rule finds fault with this run'}")
        return
    for title, part in (("speed", True), ("learning", False)):
        if lines := [each for each in found if (each.gain is not None) is part]:
            typer.echo(f"\n{title}")
        for each in lines:
            typer.echo(f"- {each}")
    if changes := found[0].changes:
        words = " ".join(shlex.quote(f"{key}={advice.shown(value)}") for key, value in changes.items())
        typer.echo(f"\ntry the first: shoal train {folder / directory.CONFIG} {words}")


def show_workers(facts: Facts) -> None:
    """Print how the workers spend their time, and how many cores that takes."""
    from rich.console import Console

    from shoal.display.panel import MANY, workers

    console = Console()
    for line in workers(facts.workers, min(console.width, 120), MANY):
        line.rstrip()
        console.print(line)
    for role in ("learner", facts.players):
        parts = {name: facts.part(role, name) for each in facts.role(role) for name in each.get("parts") or {}}
        words = ", ".join(f"{name} {part:.0%}" for name, part in sorted(parts.items(), key=lambda item: -item[1])
                          if part >= 0.01)  # fmt: skip
        if words:
            console.print(f"{role}'s work: {words}", highlight=False)
    if facts.workers:
        console.print(f"cores: {facts.cores - facts.idle_cores:.1f} of {facts.cores:g} in use", highlight=False)
