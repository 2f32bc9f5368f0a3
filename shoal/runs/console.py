"""Progress, a line at a time."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from shoal.core.types import Work

log = logging.getLogger("shoal")
LOOK = 0.5  # seconds between looks for news
SHOWN = ("policy_loss", "value_loss", "entropy", "lag")


def show(experiment: Any, journal: Any) -> Work:
    """Log a line at every interval, each evaluation and each fault; it only ever waits."""
    shown, looked = 0, 0.0
    last_steps, last_time = 0, time.monotonic()
    try:
        while True:
            now = time.monotonic()
            if now - looked >= min(experiment.log_every, LOOK):
                looked = now
                shown = news(journal, shown)
            if now - last_time >= experiment.log_every:
                state = journal.snapshot()
                rate = (state["steps"] - last_steps) / (now - last_time)
                last_steps, last_time = state["steps"], now
                log.info(progress_line(experiment.steps, state, rate))
            yield False
    finally:
        news(journal, shown)


def news(journal: Any, shown: int) -> int:
    """Log the faults and evaluations that were not shown yet, and return how many evaluations are now."""
    for fault in journal.drain_faults():
        log.warning(fault)
    evaluations = journal.snapshot()["evaluations"]
    for result in evaluations[shown:]:
        log.info(evaluation_line(result))
    return len(evaluations)


def evaluation_line(result: Mapping[str, Any]) -> str:
    """One evaluation as a line."""
    extra = "".join(f"  {name} {value:.4g}" for name, value in result["metrics"].items())
    count = len(result["scores"])
    return f"evaluation at step {result['steps']:,}: mean return {result['mean']:.1f} over {count} episodes{extra}"


def progress_line(total: int, state: Mapping[str, Any], rate: float) -> str:
    """The run's progress as a line."""
    parts = [f"{100 * state['steps'] / total:3.0f} %", f"step {state['steps']:,}", f"{rate:,.0f} steps/s"]
    if state["recent_return"] is not None:
        parts.append(f"return {state['recent_return']:.1f}")
    parts += [f"{name} {value:.3g}" for name, value in state["metrics"].items() if name in SHOWN]
    return "  ".join(parts)
