"""Whether an experiment fits into memory, worked out before it starts."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch

from shoal import envs
from shoal.core.errors import SettingsError
from shoal.core.replaying import Replaying
from shoal.core.tree import map_tree, to_numpy, to_torch
from shoal.core.types import Spec, Step
from shoal.experiment import Experiment
from shoal.runs.provenance import available_memory
from shoal.services.replay import Replay
from shoal.topology import replay_shape

log = logging.getLogger("shoal")
SAMPLE = 64  # items whose memory is measured
PACKED = 8  # how much smaller LZ4 makes pictures, at a careful guess


def check_memory(experiment: Experiment, replay: Replaying) -> None:
    """Say what the replay will take, and refuse one that cannot fit."""
    each = item_bytes(experiment, replay, envs.spec_of(experiment.environment))
    total, free = each * replay.capacity, available_memory()
    sum_ = f"{replay.capacity:,} items × {size(each)} = {size(total)}"
    if free is not None and total > free:
        raise SettingsError(
            f"algorithm.replay.capacity: {sum_}, but {size(free)} of memory are free; "
            f"{int(0.8 * free / each):,} items would fit"
        )
    log.info("replay: %s%s", sum_, "" if free is None else f" of {size(free)} that are free")


def item_bytes(experiment: Experiment, replay: Replaying, spec: Spec) -> float:
    """Bytes that one item takes, measured on a small replay of items as this algorithm records them."""
    algorithm = experiment.algorithm
    length = getattr(algorithm.experience, "length", 1)
    initial = getattr(algorithm.experience, "initial", ())
    net = algorithm.build(spec)
    seen = map_tree(lambda leaf: np.zeros((1, *leaf.shape), leaf.dtype), spec.observation)
    step = Step(seen, np.zeros(1, np.float32), np.ones(1, np.float32), np.ones(1, np.bool_))
    with torch.inference_mode():
        choice = algorithm.act(net, Step(*map(to_torch, step)), algorithm.begin(net, 1), torch.zeros(1))

    def over_time(times: int) -> Any:
        return lambda x: np.repeat(x[None], times, 0)

    record = {
        name: over_time(1 if name in initial else length)(value) for name, value in to_numpy(choice.record).items()
    }
    items = {
        "observation": map_tree(over_time(length + 1), seen),
        "first": over_time(length + 1)(step.first),
        "action": over_time(length)(choice.action.numpy()),
        "reward": over_time(length)(step.reward),
        "discount": over_time(length)(step.discount),
        "record": record,
        "version": np.zeros(1, np.int64),
    }
    plain = replay.model_copy(update={"capacity": SAMPLE, "compress": False, "minimum": 1})
    store = Replay(plain, 1, *replay_shape(experiment, spec))
    store.put(items)
    pictures = sum(pool.capacity * pool.size for pool in store.frames.values())
    numbers = sum(array.nbytes for array in (*store.memory.values(), store.keys, store.version, store.sums.values))
    return float((numbers + pictures / (PACKED if replay.compress else 1)) / SAMPLE)


def size(count: float) -> str:
    """Bytes as people say them."""
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
