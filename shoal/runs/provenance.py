"""Where a run came from: the command, the code, the libraries and the machine, one entry for each start."""

from __future__ import annotations

import getpass
import json
import logging
import os
import platform
import re
import subprocess
import sys
import threading
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from shoal.core import machine
from shoal.runs import files

log = logging.getLogger("shoal")
LIBRARIES = ("shoal", "torch", "numpy", "gymnasium", "ale-py", "safetensors", "pydantic")
PATIENCE = 5.0  # seconds that git may take: on a network disk it can take minutes
DIFF_LIMIT = 1 << 20  # bytes
STATUS_LIMIT = 200  # lines
# The folder decides which repository is meant, also where a hook of another one started the run.
ELSEWHERE = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")
# A repository's own settings can name programs, and the one in this folder may be a stranger's.
HARMLESS = ("core.fsmonitor=false", "core.hooksPath=/dev/null", "core.pager=cat", "diff.external=")
PROGRAMS = re.compile(r"filter\..*\.(clean|smudge|process|required)|diff\..*\.(command|textconv)", re.DOTALL)


def collect(folder: Path, devices: Sequence[str] | None = None) -> dict[str, Any]:
    """Everything known about this start; `devices` are the names of accelerators, by default those that torch finds."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": list(sys.argv),
        "folder": str(folder.absolute()),
        "user": user(),
        "host": platform.node(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: machine.version(name) for name in LIBRARIES},
        "processor": machine.processor(),
        "cores": os.cpu_count(),
        "usable_cores": machine.usable_cores(),
        "memory_bytes": machine.memory(),
        "devices": accelerators() if devices is None else list(devices),
        "git": repository(folder),
    }


def write(run: Path, folder: Path, devices: Sequence[str] | None = None) -> None:
    """Add this start to the run's provenance.json, and the diff from the last commit as a file beside it."""
    path = run / "provenance.json"
    try:
        entries = read(path)
        diffs = [stem.rpartition("-")[2] for stem in (file.stem for file in run.glob("provenance-*.diff"))]
        start = 1 + max([len(entries), *(int(number) for number in diffs if number.isdecimal())])
        changes = diff(folder)
        name = f"provenance-{start}.diff" if changes else None
        if name:
            (run / name).write_bytes(changes)
        entry = {"start": start, **collect(folder, devices), "diff": name}
        files.write(path, json.dumps([*entries, entry], indent=2) + "\n")
    except OSError as error:  # the run matters more
        log.warning("cannot write the run's provenance: %s", error)


def read(path: Path) -> list[Any]:
    """The entries so far; a file that holds something else is kept under another name."""
    try:
        entries = json.loads(path.read_bytes())
    except FileNotFoundError:
        return []
    except (ValueError, RecursionError):
        entries = None
    if isinstance(entries, list):
        return entries
    names = (path.with_name(f"{path.stem}-damaged-{number}.json") for number in range(1, 1000))
    aside = next(name for name in names if not name.exists())
    path.replace(aside)
    log.warning("%s is damaged; it was moved to %s", path, aside.name)
    return []


def user() -> str:
    """The user who started the run, by name, or by number where there is no name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # which one depends on the version of Python
        return str(os.getuid()) if hasattr(os, "getuid") else ""


def accelerators() -> list[str]:
    """The names of the GPUs that torch can use, where torch is loaded anyway."""
    torch = sys.modules.get("torch")
    try:
        if torch is not None and torch.cuda.is_available():
            return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    except Exception as error:  # a broken driver raises many kinds
        log.debug("no names of GPUs: %s", error)
    return []


def repository(folder: Path) -> dict[str, Any] | None:
    """The commit, the branch and the changed files of a folder; None: it is no repository."""
    status = git(folder, "status", "--porcelain", "--ignore-submodules=all")
    if status is None:
        return None
    head, branch = (
        git(folder, "rev-parse", "--verify", "-q", "HEAD"),
        git(folder, "symbolic-ref", "--short", "-q", "HEAD"),
    )
    lines = status.decode(errors="replace").splitlines()
    if len(lines) > STATUS_LIMIT:
        lines[STATUS_LIMIT:] = [f"and {len(lines) - STATUS_LIMIT} more"]
    return {
        "head": head.decode().strip() if head else None,
        "branch": branch.decode(errors="replace").strip() if branch else None,
        "status": lines,
    }


def diff(folder: Path) -> bytes:
    """The diff from the last commit, as git can apply it; empty: there is none, or this is no repository."""
    # Without what a user's own configuration may make of it.
    options = (
        "--ignore-submodules=all",
        "--no-color",
        "--no-ext-diff",
        "--no-textconv",
        "--no-relative",
        "--src-prefix=a/",
        "--dst-prefix=b/",
    )
    changes = git(folder, "diff", "HEAD", *options, limit=DIFF_LIMIT) or b""
    if len(changes) > DIFF_LIMIT:
        whole = changes[: changes.rfind(b"\n", 0, DIFF_LIMIT) + 1]
        return whole + f"# cut here: the diff is longer than {DIFF_LIMIT:,} bytes\n".encode()
    return changes


def git(folder: Path, *words: str, limit: int = 16 << 20) -> bytes | None:
    """The output of git about a folder, up to one byte more than the limit; None: git failed."""
    known = _git(folder, "config", "--null", "--list", "--name-only", "--show-scope", limit=1 << 20)
    if known is None:
        return None
    listed = known.decode(errors="surrogateescape").split("\0")
    own = [key for scope, key in zip(listed[::2], listed[1::2], strict=False) if scope in ("local", "worktree")]
    silenced = [(key, "false" * key.endswith(".required")) for key in own if PROGRAMS.fullmatch(key)]
    # By the environment, since on the command line a name may not hold an equals sign.
    settings = {"GIT_CONFIG_COUNT": str(len(silenced))}
    for index, (key, value) in enumerate(silenced):
        settings |= {f"GIT_CONFIG_KEY_{index}": key, f"GIT_CONFIG_VALUE_{index}": value}
    return _git(folder, *(word for pair in HARMLESS for word in ("-c", pair)), *words, limit=limit, **settings)


def _git(folder: Path, *words: str, limit: int, **settings: str) -> bytes | None:
    environment = {key: value for key, value in os.environ.items() if key not in ELSEWHERE} | settings
    # Other programs may be using the repository; what is missing in it is not fetched.
    environment |= {"GIT_OPTIONAL_LOCKS": "0", "GIT_ALLOW_PROTOCOL": "none", "GIT_NO_LAZY_FETCH": "1"}
    try:
        process = subprocess.Popen(
            ["git", "-C", str(folder), *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
    except OSError:
        return None
    timer = threading.Timer(PATIENCE, process.kill)
    timer.start()
    with process:
        assert process.stdout is not None
        try:
            text = process.stdout.read(limit + 1)
            if len(text) > limit:
                process.kill()
                return text
            return text if process.wait() == 0 else None
        finally:
            timer.cancel()
            timer.join()
