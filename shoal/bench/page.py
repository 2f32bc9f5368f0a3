"""What the page costs a run: its speed with and without somebody who looks, in turn within one run."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from shoal.bench.advice import ENDLESS, status
from shoal.bench.measuring import Row
from shoal.bench.soak import START, opened, started
from shoal.display.advice import shown

SETTLES = 3.0  # seconds after the page was opened or closed that do not count


def cost(configs: list[str], seconds: float, rounds: int, changes: Mapping[str, Any]) -> Iterator[Row]:
    """A row for each config: steps per second with the page closed, and their ratio to those with it open."""
    for config in configs:
        settings = [f"{key}={shown(value)}" for key, value in {**ENDLESS, **changes}.items()]
        rates: dict[bool, list[float]] = {True: [], False: []}
        looks = frames = 0
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            with started("train", config, *settings, "--run-dir", place, **quiet) as process:
                status(folder, process, 0)
                for turn in range(rounds):
                    for watched in [True, False] if turn % 2 == 0 else [False, True]:
                        if not watched:
                            rates[False].append(rate(folder, process, seconds))
                            continue
                        with opened(folder, process) as page:
                            page.visits.shown.wait(START)  # loading the policy is paid once, and not what is measured
                            rates[True].append(rate(folder, process, seconds))
                            looks, frames = looks + page.visits.looks, frames + page.visits.frames
        ratios = [with_page / without for with_page, without in zip(rates[True], rates[False], strict=True)]
        spread = {"x_with_page": median(ratios), "least_x": min(ratios), "most_x": max(ratios), "rounds": rounds}
        yield {"config": config, "steps_per_s": median(rates[False]), **spread, "looks": looks, "frames": frames}


def rate(folder: Path, process: subprocess.Popen[Any], seconds: float) -> float:
    """Steps per second of a run over some seconds, once it has settled."""
    time.sleep(SETTLES)
    begin = status(folder, process, 0)
    time.sleep(seconds)
    end = status(folder, process, begin["steps"])
    return float((end["steps"] - begin["steps"]) / (end["time"] - begin["time"]))
