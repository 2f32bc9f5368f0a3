"""Where a learner saves its progress, and from where it continues."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from shoal.core.errors import Refused
from shoal.core.tree import not_finite
from shoal.core.types import Array
from shoal.runs import checkpoint

UNFIT = ("weights", "optimizer", "target")  # where every number must be finite
COUNTERS = ("steps", "updates", "version", "period", "stage")  # of a state


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, run: str, keep: int) -> None:
        """Keep the newest `keep`, and the best."""
        self.run, self.keep = Path(run), keep

    def save(self, content: Mapping[str, Any]) -> str:
        """Write `weights`, `optimizer` and `state`, and remove what is older; return what went wrong, if anything."""
        name = f"{checkpoint.PREFIX}{_check(content)['steps']}"
        if problems := unfit(content):
            return f"checkpoint {name} was not saved: {problems}; the previous one is kept"
        try:
            checkpoint.write(checkpoint.folder(self.run) / name, content)
        except OSError as error:
            return _problem(name, error)
        self._prune()
        return ""

    def save_best(self, content: Mapping[str, Any]) -> str:
        """Write the policy as the best, if its `mean` is above that of the best before; return what went wrong.

        A score in a later stage of a curriculum is above every score before it.
        """
        mean = _check(content).get("mean")
        if isinstance(mean, bool) or not isinstance(mean, int | float):
            raise Refused(f"a checkpoint with mean {mean!r:.60} is refused: the mean must be a number")
        try:
            before = _rank(checkpoint.read_state(checkpoint.folder(self.run) / checkpoint.BEST))
        except (OSError, ValueError, KeyError):
            before = None
        if before is not None and before >= _rank(content["state"]):
            return ""
        if problems := unfit(content) or ("" if math.isfinite(mean) else "its score is not finite"):
            return f"checkpoint {checkpoint.BEST} was not saved: {problems}; the previous one is kept"
        try:
            checkpoint.write(checkpoint.folder(self.run) / checkpoint.BEST, content)
        except OSError as error:
            return _problem(checkpoint.BEST, error)
        return ""

    def save_batch(self, arrays: Mapping[str, Array]) -> str:
        """Write a batch that made updates fail, for inspection; return where it is, or what went wrong."""
        path = self.run / "failed_batch.safetensors"
        try:
            checkpoint.write_arrays(path, {key: np.asarray(array, order="C") for key, array in arrays.items()})
        except OSError as error:
            return _problem(path.name, error)
        return str(path)

    def load(self, exact: bool) -> Mapping[str, Any] | None:
        """The newest checkpoint, or under `exact` the newest scheduled one; None: there is none."""
        found = checkpoint.resumable(self.run, exact)
        return None if found is None else checkpoint.read(found)

    def _prune(self) -> None:
        """Remove all but the newest, and never the newest scheduled one, from which a lockstep run continues."""
        every = checkpoint.paths(self.run)
        kept = {*every[-self.keep :], *[path for path in every if checkpoint.scheduled(path)][-1:]}
        for path in every:
            if path not in kept:
                checkpoint.remove(path)


def _rank(state: Mapping[str, Any]) -> tuple[int, float]:
    return state.get("stage", 0), state["mean"]


def unfit(content: Mapping[str, Any]) -> str:
    """The arrays of a checkpoint that hold a number which is not finite: no run could continue from them."""
    return ", ".join(not_finite({name: content[name] for name in UNFIT if name in content})[:5])


def _check(content: Any) -> Mapping[str, Any]:
    """The state that a worker sent, if its counters are integers and the rest of it is JSON.

    The steps become part of a path, and a run continues from all of it.
    """
    state = content.get("state") if isinstance(content, Mapping) else None
    if not isinstance(state, Mapping):
        raise Refused(f"a checkpoint without a state is refused: received a {type(state).__name__}")
    for name in [name for name in COUNTERS if name in state or name == "steps"]:
        count = state.get(name)
        if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count < 1 << 63:
            raise Refused(f"a checkpoint with {name} {count!r:.60} is refused: it must be an integer of at least 0")
    try:
        json.dumps(state)
    except (TypeError, ValueError, RecursionError) as error:
        raise Refused(f"a checkpoint whose state is not JSON is refused: {error}") from None
    return state


def _problem(name: str, error: OSError) -> str:
    reason = error.strerror or error
    return f"checkpoint {name} could not be saved: {reason}; the previous one is kept, and training continues"
