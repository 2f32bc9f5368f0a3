"""A run as a table: how it stood after every so many episodes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from shoal.core.errors import ShoalError

RECENT = 100  # episodes over which every mean is taken, as returns are in metrics.jsonl
SHOWN = ("policy_loss", "value_loss", "entropy", "q")  # metrics of these names that a run has
ROWS = 20  # of a table, where nothing else is asked for


def table(rows: Sequence[Mapping[str, Any]], every: int | None = None) -> list[dict[str, Any]]:
    """Return a row for each `every` episodes of a run, from the rows of its metrics; the last row is its end.

    Returns, lengths, losses and values are means over the last 100 episodes.
    """
    training = [row for row in rows if row.get("kind") == "train" and row.get("episodes")]
    if not training:
        raise ShoalError("nothing to show: no episode has ended in this run")
    every = every or math.ceil(training[-1]["episodes"] / ROWS)
    names = {name for row in training for name in row.get("metrics") or ()}
    picked = [row for row, after in _pairs(training) if after is None or _mark(row, every) < _mark(after, every)]
    found, before = [], 0.0
    for row in picked:
        recent = [one for one in training if row["episodes"] - RECENT < one["episodes"] <= row["episodes"]]
        recent = [one for one in recent if one["steps"] <= row["steps"]]
        newest = (row.get("metrics") or {}).get("epsilon")
        found.append(
            {
                "episode": row["episodes"],
                "step": row["steps"],
                **({"epsilon": newest} if "epsilon" in names else {}),
                "return": row.get("return"),
                "length": row.get("length"),
                **{name: _mean(recent, name) for name in SHOWN if name in names},
                "seconds": row["seconds"] - before,
                "time": datetime.fromtimestamp(row["time"]).isoformat(timespec="seconds"),
            }
        )
        before = row["seconds"]
    return found


def _pairs(rows: list[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], Mapping[str, Any] | None]]:
    return list(zip(rows, [*rows[1:], None], strict=True))


def _mark(row: Mapping[str, Any], every: int) -> int:
    return int(row["episodes"]) // every


def _mean(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """The mean of a metric, of which a row has the mean since the row before."""
    values = [row["metrics"][name] for row in rows if (row.get("metrics") or {}).get(name) is not None]
    return sum(values) / len(values) if values else None
