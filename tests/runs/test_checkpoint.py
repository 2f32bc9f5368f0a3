"""Checkpoints: whole or not there, the newest and the best stay, and trouble with the disk harms nothing."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from shoal.core.errors import SettingsError, ShoalError
from shoal.runs import checkpoint
from shoal.services.checkpoints import Checkpoints


def content(steps: int, scheduled: bool = True, **more: Any) -> dict[str, Any]:
    return {
        "weights": {
            "w": np.full((2, 3), steps, np.float32),
            "other order": np.arange(6, dtype=np.float32).reshape(2, 3).T,  # as channels_last weights are
            "count": np.array(steps, np.float64),
        },
        "optimizer": {"0.step": np.array(1.0, np.float32)},
        "state": {"steps": steps, "scheduled": scheduled, **more},
    }


def names(run: Path) -> list[str]:
    return [path.name for path in checkpoint.paths(run)]


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    saved = content(10, version=3)
    assert Checkpoints(str(tmp_path), 3).save(saved) == ""
    loaded = Checkpoints(str(tmp_path), 3).load(exact=False)
    assert loaded is not None
    assert loaded["state"] == saved["state"]
    for part in ("weights", "optimizer"):
        for name, array in saved[part].items():
            assert loaded[part][name].dtype == array.dtype
            assert loaded[part][name].shape == array.shape
            assert np.array_equal(loaded[part][name], array)


def test_there_is_none_at_first(tmp_path: Path) -> None:
    assert Checkpoints(str(tmp_path), 3).load(exact=False) is None
    with pytest.raises(ShoalError, match="no checkpoint yet"):
        checkpoint.find(tmp_path, "best")


def test_the_newest_stay_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    checkpoints = Checkpoints(str(tmp_path), 2)
    for steps in (5, 90, 100, 1000):
        checkpoints.save(content(steps))
    assert names(tmp_path) == ["step_100", "step_1000"]


def test_the_newest_scheduled_one_outlives_later_unscheduled_ones(tmp_path: Path) -> None:
    checkpoints = Checkpoints(str(tmp_path), 1)
    for steps, scheduled in ((5, True), (10, True), (12, False), (14, False)):
        checkpoints.save(content(steps, scheduled))
    assert names(tmp_path) == ["step_10", "step_14"]
    assert checkpoints.load(exact=True)["state"]["steps"] == 10  # type: ignore[index]
    assert checkpoints.load(exact=False)["state"]["steps"] == 14  # type: ignore[index]


def test_the_best_is_the_one_with_the_best_mean(tmp_path: Path) -> None:
    checkpoints = Checkpoints(str(tmp_path), 1)
    for steps, mean in ((1, 5.0), (2, 9.0), (3, 7.0)):
        checkpoints.save_best({"weights": content(steps)["weights"], "state": {"steps": steps, "mean": mean}})
        Checkpoints(str(tmp_path), 1)  # a later start knows as well
    assert checkpoint.read(checkpoint.find(tmp_path, "best"))["state"] == {"steps": 2, "mean": 9.0}
    assert names(tmp_path) == []


def test_checkpoints_are_found_by_name(tmp_path: Path) -> None:
    checkpoints = Checkpoints(str(tmp_path), 5)
    for steps in (100, 200):
        checkpoints.save(content(steps))
    for name, expected in {"best": "step_200", "newest": "step_200", "100": "step_100", "step_200": "step_200"}.items():
        assert checkpoint.find(tmp_path, name).name == expected
    with pytest.raises(SettingsError, match=r"no checkpoint 'newst'.*100, 200.*did you mean 'newest'"):
        checkpoint.find(tmp_path, "newst")


def test_a_draft_that_a_crash_left_is_no_checkpoint(tmp_path: Path) -> None:
    checkpoints = Checkpoints(str(tmp_path), 3)
    checkpoints.save(content(1))
    draft = tmp_path / "checkpoints" / ".draft-step_2"
    draft.mkdir()
    (draft / "weights.safetensors").write_bytes(b"half")
    assert names(tmp_path) == ["step_1"]
    assert checkpoints.save(content(2)) == ""
    assert names(tmp_path) == ["step_1", "step_2"]
    assert not draft.exists()


@pytest.mark.parametrize("damage", ["weights.safetensors", "optimizer.safetensors", "state.json"])
def test_a_damaged_one_gives_way_to_the_one_before(tmp_path: Path, damage: str) -> None:
    checkpoints = Checkpoints(str(tmp_path), 3)
    checkpoints.save(content(1))
    checkpoints.save(content(2))
    file = tmp_path / "checkpoints" / "step_2" / damage
    file.write_bytes(file.read_bytes()[:-3])
    assert checkpoints.load(exact=False)["state"]["steps"] == 1  # type: ignore[index]
    if damage != "optimizer.safetensors":
        with pytest.raises(ShoalError, match="cannot read checkpoint"):
            checkpoint.read(tmp_path / "checkpoints" / "step_2")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_trouble_with_the_disk_leaves_the_one_before(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(str(tmp_path), 3)
    checkpoints.save(content(1, mean=1.0))

    def refuse(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    problem = checkpoints.save(content(2))
    assert "step_2" in problem
    assert os.strerror(number) in problem
    assert os.strerror(number) in checkpoints.save_best({**content(2), "state": {"steps": 2, "mean": 2.0}})
    monkeypatch.undo()
    assert names(tmp_path) == ["step_1"]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_1"]
    assert checkpoints.save(content(3)) == ""


def test_a_saved_replay_is_read_where_it_is(tmp_path: Path) -> None:
    arrays = {
        "keys": np.arange(5),
        "flags": np.array([True, False, True]),  # so that what follows is not aligned
        "numbers": np.arange(6, dtype=np.float32).reshape(2, 3),
        "one": np.array(2.5),
        "none": np.zeros((0, 3), np.uint8),
    }
    checkpoints = Checkpoints(str(tmp_path), 3)
    assert checkpoints.save({**content(1), "store": arrays}) == ""
    found = checkpoint.read(tmp_path / "checkpoints" / "step_1")["store"]
    assert [*found] == [*arrays]  # in order: a replay's last array says what the others are worth
    assert not found["keys"].flags.owndata
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        assert np.array_equal(found[name], array)
    assert {*safetensors.numpy.load_file(tmp_path / "checkpoints" / "step_1" / "store.safetensors")} == {*arrays}
    checkpoints.save({**content(2), "store": arrays})
    file = tmp_path / "checkpoints" / "step_2" / "store.safetensors"
    file.write_bytes(file.read_bytes()[:-3])
    assert checkpoints.load(exact=False)["state"]["steps"] == 1  # type: ignore[index]


def test_what_a_kill_left_is_removed_or_put_back(tmp_path: Path) -> None:
    checkpoints = Checkpoints(str(tmp_path), 3)
    for steps in (1, 2, 3):
        checkpoints.save(content(steps))
    place = checkpoint.folder(tmp_path)
    (place / "step_1").rename(place / ".draft-step_4")  # killed while it wrote
    (place / "step_2").rename(place / ".old-step_2")  # killed between two moves
    checkpoint.tidy(tmp_path)
    assert sorted(path.name for path in place.iterdir()) == ["step_2", "step_3"]


def test_rewinding_removes_what_came_after(tmp_path: Path) -> None:
    checkpoints = Checkpoints(str(tmp_path), 9)
    for steps in (1, 2, 3):
        checkpoints.save(content(steps))
    checkpoint.rewind(tmp_path, 2)
    assert names(tmp_path) == ["step_1", "step_2"]
    assert json.loads((tmp_path / "checkpoints" / "step_2" / "state.json").read_text())["steps"] == 2


BAD_STATES: dict[str, Any] = {
    "a way out": {"steps": "../../outside"},
    "text": {"steps": "7"},
    "a fraction": {"steps": 1.5},
    "NaN": {"steps": float("nan")},
    "a truth": {"steps": True},
    "less than none": {"steps": -1},
    "more than any run": {"steps": 1 << 80},
    "nothing": {},
    "another counter": {"steps": 1, "version": "2"},
    "an array": {"steps": 1, "journal": {"counts": np.zeros(3)}},
    "no mapping": [1],
}


@pytest.mark.parametrize("case", [*BAD_STATES])
def test_what_a_worker_sends_chooses_no_path_and_writes_nothing(tmp_path: Path, case: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("mine")
    run = tmp_path / "runs" / "one"
    checkpoints = Checkpoints(str(run), 3)
    state = BAD_STATES[case]
    with pytest.raises(ShoalError, match="is refused"):
        checkpoints.save({**content(1), "state": state})
    with pytest.raises(ShoalError, match="is refused"):
        checkpoints.save_best({**content(1), "state": {**state, "mean": 1.0} if isinstance(state, dict) else state})
    assert [path.name for path in outside.iterdir()] == ["precious"]
    assert not run.exists()


@pytest.mark.parametrize("mean", [None, "9", True, [1.0]])
def test_the_best_is_chosen_by_a_number(tmp_path: Path, mean: Any) -> None:
    checkpoints = Checkpoints(str(tmp_path), 3)
    checkpoints.save_best({**content(1), "state": {"steps": 1, "mean": 1.0}})
    with pytest.raises(ShoalError, match="must be a number"):
        checkpoints.save_best({**content(2), "state": {"steps": 2, "mean": mean}})
    assert checkpoint.read_state(checkpoint.find(tmp_path, "best"))["steps"] == 1
