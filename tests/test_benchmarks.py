"""Benchmarks: that they measure what they say, not how fast anything is."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest

from shoal.bench import (
    BENCHMARKS,
    advice,
    engines,
    gpu,
    learners,
    learning,
    limits,
    page,
    scale,
    soak,
    tasks,
    training,
)
from shoal.bench.measuring import Effort
from shoal.bench.tables import show
from shoal.cli.main import main
from shoal.core.errors import SettingsError, ShoalError
from shoal.display.advice import Advice
from shoal.experiment import load
from shoal.runs import launching
from tests.pace import seconds

ROOT = Path(__file__).parents[1]
LONG = pytest.mark.long


@LONG
def test_engines_are_measured_with_the_same_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(engines.TRAINING, "steps", 2_000)
    monkeypatch.setitem(engines.TRAINING, "log_every", 0.1)
    rows = {row["engine"]: row for row in engines.measure(["inline", "processes"], 0.05)}
    assert [*rows] == ["inline", "processes"]
    for row in rows.values():
        assert all(value > 0 for key, value in row.items() if key not in ("engine", "head_cpu_ms_per_1000"))
        assert row["small_p50_us"] <= row["small_p99_us"]
    # Where all live in one process it does the work; calls between other processes cost the head nothing.
    assert rows["inline"]["head_cpu_ms_per_1000"] > rows["processes"]["head_cpu_ms_per_1000"]


@pytest.mark.parametrize("shards", [1, 2])
def test_a_replay_and_its_shards_are_measured_like_a_queue(shards: int) -> None:
    (row,) = scale.measure("threads", "cartpole", (2,), 20.0, 0.2, shards)
    assert row["puts_per_s"] > 0
    assert row["busiest_cores"] >= row["learner_cores"]
    with pytest.raises(ShoalError, match="only 2 actors"):
        next(scale.measure("threads", "cartpole", (2,), 20.0, 0.2, 3))


def test_the_head_is_measured_against_more_and_more_actors() -> None:
    rows = [*scale.measure("threads", "cartpole", (1, 3), 20.0, 0.5)]
    assert [row["actors"] for row in rows] == [1, 3]
    assert rows[1]["puts_per_s"] > 1.5 * rows[0]["puts_per_s"]
    for row in rows:
        assert 0 < row["put_p50_ms"] <= row["put_p99_ms"]
        assert row["puts_per_s"] <= 20.0 * row["actors"] + 3
        assert row["refused_per_s"] == 0
        assert row["head_mb"] > 10


def test_what_is_missing_is_left_out_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(engines.NEEDS, "cluster/grpc", "shoal_missing")
    assert "cluster/grpc" not in engines.chosen([])
    assert {"inline", "processes", "cluster/torchrpc"} <= {*engines.chosen([])}
    with pytest.raises(engines.SettingsError, match="cluster/grpc needs the package shoal_missing"):
        engines.chosen(["cluster/grpc"])


def test_findings_are_shown_as_a_table_or_as_lines(capsys: pytest.CaptureFixture[str]) -> None:
    rows: list[dict[str, Any]] = [{"engine": "inline", "small_p50_us": 1234.5}, {"engine": "ray", "small_p50_us": 0.25}]
    show("engines", rows, as_json=True)
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [
        {"table": "engines", **row} for row in rows
    ]
    show("engines", rows, as_json=False)
    table = capsys.readouterr().out
    assert all(text in table for text in ("small p50 us", "inline", "1,234", "0.25"))


# The others go through the same parts, and take longer.
QUICK = {"calls", "replay"}


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=LONG) for name in BENCHMARKS])
def test_every_benchmark_runs_in_its_smallest_form(
    start: Any, request: pytest.FixtureRequest, tmp_path: Path, name: str
) -> None:
    if name == "actors":
        request.getfixturevalue("only_ray")
    smallest = [] if name in ("calls", "links", "actors") else ["--smallest"]
    window = [] if name == "solve" else ["--seconds", "0.1"]
    words = [sys.executable, "-c", launching.SHOAL, "bench", name, *smallest, *window, "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = start(words, cwd=tmp_path, env=environment, stdout=PIPE, stderr=PIPE, text=True)
    printed, errors = process.communicate()
    assert process.returncode == 0, errors
    about, *rows = map(json.loads, printed.splitlines())
    assert about["table"] == "machine"
    assert rows
    assert all(row["table"].startswith(name) for row in rows)
    figures = [value for row in rows for key, value in row.items() if key.endswith(("per_s", "_us"))]
    assert name == "solve" or (figures and all(value > 0 for value in figures))


def test_a_card_is_listened_to_from_a_moment_on() -> None:
    lines = "10, 100\n[N/A], [N/A]\n30, 300\n50, 200\n"
    card = gpu.Card([sys.executable, "-c", f"import time; print({lines!r}, end='', flush=True); time.sleep(600)"])
    limit = time.monotonic() + seconds(30)
    while len(card.samples) < 3 and time.monotonic() < limit:
        time.sleep(0.01)
    card.close()
    second = card.samples[1][0]
    assert card.since(second) == {"gpu_busy": pytest.approx(0.4), "gpu_mb": pytest.approx(300 * 1.048576)}
    assert card.since(second + 600) == {"gpu_busy": None, "gpu_mb": None}
    missing = gpu.Card(["no-such-tool"])
    missing.close()
    assert missing.since(0.0) == {"gpu_busy": None, "gpu_mb": None}


def test_a_gpu_is_measured_in_turn_with_the_cpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []
    rates = {"cuda": iter((300.0, 500.0, 400.0)), "cpu": iter((100.0, 100.0, 200.0))}

    def measure(config: str, seconds: float, overrides: Any, meter: Any) -> Any:
        asked.append(overrides)
        workers = [{"worker": "head", "cores": 1.0}, {"worker": "learner", "working": 0.25, "cores": 0.3}]
        found = dict.fromkeys(("first_update_s", "cores", "pss_mb"), 1.0) | {"workers": workers}
        return found | {"steps_per_s": next(rates[overrides["device"]])} | meter(0.0)

    def play(config: str, seconds: float, changes: Any, *_: Any) -> Any:
        return [{"rate": 250.0 * load(config, changes).actor_count}]

    monkeypatch.setattr(training, "measure", measure)
    monkeypatch.setattr(limits, "_on_cores", play)
    monkeypatch.setattr(gpu, "check", lambda: None)
    words = "impala_pong --rounds=3 --seeds=0 --change=actors=4 --change=actor_device=cuda --json"
    monkeypatch.setattr(sys, "argv", ["shoal", "bench", "gpu", *words.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    _, row = map(json.loads, capsys.readouterr().out.splitlines())
    assert [one["device"] for one in asked] == ["cuda", "cpu", "cpu", "cuda", "cuda", "cpu"]
    assert {(one["device"], one["actor_device"], one["actors"]) for one in asked} == {
        ("cuda", "cuda", 4),
        ("cpu", "cpu", 4),
    }
    assert (row["steps_per_s"], row["x_environments"], row["learner_busy"]) == (400.0, 0.4, 0.25)
    assert (row["cpu_steps_per_s"], row["least_x_cpu"], row["x_cpu"], row["most_x_cpu"]) == (100.0, 2.0, 3.0, 5.0)


@pytest.mark.parametrize(
    ("visible", "index"), [(None, "0"), ("", "0"), ("3", "3"), ("2,1", "2"), ("GPU-8f6d,1", "GPU-8f6d")]
)
def test_only_the_gpu_of_the_run_is_listened_to(
    visible: str | None, index: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(gpu.VISIBLE, raising=False)
    if visible is not None:
        monkeypatch.setenv(gpu.VISIBLE, visible)
    card = gpu.Card(["no-such-tool"])
    assert card.words[-1] == f"--id={index}"


def test_what_central_inference_took_is_kept_in_whatever_order_it_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(config: str, seconds: float, smallest: bool, overrides: Any) -> Any:
        central = overrides["inference"] == "central"
        return {"steps_per_s": 2.0, "metrics": {"inference_ms_p50": 7.0} if central else {}}

    monkeypatch.setattr(training, "measure", measure)
    for rounds in (1, 2, 3):
        (row,) = tasks.inference(Effort(smallest=True, rounds=rounds))["inference"]
        assert row["ms_p50"] == 7.0


@pytest.mark.parametrize("name", ["inference", "still"])
def test_every_run_of_a_benchmark_has_settings_that_fit_together(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run in its middle that refused them would lose the rows before it."""
    measured: list[Any] = []

    def measure(config: str, seconds: float, smallest: bool, overrides: Any) -> Any:
        changes = training.changes(config, smallest)
        measured.append(load(config, {**changes, **overrides}))
        return {"steps_per_s": 2.0, "metrics": {}, "workers": []}

    monkeypatch.setattr(training, "measure", measure)
    monkeypatch.setattr(tasks, "limits", lambda *_: BOUND)
    getattr(tasks, name)(Effort())
    assert {each.env_count for each in measured} >= ({1, 8, 64} if name == "inference" else {8, 16})


def test_what_costs_nothing_is_measured_beside_a_peer_that_has_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver that steps the peer's `Still` for an episode, in place of Stable-Baselines3's."""
    (tmp_path / "sb3").symlink_to(sys.prefix)
    (tmp_path / "sb3_train.py").write_text(
        "import sys, json, gymnasium\n"
        "words = dict(word[2:].split('=') for word in sys.argv[1:])\n"
        "env, steps, over = gymnasium.make(words['env']), 0, False\n"
        "seen, _ = env.reset()\n"
        "while not over:\n"
        "    seen, reward, ended, over, _ = env.step(0)\n"
        "    steps += 1\n"
        "    assert not (ended or reward or seen.any())\n"
        "found = dict.fromkeys(['launch_to_first_train_s', 'rss_mb', 'pss_mb', 'processes'], 1.0)\n"
        "print(json.dumps(found | {'steps_per_s': steps}))\n"
    )
    ours = {"steps_per_s": 3000.0, "first_update_s": 1.0, "pss_mb": 1.0, "metrics": {}, "workers": []}
    monkeypatch.setattr(training, "measure", lambda *_: dict(ours))
    monkeypatch.setattr(tasks, "limits", lambda *_: BOUND)
    (row,) = tasks.still(Effort(peers=tmp_path))["peers"]
    assert (row["ours"], row["steps_per_s"], row["x_steps_per_s"]) == ("ppo_cartpole", 1000, 3.0)


BOUND = {"limit": 4.0, "environment_one_core": 8.0, "environment_all_cores": 16.0}


def test_learners_are_measured_in_turn_and_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    rates = {(1, "0"): iter((10.0, 20.0)), (1, "2"): iter((15.0, 20.0)), (2, "0"): iter((5.0, 30.0)),
             (2, "2"): iter((20.0, 40.0))}  # fmt: skip

    def measure(config: str, seconds: float, smallest: bool, overrides: Any) -> Any:
        asked.append((overrides["learners"], overrides["prefetch"]))
        assert overrides["actors"] == 3
        leader = {"worker": "learner", "cores": 0.5, "working": 0.75, "waits_most_for": "reduction.take"}
        other = {"worker": "learner-1", "cores": 0.4, "working": 0.5, "waits_most_for": "store.get"}
        workers = [{"worker": "head", "cores": 1.0}, *({**one, "waiting_for_it": 0.2} for one in (leader, other))]
        found = {"workers": workers, "steps_per_s": 100.0, "batch_ms": 10.0, "return": None}
        return {**found, "updates_per_s": next(rates[overrides["learners"], overrides["prefetch"]])}

    monkeypatch.setattr(training, "measure", measure)
    rows = [*learners.compare(["impala_cartpole"], (1, 2), ("0", "2"), 1.0, 2, {"actors": 3})]
    order = [(1, "0"), (1, "2"), (2, "0"), (2, "2")]
    assert asked == [*order, *reversed(order)]
    assert [(row["learners"], row["prefetch"]) for row in rows] == order
    assert [(row["least_x"], row["x"], row["most_x"]) for row in rows] == [
        (1.0, 1.0, 1.0), (1.0, 1.25, 1.5), (0.5, 1.0, 1.5), (2.0, 2.0, 2.0)]  # fmt: skip
    first = rows[0]
    assert (first["least_updates_per_s"], first["updates_per_s"], first["most_updates_per_s"]) == (10.0, 15.0, 20.0)
    assert (first["learner_cpu_ms"], first["waits"], first["preparing"]) == (37.5, 0.25, pytest.approx(0.15))
    assert first["waits_most_for"] == "reduction.take"
    assert first["return"] is None


def test_updates_are_counted_over_the_window_only() -> None:
    rows = [{"seconds": 2.0 * number, "updates": number**2, "metrics": {"batch_ms": float(number)}, "return": number}
            for number in range(6)]  # fmt: skip
    assert training.learned(rows, 4.0) == {"updates_per_s": (25 - 9) / 4, "batch_ms": 4.0, "return": 5}
    assert training.learned(rows, 1.0)["updates_per_s"] == 25 / 10
    assert training.learned(rows[:1], 4.0)["updates_per_s"] == 0


def test_seconds_to_a_score_are_those_of_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu, "GAMES", 2)
    changes = {"device": "cpu", "steps": 600, "evaluation.every": 300, "engine": "inline"}
    (row,) = gpu.to_score(["ppo_cartpole"], 1, 5.0, tmp_path, changes)
    assert row["solved"] is True
    assert row["score"] >= 5
    assert 0 < row["first_update_s"] < row["seconds"]
    assert (tmp_path / "ppo_cartpole" / "seed-0" / "summary.json").exists()


@LONG
def test_bare_environments_are_measured_on_all_cores(start: Any) -> None:
    code = "from shoal.bench.limits import bare; print(bare('ppo_cartpole', 0.1, {'envs': 2}))"
    process = start([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=PIPE, text=True)
    assert float(process.communicate()[0]) > 10


def test_a_gpu_is_asked_for_in_words(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for words, answer in (
        ((), "there is none"),
        (("--change", "actors"), "'actors' is not a setting: write key=value"),
    ):
        monkeypatch.setattr(sys, "argv", ["shoal", "bench", "gpu", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code
        assert answer in " ".join(capsys.readouterr().err.split())


@LONG
@pytest.mark.parametrize("engine", ["inline", "cluster/websocket"])
def test_what_a_long_run_holds_is_measured(engine: str, tmp_path: Path) -> None:
    rows = soak.soak(engine, 30.0, tmp_path, leave=8.0, changes=["limits.stall=300"])
    assert {file.suffix for file in tmp_path.iterdir()} == {".json", ".log", ".png"}
    by_kind = {row["process"].rpartition(" ")[0]: row for row in rows}
    assert {"head", "page", "all"} <= set(by_kind)
    for row in rows:
        assert row["mb"] > 10
        assert min(row["descriptors"], row["threads"]) >= 1
        assert min(row["steps"], row["looks"]) >= 1  # whoever plays on the page only gets what training leaves
    together = by_kind["all"]["mb"]
    assert together == pytest.approx(sum(row["mb"] for row in rows) - together, rel=0.01) or engine != "inline"
    assert engine == "inline" or rows[0]["nodes"] > soak.NODES


def test_nodes_leave_in_their_turn_and_others_join(monkeypatch: pytest.MonkeyPatch, start: Any) -> None:
    monkeypatch.setattr(soak, "launch", lambda *words, **_: start(["sleep", "600"]))
    with soak.Nodes("127.0.0.1:1", "websocket", 10.0, {}) as nodes:
        assert [*nodes.programs] == ["node 1", "node 2"]
        nodes.exchange(9.0)
        assert [*nodes.programs] == ["node 1", "node 2"]
        nodes.exchange(10.0)
        assert [*nodes.programs] == ["node 2", "node 3"]
        nodes.exchange(11.0)
        nodes.exchange(20.0)
        assert [*nodes.programs] == ["node 3", "node 4"]
        processes = nodes.programs.values()
    assert not any(process.is_running() for process in processes)


def test_nodes_stay_where_they_cannot_come_and_go(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="torchrpc"):
        soak.soak("cluster/torchrpc", 1.0, tmp_path)


@pytest.mark.parametrize(
    "words",
    [("engines", "inline", "--seconds", "0.1"), ("scale", "--engine", "threads", "--actors", "1", "--seconds", "0.1")],
    ids=lambda words: words[0],
)
def test_the_commands_print_a_table(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(engines.TRAINING, "steps", 500)
    monkeypatch.setattr(sys, "argv", ["shoal", "bench", *words, "--json"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    (row,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert row.get("engine") == "inline" or row["actors"] == 1


@pytest.mark.parametrize("words", [("1", "1"), pytest.param(("1,2", "0,auto"), marks=LONG)], ids=["one", "all"])
def test_learners_are_compared_in_real_runs(command: Any, words: tuple[str, str]) -> None:
    smallest = ("--smallest", "--seconds", "0.1", "--rounds", "1", "--json")
    process = command("bench", "learners", *smallest, "--learners", words[0], "--prefetch", words[1])
    told, problems = process.communicate(timeout=seconds(100))
    assert process.returncode == 0, problems
    about, *rows = map(json.loads, told.splitlines())
    assert about["table"] == "machine"
    assert len(rows) == len(words[0].split(",")) * len(words[1].split(","))
    for row in rows:
        assert row["updates_per_s"] > 0
        assert 0 <= row["waits"] <= 1
        assert row["preparing"] > 0
        assert row["learner_cpu_ms"] > 0


def test_numbers_that_are_none_are_refused_in_words(command: Any) -> None:
    process = command("bench", "learners", "--learners", "1,x")
    _, told = process.communicate(timeout=seconds(60))
    assert process.returncode == 2
    assert "--learners 1,x: give whole numbers from 1 up" in " ".join(told.split())


def test_learning_is_held_to_published_scores(command: Any, tmp_path: Path) -> None:
    words = ("bench", "learn", "cartpole-ppo", "--seeds", "1", "--episodes", "3", "--json")
    process = command(*words, "--change", "steps=600", "--change", "evaluation.every=300")
    told, problems = process.communicate(timeout=seconds(120))
    assert process.returncode == 0, problems
    rows = {row["seed"]: row for row in map(json.loads, told.splitlines())}
    assert {*rows} == {0}
    assert all(row["steps"] >= 600 and 8 < row["score"] < 501 for row in rows.values())
    log = tmp_path / "learn" / "cartpole-ppo" / "seed-0.log"
    trained = log.read_text()
    process = command(*words, "--page", "docs/results.md")  # nothing is left to be done but the page
    again, problems = process.communicate(timeout=seconds(120))
    assert process.returncode == 0, problems
    assert {row["seed"]: row for row in map(json.loads, again.splitlines())} == rows
    assert log.read_text() == trained
    page = (tmp_path / "docs" / "results.md").read_text()
    assert "| `cartpole-ppo` | **" in page
    assert "return of 3 episodes" in page
    assert "| `pong-ppo` | not run |" in page
    assert "![Evaluation returns of cartpole-ppo](pictures/learn_cartpole-ppo.png)" in page
    assert (tmp_path / "docs" / "pictures" / "learn_cartpole-ppo.png").read_bytes().startswith(b"\x89PNG")
    assert "`steps=600`" in page  # how it was run
    learning.write_page(tmp_path / "elsewhere", tmp_path / "docs" / "results.md")  # rows stay whose runs are gone
    assert (tmp_path / "docs" / "results.md").read_text() == page


def test_every_task_is_a_config_with_changes_that_fit() -> None:
    for name, task in learning.TASKS.items():
        experiment = load(task.config, dict(change.split("=") for change in task.changes))
        assert name.partition("-")[0] in (experiment.environment.id + task.config).lower()
    tqc = learning.TASKS["ant-tqc"]
    assert load(tqc.config, dict(change.split("=") for change in tqc.changes)).algorithm.drop == 2


def test_an_unknown_task_is_refused_with_the_nearest(command: Any) -> None:
    process = command("bench", "learn", "pong-pp")
    _, told = process.communicate(timeout=seconds(60))
    assert process.returncode == 2
    assert "unknown task 'pong-pp'" in told
    assert "did you mean 'pong-ppo'?" in told


def test_advice_is_followed_and_its_gain_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Advice("more actors", "It waits", {"actors": 3}, {"actors": 1}, 2.5, "")
    asked = []

    def run(config: str, settings: Any, seconds: float, place: Path) -> tuple[float, list[Advice]]:
        asked.append(settings["actors"])
        return 100.0 * settings["actors"], [found] if settings["actors"] == 1 else []

    monkeypatch.setattr(advice, "run", run)
    (row,) = advice.measure(["more actors"], 1.0, 2)
    assert asked == [1, 3, 1, 1, 3]  # the question first, then with and without in turn
    assert (row["first"], row["set"], row["expected"], row["x"]) == ("more actors", "actors=3", 2.5, 3.0)
    monkeypatch.setattr(advice, "run", lambda *_: (100.0, []))
    assert next(advice.measure(["more actors"], 1.0, 1))["set"] == "not advised"


def test_an_unknown_situation_is_refused_with_the_nearest() -> None:
    with pytest.raises(SettingsError, match="did you mean 'more actors'"):
        advice.chosen(["more actor"])
    assert advice.chosen([]) == [*advice.SITUATIONS]


@LONG
@pytest.mark.parametrize("name", ["more actors", "more gradient workers"])
def test_following_advice_helps_where_environments_are_slow(name: str) -> None:
    (row,) = advice.measure([name], 6.0, 1)  # they do not compute, so that a busy machine does not matter
    assert row["set"] != "not advised"
    assert row["x"] > 1.3


@LONG
def test_what_the_page_costs_is_measured_within_one_run() -> None:
    (row,) = page.cost(["impala_cartpole"], 2.0, 1, {"actors": 1})
    assert row["x_with_page"] > 0
    assert row["looks"] > 0
