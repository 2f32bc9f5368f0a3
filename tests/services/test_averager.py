"""Merging what groups have learned apart, against a slow transcription of the rule."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shoal.core.caller import call_as
from shoal.core.codec import Codec, Receiver, Sender
from shoal.core.errors import ShoalError
from shoal.services.averager import ACTIVE, Averager


class Group:
    """A group that changes its weights by given amounts."""

    def __init__(self, averager: Averager, name: str, codec: Codec) -> None:
        """Join."""
        self.averager, self.name = averager, name
        self.sender, self.sent = Sender(codec), 0
        self.receiver = Receiver(averager.weights)
        joined = averager.join(name)
        self.life = joined["life"]
        self.weights: Any = self.receiver.take(joined["message"])
        self.sum = {key: np.zeros_like(value) for key, value in self.weights.items()}

    def send(self, change: dict[str, Any], steps: int) -> Any:
        """Send a change; take the merged weights."""
        self.sum = {key: self.sum[key] + change[key] for key in change}
        self.sender.publish(self.sent, self.sum)
        message = self.sender.message(self.sent - 1)
        self.sent += 1
        answer = self.averager.merge(self.name, self.life, self.receiver.version, steps, 1, message, {"loss": 1.0})
        self.weights = self.receiver.take(answer["message"])
        return answer


def change(random: np.random.Generator) -> dict[str, Any]:
    return {"w": random.normal(size=(3, 2)).astype(np.float32), "n": np.array(2)}


def start() -> dict[str, Any]:
    return {"w": np.ones((3, 2), np.float32), "n": np.array(10)}


def test_merges_follow_the_rule() -> None:
    random, codec = np.random.default_rng(0), Codec()
    averager = Averager(start(), codec)
    groups = {name: Group(averager, name, codec) for name in "abc"}
    weights = start()["w"].astype(np.float64)
    raw: dict[str, float] = {}
    merged, held = dict.fromkeys("abc", 0), dict.fromkeys("abc", 0)
    for version in range(60):
        name, steps = "abc"[random.choice(3, p=[0.7, 0.2, 0.1])], int(random.integers(1, 100))
        delta = change(random)
        raw[name] = steps / (1 + version - held[name])
        merged[name] = version + 1
        active = [other for other in "abc" if merged[other] >= version - ACTIVE * 3]
        weights = weights + raw[name] / sum(raw.get(other, raw[name]) for other in active) * delta["w"]
        held[name] = version + 1
        groups[name].send(delta, steps)
        np.testing.assert_allclose(averager.newest()["w"], weights, rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(groups[name].weights["w"], averager.newest()["w"])
    assert averager.newest()["n"] == 10 + 2 * 60  # counts add up
    assert averager.status()["version"] == 60


def test_one_group_alone_has_it_all_its_way() -> None:
    averager = Averager(start(), Codec())
    group = Group(averager, "a", Codec())
    delta = change(np.random.default_rng(0))
    group.send(delta, 7)
    np.testing.assert_allclose(averager.newest()["w"], 1 + delta["w"], rtol=1e-6)
    assert averager.status()["steps"] == 7


def test_equal_groups_add_their_average() -> None:
    averager = Averager(start(), Codec())
    groups = [Group(averager, name, Codec()) for name in "abcd"]
    same = {"w": np.full((3, 2), 0.5, np.float32), "n": np.array(0)}
    for _ in range(5):  # staleness settles at 3 for everyone, and so do the shares at a quarter
        for group in groups:
            group.send(same, 100)
    before = averager.newest()["w"].copy()
    for group in groups:
        group.send(same, 100)
    np.testing.assert_allclose(averager.newest()["w"] - before, 0.5, rtol=1e-5)


def test_a_group_that_vanished_soon_counts_no_more() -> None:
    averager = Averager(start(), Codec())
    lost, left = Group(averager, "lost", Codec()), Group(averager, "left", Codec())
    lost.send(change(np.random.default_rng(0)), 1000)
    for _ in range(3 * ACTIVE):
        left.send({"w": np.zeros((3, 2), np.float32), "n": np.array(0)}, 10)
    assert averager.status()["metrics"]["share"] == 1.0


def test_a_group_that_begins_again_is_told_everything_and_owes_nothing() -> None:
    codec = Codec(kind="int8", delta=True)
    averager = Averager(start(), codec)
    random = np.random.default_rng(0)
    first = Group(averager, "a", codec)
    for _ in range(3):
        first.send(change(random), 10)
    before = averager.newest()["w"].copy()
    again = Group(averager, "a", codec)  # as after a crash: it has forgotten what it sent
    held: Any = averager.sender.weights()
    np.testing.assert_array_equal(again.weights["w"], held["w"])
    delta = change(random)
    again.send(delta, 10)
    np.testing.assert_allclose(averager.newest()["w"], before + delta["w"], rtol=1e-5)


def test_quantised_changes_add_up_over_time() -> None:
    codec = Codec(kind="int8", delta=True)
    averager, random = Averager(start(), codec), np.random.default_rng(0)
    group, total = Group(averager, "a", codec), np.zeros((3, 2))
    for _ in range(50):
        delta = {"w": (0.01 * random.normal(size=(3, 2))).astype(np.float32), "n": np.array(0)}
        total += delta["w"]
        group.send(delta, 10)
    np.testing.assert_allclose(averager.newest()["w"], 1 + total, atol=0.01)  # what is lost comes with the next


def test_groups_that_have_not_merged_yet_count_in_the_share() -> None:
    averager = Averager(start(), Codec())
    first, second = Group(averager, "a", Codec()), Group(averager, "b", Codec())
    first.send(change(np.random.default_rng(0)), 100)
    assert averager.status()["metrics"]["share"] == 0.5
    second.send(change(np.random.default_rng(1)), 100)  # one merge behind: half the weight of the first
    assert averager.status()["metrics"]["share"] == pytest.approx(50 / 150)


class TestMoments:
    """Running moments are merged as what they are."""

    def start(self) -> dict[str, Any]:
        return {"w": np.zeros(2, np.float32), "m.count": np.zeros(()), "m.mean": np.zeros(3), "m.var": np.ones(3)}

    @pytest.mark.parametrize("codec", [Codec(), Codec(kind="int8", delta=True)])
    def test_they_are_those_of_all_samples_of_all_groups(self, codec: Codec) -> None:
        random = np.random.default_rng(0)
        averager = Averager(self.start(), codec)
        groups = [Group(averager, name, codec) for name in "ab"]
        samples = []
        for turn in range(10):
            seen = random.normal(10 * turn, 1 + turn, (random.integers(1, 50), 3))
            samples.append(seen)
            group = groups[turn % 2]
            group.sum = {**group.sum, **dict.fromkeys(("m.count", "m.mean", "m.var"), np.zeros(()))}
            moments = {"m.count": np.array(float(len(seen))), "m.mean": seen.mean(0), "m.var": seen.var(0)}
            group.send({"w": np.zeros(2, np.float32), **moments}, 10)
        together = np.concatenate(samples)
        for part, expected in (("count", len(together)), ("mean", together.mean(0)), ("var", together.var(0))):
            np.testing.assert_allclose(averager.newest()[f"m.{part}"], expected, rtol=1e-9)
            np.testing.assert_allclose(groups[1].weights[f"m.{part}"], expected, rtol=1e-9)


def refused(averager: Averager, group: Group, message: Any, **wrong: Any) -> str:
    """Send something that makes no sense, and return the reason for which it was refused."""
    given = {"version": group.receiver.version, "steps": 10, "updates": 1, "metrics": {"loss": 1.0}, **wrong}
    before = {name: array.copy() for name, array in averager.newest().items()}
    call_as("group-7/gradient-1")
    args = (given["version"], given["steps"], given["updates"], message, given["metrics"])
    answer = averager.merge(group.name, group.life, *args)
    assert {*answer} == {"refused"}
    for name, array in averager.newest().items():
        np.testing.assert_array_equal(array, before[name])
    return str(answer["refused"])


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"steps": -1}, "steps is -1, not an integer of at least 0"),
        ({"steps": 10.5}, "steps is 10.5"),
        ({"steps": 10**9}, "1,000,000,000 steps are more than a change can have: 1,000"),
        ({"updates": -3}, "updates is -3"),
        ({"version": 5}, "version 5 does not exist yet: the newest is 0"),
        ({"version": -1}, "version is -1"),
        ({"metrics": {"loss": float("nan")}}, "metric loss is nan"),
    ],
)
def test_counts_that_cannot_be_are_refused(wrong: dict[str, Any], reason: str) -> None:
    averager = Averager({"w": np.zeros(2, np.float32)}, Codec(), most=1_000)
    group = Group(averager, "a", Codec())
    assert reason in refused(averager, group, message(1.0), **wrong)
    (line,) = averager.status()["refused"]
    assert line.startswith("refused a change of group-7/gradient-1: ")


@pytest.mark.parametrize(
    ("total", "reason"), [(np.nan, "w holds nan"), (np.inf, "w holds inf"), (1e30, "w changed by")]
)
def test_changes_that_are_no_numbers_are_refused_and_the_group_may_begin_again(total: float, reason: str) -> None:
    averager = Averager({"w": np.zeros(2, np.float32)}, Codec())
    group, other = Group(averager, "a", Codec()), Group(averager, "b", Codec())
    assert reason in refused(averager, group, message(total))
    other.send({"w": np.ones(2, np.float32)}, 10)
    Group(averager, "a", Codec()).send({"w": np.ones(2, np.float32)}, 10)
    assert np.isfinite(averager.newest()["w"]).all()
    assert averager.status()["version"] == 2


def test_refusals_between_good_changes_are_no_error_of_their_sender() -> None:
    averager = Averager({"w": np.zeros(2, np.float32)}, Codec())
    bad, good = Group(averager, "a", Codec()), Group(averager, "b", Codec())
    for _ in range(150):
        assert "holds nan" in refused(averager, bad, message(np.nan))
        good.send({"w": np.zeros(2, np.float32)}, 10)


def test_strangers_are_refused_and_everyone_hears_of_the_end() -> None:
    averager = Averager(start(), Codec())
    with pytest.raises(ShoalError, match="x has not joined"):
        averager.merge("x", 0, 0, 1, 1, {}, {})
    group = Group(averager, "a", Codec())
    averager.stop()
    assert group.send(change(np.random.default_rng(0)), 1)["stop"] is True


def message(total: float) -> Any:
    """What a group says whose changes sum up to a number."""
    sender = Sender(Codec())
    sender.publish(0, {"w": np.full(2, total, np.float32)})
    return sender.message(-1)


def test_a_group_that_begins_again_takes_no_changes_of_its_former_life() -> None:
    averager = Averager({"w": np.zeros(2, np.float32)}, Codec())
    before = averager.join("group-0")["life"]
    averager.merge("group-0", before, 0, 10, 1, message(1.0), {})
    after = averager.join("group-0")["life"]
    with pytest.raises(ShoalError, match="group-0 has not joined, or has begun again"):
        averager.merge("group-0", before, 1, 10, 1, message(3.0), {})
    assert averager.newest()["w"].tolist() == [1.0, 1.0]
    averager.merge("group-0", after, 1, 10, 1, message(0.5), {})
    assert averager.newest()["w"].tolist() == [1.5, 1.5]
