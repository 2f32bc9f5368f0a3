"""Runs on a GPU: experience that stays there, and updates that are captured beside other threads' work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from shoal.run import Run
from shoal.workers import graph, rollout

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and CUDA_VISIBLE_DEVICES=0")
THREADS = {"engine": "threads", "device": "cuda", "actor_device": "cuda", "actors": 3, "envs": 8}


@pytest.mark.parametrize("config", ["ppo_cartpole", "impala_cartpole"])
def test_cartpole_is_learned_from_experience_that_stays_on_the_gpu(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stayed: list[bool] = []
    captured: list[Any] = []
    stays, capture = rollout.stays, graph.Graph.__init__

    def noted(experiment: Any, device: Any) -> bool:
        stayed.append(stays(experiment, device))
        return stayed[-1]

    def counted(self: Any, *args: Any) -> None:
        captured.append(args)
        capture(self, *args)

    monkeypatch.setattr(rollout, "stays", noted)
    monkeypatch.setattr(graph.Graph, "__init__", counted)
    constant = {"algorithm.clip": 0.2}  # a bound that moves could not be captured
    run = shoal.train(config, run_dir=tmp_path / "run", steps=200_000, **THREADS, **constant)
    assert stayed
    assert all(stayed)
    assert captured
    assert run.summary["best_evaluation"] >= 400


def test_a_run_on_the_gpu_is_resumed(tmp_path: Path) -> None:
    run = shoal.train("ppo_cartpole", run_dir=tmp_path / "run", steps=20_000, **THREADS)
    before = run.summary["steps"]
    again = shoal.resume(run.directory, steps=40_000)
    assert again.summary["steps"] >= 40_000 > before


def test_all_devices_of_a_run_may_differ(tmp_path: Path) -> None:
    for device, actor_device in (("cuda", "cpu"), ("cpu", "cuda")):
        given = {**THREADS, "device": device, "actor_device": actor_device}
        run = shoal.train("ppo_cartpole", run_dir=tmp_path / device, steps=10_000, **given)
        assert Run(run.directory).summary["steps"] >= 10_000


@pytest.mark.parametrize(
    ("config", "more"),
    [
        ("sac_pendulum", {}),
        ("td3_pendulum", {"prefetch": 2}),
        ("dqn_cartpole", {"algorithm.noisy": True, "algorithm.replay.alpha": 0.6, "algorithm.actor_priorities": True}),
    ],
)
def test_updates_from_a_replay_are_captured_beside_actors_that_draw(
    config: str, more: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured: list[Any] = []
    capture = graph.Graph.__init__

    def counted(self: Any, *args: Any) -> None:
        capture(self, *args)
        captured.append(args)

    monkeypatch.setattr(graph.Graph, "__init__", counted)
    run = shoal.train(config, run_dir=tmp_path / "run", steps=5_000, **THREADS, **more)
    assert len(captured) == (2 if config.startswith("td3") else 1)  # with the policy's turn, and without
    assert run.summary["steps"] >= 5_000


def test_lockstep_is_alike_on_engines_that_share_a_gpu(tmp_path: Path) -> None:
    given = {**THREADS, "actors": 2, "lockstep": True, "threads": 1, "algorithm.replay.minimum": 200}
    found = []
    for engine in ("inline", "threads"):
        run = shoal.train("sac_pendulum", run_dir=tmp_path / engine, steps=600, **{**given, "engine": engine})
        net = Run(run.directory).policy("newest").follower.net
        found.append([value.tolist() for value in net.state_dict().values()])
    assert found[0] == found[1]
