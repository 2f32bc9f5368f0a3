"""What the page says of one run, from its folder."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from shoal.core.types import INTERRUPTED
from shoal.display.page.reading import Curves, ending, mapping, number, text
from shoal.runs import directory

log = logging.getLogger("shoal")
LARGEST = 4 << 20  # bytes of a JSON file that is still read
TAIL, LINES, WIDTH = 64 << 10, 200, 400  # bytes and lines of the log, letters of a line
WORKERS = 500
WAITS = 4  # of a worker, the longest
STALE = 10.0  # seconds without news after which a run is said not to report
ADVICE, FINDINGS = 15.0, 20  # seconds between advice, and lines of it
METRICS = 200

COUNTS = ("steps", "total", "updates", "episodes", "faults", "return", "length", "seconds", "left", "steps_per_s",
          "updates_per_s", "target")  # fmt: skip
OF_WORKER = ("working", "moves_per_s", "restarts", "refused")


class Watched:
    """A run's folder; nobody has to have it trained here, or now."""

    def __init__(self, folder: Path, advise: Callable[[Path], Sequence[str]]) -> None:
        """Look at a folder; `advise` says in lines what could be better about a run."""
        self.folder, self.curves, self._advise = folder, Curves(folder), advise
        self.advice: list[str] = []
        self._advised_at, self._advised_for = -ADVICE, -1
        self._settings: tuple[int, Mapping[str, Any]] = (-1, {})

    def refresh(self) -> dict[str, Any]:
        """Read what is new, and return what there is to say, with nothing in it that JSON cannot hold."""
        self.curves.refresh()
        self._refresh_advice()
        live = directory.held(self.folder)
        status, summary = self._json(directory.STATUS), self._json(directory.SUMMARY)
        told = status or summary
        settings = self._read_settings()
        saved = mapping(status.get("checkpoint"))
        since = number(status.get("time"))
        metrics = mapping(told.get("metrics"))
        return {
            "name": text(self.folder.name),
            "title": title(settings),
            "seed": number(settings.get("seed")),
            "outcome": "training" if live else outcome(summary),
            "live": live,
            "silent": live and (since is None or time.time() - since > STALE),
            **{key: number(told.get(key)) for key in COUNTS},
            "total": number(settings.get("steps")),
            "target": number(mapping(settings.get("evaluation")).get("target")),
            "best": self.curves.best,
            "last": self.curves.last,
            "saved": number(saved.get("steps")),
            "metrics": {text(name): number(value) for name, value in [*metrics.items()][:METRICS]},
            "workers": workers(mapping(told.get("workers"))),
            "problem": text(status.get("problem"), WIDTH),
            "unreadable": self.curves.unreadable,
            "advice": self.advice,
            "log": tail(self.folder),
        }

    def close(self) -> None:
        """Let go of its files."""
        self.curves.lines.close()

    def _json(self, name: str) -> Mapping[str, Any]:
        content = ending(self.folder, name, LARGEST + 1)
        try:
            return mapping(json.loads(content)) if 0 < len(content) <= LARGEST else {}
        except (ValueError, RecursionError):
            return {}

    def _read_settings(self) -> Mapping[str, Any]:
        """The settings as they are written; nothing that they name is imported."""
        content = ending(self.folder, directory.CONFIG, LARGEST)
        if hash(content) != self._settings[0]:
            try:
                self._settings = hash(content), mapping(yaml.safe_load(content))
            except (yaml.YAMLError, ValueError, RecursionError):
                self._settings = hash(content), {}
        return self._settings[1]

    def _refresh_advice(self) -> None:
        due = time.monotonic() - self._advised_at >= ADVICE and self.curves.serial != self._advised_for
        if not due:
            return
        self._advised_at, self._advised_for = time.monotonic(), self.curves.serial
        try:
            self.advice = [text(line, WIDTH) for line in self._advise(self.folder)][:FINDINGS]
        except Exception as error:  # a page without advice is better than none
            log.debug("no advice on %s", self.folder, exc_info=True)
            self.advice = [text(f"no advice: {type(error).__name__}: {error}", WIDTH)]


def title(settings: Mapping[str, Any]) -> str:
    """Algorithm, environment and engine, in a few words."""
    algorithm, environment = (mapping(settings.get(key)) for key in ("algorithm", "environment"))
    names = [text(value) or "?" for value in (algorithm.get("name"), environment.get("id"), settings.get("engine"))]
    return f"{names[0].rpartition(':')[2].lower()} on {names[1]} · {names[2]}"


def outcome(summary: Mapping[str, Any]) -> str:
    """How a run that is not trained now has ended."""
    if not summary or summary.get("stopped_by") == INTERRUPTED:
        return "interrupted" if summary else "not finished"
    solved = summary.get("solved")
    return "solved" if solved is True else "not solved" if solved is False else "done"


def workers(states: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each worker: where it is, how busy, and what it waits for most."""
    found = []
    for name, state in [*states.items()][:WORKERS]:
        state = mapping(state)
        waits = {text(what): number(part) for what, part in mapping(state.get("waits")).items()}
        longest = sorted(((part, what) for what, part in waits.items() if part), reverse=True)[:WAITS]
        found.append(
            {
                "name": text(name),
                "node": text(state.get("node")),
                "away": state.get("away") is True,
                **{key: number(state.get(key)) for key in OF_WORKER},
                "waits": [[what, part] for part, what in longest],
            }
        )
    return found


def tail(folder: Path) -> list[str]:
    """The last lines of the log."""
    content = ending(folder, directory.LOG, TAIL)
    lines = content.decode("utf-8", "replace").splitlines()
    cut = lines[1:] if len(content) == TAIL else lines  # the first may be half of one
    return [text(line, WIDTH) for line in cut[-LINES:]]
