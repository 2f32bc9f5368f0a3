"""The folder of a run: its name, who works in it, and where things stand."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from shoal.core.errors import SettingsError, nearest

RUNS = Path("runs")
CONFIG = "config.yaml"
LOG = "log.txt"
SUMMARY = "summary.json"


def fresh(environment: str, algorithm: str) -> Path:
    """A folder that is not there yet, `runs/<environment>_<algorithm>_<unix time>`."""
    base = RUNS / re.sub(r"[^\w.-]+", "-", f"{environment}_{algorithm}_{int(time.time())}")
    return next(path for path in (base, *(Path(f"{base}-{n}") for n in range(2, 10_000))) if not path.exists())


def create(folder: Path) -> None:
    """Make a run's folder; one that holds a run already is not taken for another."""
    if (folder / CONFIG).exists():
        raise SettingsError(f"{folder} holds a run already: go on with `shoal resume {folder}`, or name another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(f"cannot make the run's folder {folder}: {error.strerror}") from None


def locate(run: str | Path) -> Path:
    """Find a run by its folder, by its name in `runs/`, or as `latest`."""
    path = Path(run)
    known = sorted((item.parent for item in RUNS.glob(f"*/{CONFIG}")), key=lambda item: item.stat().st_mtime)
    if str(run) == "latest" and known:
        # One that failed before it learned anything is hardly meant.
        return next((item for item in reversed(known) if (item / "checkpoints").is_dir()), known[-1])
    for candidate in (path, RUNS / path):
        if (candidate / CONFIG).is_file():
            return candidate
    if path.is_dir():
        raise SettingsError(f"{run} is not a run: it has no {CONFIG}")
    near = nearest(path.name, [item.name for item in known])
    there = "there is none in runs/" if not known else f"runs/ has {len(known)}, the latest {known[-1].name}"
    raise SettingsError(f"no run {str(run)!r}: {there}{near}")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a run for this process alone; the lock goes with the process, however it ends."""
    try:
        import fcntl
    except ImportError:  # not on this system: two processes at once are the user's care
        yield
        return
    descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(descriptor, 20, 0).decode() or "another"
            raise SettingsError(f"{folder} is being trained by process {holder}") from None
        with suppress(OSError):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(descriptor)


def note(folder: Path, line: str) -> None:
    """Write a line into the run's log, without showing it."""
    with suppress(OSError), (folder / LOG).open("a", encoding="utf-8") as file:
        file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n")


def write(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    draft = path.with_suffix(".tmp")
    try:
        draft.write_text(text)
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def read_summary(folder: Path) -> dict[str, Any]:
    """What came of a run; empty while it has not ended."""
    try:
        return json.loads((folder / SUMMARY).read_text())  # type: ignore[no-any-return]
    except (OSError, ValueError):
        return {}
