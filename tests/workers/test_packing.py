"""The packer against its definition: what was chosen where, what answered it, and where episodes end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from shoal.core.tree import leaves, map_tree
from shoal.core.types import Batch, NStep, Sequence, Step
from shoal.envs.toy import Counting
from shoal.envs.vector import Vector
from shoal.workers.packing import Sequences, Transitions, make

Item = dict[str, Any]


@dataclass(frozen=True)
class Stream:
    """Everything that B environments and a policy said, instant by instant: arrays of [instants, B, ...]."""

    observation: Any
    reward: np.ndarray
    discount: np.ndarray
    first: np.ndarray
    action: np.ndarray
    record: dict[str, np.ndarray]
    version: np.ndarray  # [instants]

    def play(self, packer: Sequences | Transitions) -> Iterator[Any]:
        """Let the packer see it, and yield what each instant completes."""
        for now, version in enumerate(self.version):
            row = map_tree(lambda x, now=now: x[now].copy(), vars(self) | {"version": self.version[:, None]})
            step = Step(row["observation"], row["reward"], row["discount"], row["first"])
            items = packer.observe(step)
            yield None if items is None else map_tree(np.copy, items)  # they are valid until the next choice only
            packer.choose(row["action"], row["record"], int(version))
            for leaf in leaves(row):
                leaf.fill(77)  # environments use their memory again


def random_stream(seed: int, size: int, instants: int = 50, tree: bool = True) -> Stream:
    """Episodes that end by their own rules, are cut off, or begin again at once."""
    random = np.random.default_rng(seed)
    ended = random.random((instants, size)) < 0.15
    terminated = ended & (random.random((instants, size)) < 0.5)
    first = np.concatenate([np.ones((1, size), bool), ended[:-1]]) | (random.random((instants, size)) < 0.03)
    instant, column = np.meshgrid(np.arange(instants), np.arange(size), indexing="ij")
    place = np.stack([column, instant], -1).astype(np.int32)  # says which environment and which instant it is
    return Stream(
        observation={"place": place, "image": random.integers(0, 255, (instants, size, 2), np.uint8)}
        if tree
        else place,
        reward=random.integers(-8, 8, (instants, size)).astype(np.float32),
        discount=(~terminated).astype(np.float32),
        first=first,
        action=random.normal(size=(instants, size, 2)) if tree else random.integers(0, 9, (instants, size)),
        record={
            "value": random.normal(size=(instants, size)).astype(np.float32),
            "core": random.normal(size=(instants, size, 3)).astype(np.float32),
        },
        version=np.cumsum(random.integers(0, 2, instants)),
    )


def episodes(first: np.ndarray) -> list[tuple[int, int, bool]]:
    """The first and last instant of each episode of one environment, and whether the next has begun."""
    begins = [0, *(t for t in range(1, len(first)) if first[t])]
    ends = [*(begin - 1 for begin in begins[1:]), len(first) - 1]
    return [(begin, end, end < len(first) - 1) for begin, end in zip(begins, ends, strict=True)]


def reference_transitions(stream: Stream, experience: NStep, column: int) -> Iterator[tuple[int, Item]]:
    """When each n-step transition of one environment is known, and what it is."""
    for begin, end, closed in episodes(stream.first[:, column]):
        for start in range(begin, end):
            steps = min(experience.n, end - start)
            if steps < experience.n and not closed:
                continue
            last = start + steps
            reward, power = np.float32(0), np.float32(1)  # power: γ to the number of steps before
            for instant in range(start + 1, last + 1):
                power *= np.float32(1 if instant == start + 1 else experience.gamma)
                reward += power * stream.reward[instant, column]
            yield (
                last if steps == experience.n else end + 1,
                {
                    "observation": map_tree(lambda x, t=start, u=last: x[[t, u], column], stream.observation),
                    "first": np.array([stream.first[start, column], False]),
                    "action": stream.action[[start], column],
                    "reward": np.array([reward]),
                    "discount": np.array([power * stream.discount[last, column]]),
                    "record": {name: value[[start], column] for name, value in stream.record.items()},
                    "version": stream.version[start],
                },
            )


def reference_sequences(stream: Stream, experience: Sequence, column: int) -> Iterator[tuple[int, Item]]:
    """When each sequence of one environment is known, and what it is."""
    length, overlap = experience.length, experience.overlap
    whole = [(0, len(stream.first) - 1, False)]
    for begin, end, closed in whole if experience.across else episodes(stream.first[:, column]):
        start, emitted = begin, begin  # emitted: the last instant that was returned
        while start + length <= end:
            yield start + length, sequence(stream, experience, column, start, start + length)
            start, emitted = start + length - overlap, start + length
        if closed and end > emitted:
            yield end + 1, sequence(stream, experience, column, start, end)


def sequence(stream: Stream, experience: Sequence, column: int, start: int, last: int) -> Item:
    """The instants from start to last, padded where they are fewer than a sequence has."""
    seen, length = last - start + 1, experience.length
    actions = min(seen, length)  # where the episode ended, the dummy chosen at its last observation is one of them

    def padded(x: np.ndarray, begin: int, rows: int, total: int, filling: Any = 0) -> np.ndarray:
        real = x[begin : begin + rows, column]
        return np.concatenate([real, np.full((total - rows, *real.shape[1:]), filling, x.dtype)])

    return {
        "observation": map_tree(lambda x: padded(x, start, seen, length + 1), stream.observation),
        "first": padded(stream.first, start, seen, length + 1, True),
        "action": padded(stream.action, start, actions, length),
        "reward": padded(stream.reward, start + 1, actions, length),
        "discount": padded(stream.discount, start + 1, actions, length),
        "record": {
            name: value[[start], column] if name in experience.initial else padded(value, start, actions, length)
            for name, value in stream.record.items()
        },
        "version": stream.version[start],
    }


def place_of(item: Item) -> tuple[int, ...]:
    """The environment and instant at which an item begins."""
    observation = item["observation"]
    return tuple(np.ravel((observation["place"] if isinstance(observation, dict) else observation)[0]))


def singles(items: Any) -> list[Item]:
    """Items one by one, in the order of where they begin."""
    if items is None:
        return []
    timed = {key: value for key, value in items.items() if key != "version"}
    each = [
        {**map_tree(lambda x, i=i: x[:, i], timed), "version": version} for i, version in enumerate(items["version"])
    ]
    return sorted(each, key=place_of)


def check(stream: Stream, experience: NStep | Sequence) -> int:
    """Compare the packer with the reference at every instant, and return how many items there were."""
    reference = reference_transitions if isinstance(experience, NStep) else reference_sequences
    size = stream.first.shape[1]
    known = [pair for column in range(size) for pair in reference(stream, experience, column)]
    for now, items in enumerate(stream.play(make(experience, size))):
        expected = sorted((item for when, item in known if when == now), key=place_of)
        received = singles(items)
        assert [place_of(item) for item in received] == [place_of(item) for item in expected]
        for got, want in zip(received, expected, strict=True):
            assert got.keys() == want.keys()
            map_tree(same, got, want)
    return sum(when < len(stream.first) for when, _ in known)


def same(got: Any, want: Any) -> None:
    """Check that arrays agree in type, shape and every bit."""
    assert (got.dtype, got.shape, got.tolist()) == (want.dtype, want.shape, want.tolist())


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("initial", [(), ("core",)])
@pytest.mark.parametrize("across", [True, False])
@pytest.mark.parametrize(("length", "overlap"), [(1, 0), (2, 0), (2, 1), (5, 0), (5, 1), (5, 4), (8, 6), (20, 10)])
def test_sequences_agree_with_the_definition(length, overlap, across, initial, size):
    counts = [
        check(random_stream(seed, size, tree=seed % 2 == 0), Sequence(length, overlap, across, initial))
        for seed in range(5)
    ]
    assert min(counts) > 0


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("gamma", [1.0, 0.5, 0.99])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_transitions_agree_with_the_definition(n, gamma, size):
    counts = [check(random_stream(seed, size, tree=seed % 2 == 0), NStep(n, gamma)) for seed in range(5)]
    assert min(counts) > 0


def counting(first: list[int], instants: int, terminated: tuple[int, ...] = ()) -> Stream:
    """One environment that counts: at instant t it shows t, t earned 100 + t, and 10 + t is chosen."""
    count = np.arange(instants)[:, None]
    return Stream(
        observation=count,
        reward=(100 + count).astype(np.float32),
        discount=(~np.isin(count, terminated)).astype(np.float32),
        first=np.isin(count, first),
        action=10 + count,
        record={"core": 1000 + count, "value": 2000 + count},
        version=np.arange(instants) // 2,
    )


def cut(stream: Stream, experience: NStep | Sequence) -> list[tuple[int, Item]]:
    """Every item of one environment as lists, with the instant at which it came."""
    played = enumerate(stream.play(make(experience, 1)))
    return [(now, map_tree(lambda x: x.tolist(), item)) for now, items in played for item in singles(items)]


def test_a_sequence_is_shifted_once():
    (when, one), (later, two) = cut(counting([0, 4], 8, terminated=(3,)), Sequence(3, initial=("core",)))
    assert (when, later) == (3, 6)
    assert one == {
        "observation": [0, 1, 2, 3],
        "first": [True, False, False, False],
        "action": [10, 11, 12],  # chosen at 0, 1, 2
        "reward": [101, 102, 103],  # which answer 10, 11, 12
        "discount": [1, 1, 0],
        "record": {"core": [1000], "value": [2000, 2001, 2002]},
        "version": 0,
    }
    assert two == {
        "observation": [3, 4, 5, 6],
        "first": [False, True, False, False],  # 13 was a dummy, from the last observation to the next episode
        "action": [13, 14, 15],
        "reward": [104, 105, 106],
        "discount": [1, 1, 1],
        "record": {"core": [1003], "value": [2003, 2004, 2005]},
        "version": 1,
    }


def test_an_overlap_shows_the_end_of_one_sequence_again_at_the_beginning_of_the_next():
    items = cut(counting([0], 10), Sequence(4, 3, initial=("core",)))
    assert [when for when, _ in items] == [4, 5, 6, 7, 8, 9]
    for start, (_, item) in enumerate(items):
        assert item["observation"] == [*range(start, start + 5)]
        assert item["action"] == [*range(10 + start, 14 + start)]
        assert item["reward"] == [*range(101 + start, 105 + start)]
        assert item["record"]["core"] == [1000 + start]
        assert item["version"] == start // 2


def test_a_sequence_that_stops_with_its_episode_is_padded():
    items = cut(counting([0, 5], 9, terminated=(4,)), Sequence(3, across=False))
    assert [when for when, _ in items] == [3, 5, 8]
    assert items[1][1] == {
        "observation": [3, 4, 0, 0],
        "first": [False, False, True, True],
        "action": [13, 14, 0],
        "reward": [104, 105, 0],
        "discount": [0, 1, 0],
        "record": {"core": [1003, 1004, 0], "value": [2003, 2004, 0]},
        "version": 1,
    }
    assert items[2][1]["observation"] == [5, 6, 7, 8]


def test_an_episode_that_ends_with_a_sequence_leaves_nothing_to_pad():
    for overlap in (0, 1, 2):
        items = cut(counting([0, 4], 8), Sequence(3, overlap, across=False))
        assert [item["observation"] for _, item in items] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_padded_sequence_repeats_the_overlap():
    items = cut(counting([0, 5], 6), Sequence(3, 2, across=False))
    assert [item["observation"] for _, item in items] == [[0, 1, 2, 3], [1, 2, 3, 4]]
    items = cut(counting([0, 5], 6), Sequence(3, 1, across=False))
    assert [item["observation"] for _, item in items] == [[0, 1, 2, 3], [2, 3, 4, 0]]


@pytest.mark.parametrize(
    ("first", "across", "masks"),
    [
        ([0, 4], True, [[1, 1, 1], [0, 1, 1]]),
        ([0, 3], True, [[1, 1, 0], [1, 1, 1]]),
        ([0, 6, 7], True, [[1, 1, 1], [1, 1, 0]]),
        ([0, 6, 7], False, [[1, 1, 1], [1, 1, 0]]),  # an episode of one instant holds no transition
        ([0, 5, 7], False, [[1, 1, 1], [1, 0, 0], [1, 0, 0]]),
    ],
)
def test_the_mask_hides_dummies_and_padding(first, across, masks):
    items = cut(counting(first, 8), Sequence(3, across=across))
    batches = [Batch(None, torch.tensor(item["first"])[:, None], *[None] * 7) for _, item in items]
    assert [batch.mask[:, 0].tolist() for batch in batches] == masks


def test_environments_whose_sequences_end_together_come_together():
    stream = random_stream(0, 3)
    stream.first[1:] = False
    assert [len(singles(items)) for items in stream.play(make(Sequence(5), 3))] == [0, *([0] * 4 + [3]) * 9, *[0] * 4]


def test_one_step_transitions_of_a_counting_stream():
    items = cut(counting([0, 3], 6, terminated=(2,)), NStep(1, 0.5))
    assert [(when, item["observation"], item["action"], item["reward"], item["discount"]) for when, item in items] == [
        (1, [0, 1], [10], [101], [1]),
        (2, [1, 2], [11], [102], [0]),
        (4, [3, 4], [13], [104], [1]),
        (5, [4, 5], [14], [105], [1]),
    ]
    assert items[3][1]["version"] == 2
    assert items[3][1]["record"] == {"core": [1004], "value": [2004]}


@pytest.mark.parametrize(("terminated", "alive"), [((), 1), ((4,), 0)])
def test_partial_returns_at_the_end_of_an_episode(terminated, alive):
    items = cut(counting([0, 5], 8, terminated), NStep(3, 0.5))
    assert [
        (when, item["observation"], item["action"], item["reward"], item["discount"], item["version"])
        for when, item in items
    ] == [
        (3, [0, 3], [10], [101 + 102 / 2 + 103 / 4], [1 / 4], 0),
        (4, [1, 4], [11], [102 + 103 / 2 + 104 / 4], [alive / 4], 0),
        (5, [2, 4], [12], [103 + 104 / 2], [alive / 2], 1),
        (5, [3, 4], [13], [104], [alive], 1),
    ]
    assert all(item["first"] == [when == 3, False] for when, item in items)


def test_an_episode_shorter_than_n_gives_what_it_has():
    items = cut(counting([0, 3, 4, 6], 7), NStep(5, 0.5))
    assert [(when, item["observation"], item["reward"], item["discount"]) for when, item in items] == [
        (3, [0, 2], [101 + 102 / 2], [1 / 2]),
        (3, [1, 2], [102], [1]),
        (6, [4, 5], [105], [1]),
    ]


@pytest.mark.parametrize("experience", [Sequence(0), Sequence(4, 4), Sequence(4, 5), Sequence(4, -1), NStep(0)])
def test_what_cannot_be_cut_says_so(experience):
    with pytest.raises(ValueError, match="must be at least"):
        make(experience, 2)


class Breaking(Counting):
    """Counts, and fails at every seventh step of its life."""

    life = 0

    def step(self, action: int) -> Any:
        self.life += 1
        if self.life % 7 == 0:
            raise RuntimeError("the simulator crashed")
        return super().step(action)


@pytest.mark.parametrize(
    "experience", [NStep(1, 0.5), NStep(3, 0.5), Sequence(4, overlap=1), Sequence(6, across=False)], ids=str
)
def test_nothing_is_learned_from_a_step_that_failed(experience: NStep | Sequence) -> None:
    lengths = iter([5, 12, *[12] * 100])
    vector = Vector("Breaking", lambda: Breaking(next(lengths)), 2, 0, 1000, {})
    packer = make(experience, 2)
    packer.observe(vector.reset())
    learned = set()
    for instant in range(200):
        packer.choose(np.zeros(2, np.int64), {}, instant)
        if (items := packer.observe(vector.step(np.zeros(2, np.int64)))) is None:
            continue
        count, first = items["observation"][..., 0], items["first"]
        steps = count[1:] - count[:-1]
        real = ~first[1:]
        most = experience.n if isinstance(experience, NStep) else 1
        assert ((steps >= 1) & (steps <= most))[real].all()  # none leads from an observation to itself
        for begin, taken, reward in zip(count[:-1][real], steps[real], items["reward"][real], strict=True):
            assert reward == sum(0.5**k * (begin + k + 1) for k in range(int(taken)))
            learned.add((int(begin), int(taken)))
        assert (items["discount"][real & (count[1:] == 6)] > 0).all()  # where it broke, the value of what was seen last
    assert len(vector.faults()) > 40
    assert (5, 1) in learned  # the last step before a fault
    assert not [pair for pair in learned if sum(pair) > 6]
    vector.close()
