"""Sweeps with runs that only pretend to learn: what is tried, stopped, continued and remembered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from shoal.core.errors import SettingsError, ShoalError
from shoal.display import plots
from shoal.experiment import load
from shoal.runs import metrics
from shoal.sweeps import plan as plans
from shoal.sweeps import results, running
from shoal.sweeps.plan import Plan
from shoal.sweeps.study import JOURNAL
from tests.pretended import Killed, Pretended

BASE: dict[str, Any] = {
    "environment": {"id": "Catch"},
    "algorithm": {"name": "ppo"},
    "engine": "inline",
    "threads": 1,
    "actors": 1,
    "envs": 8,
    "steps": 500,
    "evaluation": {"every": 100},
}
LR = {"low": 0.0, "high": 1.0}


def planned(**settings: Any) -> Plan:
    """A sweep of one number."""
    return Plan.model_validate({"config": BASE, "search": {"algorithm.lr": LR}, "at_once": 1, **settings})


def hill(settings: dict[str, Any], steps: int) -> float:
    """Best at 0.3, better with every step."""
    return steps / 100 - 10 * abs(settings["algorithm.lr"] - 0.3)


def trials(plan: Plan, folder: Path) -> Any:
    """What a sweep remembers."""
    return results.opened(plan, folder).trials()


def test_trials_are_scored_and_the_best_is_written_down(pretend: Any, tmp_path: Path) -> None:
    log, ended = pretend(hill), list[int]()
    plan = planned(trials=15)
    running.sweep(plan, tmp_path, ended.append)
    assert [name for _, name in log] == [f"trial-{number:03d}" for number in range(15)]
    assert ended == [*range(16)]
    found = trials(plan, tmp_path)
    for trial in found:
        assert trial.score == pytest.approx(5 - 10 * abs(trial.values["algorithm.lr"] - 0.3))
    assert len({trial.values["algorithm.lr"] for trial in found}) == 15
    rows = results.table(plan, tmp_path, found)
    assert [row["score"] for row in rows] == sorted((trial.score for trial in found), reverse=True)
    assert (rows[0]["steps"], rows[0]["seconds"]) == (500, 5)
    assert rows[0]["score"] > 4  # of 15 trials, 5 follow what the first 10 showed
    picture, best = results.write(plan, tmp_path, found)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert load(best).algorithm.lr.start == pytest.approx(rows[0]["algorithm.lr"])  # type: ignore[attr-defined]


def test_less_is_better_where_the_plan_says_so(pretend: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(lambda settings, steps: steps + settings["algorithm.lr"])
    plan = planned(trials=3, direction="minimize")
    running.sweep(plan, tmp_path)
    found = trials(plan, tmp_path)
    rows = results.table(plan, tmp_path, found)
    assert [row["score"] for row in rows] == sorted(100 + trial.values["algorithm.lr"] for trial in found)
    best = results.best(plan, found)
    assert best is not None
    assert best.number == rows[0]["trial"]
    monkeypatch.setattr(plots, "available", lambda: False)
    assert results.write(plan, tmp_path, found) == [tmp_path / "best.yaml"]  # without a picture
    last = planned(trials=3, direction="minimize", score="last")
    assert results.score(last, tmp_path, 0) == pytest.approx(500 + found[0].values["algorithm.lr"])


@pytest.mark.parametrize("cut", [3, 57])
def test_a_sweep_that_is_killed_goes_on_as_if_it_had_not_been(cut: int, pretend: Any, tmp_path: Path) -> None:
    plan = planned(trials=13)
    pretend(hill)
    running.sweep(plan, whole := tmp_path / "whole")
    before = pretend(hill, killed_after=cut)
    with pytest.raises(Killed):
        running.sweep(plan, tmp_path / "cut")
    assert before == [("train", f"trial-{number:03d}") for number in range(cut // 5 + 1)]
    with (tmp_path / "cut" / JOURNAL).open("a") as journal:
        journal.write('{"op_code": 4, "wor')  # it died while it wrote
    after = pretend(hill)
    running.sweep(plan, tmp_path / "cut")
    assert after[0] == ("resume", f"trial-{cut // 5:03d}")
    assert [name for _, name in after] == [f"trial-{number:03d}" for number in range(cut // 5, 13)]
    assert trials(plan, tmp_path / "cut") == trials(plan, whole)
    nothing = pretend(hill)
    running.sweep(plan, tmp_path / "cut")  # all is done
    assert nothing == []
    running.sweep(plan.model_copy(update={"trials": 14}), tmp_path / "cut")  # unless more are wanted
    assert nothing == [("train", "trial-013")]


def test_trials_that_do_not_keep_up_are_stopped_in_order(pretend: Any, tmp_path: Path) -> None:
    log = pretend(hill)
    plan = planned(trials=14, prune="median", prune_from=0.6)
    running.sweep(plan, tmp_path)
    found = trials(plan, tmp_path)
    stopped = [trial.number for trial in found if trial.state == "pruned"]
    assert stopped
    assert min(stopped) >= 5  # of those before nothing is known yet
    assert [name for what, name in log if what == "stopped"] == [f"trial-{number:03d}" for number in stopped]
    for number in stopped:
        worse = [trial for trial in found[:number] if trial.state == "complete"]
        assert abs(found[number].values["algorithm.lr"] - 0.3) > min(abs(t.values["algorithm.lr"] - 0.3) for t in worse)
        assert 3 <= len(metrics.evaluations(results.folders(plan, tmp_path, number)[0])) < 5
    rows = results.table(plan, tmp_path, found)
    assert [row["state"] for row in rows] == ["complete"] * (14 - len(stopped)) + ["pruned"] * len(stopped)


def test_a_trial_that_was_being_stopped_when_the_sweep_was_killed_stays_stopped(
    pretend: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(hill)
    plan = planned(trials=14, prune="median")

    def die(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(Pretended, "send_signal", die)
        with pytest.raises(Killed):
            running.sweep(plan, tmp_path)
    left = [trial.number for trial in trials(plan, tmp_path) if trial.state == "running"]
    log = pretend(hill)
    running.sweep(plan, tmp_path)
    assert f"trial-{left[0]:03d}" not in [name for _, name in log]
    assert trials(plan, tmp_path)[left[0]].state == "pruned"


def test_a_trial_of_several_seeds_has_their_mean(pretend: Any, tmp_path: Path) -> None:
    pretend(lambda settings, steps: steps + 7.0 * settings["seed"])
    plan = planned(trials=2, seeds=[0, 4], at_once=3)
    running.sweep(plan, tmp_path)
    assert sorted(path.name for path in tmp_path.glob("trial-*")) == [
        *("trial-000-seed-0", "trial-000-seed-4", "trial-001-seed-0", "trial-001-seed-4")
    ]
    assert [trial.score for trial in trials(plan, tmp_path)] == [514, 514]
    assert results.curve(plan, tmp_path, 0) == {point: 100 * point + 14 for point in range(1, 6)}
    metrics.file_of(tmp_path / "trial-000-seed-4").write_text("")  # of which none is known
    assert results.curve(plan, tmp_path, 0) == {}
    assert results.score(plan, tmp_path, 0) is None


def test_evaluations_that_come_late_or_not_at_all_are_held_to_the_others(tmp_path: Path) -> None:
    (run := tmp_path / "trial-000").mkdir()
    rows = [{"kind": "evaluation", "steps": steps, "mean": steps / 1000} for steps in (110, 190, 405, 512)]
    metrics.file_of(run).write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert results.curve(planned(), tmp_path, 0) == {1: 0.19, 2: 0.19, 3: 0.19, 4: 0.405, 5: 0.512}


def test_a_seed_that_fails_ends_its_trial_but_not_the_sweep(pretend: Any, tmp_path: Path) -> None:
    def breaks(settings: dict[str, Any], steps: int) -> float | None:
        return None if settings["seed"] == 0 and settings["algorithm.lr"] > 0.5 and steps == 200 else float(steps)

    log = pretend(breaks)
    plan = planned(trials=6, seeds=2, at_once=2)
    running.sweep(plan, tmp_path)
    found = trials(plan, tmp_path)
    assert {trial.state for trial in found} == {"complete", "failed"}
    for trial in found:
        assert (trial.state == "failed") == (trial.values["algorithm.lr"] > 0.5)
        assert ("stopped", f"trial-{trial.number:03d}-seed-1") in log or trial.state == "complete"
        assert trial.problem == (
            f"see {tmp_path}/trial-{trial.number:03d}-seed-0.log" if trial.state == "failed" else ""
        )


def test_a_sweep_whose_first_trials_all_fail_is_given_up(pretend: Any, tmp_path: Path) -> None:
    log = pretend(lambda settings, steps: None)
    with pytest.raises(ShoalError, match=r"first 3 trials all failed; the last: see .*trial-002.log"):
        running.sweep(planned(trials=9), tmp_path)
    assert len(log) == 3


def test_settings_that_do_not_fit_together_fail_without_a_run(pretend: Any, tmp_path: Path) -> None:
    log = pretend(lambda settings, steps: float(steps))
    search = {"algorithm.batch": [8, 16], "envs": [8, 16]}  # a batch of 8 is not a multiple of 16
    plan = planned(trials=8, search=search, seed=1)
    running.sweep(plan, tmp_path)
    assert any(trial.state == "failed" for trial in trials(plan, tmp_path))
    for trial in trials(plan, tmp_path):
        wrong = (trial.values["algorithm.batch"], trial.values["envs"]) == (8, 16)
        assert ("algorithm.batch 8" in trial.problem) == wrong
        assert (("train", f"trial-{trial.number:03d}") in log) != wrong


def test_another_search_in_the_same_folder_is_refused(pretend: Any, tmp_path: Path) -> None:
    pretend(hill)
    running.sweep(planned(trials=1), tmp_path)
    for change in ({"search": {"algorithm.gamma": {"low": 0.1, "high": 0.9}}}, {"overrides": {"steps": 600}}):
        with pytest.raises(SettingsError, match=r"was begun with another (search|config)"):
            running.sweep(planned(trials=1, **change), tmp_path)
        with pytest.raises(SettingsError, match="was begun with another"):
            results.opened(planned(trials=1, **change), tmp_path)
    running.sweep(planned(trials=2, at_once=2), tmp_path)
    assert yaml.safe_load((tmp_path / plans.PLAN).read_text())["trials"] == 2


def test_what_was_never_begun_cannot_be_shown(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="holds no sweep yet"):
        results.opened(planned(), tmp_path)


def test_without_the_library_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ShoalError, match=r"pip install 'shoal\[sweep\]'"):
        running.sweep(planned(), tmp_path / "new")
    assert not (tmp_path / "new").exists()
