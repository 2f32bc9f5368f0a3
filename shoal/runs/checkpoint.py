"""Checkpoints: points in time on disk, each whole or not there at all.

A checkpoint is a folder `checkpoints/step_<steps>` with `weights.safetensors`, `optimizer.safetensors` and
`state.json`; `checkpoints/best` is the policy with the best evaluation, without an optimizer. Each is written under
another name and moved into place in one step.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from shoal.core.errors import SettingsError, ShoalError, nearest
from shoal.core.types import Array
from shoal.core.wire import as_bytes
from shoal.runs import files

log = logging.getLogger("shoal")
PREFIX = "step_"
BEST = "best"
DRAFT, OLD = ".draft-", ".old-"  # beginnings of names: not complete, or about to be removed
BEGINNING = "step_0"  # nothing has been learned yet
NEEDED = ("weights", "optimizer")
STORE = "store"
ARRAYS = (*NEEDED, "target", STORE)
PIECE = 1 << 26  # bytes in one write
TYPES = {f"{kind}{bits}": f"{kind[0].upper()}{bits}" for kind in ("float", "int", "uint") for bits in (16, 32, 64)}
TYPES |= {"int8": "I8", "uint8": "U8", "bool": "BOOL"}  # NumPy's names of types, and those of safetensors


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
                for name in ARRAYS:
                    if name in NEEDED or _file(path, name).exists():
                        _arrays(path, name)
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
        arrays = {name: _arrays(path, name) for name in names if _file(path, name).exists()}
        return {"optimizer": {}, **arrays, "state": read_state(path)}
    except (OSError, ValueError) as error:
        raise ShoalError(f"cannot read checkpoint {path}: {error}") from None


def read_state(path: Path) -> dict[str, Any]:
    """The counters of a checkpoint."""
    return json.loads((path / "state.json").read_text())  # type: ignore[no-any-return]


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Write a checkpoint whole, or leave what was there."""
    draft = path.with_name(f"{DRAFT}{path.name}")
    shutil.rmtree(draft, ignore_errors=True)
    try:
        draft.mkdir(parents=True)
        for name in ARRAYS:
            if name in content:
                # The format has one memory order only; a network may use another.
                arrays = {key: np.asarray(array, order="C") for key, array in content[name].items()}
                write_arrays(_file(draft, name), arrays)
        (draft / "state.json").write_text(json.dumps(content["state"], indent=2) + "\n")
        files.sync(draft / "state.json")
        files.sync(draft)
        _swap(draft, path)
    except OSError:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def remove(path: Path) -> None:
    """Remove a checkpoint; half removed it would look like a whole one, so it loses its name first."""
    away = path.with_name(f"{DRAFT}{path.name}")
    with suppress(OSError):
        shutil.rmtree(away, ignore_errors=True)
        path.rename(away)
        shutil.rmtree(away, ignore_errors=True)


def tidy(run: Path) -> None:
    """Remove what a process left that was killed while it saved, and put back what it had just moved away."""
    for path in [*folder(run).glob(f"{OLD}*"), *folder(run).glob(f"{DRAFT}*")]:
        place = path.with_name(path.name.removeprefix(OLD))
        if path.name.startswith(OLD) and not place.exists():
            path.rename(place)
        else:
            shutil.rmtree(path, ignore_errors=True)


def _swap(draft: Path, path: Path) -> None:
    """Move a folder into place; one that stands there goes only when the new one is complete."""
    remove_first = path.with_name(f"{OLD}{path.name}")
    shutil.rmtree(remove_first, ignore_errors=True)
    if path.exists():
        path.rename(remove_first)
    draft.rename(path)
    files.sync(path.parent)
    shutil.rmtree(remove_first, ignore_errors=True)


def write_arrays(path: Path, arrays: Mapping[str, Array]) -> None:
    """Write arrays as safetensors, one after the other in their order and without a copy."""
    header, end = {}, 0
    for name, array in arrays.items():
        header[name] = {
            "dtype": TYPES[array.dtype.name],
            "shape": array.shape,
            "data_offsets": [end, end + array.nbytes],
        }
        end += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb", buffering=0) as file:
        for part in (np.frombuffer(len(text).to_bytes(8, "little") + text, np.uint8), *arrays.values()):
            view = as_bytes(part)
            while view:
                view = view[file.write(view[:PIECE]) :]
        os.fsync(file.fileno())


def _file(path: Path, name: str) -> Path:
    return path / f"{name}.safetensors"


def _arrays(path: Path, name: str) -> dict[str, Any]:
    """Arrays of a checkpoint; a store's, which may fill half the memory, are read from the file when they are used."""
    from safetensors import SafetensorError, safe_open
    from safetensors.numpy import load_file

    file = _file(path, name)
    try:
        if name != STORE:
            return load_file(file)
        with safe_open(file, framework="np"):  # checks that the header makes sense and the file is whole
            return _mapped(file)
    except SafetensorError as error:
        raise ValueError(f"{file.name}: {error}") from None


def _mapped(path: Path) -> dict[str, Any]:
    content = np.memmap(path, np.uint8, "r")
    start = 8 + int.from_bytes(content[:8].tobytes(), "little")
    header = json.loads(content[8:start].tobytes())
    header.pop("__metadata__", None)
    types, arrays = {short: name for name, short in TYPES.items()}, {}
    for name, entry in header.items():
        begin, end = (start + offset for offset in entry["data_offsets"])
        arrays[name] = np.asarray(content[begin:end]).view(types[entry["dtype"]]).reshape(entry["shape"])
    return arrays


def scheduled(path: Path) -> bool:
    """Whether a checkpoint was saved on schedule, so that a lockstep run can continue from it."""
    with suppress(OSError, ValueError):
        return bool(read_state(path).get("scheduled"))
    return False
