"""Run benchmarks by name, print a table of each, and one line of JSON at the end."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from statistics import median, median_low
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import peers, replay, training
from bench.actors import actors
from bench.calls import calls
from bench.limits import limits
from bench.links import links

Tables = dict[str, list[dict[str, Any]]]
console = Console(width=None if os.isatty(1) else 160)


def train_all(configs: list[str], options: argparse.Namespace) -> Tables:
    """Ours and the peers' in turn, as often as there are rounds; a row is the round of the median rate."""
    small = options.smallest
    window = min(options.seconds, 5.0)
    bounds = {config: limits(config, window, small) for config in configs}
    rivals = [(config, *peer) for config in configs for peer in peers.TRAINING.get(config, ())]
    rivals = rivals if options.peers else []
    found: Tables = {name: [] for name in (*configs, *(rival[1] for rival in rivals))}
    for _ in range(options.rounds):
        for config in configs:
            found[config].append(training.measure(config, options.seconds, small))
        for _, name, virtual, words in rivals:
            found[name].append(peers.train(options.peers, virtual, words, options.seconds))
    tables: Tables = {"training": [], "limits": [], "workers": [], "peers": []}
    for config in configs:
        row = _middle(found[config])
        tables["workers"] += [{"config": config, **worker} for worker in row.pop("workers")]
        for name in ("environment_one_core", "environment_all_cores", "limit"):
            row[f"x_{name}"] = row["steps_per_s"] / bounds[config][name]
        tables["training"].append({"config": config, **row})
        tables["limits"].append({"config": config, **bounds[config]})
    for config, name, *_ in rivals:
        pairs = [*zip(found[config], found[name], strict=True)]
        ratios = {
            f"x_{key}": median(our[key] / their[key] for our, their in pairs)
            for key in ("steps_per_s", "first_update_s", "pss_mb")
        }
        tables["peers"].append({"peer": name, **_middle(found[name]), "ours": config, **ratios})
    return tables


def _middle(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    rate = median_low(found["steps_per_s"] for found in rounds)
    return dict(next(found for found in rounds if found["steps_per_s"] == rate))


def solve_all(options: argparse.Namespace) -> Tables:
    """Each seed by everyone in turn."""
    rows: list[dict[str, Any]] = []
    seeds, changes = ((0,), ("steps=1000",)) if options.smallest else ((0, 1, 2), ())
    for seed in seeds:
        rows += [training.solve(config, seed, *changes) for config in ("ppo_cartpole", "impala_cartpole")]
        rows += [peers.solve(options.peers, seed)] if options.peers else []
    names = dict.fromkeys(row["who"] for row in rows)
    middle = {name: median(row["seconds"] for row in rows if row["who"] == name) for name in names}
    rival = middle.get(peers.SOLVING)
    medians = [{"who": who, "seconds": s, "x_peer": rival and s / rival} for who, s in middle.items()]
    return {"seeds": rows, "medians": medians}


BENCHMARKS: dict[str, Callable[[argparse.Namespace], Tables]] = {
    "cartpole": lambda options: train_all(["impala_cartpole"], options),
    "pong": lambda options: train_all(["impala_pong", "ppo_pong"], options),
    "dqn": lambda options: train_all(["dqn_pong"], options),
    "solve": solve_all,
    "calls": lambda options: calls(options.seconds),
    "links": lambda options: links(options.seconds),
    "actors": lambda options: actors(options.seconds),
    "replay": lambda options: {
        "replay": replay.measure_all(min(options.seconds, 3.0), options.peers, options.smallest)
    },
}


def machine() -> dict[str, Any]:
    """What the figures were taken on, and how busy it was before."""
    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    packages = {name: version(name) for name in ("torch", "numpy", "gymnasium", "ale-py")}
    about = {
        "processor": model and model[1],
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
    }
    return about | {"python": platform.python_version()} | packages


def show(title: str, rows: list[dict[str, Any]]) -> None:
    """Print rows as a table."""
    table = Table(title=title, title_justify="left")
    for column, value in rows[-1].items():
        table.add_column(column.replace("_", " "), justify="left" if isinstance(value, str) else "right")
    for row in rows:
        table.add_row(*(_cell(row.get(column)) for column in rows[-1]))
    console.print(table)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return "" if value is None else f"{value:,}" if type(value) is int else str(value)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help=f"any of {', '.join(BENCHMARKS)}; none: all")
    parser.add_argument("--seconds", type=float, default=30.0, help="length of each measured window")
    parser.add_argument("--rounds", type=int, default=1, help="how often training is measured, peers in turn")
    parser.add_argument("--peers", type=Path, help="folder of peers' drivers and environments sb3 and sf")
    parser.add_argument(
        "--smallest", action="store_true", help="as little as shows that all runs; its figures say nothing"
    )
    parser.add_argument("--json", type=Path, help="file for the JSON document")
    return parser


def main() -> None:
    """Parse the command line and run."""
    options = parser().parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended too
    if unknown := [name for name in options.names if name not in BENCHMARKS]:
        parser().error(f"unknown benchmark {unknown[0]!r}: choose from {', '.join(BENCHMARKS)}")
    if options.peers is None:
        console.print("peers: skipped, since --peers names no folder with their drivers")
    document: dict[str, Any] = {"machine": machine(), "seconds": options.seconds, "rounds": options.rounds}
    show("machine", [document["machine"]])
    for name in options.names or BENCHMARKS:
        document[name] = {title: rows for title, rows in BENCHMARKS[name](options).items() if rows}
        for title, rows in document[name].items():
            show(f"{name}: {title}", rows)
        if options.json:  # after each, so that an interrupted run keeps what it has
            options.json.write_text(json.dumps(document, indent=2) + "\n")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
