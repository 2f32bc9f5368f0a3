"""Results as tables, or as lines of JSON."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable
from typing import Any

from shoal.bench.measuring import Row
from shoal.core import machine


def about() -> Row:
    """What the numbers were measured on, and how busy it was before."""
    packages = {name: machine.version(name) for name in ("torch", "numpy", "gymnasium", "ale-py")}
    cores, load = machine.usable_cores(), os.getloadavg()[0]
    return {
        "processor": machine.processor(),
        "cores": cores,
        "load": load,
        "python": platform.python_version(),
        **packages,
    }


def show(title: str, rows: Iterable[Row], as_json: bool, total: int | None = None) -> None:
    """Print rows as one table, or each as a line of JSON as soon as it is there; a terminal shows how many are done."""
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

    console, found = Console(width=None if Console().is_terminal else 160), []
    with Progress(
        console=Console(stderr=True), transient=True, disable=not (total and console.is_terminal)
    ) as progress:
        task = progress.add_task(title, total=total)
        for row in rows:
            progress.advance(task)
            found.append(row)
            if as_json:
                print(json.dumps({"table": title, **row}), flush=True)
    if as_json or not found:
        return
    table = Table(title=title, title_justify="left")
    for name, value in found[-1].items():
        table.add_column(name.replace("_", " "), justify="left" if isinstance(value, str) else "right")
    for row in found:
        table.add_row(*(_text(row.get(name)) for name in found[-1]))
    console.print(table)


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return "" if value is None else f"{value:,}" if type(value) is int else str(value)
