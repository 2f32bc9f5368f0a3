"""Federated groups in whole runs: they merge, they keep what was learned meanwhile, and they end together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shoal
from shoal.core.codec import Codec
from shoal.experiment import configure
from shoal.runs import metrics
from shoal.services.averager import Averager
from shoal.workers.federate import Delegate
from shoal.workers.shared import Shared, contents
from tests.pace import long

SETTINGS: dict[str, Any] = {
    "environment": {"id": "Catch"},
    "algorithm": {"name": "a3c", "rule": "adam", "lr": 2e-3, "unroll": 10, "network": {"hidden": [16]}},
    "topology": "federated",
    "federation": {"groups": 2, "round": 200},
    "engine": "inline",
    "actors": 2,
    "envs": 4,
    "threads": 1,
    "steps": 4_000,
    "evaluation": {"every": 2_000, "episodes": 4},
}


@pytest.mark.parametrize("codec", [long({}), {"kind": "int8", "delta": True}])
def test_lockstep_gives_the_same_bits_on_every_engine(tmp_path: Path, codec: dict[str, Any]) -> None:
    """The averager's weights depend on the order of turns only."""
    base = SETTINGS | {"lockstep": True, "steps": 1_000, "weights": codec}
    runs = {
        engine: shoal.train(base | {"engine": engine}, tmp_path / engine)
        for engine in ("inline", "threads", "processes")
    }
    assert len({run.summary["weights_sha256"] for run in runs.values()}) == 1


def test_all_groups_take_part_and_the_run_ends_after_its_steps(tmp_path: Path) -> None:
    shoal.train(SETTINGS, tmp_path / "run")
    rows = [row for row in metrics.read(tmp_path / "run") if row["kind"] == "train"]
    assert rows[-1]["steps"] >= 4_000
    share = [row["metrics"]["share"] for row in rows if "share" in row["metrics"]]
    assert 0 < min(share) < 1  # neither group has it all its way
    assert rows[-1]["metrics"]["sent_mb"] > 0


class TestDelegate:
    """What speaks for a group."""

    def make(self, codec: Codec | None = None) -> tuple[Any, Any, Any]:
        experiment = configure(SETTINGS | {"weights": (codec or Codec()).model_dump()})
        block = contents(experiment, None)
        spec = shoal.envs.spec_of(experiment.environment)
        model = Shared(experiment.algorithm, spec, block, 1)
        weights = {name[4:]: array for name, array in block.items() if name.startswith("net/")}
        averager = Averager(weights, experiment.weights)
        delegate = Delegate(experiment, model, averager, "group-0")
        delegate.publish(model.now())
        return block, averager, delegate

    def test_a_change_reaches_the_averager(self) -> None:
        block, averager, delegate = self.make()
        name = next(name for name in block if name.startswith("net/"))
        block[name] += 1.0
        block["steps"][0] += 200
        delegate.after({"loss": 2.0})
        np.testing.assert_allclose(averager.newest()[name[4:]], block[name], rtol=1e-6)
        assert averager.status()["steps"] == 200
        assert averager.status()["metrics"]["loss"] == 2.0

    def test_nothing_is_sent_before_a_round_is_over(self) -> None:
        block, averager, delegate = self.make()
        block["steps"][0] += 199
        delegate.after({})
        assert averager.status()["version"] == 0

    def test_what_the_group_learned_while_the_weights_travelled_is_kept(self) -> None:
        block, averager, delegate = self.make()
        name = next(name for name in block if name.startswith("net/"))
        begun = block[name].copy()
        merge = averager.merge

        def slowly(*args: Any) -> Any:
            block[name] += 0.25  # another worker of the group, meanwhile
            averager.weights[name[4:]] += 10.0  # another group
            return merge(*args)

        averager.merge = slowly
        block[name] += 1.0
        block["steps"][0] += 200
        delegate.after({})
        np.testing.assert_allclose(block[name], begun + 1.0 + 0.25 + 10.0, rtol=1e-6)

    def test_the_end_reaches_the_group_and_steps_elsewhere_count_for_schedules(self) -> None:
        block, averager, delegate = self.make()
        averager.steps += 1_000
        averager.stop()
        block["steps"][0] += 200
        delegate.after({})
        assert block["stop"] == 1
        assert block["elsewhere"] == 1_000


def test_groups_need_a_name_of_their_own() -> None:
    """Memory is shared within a machine: on a cluster, gradient workers must be federated."""
    with pytest.raises(shoal.core.errors.SettingsError, match="use topology: federated"):
        configure(SETTINGS | {"topology": "gradient_workers", "engine": "cluster", "nodes": ["127.0.0.1:7700"]})
