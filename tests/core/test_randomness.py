"""Each worker's own random state."""

from __future__ import annotations

import random
from contextlib import suppress

import numpy as np
import pytest
import torch

from shoal.core.randomness import Randomness, derive, get_state, seed_everything, set_state

SOURCES = {
    "random": random.random,
    "numpy": np.random.rand,
    "torch": lambda: torch.rand(()).item(),
}


def draw() -> list[float]:
    """One number from each source."""
    return [source() for source in SOURCES.values()]


@pytest.fixture(autouse=True)
def _outside():
    """Leave the process's random state as it was."""
    state = get_state()
    yield
    set_state(state)


def test_derived_seeds_are_the_same_everywhere():
    assert derive(0, "learner") == 1118868171
    assert derive(7, "actor-1", 2) == 831401659


def test_derived_seeds_differ():
    parts = [(seed, name) for seed in range(20) for name in ("learner", "actor-0", "actor-1", "actor-10")]
    seeds = {derive(*each) for each in [*parts, (0,), (1,), ("0",), (0, "actor-1", 0), ("01",)]}
    assert len(seeds) == len(parts) + 5
    assert all(0 <= seed < 2**32 for seed in seeds)


def test_a_seed_sets_every_source():
    seed_everything(3)
    before = draw()
    seed_everything(3)
    assert draw() == before
    seed_everything(4)
    assert all(new != old for new, old in zip(draw(), before, strict=True))


def test_interleaved_streams_equal_separate_ones():
    separate = []
    for seed in (1, 2):
        seed_everything(seed)
        separate.append([draw() for _ in range(5)])
    one, two = Randomness(1), Randomness(2)
    together: list[list[list[float]]] = [[], []]
    for _ in range(5):
        for stream, drawn in zip((one, two), together, strict=True):
            with stream.active():
                drawn.append(draw())
    assert together == separate


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_drawing_inside_leaves_the_outside_alone(source):
    seed_everything(5)
    expected = [source(), source()]
    seed_everything(5)
    drawn = [source()]
    with Randomness(6).active():
        source()
        seed_everything(7)
    drawn.append(source())
    assert drawn == expected


def test_each_has_its_own_numbers_on_a_gpu_too(monkeypatch):
    gpu = torch.Generator()  # stands for that of a GPU, which torch seeds with the others
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", gpu.manual_seed)
    monkeypatch.setattr(torch.cuda, "get_rng_state", gpu.get_state)
    monkeypatch.setattr(torch.cuda, "set_rng_state", gpu.set_state)
    monkeypatch.setitem(SOURCES, "gpu", lambda: torch.rand((), generator=gpu).item())
    test_interleaved_streams_equal_separate_ones()


def test_the_state_goes_on_after_an_error():
    seed_everything(1)
    first, second, outside = draw(), draw(), draw()
    stream = Randomness(1)
    seed_everything(1)
    draw(), draw()
    with suppress(ZeroDivisionError), stream.active():
        assert draw() == first
        raise ZeroDivisionError
    assert draw() == outside
    with stream.active():
        assert draw() == second
