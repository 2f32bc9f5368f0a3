"""An algorithm and environments for tests of whole runs; a module, so that other processes can import it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from pydantic import Field
from torch import Tensor, nn

import shoal
from shoal.algorithms.impala import Impala
from shoal.core.settings import Schedule, Settings
from shoal.core.types import Act, Batch, Loss, NStep, Sequence, Spec, Step
from shoal.engines import ENGINES
from shoal.engines.inline import Inline
from shoal.engines.supervisor import Launcher

# Each worker of `ray` takes seconds to start: tests/engines/test_ray.py has the runs on it.
QUICK = [name for name in ENGINES if name != "ray"]
LOCAL = ("inline", "threads", "processes")  # for runs in which it does not matter on which machine anyone lives


def small(algorithm: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Settings of a run of two workers that is over in seconds and is scored and saved on the way."""
    return {
        "environment": {"id": "CartPole-v1"},
        "algorithm": algorithm,
        "actors": 2,
        "envs": 2,
        "threads": 1,
        "steps": 480,
        "evaluation": {"episodes": 2, "every": 160},
        "checkpoints": {"every": 130, "keep": 9},
        **more,
    }


def outcome(run: shoal.Run) -> Any:
    """What must be equal in runs that are equal."""
    summary = run.summary
    scores = [(item["steps"], item["mean"]) for item in summary["evaluations"]]
    return [summary[key] for key in ("weights_sha256", "steps", "updates", "episodes")], scores


class Misaligned(Exception):
    """Experience that is not what the counting environment showed."""


def demand(fact: Tensor, what: str) -> None:
    """Raise unless a statement holds everywhere."""
    if not bool(fact.all()):
        raise Misaligned(what)


class Checker(Settings):
    """Acts by the count it sees, and its loss checks with whole numbers that every part stands at its time."""

    length: int = Field(5, description="Length of the counting environment's episodes.")
    truncates: bool = Field(False, description="Whether they are cut off.")
    kind: str = Field("sequence", description="sequence, padded or nstep.")
    lr: Schedule = Field(Schedule(start=0.1, shape="constant"), description="Unused.")
    batch: int | None = Field(4, description="Items per update.")
    clip_norm: float | None = Field(None, description="None.")
    max_lag: int | None = Field(None, description="Any.")

    @property
    def experience(self) -> NStep | Sequence:
        if self.kind == "nstep":
            return NStep(3, 0.5)
        return Sequence(7, overlap=2, across=self.kind == "sequence", initial=("opening",))

    def build(self, spec: Spec) -> nn.Module:
        return nn.Linear(1, 1)

    def optimizer(self, net: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(net.parameters(), lr=0.1)

    def begin(self, net: nn.Module, size: int) -> Any:
        return torch.zeros(size)  # counts the calls: an instant number that no environment knows

    def act(self, net: nn.Module, step: Step, carry: Any, rank: Tensor | None) -> Act:
        count = step.observation[:, 0]
        record = {"count": count, "opening": count, "instant": carry}
        return Act((count.long() + 1) % 4, record, carry + 1)

    def prepare(self, net: nn.Module, batch: Batch) -> Batch:
        return batch

    def loss(self, net: nn.Module, target: nn.Module, batch: Batch) -> Loss:
        check = self.check_transitions if self.kind == "nstep" else self.check_sequences
        check(batch)
        each = net(torch.ones(batch.action.shape[1], 1))[:, 0]
        return Loss(each, each.detach().abs(), {})

    def check_sequences(self, batch: Batch) -> None:
        count, episode, own, told = batch.observation.unbind(-1)
        real, end = batch.mask.bool(), self.length
        demand(~real | (count[1:] == count[:-1] + 1), "observations follow each other")
        demand(~real | (episode[1:] == episode[:-1]), "a transition stays in its episode")
        demand(~real | (own[1:] == own[:-1]), "a sequence stays in its environment")
        demand(~real | (batch.action == (count[:-1].long() + 1) % 4), "the action was chosen at the observation")
        demand(~real | (told[1:].long() == batch.action), "the next observation answers the action")
        demand(~real | (batch.reward == count[:-1] + 1), "the reward answers the action")
        demand(~real | (batch.record["count"] == count[:-1]), "the record was made at the observation")
        last = torch.zeros_like(batch.discount) if not self.truncates else torch.ones_like(batch.discount)
        expected = torch.where(count[1:] == end, last, torch.ones_like(last))
        demand(~real | (batch.discount == expected), "only an ending by the rules stops the future")
        demand(batch.record["opening"][0] == count[0], "the initial record belongs to the first step")
        demand(batch.first[0] == (count[0] == 0), "first is where the count is 0")
        dummy = ~real if self.kind == "sequence" else ~real & ~batch.first[:-1]
        demand(~dummy | (count[:-1] == end), "an episode ends with its true last observation")
        if self.kind == "sequence":
            demand(real | ((count[1:] == 0) & (episode[1:] == episode[:-1] + 1)), "after the last comes the first")
            instant = batch.record["instant"]
            demand(instant[1:] == instant[:-1] + 1, "no instant is missing or comes twice")

    def check_transitions(self, batch: Batch) -> None:
        count, episode, _, _ = batch.observation.unbind(-1)
        steps = (count[1] - count[0]).long()
        demand(episode[0] == episode[1], "a transition stays in its episode")
        demand((steps >= 1) & (steps <= 3), "between one and three steps")
        demand((steps == 3) | (count[1] == self.length), "shorter only at the end")
        demand(batch.action[0] == (count[0].long() + 1) % 4, "the action was chosen at the observation")
        for item in range(len(steps)):
            reward = sum(0.5**k * (float(count[0, item]) + k + 1) for k in range(int(steps[item])))
            demand(batch.reward[0, item] == reward, "the n-step return has its powers of gamma")
        over = (count[1] == self.length) & (not self.truncates)
        expected = torch.where(over, torch.zeros(()), 0.5 ** (steps - 1).float())
        demand(batch.discount[0] == expected, "the discount has its powers of gamma")


class Broken(Impala):
    """Gives a loss that is no number for weights of some versions, and may spoil the rewards before that."""

    after: int = Field(100, description="The first version.")
    times: int = Field(10**9, description="How many versions.")
    spoil: bool = Field(False, description="Whether rewards are no numbers, and not only the loss.")

    def _bad(self, batch: Batch) -> bool:
        return self.after <= batch.version.max() < self.after + self.times

    def prepare(self, net: Any, batch: Batch) -> Batch:
        if self.spoil and self._bad(batch):
            batch = batch._replace(reward=batch.reward * float("nan"))
        return super().prepare(net, batch)

    def loss(self, net: Any, target: object, batch: Batch) -> Loss:
        loss = super().loss(net, target, batch)
        return loss._replace(each=loss.each * float("nan")) if self._bad(batch) else loss


class Faulty(gymnasium.Env[Any, Any]):
    """Breaks down every so often: raises, or shows NaN."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, healthy: int = 50, how: str = "raise") -> None:
        self.healthy, self.how, self.steps = healthy, how, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        if self.steps > self.healthy and self.how == "raise":
            raise RuntimeError("the simulator crashed")
        seen = np.full(2, np.nan if self.steps > self.healthy else 0.0, np.float32)
        return seen, 1.0, self.steps % 10 == 0, False, {"coins": self.steps, "speed": 2.0}


class Endless(gymnasium.Env[Any, Any]):
    """Never ends an episode."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.zeros(2, np.float32), 1.0, False, False, {}


class Hanging(Endless):
    """Makes a file, and does not come back from its step until there is another one."""

    def __init__(self, marker: str, healthy: int = 100) -> None:
        self.marker, self.steps = Path(marker), -healthy

    def step(self, action: Any) -> Any:
        self.steps += 1
        if self.steps == 0:
            self.marker.touch()
            while not self.marker.with_suffix(".released").exists():
                time.sleep(0.01)
        return super().step(action)


class Mixed(gymnasium.Env[Any, Any]):
    """Shows an image, a vector and a symbol at once; the reward is 1 for the action that the symbol names."""

    observation_space = spaces.Dict(
        {
            "camera": spaces.Box(0, 255, (40, 40, 3), np.uint8),
            "inner": spaces.Dict({"speed": spaces.Box(-1, 1, (3,), np.float64)}),
            "symbol": spaces.Discrete(2),
        }
    )
    action_space = spaces.Discrete(2)

    def show(self) -> Any:
        self.symbol = int(self.np_random.integers(2))
        return {
            "camera": np.full((40, 40, 3), 100, np.uint8),
            "inner": {"speed": np.zeros(3)},
            "symbol": self.symbol,
        }

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return self.show(), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        reward = float(action == self.symbol)
        return self.show(), reward, False, self.steps == 10, {}


class Lone(Inline):
    """An engine without shared memory."""

    share = Launcher.share  # type: ignore[assignment]


class Named(gymnasium.Env):  # type: ignore[type-arg]
    """Do what is shown, in several actions at once: 1 for each that is right, less by its distance for a number."""

    SPACES: ClassVar = {
        "several": spaces.MultiDiscrete([3, 4], start=[5, 0]),
        "bits": spaces.MultiBinary(3),
        "hybrid": spaces.Dict({"kind": spaces.Discrete(3, start=1), "force": spaces.Box(-2.0, 2.0, (2,))}),
        "pair": spaces.Tuple([spaces.Discrete(2), spaces.MultiBinary(2)]),
    }

    def __init__(self, kind: str, length: int = 10) -> None:
        self.action_space = self.SPACES[kind]
        self.observation_space = self.action_space
        self.length = length

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.count = 0
        self.shown = self.observation_space.sample()
        return self.shown, {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), action
        reward = self._judge(self.action_space, action, self.shown)
        self.count += 1
        self.shown = self.observation_space.sample()
        return self.shown, reward, self.count == self.length, False, {}

    def _judge(self, space: Any, action: Any, shown: Any) -> float:
        if isinstance(space, spaces.Dict):
            return sum(self._judge(space[key], action[key], shown[key]) for key in space)
        if isinstance(space, spaces.Tuple):
            return sum(map(self._judge, space, action, shown))
        if isinstance(space, spaces.Box):
            return 1.0 - float(np.abs(action - shown).mean())
        return float(np.mean(np.asarray(action) == np.asarray(shown)))


class Allowing(gymnasium.Env):  # type: ignore[type-arg]
    """Take the highest of the numbers shown that is allowed; others break the rules, and are counted."""

    broken = 0

    def __init__(self, where: str = "observation", actions: int = 6, length: int = 10) -> None:
        numbers = spaces.Box(0.0, 1.0, (actions,), np.float32)
        masks = {"numbers": numbers, "action_mask": spaces.MultiBinary(actions)}
        self.observation_space = spaces.Dict(masks) if where == "observation" else numbers
        self.action_space = spaces.Discrete(actions)
        self.where, self.actions, self.length = where, actions, length

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.count = 0
        return self._show()

    def step(self, action: Any) -> Any:
        if not self.mask[action]:
            type(self).broken += 1
        reward = float(self.numbers[action]) * bool(self.mask[action])
        self.count += 1
        seen, info = self._show()
        return seen, reward, self.count == self.length, False, info

    def _show(self) -> Any:
        self.numbers = self.np_random.random(self.actions, dtype=np.float32)
        self.mask = np.zeros(self.actions, np.int8)
        if getattr(self, "count", 0) < self.length:  # after the end nothing is allowed
            self.mask[self.np_random.choice(self.actions, 3, replace=False)] = 1
        if self.where == "observation":
            return {"numbers": self.numbers, "action_mask": self.mask}, {}
        return self.numbers, {"allowed": self.mask}


gymnasium.register("Named-v0", entry_point=Named)
gymnasium.register("Allowing-v0", entry_point=Allowing)
gymnasium.register("Faulty-v0", entry_point=Faulty)
gymnasium.register("Endless-v0", entry_point=Endless)
gymnasium.register("Hanging-v0", entry_point=Hanging)
gymnasium.register("Mixed-v0", entry_point=Mixed)
