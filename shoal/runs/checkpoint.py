"""Checkpoints: points in time on disk, each whole or not there at all.

A checkpoint is a folder `checkpoints/step_<steps>` with `weights.safetensors`, `optimizer.safetensors` and
`state.json`; `checkpoints/best` is the policy with the best evaluation, without an optimizer. Each is written under
another name and moved into place in one step.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from shoal.core.errors import SettingsError, ShoalError, nearest
from shoal.runs import files

log = logging.getLogger("shoal")
PREFIX = "step_"
BEST = "best"
BEGINNING = "step_0"  # nothing has been learned yet
NEEDED = ("weights", "optimizer")
ARRAYS = (*NEEDED, "target", "store")


def folder(run: Path) -> Path:
    """Where a run keeps its checkpoints."""
    return run / "checkpoints"


def learned(run: Path) -> bool:
    """Whether a run has a checkpoint other than the one that it began with."""
    return any(path.name != BEGINNING for path in folder(run).glob("[!.]*"))


def paths(run: Path) -> list[Path]:
    """The numbered checkpoints of a run, oldest first."""
    if not folder(run).is_dir():
        return []
    found = [path for path in folder(run).iterdir() if path.name.removeprefix(PREFIX).isdigit()]
    return sorted(found, key=lambda path: int(path.name.removeprefix(PREFIX)))


def resumable(run: Path, exact: bool) -> Path | None:
    """The newest checkpoint that can be read; under `exact` the newest one that was on schedule."""
    for path in reversed(paths(run)):
        try:
            scheduled = read_state(path)["scheduled"]
            if scheduled or not exact:
                for name in NEEDED:
                    _arrays(path / f"{name}.safetensors")
                return path
        except (OSError, ValueError, KeyError) as error:
            log.warning("cannot read checkpoint %s, trying the previous one: %s", path, error)
    return None


def find(run: Path, name: str) -> Path:
    """A checkpoint by name: `best` (or, where there is none, the newest), `newest`, or a number of steps."""
    every = paths(run)
    known = {**{path.name.removeprefix(PREFIX): path for path in every}}
    if every:
        known["newest"] = every[-1]
    best = folder(run) / BEST
    if best.is_dir():
        known[BEST] = best
    elif every:
        known[BEST] = every[-1]
    if not known:
        raise ShoalError(f"{run} has no checkpoint yet")
    name = name.removeprefix(PREFIX)
    if name not in known:
        raise SettingsError(f"{run} has no checkpoint {name!r}; available: {', '.join(known)}{nearest(name, known)}")
    return known[name]


def rewind(run: Path, steps: int) -> None:
    """Remove the checkpoints after a number of steps: those steps are taken again."""
    for path in paths(run):
        if int(path.name.removeprefix(PREFIX)) > steps:
            remove(path)


def read(path: Path, names: tuple[str, ...] = ARRAYS) -> dict[str, Any]:
    """The content of a checkpoint, or some of its arrays; `optimizer` is empty where none was saved."""
    try:
        arrays = {
            name: _arrays(path / f"{name}.safetensors") for name in names if (path / f"{name}.safetensors").exists()
        }
        return {"optimizer": {}, **arrays, "state": read_state(path)}
    except (OSError, ValueError) as error:
        raise ShoalError(f"cannot read checkpoint {path}: {error}") from None


def read_state(path: Path) -> dict[str, Any]:
    """The counters of a checkpoint."""
    return json.loads((path / "state.json").read_text())  # type: ignore[no-any-return]


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Write a checkpoint whole, or leave what was there."""
    draft = path.with_name(f".draft-{path.name}")
    shutil.rmtree(draft, ignore_errors=True)
    try:
        draft.mkdir(parents=True)
        for name in ARRAYS:
            if name in content:
                # The format has one memory order only; a network may use another.
                arrays = {key: np.asarray(array, order="C") for key, array in content[name].items()}
                write_arrays(draft / f"{name}.safetensors", arrays)
        (draft / "state.json").write_text(json.dumps(content["state"], indent=2) + "\n")
        files.sync(draft / "state.json")
        _swap(draft, path)
    except OSError:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def remove(path: Path) -> None:
    """Remove a checkpoint; half removed it would look like a whole one, so it loses its name first."""
    away = path.with_name(f".draft-{path.name}")
    with suppress(OSError):
        shutil.rmtree(away, ignore_errors=True)
        path.rename(away)
        shutil.rmtree(away, ignore_errors=True)


def _swap(draft: Path, path: Path) -> None:
    """Move a folder into place; one that stands there goes only when the new one is complete."""
    remove_first = path.with_name(f".old-{path.name}")
    shutil.rmtree(remove_first, ignore_errors=True)
    if path.exists():
        path.rename(remove_first)
    draft.rename(path)
    files.sync(path.parent)
    shutil.rmtree(remove_first, ignore_errors=True)


def write_arrays(path: Path, arrays: dict[str, Any]) -> None:
    """Write arrays as safetensors, with the errors of a disk as such."""
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    try:
        save_file(arrays, path)  # not by way of bytes: a replay's arrays may fill half the memory
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        raise OSError(int(number[1]), os.strerror(int(number[1]))) if number else OSError(str(error)) from None
    files.sync(path)


def _arrays(path: Path) -> dict[str, Any]:
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path.name}: {error}") from None


def scheduled(path: Path) -> bool:
    """Whether a checkpoint was saved on schedule, so that a lockstep run can continue from it."""
    with suppress(OSError, ValueError):
        return bool(read_state(path).get("scheduled"))
    return False
