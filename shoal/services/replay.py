"""Replay: experience that is kept in a ring and drawn again, by priority or uniformly."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from shoal.core.errors import Fatal
from shoal.core.sampling import importance
from shoal.core.settings import Replaying
from shoal.core.tree import flat
from shoal.core.types import Array, Tree
from shoal.services.frames import Frames, Full
from shoal.services.inspection import Refusals, items_problem, priority_problem
from shoal.services.queue import ages
from shoal.services.sum_tree import SumTree

PICTURE = 1024  # bytes; observations of this size or more are kept as frames, each frame once
SPARE = 1.2  # frames per new step: episodes begin with whole stacks
LEAST = 1e-6  # added to every priority, so that every item can be drawn


class Replay:
    """A ring of items in memory that is allocated once; draws are by priority (arXiv:1511.05952) or uniform.

    Every item has a key that is never given again; a key whose item was overwritten is ignored.
    """

    def __init__(
        self,
        settings: Replaying,
        batch: int,
        overlap: int = 0,
        stack: Any = 1,
        choices: Sequence[int] = (),
        overwritten: Callable[[Array, int, int], Array] | None = None,
    ) -> None:
        """Draw `batch` items at a time; `overlap` steps of each sequence are those of the previous one.

        `choices` has the number of choices for each number of an action, 0 where it is continuous. `overwritten` says
        which slots make room once it is full, given the keys in them, the items so far and how many come; else the
        oldest do.
        """
        self.overwritten = overwritten
        self.settings, self.batch, self.overlap, self.stack, self.choices = settings, batch, overlap, stack, choices
        self.capacity = settings.capacity
        self.memory: dict[str, Any] = {}
        self.frames: dict[str, Frames] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}  # of observations that are kept as frames
        self.keys = np.full(self.capacity, -1, np.int64)
        self.version = np.zeros(self.capacity, np.int64)
        self.arrived = np.zeros(self.capacity, np.int64)  # the learner's version when an item arrived
        self.fresh = np.zeros(self.capacity, np.bool_)  # not drawn yet
        self.sums = SumTree(self.capacity)
        self.highest = 1.0  # the highest priority so far, which an item without one gets
        self.inserted = self.filled = self.drawn = self.steps = 0
        self.next = 0  # version of the weights that the next batch will change
        self.ages = {"age_of_weights": 0.0, "age_of_data": 0.0}
        self.refusals = Refusals()

    def admit(self, actor: int, version: int, count: int) -> bool:
        """Whether an actor may begin: always, since a replay draws old experience as well."""
        return True

    def put(self, items: Mapping[str, Tree], priority: Array | None = None, actor: int | None = None) -> bool:
        """Copy items in over the oldest; False: the learner is behind, come back.

        Invalid items or priorities are refused and counted.
        """
        if self._ahead() > self._slack():
            return False
        if problem := items_problem(items, priority, self.choices):
            self.refusals.add("experience", problem)
            return True
        self.add(items, priority)
        self.refusals.accept()
        return True

    def add(self, items: Mapping[str, Tree], priority: Array | None = None) -> None:
        """Copy items in that somebody has inspected."""
        versions = np.asarray(items["version"])
        count = len(versions)
        if count > self.capacity:
            raise ValueError(f"{count} items at once do not fit a replay of {self.capacity}")
        content = {key: value for key, value in items.items() if key != "version"}
        leaves = {name: np.asarray(leaf) for name, leaf in flat(content, separator="/")}
        if not self.memory:
            self._allocate(leaves)
        keys = self._make_room(count)
        slots = keys % self.capacity
        for name, value in leaves.items():
            self._write(name, slots, value)
        self.keys[slots], self.version[slots], self.arrived[slots] = keys, versions, self.next
        self.fresh[slots] = True
        if priority is None:
            priority = np.full(count, self.highest)
        self.sums.set(slots, self._sharpen(priority))
        self.inserted, self.filled = self.inserted + count, self.filled + count
        self.steps += self._fresh(np.asarray(items["first"]))

    def get(self, size: int, version: int = 0, beta: float = 1.0, seed: int | None = None) -> Mapping[str, Tree] | None:
        """Draw a batch for weights of this version, with importance weights of at most 1; None: too few yet."""
        self.next = version
        if self.filled < self.settings.minimum or self._ahead() - size < -self._slack():
            return None
        batch = self.draw(size, version, seed)
        chance = batch.pop("chance")
        weight = importance(self.filled * chance, beta) if self.settings.alpha else np.ones(size, np.float32)
        return {**batch, "weight": weight}

    def draw(self, size: int, version: int, seed: int | None = None) -> dict[str, Any]:
        """Draw items whatever the limits say, if there are any; each has its `chance` instead of a weight."""
        dice = np.random if seed is None else np.random.RandomState(seed)
        if self.settings.alpha == 0:
            slots = dice.randint(self.inserted - self.filled, self.inserted, size) % self.capacity
            chance = np.full(size, 1 / self.filled)
        else:
            slots = self.sums.draw(size, dice)
            chance = self.sums.get(slots) / self.sums.total()
        self.drawn, self.next = self.drawn + size, version + 1
        self.ages = ages(version, self.version[slots], self.arrived[slots])
        batch = self.items(slots)
        fresh = np.zeros(size, np.bool_)
        fresh[np.unique(slots, return_index=True)[1]] = True  # an item may be drawn twice at once
        fresh &= self.fresh[slots]
        self.fresh[slots] = False
        return {**batch, "key": self.keys[slots], "version": self.version[slots], "chance": chance, "fresh": fresh}

    def items(self, slots: Array) -> dict[str, Any]:
        """The items in these slots, as a tree."""
        return nested({name: self._read(name, slots) for name in self.memory})

    def update(self, key: Array, priority: Array) -> None:
        """Set priorities; keys of overwritten items are ignored, and invalid priorities refused."""
        if problem := priority_problem(priority, len(key)):
            self.refusals.add("priorities", problem)
            return
        slots = key % self.capacity
        there = self.keys[slots] == key
        self.highest = max(self.highest, float(priority.max(initial=0.0)))
        self.sums.set(slots[there], self._sharpen(priority[there]))

    def status(self) -> Mapping[str, float]:
        """How full it is, how much went in and out, how many puts were refused, and the ages of the last batch."""
        counts = {"inserted": self.inserted, "drawn": self.drawn, "steps": self.steps, "refused": self.refusals.total}
        return {"filled": self.filled, "capacity": self.capacity, **counts, **self.ages}

    def refused(self) -> list[str]:
        """What was refused since the last call, in words."""
        return self.refusals.drain()

    def nbytes(self) -> int:
        """Bytes that the items take."""
        plain = sum(int(array.nbytes) for array in self.memory.values())
        return plain + sum(frames.nbytes() for frames in self.frames.values())

    def settle(self) -> Mapping[str, Array]:
        """Everything, for a checkpoint, without a copy: items may still arrive while it is written, in this order.

        `keys` are those of now, and `kept`, the last, those at the end: where they differ, an item was overwritten.
        """
        if not self.memory:
            return {}
        used = slice(None) if self.inserted >= self.capacity else slice(self.inserted)
        counts = np.array([self.inserted, self.filled, self.drawn, self.steps, self.next])
        saved = {"keys": self.keys.copy(), "counts": counts, "highest": np.array(self.highest)}
        saved |= {f"items|{name}": array[used] for name, array in self.memory.items()}
        for name, frames in self.frames.items():
            saved |= {f"{part}|{name}": array for part, array in frames.snapshot().items()}
            saved[f"shape|{name}"] = np.array(self.shapes[name])
        rest = {"version": self.version, "arrived": self.arrived, "fresh": self.fresh}
        saved |= {**rest, "priorities": self.sums.values.reshape(-1)[: self.capacity], "kept": self.keys}
        # Where any item may be overwritten next, not only the oldest, a gap could be anywhere: then it is a copy.
        return saved if self.overwritten is None else {name: np.array(array) for name, array in saved.items()}

    def restore(self, saved: Mapping[str, Array]) -> None:
        """Put back what `settle` returned, except items that were overwritten meanwhile."""
        if not saved:
            return
        if "keys" not in saved:
            raise Fatal("the saved replay has shards: set algorithm.replay.shards to their number")
        if (size := len(saved["keys"])) != self.capacity:
            raise Fatal(f"the saved replay has a capacity of {size} items; replay.capacity is {self.capacity}")
        self.inserted, _, self.drawn, self.steps, self.next = saved["counts"].tolist()
        self.highest = float(saved["highest"])
        slots = self._intact(saved["keys"], saved["kept"])
        self.filled = len(slots)
        for mine, name in [
            (self.keys, "keys"),
            (self.version, "version"),
            (self.arrived, "arrived"),
            (self.fresh, "fresh"),
        ]:
            mine[slots] = saved[name][slots]
        self.sums.set(slots, saved["priorities"][slots])
        for name in [key.removeprefix("items|") for key in saved if key.startswith("items|")]:
            array = saved[f"items|{name}"]
            self.memory[name] = np.zeros((self.capacity, *array.shape[1:]), array.dtype)
            self.memory[name][: len(array)] = array
            parts = {key.removesuffix(f"|{name}"): value for key, value in saved.items() if key.endswith(f"|{name}")}
            if "shape" in parts:
                self.shapes[name] = tuple(parts["shape"].tolist())
                size = int(np.prod(self.shapes[name])) // array.shape[-1]
                self.frames[name] = self._pool(int(parts["room"]), size)
                self.frames[name].restore(parts, array[slots])

    def _intact(self, before: Array, after: Array) -> Array:
        """Slots of the newest items, oldest first, as far as nothing overwrote them while they were saved."""
        if self.overwritten is not None:
            if not np.array_equal(before, after):  # it was saved where the oldest make room: gaps do not fit here
                self.inserted = 0
            return np.arange(min(self.inserted, self.capacity))
        keys = np.arange(max(self.inserted - self.capacity, 0), self.inserted)
        slots = keys % self.capacity
        gone = np.flatnonzero((before[slots] != keys) | (after[slots] != keys))
        return slots[gone.max(initial=-1) + 1 :]  # the oldest go first

    def _ahead(self) -> float:
        """Draws that the items so far allow, beyond those made; Acme's limiter, arXiv:2006.00979, section 2.5."""
        ratio = self.settings.samples_per_insert
        if ratio is None or self.inserted < self.settings.minimum:
            return 0.0
        return ratio * (self.inserted - self.settings.minimum) - self.drawn

    def _slack(self) -> float:
        ratio = self.settings.samples_per_insert
        return float("inf") if ratio is None else self.settings.tolerance * self.batch

    def _sharpen(self, priority: Array) -> Array:
        return (np.abs(priority).astype(np.float64) + LEAST) ** self.settings.alpha

    def _fresh(self, first: Array) -> int:
        """Steps that no item before held: an overlap is new only where its episode begins with the item."""
        real = ~first[1:]
        return int(real[self.overlap :].sum() + real[: self.overlap, first[0]].sum())

    def _allocate(self, leaves: Mapping[str, Array]) -> None:
        for name, value in leaves.items():
            shape, dtype = (value.shape[0], *value.shape[2:]), value.dtype
            if name.startswith("observation") and dtype == np.uint8 and value[0, 0].nbytes >= PICTURE:
                depth = self._depth(name)
                new = max(shape[0] - 1 - self.overlap, 1) if shape[0] > 2 else 1
                places = int(self.capacity * new * SPARE) + shape[0] * depth
                if self.overwritten is not None:  # then neighbours, which share frames, do not leave together
                    places = self.capacity * shape[0] * depth
                self.frames[name] = self._pool(places, value[0, 0].nbytes // depth)
                self.shapes[name] = value.shape[2:]
                shape, dtype = (shape[0], depth), np.dtype(np.int32)
            self.memory[name] = np.zeros((self.capacity, *shape), dtype)

    def _pool(self, places: int, size: int) -> Frames:
        return Frames(places, size, self.settings.compress)

    def _depth(self, name: str) -> int:
        """Instants in one observation."""
        depth = self.stack
        for part in name.split("/")[1:]:
            depth = depth[part]
        return int(depth)

    def _write(self, name: str, slots: Array, value: Array) -> None:
        memory = self.memory[name]
        if name in self.frames:
            value = self._keep(name, value)
        if value.shape != (shape := (memory.shape[1], len(slots), *memory.shape[2:])):
            raise ValueError(f"items of shape {value.shape}, but earlier ones had {shape}")
        memory[slots] = np.swapaxes(value, 0, 1)

    def _keep(self, name: str, value: Array) -> Array:
        """Keep the frames of observations [T, n, ...] and return their places [T, n, depth]."""
        depth = self.memory[name].shape[-1]
        frames = np.ascontiguousarray(value).reshape(-1, self.frames[name].size)
        while True:
            try:
                return self.frames[name].add(frames).reshape(*value.shape[:2], depth)
            except Full:
                if self.filled == 0:
                    raise ValueError("the frames of one put do not fit the replay: raise capacity") from None
                self._evict(max(self.filled // 100, 1))

    def _make_room(self, count: int) -> Array:
        """Drop as many items as must go, and return keys for the new ones: their slots are those modulo capacity."""
        keys = self.inserted + np.arange(count)
        left = max(self.capacity - self.inserted, 0)
        if self.overwritten is None or count <= left:
            self._evict(self.filled + count - self.capacity)
            return keys
        slots = self.overwritten(self.keys[: self.filled], self.inserted, count - left)
        self._drop(slots)
        keys[left:] = keys[left:] * self.capacity + slots  # never given before, and found in the same way
        return keys

    def _evict(self, count: int) -> None:
        """Drop the oldest items."""
        if count > 0:
            oldest = self.inserted - self.filled
            self._drop(np.arange(oldest, oldest + count) % self.capacity)

    def _drop(self, slots: Array) -> None:
        for name, frames in self.frames.items():
            frames.drop(self.memory[name][slots].reshape(-1))
        self.keys[slots] = -1
        self.sums.set(slots, np.zeros(len(slots)))
        self.filled -= len(slots)

    def _read(self, name: str, slots: Array) -> Array:
        """The items at these slots, [T, n, ...]."""
        rows = self.memory[name].take(slots, axis=0)
        if name not in self.frames:
            return np.swapaxes(rows, 0, 1)
        frames = self.frames[name].get(np.swapaxes(rows, 0, 1).reshape(-1))
        return frames.reshape(rows.shape[1], len(slots), *self.shapes[name])


def nested(leaves: Mapping[str, Array]) -> dict[str, Any]:
    """The tree of arrays by path."""
    tree: dict[str, Any] = {"record": {}}
    for path, array in leaves.items():
        *parents, name = path.split("/")
        inner = tree
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[name] = array
    return tree
