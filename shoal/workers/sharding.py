"""A replay that is spread over processes: the workers that hold its shards, and the learner's view of all of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from shoal.core.errors import Fatal, ServiceLost
from shoal.core.sampling import importance, strata
from shoal.core.tree import map_tree
from shoal.core.types import Array, Store, Tree, Work

if TYPE_CHECKING:
    from shoal.core.settings import Replaying
    from shoal.services.shard import Shard

COUNTS = ("inserted", "drawn", "steps", "refused")  # what a shard counts from its beginning
SUMS = ("filled", "capacity", *COUNTS)
FLAT = ("key", "version", "chance", "fresh")  # [N]; everything else has time before the items


def hold() -> Work:
    """Do nothing: the services that live with this worker have its process to themselves."""
    while True:
        yield False


def stored(store: Store, items: Mapping[str, Tree], priority: Array | None, actor: int, sharded: bool) -> bool:
    """Put items into a store; a shard that has died answers like one that is full, since it will be there again."""
    try:
        return store.put(items, priority, actor)
    except ServiceLost:
        if not sharded:
            raise
        return False


class Shards:
    """The shards of a replay as one store, from which items are drawn as from one that holds all of them.

    Of the equal parts of the total priority, one for each item of a batch, as many are drawn from a shard as fall into
    its own total. So every item is drawn as often as from one store, and its chance, and with it its weight, is the
    same. A shard that dies begins again empty: what it had is counted and reported, and the others go on.
    """

    def __init__(self, shards: Sequence[Shard], settings: Replaying, batch: int) -> None:
        """Draw `batch` items at a time."""
        self.shards, self.settings, self.batch = shards, settings, batch
        self.seen: dict[int, Mapping[str, Any]] = {}  # what each shard last said
        self.lives: dict[int, int] = {}  # of the shards, when the last batch was drawn
        self.gone: Counter[str] = Counter()  # counts of shards that have died, and their number
        self.highest = 0.0  # priority so far
        self.ages = {"age_of_weights": 0.0, "age_of_data": 0.0}
        self.news: list[str] = []

    def admit(self, actor: int, version: int, count: int) -> bool:
        """Whether an actor may begin: always, as for a replay."""
        return True

    def put(self, items: Mapping[str, Tree], priority: Array | None = None, actor: int | None = None) -> bool:
        """Copy the items of an actor into its shard; False: it is over the limit, or has just died."""
        index = (actor or 0) % len(self.shards)
        with self._surviving(index):
            return self.shards[index].put(items, priority, actor)
        return False

    def get(self, size: int, version: int = 0, beta: float = 1.0, seed: int | None = None) -> Mapping[str, Tree] | None:
        """Draw a batch for weights of this version, with importance weights of at most 1; None: too few yet."""
        self._look(version)
        now = self.status()
        self._allow(now)
        if not self.seen or now["filled"] < self.settings.minimum or self._ahead(now) - size < -self._slack():
            return None
        dice = np.random.RandomState(np.random.randint(2**31) if seed is None else seed)
        if (parts := self._draw(size, version, dice)) is None:
            return None
        for name in self.ages:
            self.ages[name] = sum(part.pop(name) * len(part["key"]) for part in parts) / size
        batch = {name: beside(name, [part[name] for part in parts]) for name in parts[0]}
        chance = batch.pop("chance")
        return {**batch, "weight": importance(now["filled"] * chance, beta if self.settings.alpha else 0.0)}

    def _draw(self, size: int, version: int, dice: Any) -> list[dict[str, Any]] | None:
        """Items of every shard in proportion to its total, with the chance that each had; None: a shard has died."""
        totals = {index: self.seen[index]["total"] for index in sorted(self.seen)}
        self.lives = {index: self.seen[index]["life"] for index in totals}
        counts, seeds = dealt(np.array([*totals.values()]), size, dice), dice.randint(2**31, size=len(totals))
        parts = []
        for index, count, seed in zip(totals, counts.tolist(), seeds.tolist(), strict=True):
            part = None
            if not count:
                continue
            with self._surviving(index):
                part = self.shards[index].draw(self.lives[index], count, version, seed)
            if part is None:  # if it has begun again, the next look will tell
                return None
            chance = part["chance"] * (totals[index] / sum(totals.values()))
            parts.append({**part, "key": part["key"] * len(self.shards) + index, "chance": chance})
        return parts

    def update(self, key: Array, priority: Array) -> None:
        """Set priorities; keys of items that are gone are ignored."""
        self.highest = max(self.highest, float(np.abs(priority).max(initial=0.0)))
        for index, life in self.lives.items():
            mine = key % len(self.shards) == index
            keys, priorities = key[mine] // len(self.shards), priority[mine]
            with self._surviving(index):
                self.shards[index].update(life, keys, priorities, self.highest)

    def settle(self) -> Mapping[str, Array]:
        """Everything in every shard, for a checkpoint."""
        saved = {"shards": np.array(len(self.shards))}
        for index, shard in enumerate(self.shards):
            with self._surviving(index):
                saved |= {f"{index}/{name}": array for name, array in shard.settle().items()}
        return saved

    def restore(self, saved: Mapping[str, Array]) -> None:
        """Put back what `settle` returned."""
        if not saved:
            return
        count = int(saved.get("shards", 1))
        if count != len(self.shards):
            raise Fatal(f"the saved replay has {count} shards; algorithm.replay.shards is {len(self.shards)}")
        for index, shard in enumerate(self.shards):
            start = f"{index}/"
            content = {name.removeprefix(start): array for name, array in saved.items() if name.startswith(start)}
            if content:
                shard.restore(content)
        self.seen.clear()

    def refused(self) -> list[str]:
        """What was refused since the last call, and which shards died, in words."""
        news, self.news = self.news, []
        for index, shard in enumerate(self.shards):
            with self._surviving(index):
                news += shard.refused()
        return news

    def status(self) -> Mapping[str, float]:
        """Sums over the shards, and the deaths among them as `lost`, as of the last time that a batch was asked for."""
        if not self.seen:
            self._look(None)
        sums = {name: float(sum(seen[name] for seen in self.seen.values()) + self.gone[name]) for name in SUMS}
        return {**sums, **self.ages, "lost": float(self.gone["lives"])}

    def _look(self, version: int | None) -> None:
        """Ask every shard how things stand."""
        for index, shard in enumerate(self.shards):
            with self._surviving(index):
                seen = shard.look(version)
                if index in self.seen and self.seen[index]["life"] != seen["life"]:
                    self._mourn(index)
                self.seen[index] = seen

    def _allow(self, now: Mapping[str, float]) -> None:
        """Share out the items that may be put before the learner has drawn as often as it should.

        Where a shard died there may be fewer items than the minimum, which the learner waits for: then as many are
        allowed in any case.
        """
        if self.settings.samples_per_insert is None or not self.seen:
            return
        limit = self.settings.minimum + (self._slack() + now["drawn"]) / self.settings.samples_per_insert
        room = max(math.floor(limit) + 1 - now["inserted"], self.settings.minimum - now["filled"], 0)
        for index, seen in [*self.seen.items()]:
            with self._surviving(index):
                self.shards[index].allow(seen["inserted"] + math.ceil(room / len(self.seen)))

    def _ahead(self, now: Mapping[str, float]) -> float:
        """Draws that the items so far allow, beyond those made; as in one store."""
        ratio = self.settings.samples_per_insert
        return 0.0 if ratio is None else ratio * (now["inserted"] - self.settings.minimum) - now["drawn"]

    def _slack(self) -> float:
        return math.inf if self.settings.samples_per_insert is None else self.settings.tolerance * self.batch

    @contextmanager
    def _surviving(self, index: int) -> Iterator[None]:
        """Do without a shard that has died."""
        try:
            yield
        except ServiceLost:
            self._mourn(index)

    def _mourn(self, index: int) -> None:
        """Count what a shard had that died, once."""
        if (seen := self.seen.pop(index, None)) is None:
            return
        self.gone.update({name: int(seen[name]) for name in COUNTS}, lives=1)
        self.news.append(
            f"shard-{index} of the replay has died with {seen['filled']:,.0f} items and begins again empty "
            f"({self.gone['lives']} such deaths so far)"
        )


def beside(name: str, parts: Sequence[Any]) -> Any:
    """A part of several batches as that of one."""
    return map_tree(lambda *each: np.concatenate(each, int(name not in FLAT)), *parts)


def dealt(totals: Array, size: int, dice: Any) -> Array:
    """How many of `size` draws fall to each total: one is made in each of as many equal parts of all of them."""
    ends = totals.cumsum()
    which = np.minimum(ends.searchsorted(strata(ends[-1], size, dice), side="right"), len(ends) - 1)
    return np.bincount(which, minlength=len(totals))
