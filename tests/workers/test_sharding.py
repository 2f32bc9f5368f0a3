"""A replay in shards: drawn from as from one store, a limiter over all, and a shard that dies costs its items only."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shoal.core.errors import Fatal, ServiceLost
from shoal.core.settings import Replaying
from shoal.core.types import Store
from shoal.services.replay import Replay
from shoal.services.shard import Shard
from shoal.workers.sharding import Shards, stored
from tests.services.test_replay import items, names

COUNT = 3


@pytest.fixture(autouse=True)
def seeded() -> None:
    np.random.seed(0)


class Mortal:
    """A shard that can die: calls of it are lost until it begins again."""

    def __init__(self, settings: Replaying) -> None:
        self.settings, self.shard, self.dead = settings, Shard(settings, 8), False

    def die(self) -> None:
        self.shard, self.dead = Shard(self.settings, 8), True

    def __getattr__(self, name: str) -> Any:
        if self.dead:
            raise ServiceLost("it has gone")
        return getattr(self.shard, name)


def whole(count: int = COUNT, batch: int = 8, **more: Any) -> tuple[list[Any], Shards]:
    given = {"capacity": 300, "minimum": 1, "alpha": 0.7, **more}
    settings = Replaying(**given, shards=count)
    shards: list[Any] = [Mortal(settings) for _ in range(count)]
    return shards, Shards(shards, settings, batch)


def filled(alpha: float) -> tuple[Replay, Shards, Any]:
    """The same items with the same priorities in one store and in shards of unequal size and weight."""
    one = Replay(Replaying(capacity=300, minimum=1, alpha=alpha), 8)
    _, many = whole(alpha=alpha)
    named = np.arange(60)
    priority = np.random.random_sample(60) ** 3 * np.where(named < 30, 10, 1)
    one.put(items(named), priority)
    for part, actor in ((named[:7], 0), (named[7:50], 1), (named[50:], 2)):
        assert many.put(items(part), priority[part], actor)
    return one, many, (priority + 1e-6) ** alpha


@pytest.mark.parametrize("alpha", [0.0, 0.7, 1.0])
def test_draws_over_shards_follow_the_distribution_of_one_store(alpha: float) -> None:
    _, many, mass = filled(alpha)
    size, times = 96, 500
    counts = np.bincount(np.concatenate([names(many.get(size)) for _ in range(times)]), minlength=60)
    expected = size * times * mass / mass.sum()
    # Draws from equal parts vary less than independent ones, so the statistic is at most that of a χ² test.
    statistic = float(((counts - expected) ** 2 / expected).sum())
    assert statistic < 98.3  # χ² of 59 degrees of freedom, p = 0.001


@pytest.mark.parametrize("alpha", [0.0, 0.7])
def test_weights_are_those_of_one_store(alpha: float) -> None:
    one, many, mass = filled(alpha)
    for beta in (0.4, 1.0):
        for store in (one, many):
            batch = store.get(32, beta=beta)
            assert batch is not None
            drawn = mass[names(batch)]
            weights = (60 * drawn / mass.sum()) ** -beta
            assert np.allclose(batch["weight"], weights / weights.max() if alpha else 1.0, rtol=1e-6)


def test_it_is_a_store_and_sums_over_its_shards() -> None:
    _, many, _ = filled(0.7)
    store: Store = many
    store.get(16)
    status = store.status()
    counts = {"filled": 60, "capacity": 300, "inserted": 60, "steps": 60, "refused": 0, "lost": 0}
    assert {name: status[name] for name in counts} == counts
    store.get(16)
    assert store.status()["drawn"] == 16  # as of the moment when the second batch was asked for
    many.put({**items([1]), "reward": np.full((1, 1), np.nan, np.float32)}, None, 1)
    store.get(1)
    assert store.status()["refused"] == 1
    assert "refused experience" in store.refused()[0]


def test_priorities_go_to_the_shard_of_their_key_and_unknown_keys_nowhere() -> None:
    _, many, _ = filled(1.0)
    batch = many.get(64)
    assert batch is not None
    chosen = names(batch) == names(batch)[0]
    many.update(batch["key"], np.where(chosen, 1e9, 0.0))
    again = many.get(64)
    assert again is not None
    assert (names(again) == names(batch)[0]).mean() > 0.9
    many.update(np.array([10**6, 10**6 + 1]), np.ones(2))
    many.put(items([99]), None, 2)  # without a priority it gets the highest of any shard
    new = many.get(64)
    assert new is not None
    assert (names(new) == 99).sum() == pytest.approx(32, abs=6)


def test_every_draw_is_decided_by_the_seed() -> None:
    _, many, _ = filled(0.7)
    draws = []
    for state in (5, 5, 6):
        np.random.seed(state)
        draws.append(many.get(16)["key"].tolist())
    assert draws[0] == draws[1] != draws[2]


def test_what_is_saved_comes_back_and_draws_the_same() -> None:
    _, many, _ = filled(0.7)
    saved = {name: np.array(value) for name, value in many.settle().items()}
    _, again = whole()
    again.restore(saved)
    assert again.status()["filled"] == 60
    for _ in range(3):
        keys = [store.get(16, seed=9)["key"].tolist() for store in (many, again)]
        assert keys[0] == keys[1]
    with pytest.raises(Fatal, match=r"3 shards; algorithm\.replay\.shards is 2"):
        whole(2)[1].restore(saved)
    with pytest.raises(Fatal, match=r"set algorithm\.replay\.shards"):
        Replay(Replaying(capacity=300), 8).restore(saved)
    single = Replay(Replaying(capacity=300), 8)
    single.put(items([1]))
    with pytest.raises(Fatal, match=r"1 shards; algorithm\.replay\.shards is 3"):
        whole()[1].restore(single.settle())


def test_draws_per_insert_hold_over_all_shards_however_unequal_they_are() -> None:
    ratio, minimum = 4.0, 30
    _, many = whole(minimum=minimum, samples_per_insert=ratio, tolerance=2.0, capacity=3000)
    drawn = inserted = 0
    for turn in range(600):
        actor = turn % COUNT
        priority = np.array([100.0 if actor == 0 else 0.01])  # nearly all draws come from one shard
        for _ in range(5):
            inserted += many.put(items([turn]), priority, actor)
        if many.get(8) is not None:
            drawn += 8
        ahead = ratio * max(inserted - minimum, 0) - drawn
        assert -16 <= ahead <= 16 + ratio * COUNT
    assert inserted > 150
    assert drawn > 500


def test_a_shard_that_dies_costs_its_items_and_is_counted_once() -> None:
    shards, many = whole(minimum=20, samples_per_insert=2.0)
    for actor in range(COUNT):
        for name in range(7):
            many.put(items([10 * actor + name]), None, actor)
    batch = many.get(8)
    assert batch is not None
    shards[1].die()
    assert stored(shards[1], items([50]), None, 1, sharded=True) is False  # the actor tries again
    with pytest.raises(ServiceLost):
        stored(shards[1], items([50]), None, 1, sharded=False)
    many.update(batch["key"], np.ones(8))
    assert many.get(8) is None  # 14 items are fewer than the minimum
    shards[1].dead = False
    for name in range(6):  # keys that were those of other items before
        assert many.get(8) is None
        assert many.put(items([50 + name]), np.array([1.0]), 1)
    many.lives[1] = shards[1].shard.life - 1
    many.update(np.arange(0, 21), np.full(21, 1e9))
    found = [names(many.get(8)) for _ in range(2)]
    assert not np.isin(found, range(50, 56)).any()  # their priorities were not set by keys of the former life
    status = many.status()
    assert (status["lost"], status["inserted"], status["filled"]) == (1, 27, 20)
    assert [line for line in many.refused() if "died" in line] == [
        "shard-1 of the replay has died with 7 items and begins again empty (1 such deaths so far)"
    ]
    assert many.refused() == []


def test_a_shard_that_dies_unseen_is_noticed_by_its_life() -> None:
    shards, many = whole()
    for actor in range(COUNT):
        many.put(items([actor]), None, actor)
    assert many.get(8) is not None
    shards[0].die()
    shards[0].dead = False
    many.put(items([7]), None, 0)
    batch = many.get(8)
    assert batch is not None
    assert 0 not in names(batch)
    assert many.status()["lost"] == 1


def test_actors_and_learner_do_not_wait_for_each_other_after_a_death() -> None:
    shards, many = whole(minimum=25, samples_per_insert=2.0, capacity=30)
    for turn in range(200):
        many.put(items([turn]), None, turn % COUNT)
        many.get(8)
    while any(many.put(items([0]), None, actor) for actor in range(COUNT)):
        pass  # until no more are allowed
    many.seen.clear()
    assert many.status()["filled"] == 30
    shards[1].die()
    shards[1].dead = False
    for turn in range(60):
        if many.get(8) is not None:
            break
        many.put(items([turn]), None, turn % COUNT)
    assert many.status()["lost"] == 1
    assert many.status()["filled"] >= 25
