"""Central inference: whoever asks nonsense spoils nothing for others, and what was lost is asked for again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from shoal import envs
from shoal.core.caller import call_as
from shoal.core.errors import Fatal, ServiceLost
from shoal.experiment import Experiment, load
from shoal.services.requests import Requests
from shoal.workers.follower import Follower
from shoal.workers.inference import Answers, RemoteActing
from shoal.workers.rollout import Stream

SIZE = 2
OWNERS = {"0/0": "actor-0", "1/0": "actor-1"}


@pytest.fixture(autouse=True)
def _callers() -> Iterator[None]:
    yield
    call_as("")


def made(**more: Any) -> tuple[Experiment, Answers, Requests]:
    settings = {"environment": {"id": "CartPole-v1"}, "algorithm": {"name": "impala", "network": {"hidden": [8]}}}
    experiment = load({**settings, "actors": 2, "envs": SIZE, "inference": "central", **more})
    torch.manual_seed(0)
    policy = Follower(experiment.algorithm, envs.spec_of(experiment.environment), "cpu")
    return experiment, Answers(experiment.algorithm, policy), Requests([[4], "float32"], SIZE, OWNERS, [2])


def step() -> dict[str, Any]:
    return {
        "observation": np.zeros((SIZE, 4), np.float32),
        "reward": np.zeros(SIZE, np.float32),
        "discount": np.ones(SIZE, np.float32),
        "first": np.zeros(SIZE, bool),
    }


def items() -> dict[str, Any]:
    """Items that pass every check of their numbers, and whose shapes fit nothing."""
    return {"observation": np.zeros(3, np.float32), "record": {}, "version": np.zeros(1, np.int64)}


@pytest.mark.parametrize("lockstep", [False, True])
def test_items_that_cannot_be_scored_are_refused_and_others_are_answered(lockstep: bool) -> None:
    _, answers, requests = made()
    requests.serve({"version": 0}, answers.alone if lockstep else None)
    said = {}
    for stream, owner in OWNERS.items():
        call_as(owner)
        assert requests.open(stream, SIZE, 0, np.zeros(SIZE, np.float32)) == ""
        said[stream] = requests.ask(stream, 1, *(("act", step()) if owner == "actor-0" else ("score", items())))
    if not lockstep:
        taken = requests.take()
        assert taken is not None
        for stream, answer in answers.together(taken):
            requests.give(stream, taken[stream], answer)
        for stream, owner in OWNERS.items():
            call_as(owner)
            said[stream] = requests.answer(stream, 1) or {}
    assert said["0/0"]["action"].shape == (SIZE,)  # type: ignore[index]
    assert "refused a request of actor-1: " in said["1/0"]["refused"]  # type: ignore[index]
    assert len(requests.refused()) == 1


class Flaky:
    """Requests that lose the calls that they are told to, and can begin again knowing nothing."""

    def __init__(self, requests: Requests) -> None:
        self.requests, self.losing, self.lost = requests, set[str](), 0

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            call_as("actor-0")
            if name in self.losing:
                self.lost += 1
                raise ServiceLost("gone")
            return getattr(self.requests, name)(*args)

        return call

    def serve(self, answers: Answers) -> None:
        """Answer what waits."""
        taken = {**self.requests.waiting}
        self.requests.waiting.clear()
        for stream, answer in answers.together(taken):
            self.requests.give(stream, taken[stream], answer)


@pytest.fixture
def remote() -> Iterator[tuple[Answers, Flaky, RemoteActing]]:
    experiment, answers, requests = made()
    groups = envs.make(experiment.environment, SIZE, seed=0)
    flaky = Flaky(requests)
    yield answers, flaky, RemoteActing(flaky, 0, [Stream(experiment, 0, groups)], 0, list)  # type: ignore[arg-type]
    groups.close()


def test_whatever_call_is_lost_the_actor_goes_on(remote: tuple[Answers, Flaky, RemoteActing]) -> None:
    answers, flaky, acting = remote
    for losing in ({"open"}, {"ask"}, {"answer"}, {"open", "ask", "answer"}):
        work = acting.collect()
        flaky.losing, flaky.lost, flaky.requests.streams = losing, 0, {}
        while flaky.lost < 3:
            assert next(work) is False or flaky.lost == 0
            flaky.serve(answers)
            if losing == {"ask"}:
                flaky.requests.streams.clear()
        flaky.losing = set()
        for _ in work:
            flaky.serve(answers)


def test_a_service_that_forgets_between_two_calls_is_asked_again(
    remote: tuple[Answers, Flaky, RemoteActing], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, flaky, acting = remote
    work, asked = acting.collect(), []
    ask = flaky.requests.ask

    def forgets(*args: Any) -> Any:
        asked.append(args)
        if len(asked) < 5:
            flaky.requests.streams.clear()
        return ask(*args)

    monkeypatch.setattr(flaky.requests, "ask", forgets)
    for _ in work:
        flaky.serve(answers)
    assert len(asked) > 5


def test_an_actor_that_is_refused_says_why(remote: tuple[Answers, Flaky, RemoteActing]) -> None:
    _, flaky, acting = remote
    flaky.requests.owners.clear()
    with pytest.raises(Fatal, match="refused a stream of actor-0: stream '0/0' is not its own"):
        next(acting.collect())
