"""Advice: every rule in a situation that it is about, and in one that is nearly the same."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file
from typer.testing import CliRunner

import shoal
from shoal.cli.main import app
from shoal.display import advice, facts
from shoal.display.advice import FLAT, LEARNING, SPEED, UNREWARDED, advise
from shoal.display.facts import Facts
from shoal.display.page.watched import Watched
from tests.pace import long

SETTINGS: Mapping[str, Any] = {
    "engine": "processes", "steps": 100_000, "envs": 8, "actors": 2, "device": "auto", "inference": "local",
    "evaluation": {"every": 5_000, "target": 475.0}, "checkpoints": {"every": 10_000},
    "algorithm": {"name": "impala", "lr": {"start": 1e-3, "end": 0.0}, "batch": 16, "unroll": 20, "entropy_cost": 0.01,
                  "network": {"separate": False}},
}  # fmt: skip
RISING = [float(score) for score in range(10, 130, 10)]
FLAT_SCORES = [20.0, 21.0, 19.0, 20.5, 19.5, 20.0, 21.0, 19.0, 20.5, 19.5, 20.0, 20.0]


def worker(working: float, waits: Mapping[str, float] | None = None, parts: Mapping[str, float] | None = None,
           computing: float | None = None) -> dict[str, Any]:  # fmt: skip
    """How a worker spent a minute."""
    cores = working if computing is None else computing
    return {"seconds": 60.0, "working": working, "computing": cores, "waits": waits or {}, "parts": parts or {}}


def run(
    learner: Mapping[str, Any] | None = None,
    actor: Mapping[str, Any] | None = None,
    actors: int = 2,
    scores: list[float] | None = None,
    train: Mapping[str, list[float]] | None = None,
    cores: float = 8,
    gpus: int = 0,
    more: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Facts:
    """A run on a machine, well balanced unless it is said otherwise; settings by their dotted names."""
    tree = json.loads(json.dumps(SETTINGS))
    for path, value in settings.items():
        place, *names = tree, *path.split("__")
        for name in names[:-1]:
            place = place[name]
        place[names[-1]] = value
    workers = {f"actor-{index}": actor or worker(0.9) for index in range(actors)}
    return Facts(
        settings=tree,
        workers={"learner": learner or worker(0.9), **workers, **(more or {})},
        train=train or {},
        scores=RISING if scores is None else scores,
        counts={"steps": 60_000, "updates": 500, "seconds": 60.0, "steps_per_s": 1000.0, "updates_per_s": 100.0},
        cores=cores,
        gpus=gpus,
    )


def constant(value: float) -> list[float]:
    """A metric that stays where it is."""
    return [value] * 12


WAITS = worker(0.3, {"store.get": 0.7})  # a learner that waits
FULL = worker(0.5, {"store.put": 0.5})  # an actor that waits
HARD = worker(0.98)  # a learner that always works
CHOOSES = worker(0.9, parts={"infer": 0.5})  # an actor that spends half of its time on choices


def gradient(cores: float) -> Facts:
    """A3C, two workers on a machine."""
    return replace(run(cores=cores), workers={f"gradient-{index}": worker(0.95) for index in range(2)})


def at_speed(facts: Facts, **counts: float) -> Facts:
    """The same run with other numbers."""
    return replace(facts, counts={**facts.counts, **counts})


# What a run is like, the rule that applies, what it sets; and the nearest run to which it does not apply.
CASES: Mapping[str, tuple[Facts, Mapping[str, Any], Facts]] = {
    "more actors": (run(WAITS), {"actors": 7}, run(WAITS, cores=2.5)),
    "more gradient workers": (gradient(4), {"actors": 4}, gradient(2)),
    "more environments": (
        at_speed(run(WAITS, CHOOSES, cores=2.2, envs=1), steps_per_s=4_000),
        {"envs": 4},
        at_speed(run(WAITS, CHOOSES, cores=2.2, envs=32), steps_per_s=4_000),
    ),
    "act while learning": (
        run(worker(0.5, {"store.get": 0.5}), worker(0.5, {"store.admit": 0.5}), algorithm__max_lag=0),
        {"algorithm.max_lag": 1},
        run(worker(0.5, {"store.get": 0.5}), worker(0.5, {"store.admit": 0.5}), algorithm__max_lag=1),
    ),
    "use the GPU": (run(HARD, FULL, device="cpu", gpus=1), {"device": "auto"}, run(HARD, FULL, device="cpu")),
    "more threads": (
        at_speed(run(HARD, FULL), updates_per_s=10),
        {"threads": 7},
        at_speed(run(HARD, FULL, cores=2), updates_per_s=10),
    ),
    "larger batches": (
        at_speed(run(HARD, FULL), updates_per_s=500),
        {"algorithm.batch": 32},
        at_speed(run(HARD, worker(0.9, {"store.put": 0.1})), updates_per_s=500),
    ),
    "rarer weights": (
        run(actor=worker(0.6, {"parameters.fetch": 0.4})),
        {"algorithm.unroll": 40},
        run(actor=worker(0.95, {"parameters.fetch": 0.05})),
    ),
    "rarer evaluations": (
        run(cores=3, more={"evaluator": worker(0.9)}),
        {"evaluation.every": 30_000},
        run(cores=8, more={"evaluator": worker(0.9)}),
    ),
    "use all cores": (
        run(worker(0.4), worker(0.5), actors=1, engine="inline"),
        {"engine": "processes", "actors": "auto"},
        run(worker(0.4), worker(0.5), actors=1, engine="inline", cores=1),
    ),
    "others use the cores": (run(worker(0.9, computing=0.4)), {}, run(worker(0.9, computing=0.85))),
    "local inference": (
        run(WAITS, worker(0.3, {"requests-0.answer": 0.7}), inference="central"),
        {"inference": "local"},
        run(WAITS, worker(0.3, {"requests-0.answer": 0.7}), inference="central", gpus=1),
    ),
    "rarer checkpoints": (
        run(worker(0.6, {"checkpoints.save": 0.4})),
        {"checkpoints.every": 40_000},
        run(worker(0.95, {"checkpoints.save": 0.05})),
    ),
    "nothing is ever rewarded": (run(scores=[0.0] * 12), {}, run(scores=FLAT_SCORES)),
    "entropy collapsed": (
        run(scores=FLAT_SCORES, train={"entropy": [1.1, *constant(0.01)]}),
        {"algorithm.entropy_cost": 0.03},
        run(scores=RISING, train={"entropy": [1.1, *constant(0.01)]}),
    ),
    "entropy at its maximum": (
        run(scores=FLAT_SCORES, train={"entropy": constant(1.1)}),
        {"algorithm.entropy_cost": 0.001},
        run(scores=FLAT_SCORES, train={"entropy": [1.1, *constant(0.8)]}),
    ),
    "values explain nothing": (
        run(scores=FLAT_SCORES, train={"explained_variance": constant(-0.2)}),
        {"algorithm.network.separate": True},
        run(scores=[*FLAT_SCORES, 500.0], train={"explained_variance": constant(-0.2)}),
    ),
    "updates too large": (
        run(train={"clip_fraction": constant(0.6)}),
        {"algorithm.lr.start": 5e-4},
        run(train={"clip_fraction": constant(0.3)}),
    ),
    "experience too old": (
        run(train={"lag": constant(60.0)}),
        {"algorithm.batch": 32},
        run(train={"lag": constant(60.0)}, algorithm__name="apex_dqn"),
    ),
    "a normaliser that never moved": (
        replace(run(), counted=(1e-4,)), {}, replace(run(), counted=(40_000.0,))
    ),
    "explores too long": (
        run(scores=FLAT_SCORES, train={"epsilon": constant(0.6)}, algorithm__epsilon=1.0),
        {"algorithm.epsilon": {"start": 1.0, "end": 0.05, "until": 0.3}},
        run(scores=FLAT_SCORES, train={"epsilon": constant(0.1)}),
    ),
    "forgets what it learned": (
        run(scores=[10, 20, 30, 40, 200, 210, 190, 205, 50, 60, 55, 50], algorithm__lr=1e-3),
        {"algorithm.lr": {"start": 1e-3, "end": 0.0}},
        run(scores=[10, 20, 30, 40, 200, 210, 190, 205, 50, 60, 55, 50]),
    ),
    "returns flat": (
        run(scores=FLAT_SCORES), {"algorithm.lr.start": 3.33e-4}, run(scores=FLAT_SCORES, evaluation__target=20.0)
    ),
}  # fmt: skip


def rules(facts: Facts) -> list[str]:
    return [each.rule for each in advise(facts)]


def test_every_rule_has_a_case() -> None:
    assert [rule.name for rule in (*SPEED, *UNREWARDED, *LEARNING, *FLAT)] == [*CASES]


@pytest.mark.parametrize("name", CASES)
def test_a_rule_applies_where_it_should_and_says_what_to_set(name: str) -> None:
    facts, changes, near = CASES[name]
    found = advise(facts)
    assert found[0].rule == name  # and nothing matters more
    assert found[0].changes == changes
    for key, value in changes.items():
        assert f"{key}={advice.shown(value)} (now " in str(found[0])
    assert name not in rules(near)


def test_a_run_that_is_well_balanced_and_learns_is_left_alone() -> None:
    assert advise(run()) == []


def test_a_run_that_has_reached_its_target_is_not_taught_how_to_learn() -> None:
    bad = {"entropy": [1.1, *constant(0.01)], "explained_variance": constant(-3.0), "clip_fraction": constant(0.9)}
    assert rules(run(scores=[*FLAT_SCORES, 480.0], train=bad)) == []


def test_a_run_without_a_target_is_stuck_only_if_nothing_ever_rose() -> None:
    bad: dict[str, list[float]] = {"explained_variance": constant(-3.0)}
    high = [500.0, 490.0] * 6  # since its first evaluation: who knows whether more is possible
    assert rules(run(scores=high, train=bad, evaluation__target=None)) == ["values explain nothing"]
    learned = {**bad, "return": [20.0, 22.0, *constant(480.0)]}
    assert rules(run(scores=high, train=learned, evaluation__target=None)) == []


def test_too_short_a_run_says_nothing_about_speed() -> None:
    brief = {name: {**state, "seconds": 2.0} for name, state in run(WAITS).workers.items()}
    assert advise(replace(run(WAITS), workers=brief)) == []
    assert "too early" in advice.enough(replace(run(WAITS, scores=[]), workers=brief))


@pytest.mark.parametrize("name", [rule.name for rule in SPEED])
def test_the_expected_gain_is_a_number_worth_the_trouble(name: str) -> None:
    (found,) = [each for each in advise(CASES[name][0]) if each.rule == name]
    assert found.gain is not None
    assert advice.WORTHWHILE <= found.gain < 20
    assert f"about {found.gain:.1f} times as fast" in str(found) or not found.changes


def test_actors_are_as_many_as_the_cores_or_the_learner_can_use() -> None:
    assert advise(run(WAITS, cores=64))[0].changes == {"actors": 7}  # then the learner does not wait any more
    assert advise(run(WAITS, cores=4))[0].changes == {"actors": 4}  # then no core is idle
    sleeping = worker(0.95, computing=0.05)  # as environments that wait for something
    assert advise(run(WAITS, sleeping, cores=2))[0].changes == {"actors": 7}


def test_a_moving_setting_is_scaled_at_its_start() -> None:
    bad = {"clip_fraction": constant(0.6)}
    assert advise(run(train=bad))[0].changes == {"algorithm.lr.start": 5e-4}
    assert advise(run(train=bad, algorithm__lr=1e-3))[0].changes == {"algorithm.lr": 5e-4}


# From folders.


def written(folder: Path, facts: Facts, weights: Mapping[str, Any] | None = None) -> Path:
    """A folder that says the same."""
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(facts.settings))
    (folder / "provenance.json").write_text(json.dumps([{"usable_cores": facts.cores, "devices": ["x"] * facts.gpus}]))
    (folder / "status.json").write_text(json.dumps({**facts.counts, "workers": facts.workers}))
    rows: list[dict[str, Any]] = [
        {"kind": "evaluation", "steps": 1000 * index, "mean": score, "length": 1, "metrics": {}}
        for index, score in enumerate(facts.scores)
    ]
    counts = {"steps_per_s": 1.0, "updates_per_s": 1.0, "return": None, "length": None}
    for name, column in facts.train.items():
        points = [{"steps": index, "metrics": {name: value}} for index, value in enumerate(column)]
        rows += [{"kind": "train", **counts, **point} for point in points]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if weights is not None:
        saved = folder / "checkpoints" / "step_1000"
        saved.mkdir(parents=True)
        save_file({name: np.array(value) for name, value in weights.items()}, saved / "weights.safetensors")
    return folder


@pytest.mark.parametrize("name", [name for name in CASES if name != "a normaliser that never moved"])
def test_the_same_is_found_in_a_folder(name: str, tmp_path: Path) -> None:
    facts = CASES[name][0]
    assert [str(each) for each in advice.of(written(tmp_path, facts))] == [str(each) for each in advise(facts)]


def test_a_normaliser_is_looked_up_in_the_newest_checkpoint(tmp_path: Path) -> None:
    facts = run(algorithm__network={"normalise_observation": True})
    still = written(tmp_path / "still", facts, {"moments.count": 1e-4, "body.weight": [1.0]})
    moved = written(tmp_path / "moved", facts, {"moments.count": 512.0, "body.weight": [1.0]})
    assert [each.rule for each in advice.of(still)] == ["a normaliser that never moved"]
    assert advice.of(moved) == []


@pytest.mark.parametrize("spoiled", ["status.json", "config.yaml", "metrics.jsonl", "provenance.json"])
@pytest.mark.parametrize("content", ["", "[1, 2]", "{", '{"workers": {"learner": 7, "actor-0": null}}', "\0\1",
                                     '{"workers": {"learner": {"working": 1e400, "waits": {"store.get": -5}}}}',
                                     "kind: [", '[{"usable_cores": -3, "devices": 5}]'])  # fmt: skip
def test_files_of_strangers_harm_nobody(spoiled: str, content: str, tmp_path: Path) -> None:
    folder = written(tmp_path, CASES["more actors"][0])
    (folder / spoiled).write_text(content)
    for each in advice.of(folder):
        assert str(each)


def test_the_page_shows_advice(tmp_path: Path) -> None:
    watched = Watched(written(tmp_path, CASES["more actors"][0]), advice.lines)
    try:
        assert watched.refresh()["advice"][0].startswith("The learner waits 70% of its time")
    finally:
        watched.close()


def test_explain_prints_what_to_do_and_the_command(tmp_path: Path) -> None:
    folder = written(tmp_path, CASES["more actors"][0])
    shown = CliRunner().invoke(app, ["explain", str(folder)])
    assert shown.exit_code == 0
    assert "actors=7 (now 2): about 3.3 times as fast" in shown.stdout
    assert f"shoal train {folder}/config.yaml actors=7" in shown.stdout.replace("\n", "")
    as_json = CliRunner().invoke(app, ["explain", str(folder), "--json"])
    assert json.loads(as_json.stdout)[0]["set"] == {"actors": 7}


def test_explain_says_that_nothing_needs_to_change(tmp_path: Path) -> None:
    shown = CliRunner().invoke(app, ["explain", str(written(tmp_path, run()))])
    assert "nothing to change" in shown.stdout


# Real runs, each in a situation: advice is read from their folders.

SMALL = {"environment.id": "CartPole-v1", "evaluation.every": 1_000_000, "steps": 1_000_000, "log_every": 1}
WAITING = {"environment.id": "Still", "environment.arguments": {"seconds": 0.005, "length": 20}, "envs": 2}
REAL: Mapping[str, Mapping[str, Any]] = {
    "more actors": {**WAITING, "algorithm": "impala", "engine": "processes", "actors": 1, "steps": 4_000},
    "more gradient workers": {**WAITING, "algorithm": "a3c", "engine": "processes", "actors": 1, "steps": 3_000},
    "act while learning": {**WAITING, "engine": "processes", "actors": 2, "steps": 1_000, "threads": 1,
                           "algorithm": {"name": "ppo", "max_lag": 0, "epochs": 30, "unroll": 32, "minibatches": 4}},
    "local inference": {"environment.id": "CartPole-v1", "algorithm": "impala", "engine": "processes", "actors": 1,
                        "envs": 1, "inference": "central", "steps": 8_000},
    "rarer evaluations": {"environment.id": "CartPole-v1", "algorithm": "ppo", "engine": "inline", "actors": 1,
                          "envs": 4, "steps": 30_000, "evaluation.every": 500, "evaluation.episodes": 40},
    "use all cores": {"environment.id": "CartPole-v1", "engine": "inline", "actors": 1, "envs": 8, "steps": 40_000,
                      "algorithm": {"name": "impala", "epochs": 4, "clip": 0.1}},
    "entropy at its maximum": {"environment.id": "Catch", "engine": "inline", "actors": 1, "envs": 8,
                               "steps": 20_000,
                               "algorithm": {"name": "impala", "entropy_cost": 50.0, "evaluation_policy": "sample"},
                               "evaluation.every": 1_000, "evaluation.episodes": 20, "evaluation.target": 0.9},
    "entropy collapsed": {"environment.id": "CartPole-v1", "engine": "inline", "actors": 1, "envs": 8,
                          "steps": 30_000, "algorithm": {"name": "impala", "entropy_cost": 0, "lr": 0.1},
                          "evaluation.every": 2_000, "evaluation.episodes": 5, "evaluation.target": 475},
    "explores too long": {"environment.id": "Catch", "engine": "inline", "actors": 1, "envs": 4, "steps": 4_000,
                          "algorithm": {"name": "dqn", "lr": 1e-7, "epsilon": {"start": 1.0, "end": 0.5},
                                        "replay": {"minimum": 100}},
                          "evaluation.every": 300, "evaluation.episodes": 10, "evaluation.target": 0.9},
    "nothing is ever rewarded": {"environment.id": "Still", "engine": "inline", "actors": 1, "envs": 4,
                                 "environment.arguments": {"length": 10}, "algorithm": "impala", "steps": 12_000,
                                 "evaluation.every": 1_000, "evaluation.episodes": 2, "evaluation.target": 1},
}  # fmt: skip


def test_ten_situations_are_real() -> None:
    assert len(REAL) >= 10
    assert set(REAL) <= set(CASES)


@pytest.mark.parametrize("name", ["explores too long", *(long(name) for name in REAL if name != "explores too long")])
def test_a_real_run_is_advised_rightly(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advice, "ENOUGH", 0.5)  # short as it is
    monkeypatch.setattr(facts, "CONTENDED", 0.0)  # as if it were alone on the machine
    settings = {"seed": 0, **REAL[name]}
    shoal.train({}, tmp_path / "run", **settings)
    assert name in [each.rule for each in advice.of(tmp_path / "run")]
