"""Central inference: one network answers for many actors, which hold none (SEED RL, openreview rkgvXlrKwH)."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from shoal.core.algorithm import Algorithm, HasChoices
from shoal.core.doing import span
from shoal.core.errors import Fatal, ServiceLost
from shoal.core.randomness import Randomness
from shoal.core.rights import calls
from shoal.core.settings import at
from shoal.core.tree import map_tree, to_numpy, to_torch
from shoal.core.types import Act, Array, Step, Work
from shoal.envs import spec_of
from shoal.workers.follower import Follower
from shoal.workers.graph import drawing
from shoal.workers.model import first_priorities
from shoal.workers.packing import joined
from shoal.workers.rollout import Stream, first_carry

if TYPE_CHECKING:
    from shoal.experiment import Experiment
    from shoal.services.journal import Journal
    from shoal.services.parameters import Parameters
    from shoal.services.requests import Requests
    from shoal.workers.packing import Items

FOLLOWING = 0.1  # the share of its time that an inference worker may spend on fetching weights
REPORTS = 1.0  # seconds between two reports of latency and of what was refused


@calls(
    requests=("serve", "take", "give", "refused", "status"),
    parameters=("fetch",),
    journal=("report", "measured"),
)
def infer(experiment: Experiment, requests: Requests, parameters: Parameters, journal: Journal) -> Work:
    """Answer requests with the newest weights; one unit of work is a batch of them."""
    torch.set_num_threads(1)
    policy = Follower(experiment.algorithm, spec_of(experiment.environment), experiment.actor_device)
    answers = Answers(experiment.algorithm, policy)
    due, reported = 0.0, time.monotonic()
    while True:
        newer, now = False, time.monotonic()
        if experiment.lockstep or now >= due:
            newer = policy.follow(parameters)
            due = now + (time.monotonic() - now) / FOLLOWING  # the learner may be busy, and actors wait meanwhile
        if newer:
            answers.algorithm = at(experiment.algorithm, policy.steps, experiment.steps)
            weights = {"version": policy.version, "steps": policy.steps, "period": policy.period}
            requests.serve(weights, answers.alone if experiment.lockstep else None)
        taken = requests.take()
        if taken is None:
            yield newer
            continue
        for stream, answer in answers.together(taken):
            requests.give(stream, taken[stream], answer)
        if now - reported > REPORTS:
            reported = now
            report(requests, journal)
        yield True


def report(requests: Requests, journal: Journal) -> None:
    """Tell the journal how long requests wait, how many share a batch, and what was refused."""
    status = requests.status()
    batch = status["requests"] / max(status["batches"], 1.0)
    journal.measured({**{f"inference_{key}": status[key] for key in ("ms_p50", "ms_p99")}, "inference_batch": batch})
    for problem in requests.refused():
        journal.report(problem)


class Answers:
    """The network, and for each stream what its environments carry from one choice to the next."""

    def __init__(self, algorithm: Algorithm[Any], policy: Follower) -> None:
        """Know no stream yet."""
        self.algorithm, self.policy = algorithm, policy
        self.carries: dict[str, tuple[int, Any]] = {}  # with the life of the stream that it belongs to
        self.randomness: dict[str, tuple[int, Randomness]] = {}

    def alone(self, stream: str, request: Mapping[str, Any]) -> dict[str, Any]:
        """Answer one request with the random numbers of its stream, as its actor would by itself."""
        life, randomness = self.randomness.get(stream, (0, None))
        if randomness is None or life != request["life"]:
            randomness = Randomness(request["seed"])
            self.randomness[stream] = request["life"], randomness
        with randomness.active():
            return self._one(stream, request)

    def together(self, taken: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
        """Answer requests, those for actions in one batch where all that is carried are tensors."""
        acts = {stream: request for stream, request in taken.items() if request["what"] == "act"}
        carries = [self._carry(stream, request) for stream, request in acts.items()]
        joined = len(acts) > 1 and all(torch.is_tensor(part) for carry in carries for part in (carry or {}).values())
        answers = [(stream, self._one(stream, taken[stream])) for stream in taken if not (joined and stream in acts)]
        if not joined:
            return answers
        step = map_tree(lambda *parts: np.concatenate(parts), *(request["tree"] for request in acts.values()))
        carry = (
            {name: torch.cat([carry[name] for carry in carries]) for name in carries[0]} if carries[0] else carries[0]
        )
        rank = np.concatenate([request["rank"] for request in acts.values()])
        choice = self._act(step, carry, rank)
        begin = 0
        for stream, request in acts.items():
            part = slice(begin, begin := begin + request["size"])
            mine = {name: value[part] for name, value in choice.carry.items()} if choice.carry else choice.carry
            record = {name: value[part] for name, value in choice.record.items()}
            answers.append((stream, self._answer(stream, request, Act(choice.action[part], record, mine))))
        return answers

    def _one(self, stream: str, request: Mapping[str, Any]) -> dict[str, Any]:
        torch.set_num_threads(1)  # every time, since workers of one process share the number
        if request["what"] == "score":
            return self._score(request["tree"])
        choice = self._act(request["tree"], self._carry(stream, request), request["rank"])
        return self._answer(stream, request, choice)

    def _score(self, items: Items) -> dict[str, Any]:
        """The first priorities of items; where they do not fit the loss, `problem` says how: nobody else is to pay."""
        try:
            return {"priority": first_priorities(self.algorithm, self.policy.net, items, self.policy.device)}
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            return {"problem": f"{type(error).__name__}: {error} ({place.filename}, line {place.lineno})"}

    def _carry(self, stream: str, request: Mapping[str, Any]) -> Any:
        """What a stream carries; a fresh one where it began again."""
        life, carry = self.carries.get(stream, (0, None))
        return carry if life == request["life"] else self._fresh(request)

    def _fresh(self, request: Mapping[str, Any]) -> Any:
        return first_carry(self.algorithm, self.policy.net, request["size"], request["pulls"])

    def _act(self, tree: Mapping[str, Any], carry: Any, rank: Array) -> Act:
        device = self.policy.device
        with span("infer"), torch.inference_mode():
            step = Step(*(to_torch(tree[name], device) for name in Step._fields))
            with drawing(device):
                return self.algorithm.act(self.policy.net, step, carry, to_torch(rank, device))

    def _answer(self, stream: str, request: Mapping[str, Any], choice: Act) -> dict[str, Any]:
        self.carries[stream] = request["life"], choice.carry
        choices = self.algorithm.choices(choice.carry) if isinstance(self.algorithm, HasChoices) else []
        return {
            "action": choice.action.cpu().numpy(),
            "record": to_numpy(choice.record),
            "version": self.policy.version,
            "choices": choices,
        }


class RemotePolicy:
    """The policy of an actor without a network: which weights the inference worker holds."""

    def __init__(self, requests: Requests) -> None:
        """Know of none yet."""
        self.requests = requests
        self.version, self.steps, self.period = -1, 0, 0

    def follow(self, parameters: Parameters) -> bool:
        """Ask which weights answer now, and say whether they are others than before."""
        try:
            newest = self.requests.newest()
        except ServiceLost:  # it will be there again
            return False
        if newest is None or newest["version"] == self.version:
            return False
        self.version, self.steps, self.period = newest["version"], newest["steps"], newest["period"]
        return True


class RemoteActing:
    """Acting without a network: while one group of environments waits for its actions, another steps."""

    def __init__(
        self,
        requests: Requests,
        index: int,
        streams: Sequence[Stream],
        seed: int,
        pulls: Callable[[], Sequence[list[float]]],
    ) -> None:
        """Ask for the actions of these groups; `pulls` says what bandits know when a group begins."""
        self.requests, self.streams, self.seed, self.pulls = requests, streams, seed, pulls
        self.names = [f"{index}/{group}" for group in range(len(streams))]
        self.numbers = [0] * len(streams)
        self.opened: set[int] = set()
        self.choices: list[list[float]] = []

    def collect(self) -> Generator[bool, None, Items]:
        """Step every group until it has items, and return those of all."""
        done: dict[int, Items] = {}
        asked: dict[int, Mapping[str, Any]] = {}
        waited = False
        while len(done) < len(self.streams):
            moved = False
            for group, stream in enumerate(self.streams):
                if group in done:
                    continue
                if group not in asked:
                    asked[group] = step = dict(stream.step._asdict())
                    self.numbers[group] += 1
                    answer = self._ask(group, "act", step)
                else:
                    answer = self._look(group, "act", asked[group])
                if answer is None:
                    continue
                moved = True
                del asked[group]
                self.choices += answer["choices"]
                items = stream.take(answer["action"], answer["record"], answer["version"])
                if items is not None:
                    done[group] = items
            if waited or not moved:  # every wait is one by itself: how long it takes decides how often to look
                yield moved
            waited = not moved
        return joined(*(done[group] for group in range(len(self.streams))))

    def priorities(self, items: Items) -> Generator[bool, None, Array]:
        """The first priorities of items, by the network."""
        self.numbers[0] += 1
        answer = self._ask(0, "score", items)
        while answer is None:
            yield False
            answer = self._look(0, "score", items)
        return answer["priority"]  # type: ignore[no-any-return]

    def report(self, journal: Journal) -> None:
        """Report finished episodes, faults, and the algorithm's choices to the journal."""
        choices, self.choices = self.choices, []
        for stream in self.streams:
            stream.report(choices, journal)
            choices = []

    def _open(self, group: int) -> None:
        stream = self.streams[group]
        opening = self.names[group], stream.envs.size, self.seed, stream.rank, self.pulls()
        if problem := self.requests.open(*opening):
            raise Fatal(problem)
        self.opened.add(group)

    def _ask(self, group: int, what: str, tree: Mapping[str, Any]) -> Mapping[str, Any] | None:
        return self._said(group, what, tree, "ask", self.names[group], self.numbers[group], what, tree)

    def _look(self, group: int, what: str, tree: Mapping[str, Any]) -> Mapping[str, Any] | None:
        return self._said(group, what, tree, "answer", self.names[group], self.numbers[group])

    def _said(
        self, group: int, what: str, tree: Mapping[str, Any], method: str, *args: Any
    ) -> Mapping[str, Any] | None:
        """What the service says; where it does not know the stream, that begins there and asks once more."""
        said: Mapping[str, Any] | bool | None = {"unknown": True}
        try:
            if group in self.opened:
                said = getattr(self.requests, method)(*args)
            if isinstance(said, Mapping) and "unknown" in said:
                self._open(group)
                said = self.requests.ask(self.names[group], self.numbers[group], what, tree)
        except ServiceLost:  # it will be there again
            return None
        if not isinstance(said, Mapping) or "unknown" in said:
            return None
        if "refused" in said:
            raise Fatal(said["refused"])
        return said
