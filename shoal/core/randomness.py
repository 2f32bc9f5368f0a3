"""Each worker's own random state, in and out of the process-wide generators."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np


def derive(*parts: object) -> int:
    """A 32-bit seed from a seed and names, the same on every machine."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4], "little")


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch."""
    import torch

    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def get_state() -> tuple[Any, ...]:
    """The process-wide random states, that of a GPU too once one is in use."""
    import torch

    used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    gpu = torch.cuda.get_rng_state() if used else None
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), gpu


def set_state(state: tuple[Any, ...]) -> None:
    """Put process-wide random states back."""
    import torch

    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])
    if state[3] is not None:
        torch.cuda.set_rng_state(state[3])


class Randomness:
    """A random state that is current only inside `active()`."""

    def __init__(self, seed: int) -> None:
        """Begin from a seed."""
        self.seed = seed
        self.state: tuple[Any, ...] | None = None

    @contextmanager
    def active(self) -> Iterator[None]:
        """Swap this state in, and out again at the end."""
        outside = get_state()
        if self.state is None:
            seed_everything(self.seed)
        else:
            set_state(self.state)
        try:
            yield
        finally:
            self.state = get_state()
            set_state(outside)
