"""Loggers: what they are given, and that whatever they do harms no run."""

from __future__ import annotations

import struct
import threading
from pathlib import Path
from typing import Any, ClassVar

import pytest

import shoal
from shoal.core.errors import SettingsError
from shoal.runs import loggers, metrics
from shoal.runs.loggers import Background, check
from tests.pace import long
from tests.runs.test_metrics import row, score

TINY = {
    "environment": "Catch",
    "algorithm": {"name": "ppo", "unroll": 8, "epochs": 1, "minibatches": 1},
    "engine": "inline",
    "actors": 1,
    "envs": 2,
    "steps": 200,
    "evaluation": {"episodes": 2},
}


class Kept:
    """Keeps what it is given."""

    made: ClassVar[list[Kept]] = []

    def __init__(self, run: Path, settings: dict[str, Any], steps: int) -> None:
        self.settings, self.heard = settings, list[Any]()
        Kept.made.append(self)

    def write(self, rows: Any) -> None:
        self.heard += [row["steps"] for row in rows]

    def rewind(self, steps: int) -> None:
        self.heard.append(f"back to {steps}")

    def close(self) -> None:
        self.heard.append("closed")


class Raises:
    """Fails at every call."""

    def __init__(self, *_: Any) -> None:
        raise RuntimeError("no service today")


class Stuck:
    """Never answers."""

    release = threading.Event()

    def __init__(self, *_: Any) -> None:
        Stuck.release.wait()


def test_a_logger_of_ones_own_hears_everything(tmp_path: Path) -> None:
    Kept.made.clear()
    run = shoal.train(TINY, tmp_path / "run", loggers=["tests.runs.test_loggers:Kept"])
    (logger,) = Kept.made
    assert logger.settings["algorithm.unroll"] == 8
    assert logger.heard == [*(row["steps"] for row in run.rows()), "closed"]
    assert not (tmp_path / "run" / "tensorboard").exists()


@pytest.mark.parametrize("kind", ["Raises", "Stuck"])
def test_a_logger_that_fails_or_hangs_harms_nothing(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loggers, "PATIENCE", 0.1)
    Stuck.release.clear()
    try:
        run = shoal.train(TINY, tmp_path / "run", loggers=[f"tests.runs.test_loggers:{kind}", "tensorboard"])
        assert run.summary["steps"] >= 200
        assert {line["kind"] for line in run.rows()} == {"train", "evaluation"}
        assert any((tmp_path / "run" / "tensorboard").iterdir())
        said = {"Raises": "failed, and the run continues", "Stuck": "did not end within"}[kind]
        assert caplog.text.count(said) == 1
    finally:
        Stuck.release.set()
        for thread in threading.enumerate():
            if thread.name.startswith("logger"):
                thread.join()


def test_a_slow_logger_drops_what_it_cannot_keep_up_with(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loggers, "WAITING", 2)
    begin = threading.Event()
    kept: list[Any] = []

    class Slow(Kept):
        def __init__(self) -> None:
            begin.wait()
            self.heard = kept

    logger = Background("slow", Slow)
    for steps in range(5):
        logger.write([row(steps)])
    begin.set()
    logger.thread.join(0.1)  # it may take what waits before the request to close
    logger.waiting.put(("close", None))
    logger.thread.join()
    assert kept == [0, 1, "closed"]
    assert logger.dropped == 3


def test_unknown_loggers_are_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingsError, match=r"unknown logger 'tensorbord': .*; did you mean 'tensorboard'\?"):
        check(["tensorbord"])
    monkeypatch.setattr(loggers, "installed", lambda name: False)
    with pytest.raises(SettingsError, match=r"wandb is not installed: pip install 'shoal\[wandb\]'"):
        check(["wandb"])


def test_the_metrics_reach_every_logger_in_order(tmp_path: Path) -> None:
    Kept.made.clear()
    logger = Kept(tmp_path, {}, 0)
    writer = metrics.Metrics(tmp_path, 0, [logger])
    writer.add(row(1))
    writer.flush()
    writer.add(row(2))
    writer.rewind(1)
    writer.add(score(2, 1.0))
    writer.flush()
    writer.close()
    assert logger.heard == [1, "back to 1", 2, "closed"]


@pytest.mark.filterwarnings("ignore")  # of other people's code
@pytest.mark.parametrize("_", [long("offline")])
def test_weights_and_biases_is_written_offline(_: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="the extra `wandb` is not installed")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    run = shoal.train(TINY, tmp_path / "run", loggers=["wandb"])
    (file,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    history = [{item.nested_key[0] if item.nested_key else item.key: item.value_json for item in record.history.item}
               for record in wandb_records(file) if record.history.item]  # fmt: skip
    returns = [float(each["evaluation/return"]) for each in history if "evaluation/return" in each]
    assert returns == [line["mean"] for line in run.rows() if line["kind"] == "evaluation"]


def wandb_records(file: Path) -> list[Any]:
    """The records of a W&B file, which is a LevelDB log after a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2 as proto

    data, place, parts, records = file.read_bytes(), 7, b"", []
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:  # the rest of a block has no room for a header
            place += 32768 - place % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            records.append(proto.Record.FromString(parts))
            parts = b""
    return records


@pytest.mark.filterwarnings("ignore")  # of other people's code
@pytest.mark.parametrize("_", [long("offline")])
def test_mlflow_is_written_to_a_file_and_continued(_: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow", reason="the extra `mlflow` is not installed")
    from mlflow.tracking import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run = shoal.train(TINY, tmp_path / "run", loggers=["mlflow"])
    run = run.resume(steps=400)
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    (experiment,) = [one for one in client.search_experiments() if one.name == "shoal"]
    (found,) = client.search_runs([experiment.experiment_id])
    written = [(each.step, each.value) for each in client.get_metric_history(found.info.run_id, "evaluation/return")]
    assert written == [(line["steps"], line["mean"]) for line in run.rows() if line["kind"] == "evaluation"]
    assert found.data.params["algorithm.unroll"] == "8"
    assert found.info.status == "FINISHED"
