"""A mixture: a queue of fresh experience and replays of old, from which every batch gets its shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shoal.core.mixing import BY_ITEM, Mixing, ordered, shares
from shoal.core.randomness import derive
from shoal.core.tree import map_tree
from shoal.core.types import Array, Tree
from shoal.services.queue import Queue
from shoal.services.replay import Replay


class Mixture:
    """A queue and replays by name: what is put goes to all of them, and a batch has items of each.

    The queue sets the pace: while it has too few items there is no batch, and where it is full, actors wait. Until a
    replay holds its minimum, batches are smaller by its share. Keys tell the part: modulo the number of parts.
    """

    def __init__(
        self,
        parts: Mixing,
        batch: int,
        capacity: int,
        max_lag: int | None = None,
        overlap: int = 0,
        stack: Any = 1,
        choices: Sequence[int] = (),
        exact: bool = False,
        seed: int = 0,
    ) -> None:
        """Mix batches of `batch` items, with a queue of `capacity`; the rest is as for the stores inside.

        Which items elite insertion compares depends on `seed` and on how many came before, not on who puts.
        """
        self.names = ordered(parts)
        self.first, self.exact = self.names[0], exact
        self.parts = {name: parts[name] for name in self.names}
        self.shares = shares(parts, batch)
        when_full = parts[self.first].when_full
        self.queue = Queue(capacity, self.shares[self.first], max_lag, choices, exact, when_full)
        self.scores: dict[str, Scores] = {}
        self.replays: dict[str, Replay] = {}
        for name, part in self.parts.items():
            if part.kind == "queue":
                continue
            if part.selects:
                self.scores[name] = Scores(part.room, part.contenders, derive(seed, name))
            overwritten = self.scores[name].farthest if part.insertion == "elite" else None
            count = self.shares[name]
            self.replays[name] = Replay(part.replaying(count), count, overlap, stack, choices, overwritten)

    def admit(self, actor: int, version: int, count: int) -> bool:
        """Whether an actor may begin `count` items with these weights; False: fetch newer ones, and ask again."""
        return self.queue.admit(actor, version, count)

    def put(self, items: Mapping[str, Tree], priority: Array | None = None, actor: int | None = None) -> bool:
        """Copy items into every part, or none; False: the queue is full, come back. The queue inspects them."""
        refused = self.queue.refusals.total
        if not self.queue.put(items, None, actor):
            return False
        if self.queue.refusals.total == refused and len(items["version"]):
            for replay in self.replays.values():
                replay.next = self.queue.next
                replay.add(items)
        return True

    def get(self, size: int, version: int = 0, beta: float = 1.0, seed: int | None = None) -> Mapping[str, Tree] | None:
        """A batch of whole shares, by largest remainder, with nothing chosen by distance; None: too little yet."""
        batch = self._mixed(shares(self.parts, size), version, seed, candidates=False)
        return batch and {name: value for name, value in batch.items() if name not in ("part", "uses")}

    def draw(self, counts: Mapping[str, int], version: int) -> Mapping[str, Tree] | None:
        """The candidates of each part, from which the learner chooses; None: too little fresh experience yet.

        Besides a batch it holds the `part` of each item by number, and its `uses`: how often it was chosen. Of an
        attentive part, the newest item comes before those that were drawn.
        """
        return self._mixed(counts, version, None, candidates=True)

    def _mixed(
        self, counts: Mapping[str, int], version: int, seed: int | None, candidates: bool
    ) -> dict[str, Any] | None:
        fresh = self.queue.get(counts[self.first], version)
        if fresh is None:
            return None
        pieces = [self._piece(0, fresh, fresh=True)]
        for number, name in enumerate(self.names[1:], 1):
            replay = self.replays[name]
            drawn = replay.get(counts[name], version, 1.0, None if seed is None else derive(seed, name))
            if drawn is None:
                continue
            if candidates and self.parts[name].kind == "attentive":
                pieces.append(self._piece(number, newest(replay), fresh=False))
            pieces.append(self._piece(number, drawn, fresh=False))
        return {key: map_tree(_beside(int(key not in BY_ITEM)), *(piece[key] for piece in pieces)) for key in fresh} | {
            key: np.concatenate([piece[key] for piece in pieces]) for key in ("fresh", "part", "uses")
        }

    def _piece(self, number: int, batch: Mapping[str, Any], fresh: bool) -> dict[str, Any]:
        """Items of one part, with keys that tell which."""
        key, count = np.asarray(batch["key"]), len(batch["key"])
        scores = self.scores.get(self.names[number])
        return {
            **batch,
            "key": key * len(self.names) + number,
            "fresh": np.full(count, fresh),
            "part": np.full(count, number),
            "uses": np.zeros(count, np.int64) if scores is None else scores.uses_of(key),
        }

    def choose(self, key: Array, score: Array, chosen: Array) -> None:
        """Take the distances of candidates, and which of them were chosen."""
        for name, mine in self._by_part(key).items():
            if name in self.scores:
                self.scores[name].note(key[mine] // len(self.names), score[mine], chosen[mine])

    def update(self, key: Array, priority: Array) -> None:
        """Set priorities in the parts that draw by them."""
        for name, mine in self._by_part(key).items():
            if self.parts[name].kind == "prioritized":
                self.replays[name].update(key[mine] // len(self.names), priority[mine])

    def _by_part(self, key: Array) -> dict[str, Array]:
        """Where the keys of each part stand."""
        return {name: key % len(self.names) == number for number, name in enumerate(self.names)}

    def settle(self) -> Mapping[str, Array]:
        """The replays, for a checkpoint; where the clock decides nothing, what waits in the queue is forgotten."""
        if self.exact:
            self.queue.settle()
        inner = {name: {**replay.settle()} for name, replay in self.replays.items()}
        for name, scores in self.scores.items():
            inner[name] |= {f"scores|{key}": array for key, array in scores.settle().items()}
        return {f"{name}.{key}": array for name, saved in inner.items() for key, array in saved.items()}

    def restore(self, saved: Mapping[str, Array]) -> None:
        """Put back what `settle` returned; parts that it does not know stay empty."""
        for name, replay in self.replays.items():
            own = {key.removeprefix(f"{name}."): array for key, array in saved.items() if key.startswith(f"{name}.")}
            scores = {key.removeprefix("scores|"): own.pop(key) for key in [*own] if key.startswith("scores|")}
            replay.restore(own)
            if own and scores and name in self.scores:
                self.scores[name].restore(scores)

    def refused(self) -> list[str]:
        """What was refused since the last call, in words."""
        return [*self.queue.refused(), *(line for replay in self.replays.values() for line in replay.refused())]

    def status(self) -> Mapping[str, float]:
        """The status of the queue, and of every replay how many items it holds and has drawn."""
        status = {**self.queue.status()}
        for name, replay in self.replays.items():
            status |= {f"{name}_filled": replay.filled, f"{name}_drawn": replay.drawn}
            status["refused"] += replay.refusals.total
        return status


class Scores:
    """What the learner said of items: how far they are, and how often they were chosen; by the slots of a replay.

    An item of which it said nothing is new: as near as can be, and never chosen.
    """

    def __init__(self, capacity: int, contenders: int, seed: int) -> None:
        """Know nothing of any of `capacity` items."""
        self.capacity, self.contenders, self.seed = capacity, contenders, seed
        self.keys = np.full(capacity, -1, np.int64)  # of the items that scores and uses belong to
        self.score = np.zeros(capacity)
        self.uses = np.zeros(capacity, np.int64)

    def note(self, key: Array, score: Array, chosen: Array) -> None:
        """Keep scores, and count each time an item was chosen."""
        slots = key % self.capacity
        newer = self.keys[slots] < key
        fresh = slots[newer]
        self.keys[fresh], self.score[fresh], self.uses[fresh] = key[newer], 0.0, 0
        mine = (self.keys[slots] == key) & np.isfinite(score)
        self.score[slots[mine]] = score[mine]
        np.add.at(self.uses, slots[mine & chosen], 1)

    def uses_of(self, key: Array) -> Array:
        """How often items were chosen."""
        slots = key % self.capacity
        return np.where(self.keys[slots] == key, self.uses[slots], 0)

    def farthest(self, keys: Array, inserted: int, count: int) -> Array:
        """The slots that `count` new items take, of slots with these keys: each the farthest of some at random."""
        dice = np.random.default_rng([self.seed, inserted])
        score = np.where(self.keys[: len(keys)] == keys, self.score[: len(keys)], 0.0)
        taken = np.zeros(len(keys), np.bool_)
        for _ in range(count):
            open_ = np.flatnonzero(~taken)
            some = dice.choice(open_, min(self.contenders, len(open_)), replace=False)
            taken[some[np.argmax(score[some])]] = True
        return np.flatnonzero(taken)

    def settle(self) -> dict[str, Array]:
        """Everything, for a checkpoint."""
        return {"keys": self.keys.copy(), "score": self.score.copy(), "uses": self.uses.copy()}

    def restore(self, saved: Mapping[str, Array]) -> None:
        """Put back what `settle` returned."""
        self.keys[:], self.score[:], self.uses[:] = saved["keys"], saved["score"], saved["uses"]


def newest(replay: Replay) -> dict[str, Any]:
    """The item that was put last, as a batch of one."""
    slot = replay.keys.argmax(0, keepdims=True)
    return {
        **replay.items(slot),
        "key": replay.keys[slot],
        "version": replay.version[slot],
        "weight": np.ones(1, np.float32),
    }


def _beside(axis: int) -> Any:
    return lambda *parts: np.concatenate(parts, axis)
