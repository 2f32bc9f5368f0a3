"""Calls between two processes through Ray: the engine `ray` beside a bare actor with the same bytes."""

from __future__ import annotations

from functools import partial
from typing import Any

from shoal import engines
from shoal.bench.measuring import ORDER, Effort, Slot, Tables, contest, payloads, rest
from shoal.core.tree import size_of
from shoal.engines.options import Options
from shoal.engines.ray import library
from shoal.services.parameters import Parameters


def actors(effort: Effort) -> Tables:
    """Time of small and large calls, and as multiples of what the bare actor needs for each."""
    weights, rollout = payloads().values()
    engine = engines.make("ray", Options(homes=dict.fromkeys(("slot", "rollouts", "parameters"), "resting")))
    try:
        ray = library()
        slot, queue = engine.serve("slot", Slot), engine.serve("rollouts", Slot)
        parameters = engine.serve("parameters", Parameters)
        engine.run("resting", rest)
        bare, other = (ray.remote(Slot).options(num_cpus=1).remote() for _ in range(2))

        def call(method: str, *args: Any) -> Any:
            return ray.get(getattr(bare, method).remote(*args))

        parameters.publish(1, 0, 0, False, weights)
        call("put", weights)
        contests: list[tuple[int, dict[str, Any]]] = [
            (ORDER.size, {"small": partial(slot.same, 7), "bare": partial(call, "same", 7)}),
            (size_of(weights), {"weights put": partial(slot.put, weights), "bare": partial(call, "put", weights)}),
            (size_of(weights), {"weights fetched": partial(parameters.fetch, 0), "bare": partial(call, "get")}),
            (
                size_of(rollout),
                {"rollout put": partial(queue.put, rollout), "bare": lambda: ray.get(other.put.remote(rollout))},
            ),
        ]
        rows = []
        for size, rivals in contests:
            rows += contest(rivals, size, effort.seconds / len(contests), ("bare",))
    finally:
        engine.close()
    return {"actors": rows}
