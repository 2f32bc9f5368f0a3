"""Shoal: distributed deep reinforcement learning in Python and PyTorch."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

# Torch's threads that wait for each other use a core for little longer than from one kernel to the next. By default
# it is sixty times as long: on a busy machine another program could use it, or the very thread that they wait for.
# This has to be known before torch is loaded.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")

if TYPE_CHECKING:
    from shoal.experiment import Experiment, configure
    from shoal.policy import Policy, load
    from shoal.run import Run
    from shoal.training import resume, train

__all__ = ["Experiment", "Policy", "Run", "configure", "load", "resume", "train"]

_HOMES = {
    "Experiment": "experiment",
    "Policy": "policy",
    "Run": "run",
    "configure": "experiment",
    "load": "policy",
    "resume": "training",
    "train": "training",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: start-up stays quick."""
    if name not in _HOMES:
        raise AttributeError(f"module 'shoal' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"shoal.{_HOMES[name]}"), name)
