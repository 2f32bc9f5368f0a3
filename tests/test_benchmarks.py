"""Benchmarks that a user runs: that they measure what they say, not how fast anything is."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shoal.benchmarks import engines, scale
from shoal.benchmarks.tables import show


def test_engines_are_measured_with_the_same_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(engines.TRAINING, "steps", 2_000)
    monkeypatch.setitem(engines.TRAINING, "log_every", 0.1)
    rows = {row["engine"]: row for row in engines.measure(["inline", "processes"], 0.05)}
    assert [*rows] == ["inline", "processes"]
    for row in rows.values():
        assert all(value > 0 for key, value in row.items() if key not in ("engine", "head_cpu_ms_per_1000"))
        assert row["small_p50_us"] <= row["small_p99_us"]
    # Where all live in one process it does the work; of calls between others the head knows nothing.
    assert rows["inline"]["head_cpu_ms_per_1000"] > 10 * rows["processes"]["head_cpu_ms_per_1000"]


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
    show("engines", rows, 2, as_json=True)
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == rows
    show("engines", rows, 2, as_json=False)
    table = capsys.readouterr().out
    assert all(text in table for text in ("small p50 us", "inline", "1,234", "0.25"))
