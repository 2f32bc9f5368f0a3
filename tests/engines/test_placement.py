"""Which worker lives on which machine."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from shoal.engines.placement import HERE, group_of, place

WORKERS = [f"actor-{index}" for index in range(6)]


def test_workers_are_spread_by_slots() -> None:
    places = place(WORKERS, {}, {"big": 4, "small": 2})
    assert Counter(places.values()) == {"big": 4, "small": 2}


def test_too_many_workers_are_shared_in_proportion() -> None:
    places = place([f"a{index}" for index in range(12)], {}, {"big": 4, "small": 2})
    assert Counter(places.values()) == {"big": 8, "small": 4}


def test_without_a_machine_workers_wait() -> None:
    assert place(WORKERS, {}, {}) == {}
    assert place(WORKERS, {}, {"useless": 0}) == {}


def test_workers_stay_where_they_are() -> None:
    before = place(WORKERS, {}, {"a": 3, "b": 3})
    assert place(WORKERS, before, {"a": 3, "b": 3, "c": 3}) == before


def test_workers_of_a_lost_machine_move_and_the_others_do_not() -> None:
    before = place(WORKERS, {}, {"a": 3, "b": 3})
    after = place(WORKERS, before, {"a": 3})
    assert set(after.values()) == {"a"}
    assert all(after[worker] == "a" for worker in WORKERS if before[worker] == "a")


def test_a_machine_that_comes_takes_over_what_is_too_much_for_the_others() -> None:
    before = place(WORKERS, {}, {"a": 3})
    after = place(WORKERS, before, {"a": 3, "b": 2})
    assert Counter(after.values()) == {"a": 4, "b": 2}
    assert sum(before[worker] != after[worker] for worker in WORKERS) == 2


def test_a_group_stays_together() -> None:
    workers = [f"group-{group}/gradient-{index}" for group in range(3) for index in range(2)]
    assert group_of(workers[0]) == "group-0"
    places = place(workers, {}, {"a": 2, "b": 2, "c": 2})
    assert {places[worker] for worker in workers[:2]} != {places[worker] for worker in workers[2:4]}
    for group in range(3):
        assert len({places[worker] for worker in workers[2 * group : 2 * group + 2]}) == 1


def test_the_head_takes_no_more_than_it_is_allowed() -> None:
    places = place(WORKERS, {}, {"a": 2}, here=1)
    assert Counter(places.values()) == {"a": 5, HERE: 1}


@given(
    st.integers(0, 12),
    st.lists(st.dictionaries(st.sampled_from("abcd"), st.integers(0, 4)), max_size=6),
    st.integers(1, 3),
)
def test_groups_are_whole_and_placed_whatever_comes_and_goes(
    groups: int, history: list[dict[str, int]], size: int
) -> None:
    workers = [f"g{group}/w{index}" for group in range(groups) for index in range(size)]
    places: dict[str, str] = {}
    for nodes in history:
        places = place(workers, places, nodes)
        usable = {name for name, slots in nodes.items() if slots}
        assert set(places.values()) <= usable
        assert len(places) == (len(workers) if usable else 0)
        for group in range(groups):
            assert len({places[worker] for worker in workers if group_of(worker) == f"g{group}" and places}) <= 1


def test_a_node_that_is_away_keeps_its_workers_and_takes_no_more() -> None:
    before = {"a": "gone", "b": "away", "c": "here"}
    after = place(["a", "b", "c"], before, {"away": 4, "here": 1}, away=frozenset({"away"}))
    assert after == {"a": "here", "b": "away", "c": "here"}
    assert place(["a", "b"], before, {"away": 4}, away=frozenset({"away"})) == {"b": "away"}
