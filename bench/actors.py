"""Calls between two processes through Ray: the engine `ray` beside a bare actor with the same bytes."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from bench.calls import NATURE, ORDER, Shelf, contest, rest
from shoal import engines
from shoal.core.tree import size_of
from shoal.engines.options import Options
from shoal.services.parameters import Parameters


def actors(seconds: float) -> dict[str, list[dict[str, Any]]]:
    """Time of small and large calls, and as multiples of what the bare actor needs for each."""
    random = np.random.default_rng(0)
    weights = {str(index): random.standard_normal(shape, np.float32) for index, shape in enumerate(NATURE)}
    rollout = {"observation": random.integers(0, 256, (20, 1, 4, 84, 84), np.uint8)}
    engine: Any = engines.make("ray", Options(homes=dict.fromkeys(("shelf", "rollouts", "parameters"), "resting")))
    try:
        ray = engine.ray
        shelf, queue = engine.serve("shelf", Shelf), engine.serve("rollouts", Shelf)
        parameters = engine.serve("parameters", Parameters)
        engine.run("resting", rest)
        bare, other = (ray.remote(Shelf).options(num_cpus=1).remote() for _ in range(2))

        def call(method: str, *args: Any) -> Any:
            return ray.get(getattr(bare, method).remote(*args))

        parameters.publish(1, 0, 0, False, weights)
        call("put", weights)
        contests: list[tuple[int, Any, Any]] = [
            (ORDER.size, {"small": partial(shelf.same, 7)}, partial(call, "same", 7)),
            (size_of(weights), {"weights put": partial(shelf.put, weights)}, partial(call, "put", weights)),
            (size_of(weights), {"weights fetched": partial(parameters.fetch, 0)}, partial(call, "get")),
            (
                size_of(rollout),
                {"rollout put": partial(queue.put, rollout)},
                lambda: ray.get(other.put.remote(rollout)),
            ),
        ]
        rows = []
        for size, rivals, plain in contests:
            rows += contest({**rivals, "bare": plain}, size, seconds / len(contests))
    finally:
        engine.close()
    return {"actors": rows}
