"""A trace is strict JSON in which every worker has a track, and spans nest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shoal
from shoal.core.errors import Refused
from shoal.core.spans import CHUNKS, Chunk, Spans, keep
from shoal.engines.messages import read_spans
from shoal.runs.trace import END, Trace
from tests.pace import long

SMALL = {"steps": 3000, "actors": 2, "threads": 1, "evaluation.target": None, "evaluation.episodes": 2}


def tracks(path: Path) -> dict[str, list[tuple[str, float, float]]]:
    """Worker → its spans as (name, start, end) by their start, the longest first."""
    events = json.loads(path.read_text())
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    found: dict[str, list[tuple[str, float, float]]] = {name: [] for name in names.values()}
    for event in events:
        assert event["ph"] in "MX"
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            found[names[event["tid"]]].append((event["name"], event["ts"], event["ts"] + event["dur"]))
    return {name: sorted(spans, key=lambda span: (span[1], -span[2])) for name, spans in found.items()}


def check_nesting(spans: list[tuple[str, float, float]]) -> None:
    """Two spans of a track are apart, or one lies in the other; figures in the file are rounded to nanoseconds."""
    inside: list[float] = []
    for name, start, end in spans:
        while inside and inside[-1] <= start + 0.002:
            inside.pop()
        assert not inside or end <= inside[-1] + 0.002, name
        inside.append(end)


@pytest.mark.parametrize("engine", ["inline", "processes", *map(long, ["threads", "ray", "cluster/grpc"])])
def test_a_run_leaves_a_trace_of_every_worker(hosted: Any, engine: str, tmp_path: Path) -> None:
    shoal.train("impala_cartpole", tmp_path / "run", trace=True, **hosted(engine), **SMALL)
    found = tracks(tmp_path / "run" / "trace.json")
    assert {"learner", "actor-0", "actor-1", "evaluator", "recorder"} <= found.keys()
    for spans in found.values():
        check_nesting(spans)
    names = {worker: {name for name, _, _ in spans} for worker, spans in found.items()}
    calls = (
        {"store.put", "parameters.fetch"} if engine not in ("inline", "threads") else set()
    )  # else too brief to be shown
    assert {"make", "reset", "infer", "step", *calls} <= names["actor-0"] & names["actor-1"]
    assert {"update", "checkpoints.save"} <= names["learner"]
    assert {"evaluate", "infer", "step"} <= names["evaluator"]
    if engine != "inline":  # where nobody waits, but gives the turn to others
        assert any(name.startswith("wait for ") for name in names["learner"] | names["evaluator"])
    learning = [end for name, _, end in found["learner"] if name == "update"]
    assert max(end for _, _, end in found["actor-0"]) > min(learning)  # by one clock


def test_a_trace_says_up_to_when_it_goes(tmp_path: Path) -> None:
    Trace(tmp_path / "trace.json", list).close()
    assert [event["args"]["labels"] for event in json.loads((tmp_path / "trace.json").read_text())[1:]] == [END]


def test_a_run_that_nobody_wants_to_trace_leaves_none(tmp_path: Path) -> None:
    shoal.train("impala_cartpole", tmp_path / "run", engine="inline", **{**SMALL, "steps": 300})
    assert not [*(tmp_path / "run").glob("trace*")]


def test_a_resumed_run_has_a_trace_of_its_own(tmp_path: Path) -> None:
    run = shoal.train("impala_cartpole", tmp_path / "run", engine="inline", **{**SMALL, "steps": 300})
    steps = run.summary["steps"]
    shoal.training.resume(run.directory, trace=True, steps=2 * steps)
    assert tracks(run.directory / f"trace_{steps}.json")["learner"]


def test_spans_beyond_the_limit_are_left_out_and_counted(tmp_path: Path) -> None:
    spans = Spans(3)
    for start in range(5):
        spans.add("step", float(start), start + 0.5)
    chunks = [("actor", "", chunk) for chunk in filter(None, [spans.drain()])]
    again = Spans(3)  # of a worker that was started again
    again.add("step", 9.0, 9.5)
    chunks += [("actor", "", chunk) for chunk in filter(None, [again.drain()])]
    trace = Trace(tmp_path / "trace.json", lambda: [chunks.pop(0)] if chunks else [], each=3)
    trace.take()
    trace.take()
    cut = (tmp_path / "trace.json").read_text()
    assert json.loads(cut + "]")  # as a run that was killed leaves it
    trace.close()
    assert len(tracks(tmp_path / "trace.json")["actor"]) == 3
    assert f"{END}; spans were left out: 3 of actor" in (tmp_path / "trace.json").read_text()


def test_what_nobody_takes_is_left_out_and_counted() -> None:
    spans, waiting = Spans(1000), list[Chunk]()
    for number in range(CHUNKS + 3):
        spans.add("step", number, number + 1)
        keep(waiting, spans.drain() or {})
    assert len(waiting) == CHUNKS
    assert [chunk["left_out"] for chunk in waiting[-2:]] == [0, 3]


def test_all_workers_together_have_a_limit_too(tmp_path: Path) -> None:
    workers = {name: Spans(10) for name in ("one", "two")}
    for spans in workers.values():
        for start in range(4):
            spans.add("step", float(start), start + 0.5)
    trace = Trace(
        tmp_path / "trace.json",
        lambda: [(name, "", chunk) for name, spans in workers.items() if (chunk := spans.drain())],
        total=5,
    )
    trace.close()
    found = tracks(tmp_path / "trace.json")
    assert [len(found[name]) for name in workers] == [4, 1]
    assert "3 of two" in (tmp_path / "trace.json").read_text()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("names", ["\x1b[2J"]),
        ("names", []),
        ("which", np.zeros(2, np.uint16)),
        ("which", np.zeros(1, np.int64)),
        ("start", np.array([np.nan])),
        ("start", np.array([3.0])),
        ("end", np.array([np.inf])),
        ("left_out", -1),
        ("more", 1),
    ],
)
def test_spans_of_a_node_that_make_no_sense_are_refused(key: str, value: object) -> None:
    good = {
        "names": ["step"],
        "which": np.zeros(1, np.uint16),
        "start": np.array([1.0]),
        "end": np.array([2.0]),
        "left_out": 0,
    }
    assert read_spans(["run", "actor", good])[2]["names"] == ["step"]
    with pytest.raises(Refused, match="spans"):
        read_spans(["run", "actor", {**good, key: value}])
