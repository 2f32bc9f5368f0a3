"""Findings as a table that grows while they are made, or as lines of JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any


def show(title: str, rows: Iterable[dict[str, Any]], count: int, as_json: bool) -> None:
    """Print every row; on a terminal a line tells how far it is."""
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

    console, found = Console(width=None if Console().is_terminal else 160), []
    with Progress(console=Console(stderr=True), transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=count)
        for row in rows:
            progress.advance(task)
            found.append(row)
            if as_json:
                print(json.dumps(row), flush=True)
    if as_json or not found:
        return
    table = Table(title=title)
    for name in found[0]:
        table.add_column(name.replace("_", " "), justify="left" if isinstance(found[0][name], str) else "right")
    for row in found:
        table.add_row(*(_text(value) for value in row.values()))
    console.print(table)


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
