"""Settings: frozen, closed to unknown keys, with numbers that move over the run."""

from __future__ import annotations

import pytest
from pydantic import Field, ValidationError

from shoal.algorithms.deterministic import Td3
from shoal.algorithms.sac import Sac
from shoal.core.settings import Schedule, Settings, at


class Two(Settings):
    """One number that moves and one that does not."""

    rate: Schedule = Field(Schedule(start=8.0, end=0.0), description="Moves.")
    size: int = Field(3, ge=1, description="Does not.")


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (0.5, [0.5, 0.5, 0.5, 0.5]),
        ({"start": 0.5}, [0.5, 0.5, 0.5, 0.5]),
        ({"start": 4, "end": 0, "shape": "constant"}, [4, 4, 4, 4]),
        ({"start": 4, "end": 0}, [4, 3, 2, 0]),
        ({"start": 1, "end": 9, "shape": "linear"}, [1, 3, 5, 9]),
        ({"start": 16, "end": 0, "shape": "polynomial"}, [16, 9, 4, 0]),
        ({"start": 65, "end": 1, "shape": "polynomial", "power": 3}, [65, 28, 9, 1]),
        ({"start": 8, "end": 0, "until": 0.5}, [8, 4, 0, 0]),
        ({"start": 8, "end": 0, "until": 200}, [8, 4, 0, 0]),
        ({"start": 8, "end": 0, "until": 800}, [8, 7, 6, 4]),
        ({"start": 8, "shape": "constant", "warmup": 0.5}, [0, 4, 8, 8]),
        ({"start": 8, "end": 0, "warmup": 200}, [0, 3, 4, 0]),
    ],
)
def test_shapes(written, expected):
    schedule = Schedule.model_validate(written)
    assert schedule.now == schedule.start
    assert [schedule.at(steps, 400).now for steps in (0, 100, 200, 400)] == expected
    assert Schedule.model_validate(schedule.model_dump()) == schedule


@pytest.mark.parametrize(("progress", "expected"), [(-1, 8), (2, 0)])
def test_progress_beyond_the_run_stays_at_its_ends(progress, expected):
    assert Schedule(start=8, end=0).at(progress, 1).now == expected


def test_moving_begins_from_the_start_each_time():
    schedule = Schedule(start=8, end=0)
    assert schedule.at(0.5, 1).at(0.25, 1).now == 6
    assert schedule.now == 8


@pytest.mark.parametrize("written", [1e-3, "1e-3", "0.001", {"start": "1e-3", "shape": "constant"}])
def test_a_number_may_be_written_as_text(written):
    # YAML 1.1 reads 1e-3 as text.
    assert Schedule.model_validate(written) == Schedule(start=0.001, shape="constant")


@pytest.mark.parametrize(
    "written",
    [
        "much",
        True,
        None,
        [1],
        {},
        {"start": 1, "end": 0, "shape": "cosine"},
        {"start": 1, "power": 0},
        {"begin": 1},
        {"start": 1, "until": 0},
        {"start": 1, "warmup": -1},
    ],
    ids=str,
)
def test_what_is_no_schedule_is_refused(written):
    with pytest.raises(ValidationError):
        Schedule.model_validate(written)


@pytest.mark.parametrize(
    ("schedule", "written"),
    [
        (Schedule(start=0.5, shape="constant"), 0.5),
        (Schedule(start=0.5), {"start": 0.5, "end": None, "shape": "linear"}),
        (Schedule(start=1, end=0), {"start": 1, "end": 0, "shape": "linear"}),
        (Schedule(start=1, end=0, power=3), {"start": 1, "end": 0, "shape": "linear", "power": 3}),
        (Schedule(start=1, end=0, shape="constant"), {"start": 1, "end": 0, "shape": "constant"}),
        (
            Schedule(start=1, end=0, shape="polynomial"),
            {"start": 1, "end": 0, "shape": "polynomial", "power": 2},
        ),
    ],
    ids=str,
)
def test_written_down_and_read_back(schedule, written):
    assert schedule.model_dump(mode="json") == written
    assert Schedule.model_validate(written) == schedule


def test_the_present_value_is_not_written_down():
    moved = at(Two(), 0.5, 1)
    assert moved.rate.now == 4
    assert Two.model_validate(moved.model_dump(mode="json")) == Two()


def test_schedules_of_settings_move_together_and_the_rest_stays():
    settings = Two(size=5)
    moved = at(settings, 75, 100)
    assert (moved.rate.now, moved.size) == (2, 5)
    assert settings.rate.now == 8
    constant = Two(rate=1.0)
    assert at(constant, 75, 100) is constant


def test_settings_are_frozen():
    with pytest.raises(ValidationError, match="frozen"):
        Two().size = 4
    with pytest.raises(ValidationError, match="frozen"):
        Schedule(start=1).start = 2


@pytest.mark.parametrize("wrong", [{"sise": 3}, {"rate": {"start": 1, "finish": 0}}, {"size": 0}, {"size": "many"}])
def test_an_unknown_key_or_a_wrong_value_is_refused(wrong):
    with pytest.raises(ValidationError):
        Two.model_validate(wrong)


def test_the_schema_takes_a_bare_number_too():
    number, whole = Schedule.model_json_schema()["anyOf"]
    assert number == {"type": "number"}
    assert list(whole["properties"]) == ["start", "end", "shape", "power", "until", "warmup"]


def test_settings_given_in_part_keep_the_rest_of_their_own_default() -> None:
    given = Sac(replay={"capacity": 5_000})
    assert given.replay == Sac().replay.model_copy(update={"capacity": 5_000})
    assert given.replay.alpha == 0.0  # SAC's, where a replay's own default is 0.6
    assert Sac(replay={"alpha": 0.6}).replay.alpha == 0.6
    assert Td3(network={"normalise_observation": True}).network.hidden == (400, 300)
    # A schedule is one thing: nothing of another one is left in it.
    assert Sac(lr={"start": 1e-3, "end": 0}).lr.shape == "linear"
