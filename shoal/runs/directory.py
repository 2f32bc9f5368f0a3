"""The folder of a run: its name, its lock, and what may be written there or imported because of it."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from shoal.core.errors import SettingsError, nearest
from shoal.runs import checkpoint, files

log = logging.getLogger("shoal")
RUNS = Path("runs")
CONFIG = "config.yaml"
LOG = "log.txt"
SUMMARY = "summary.json"
STATUS = "status.json"
LOCK = ".lock"
LOOKS = 5  # tries to take a lock: whoever asks whether a run is held has it for a moment


def fresh(environment: str, algorithm: str) -> Path:
    """A folder that does not exist yet, `runs/<environment>_<algorithm>_<unix time>`."""
    base = RUNS / re.sub(r"[^\w.-]+", "-", f"{environment}_{algorithm}_{int(time.time())}")
    return next(path for path in (base, *(Path(f"{base}-{n}") for n in range(2, 10_000))) if not path.exists())


def create(folder: Path) -> None:
    """Create a run's folder; one that holds an earlier run is refused."""
    if checkpoint.learned(folder) or (folder / SUMMARY).exists():
        raise SettingsError(
            f"{folder} already holds a run: continue it with `shoal resume {folder}`, or choose another folder"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(f"cannot create the run's folder {folder}: {error.strerror}") from None


def clear(folder: Path) -> None:
    """Rename the log of a start that failed before anything was learned, and remove the rest of it."""
    if (folder / CONFIG).exists() and (folder / LOG).exists():
        names = (folder / f"log-{number}.txt" for number in range(1, 10_000))
        (folder / LOG).rename(next(name for name in names if not name.exists()))
    (folder / CONFIG).unlink(missing_ok=True)
    shutil.rmtree(checkpoint.folder(folder) / checkpoint.BEGINNING, ignore_errors=True)


def locate(run: str | Path) -> Path:
    """Find a run by its folder, by its name in `runs/`, or as `latest`."""
    path = Path(run)
    known = sorted((item.parent for item in RUNS.glob(f"*/{CONFIG}")), key=lambda item: item.stat().st_mtime)
    if str(run) == "latest" and known:
        # One that failed before it learned anything is hardly meant.
        return next((item for item in reversed(known) if checkpoint.folder(item).is_dir()), known[-1])
    for candidate in (path, RUNS / path):
        if (candidate / CONFIG).is_file():
            return candidate
    if path.is_dir():
        raise SettingsError(f"{run} is not a run: it has no {CONFIG}")
    near = nearest(path.name, [item.name for item in known])
    there = "runs/ has none" if not known else f"runs/ has {len(known)}, the latest is {known[-1].name}"
    raise SettingsError(f"no run {str(run)!r}: {there}{near}")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a run for this process alone; the lock goes with the process, however it ends."""
    check_links(folder)
    try:
        import fcntl
    except ImportError:  # not on this system: the user must not train a run twice at once
        yield
        return
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    try:
        for tries in range(LOOKS):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if tries == LOOKS - 1:
                    holder = os.pread(descriptor, 20, 0).decode() or "another"
                    raise SettingsError(f"{folder} is being trained by process {holder}") from None
                time.sleep(0.02)
        with suppress(OSError):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(descriptor)


def held(folder: Path) -> bool:
    """Whether some process holds a run."""
    try:
        import fcntl

        descriptor = os.open(folder / LOCK, os.O_RDONLY | os.O_NOFOLLOW)
    except (ImportError, OSError):
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def check_links(folder: Path) -> None:
    """Refuse a folder with a symbolic link that leads out of it: a run writes to its own folder only."""
    home = folder.resolve()
    for where, *names in os.walk(home):
        for path in (Path(where, name) for group in names for name in group):
            if path.is_symlink() and not path.resolve().is_relative_to(home):
                raise SettingsError(
                    f"{path} is a symbolic link to {os.readlink(path)}, outside the run's folder, which training "
                    "would overwrite: remove the link"
                )


def check_code(folder: Path, tree: Mapping[str, Any]) -> None:
    """Log which code the settings of a run name, and refuse code in its folder: looking at a run must not run it.

    Only the first package of a path is looked up, since finding what is in it would import it.
    """
    algorithm, environment = tree.get("algorithm"), tree.get("environment")
    named = [tree.get("engine"), *(part.get(key) for part, key in ((algorithm, "name"), (environment, "id"))
                                   if isinstance(part, Mapping))]  # fmt: skip
    paths = [path for path in named if isinstance(path, str) and ":" in path and not path.startswith("shoal.")]
    home = folder.resolve()
    for path in paths:
        try:
            spec = importlib.util.find_spec(path.partition(":")[0].partition(".")[0])
        except (ImportError, ValueError):
            continue  # whoever needs it reports that
        places = [] if spec is None else [*(spec.submodule_search_locations or []), *filter(None, [spec.origin])]
        for place in places:
            if Path(place).resolve().is_relative_to(home):
                raise SettingsError(
                    f"{folder / CONFIG} names {path}, which is in the run's own folder ({place}) and is not imported "
                    "from there: if you trust it, install it or move it elsewhere"
                )
    if paths:
        log.info("%s names code outside shoal, which is imported: %s", folder / CONFIG, ", ".join(paths))


def note(folder: Path, line: str) -> None:
    """Write a line to the run's log only."""
    with suppress(OSError), (folder / LOG).open("a", encoding="utf-8") as file:
        file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n")


def read_summary(folder: Path) -> dict[str, Any]:
    """The summary of a run; empty while it has not ended."""
    try:
        return json.loads((folder / SUMMARY).read_text())  # type: ignore[no-any-return]
    except (OSError, ValueError):
        return {}


def write_status(folder: Path, status: Mapping[str, Any]) -> None:
    """Write how a run stands, for whoever watches its folder; a disk that refuses it harms nothing."""
    with suppress(OSError):
        files.write(folder / STATUS, json.dumps(status) + "\n")
