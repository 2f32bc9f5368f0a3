"""Requests of actors that hold no network, until an inference worker has answered them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import Any

import numpy as np

from shoal.core.caller import caller
from shoal.core.tree import map_tree, not_finite
from shoal.services.inspection import Refusals, items_problem

LONGEST = 0.01  # seconds for which a request may wait for others to share its batch
PATIENCE = 2.0  # gaps between requests, by their running mean, after which no other is expected
KEPT = 4096  # waiting times of the last requests, for percentiles
FAR = 1 << 62
STEP = {"reward": [[], "float32"], "discount": [[], "float32"], "first": [[], "bool"]}  # beside the observation


class Requests:
    """Holds at most one request and one answer of each stream; a stream is some environments of one actor.

    In lockstep a request is answered inside the call, by a function of the worker that lives with this service: so
    actors take the same turns as with a network of their own.
    """

    def __init__(self, observation: Any, size: int, owners: Mapping[str, str], choices: Sequence[int]) -> None:
        """Take observations with arrays of these shapes, as `[shape, type]`, for streams of `size` environments each.

        `owners` has the actor that each stream belongs to; `choices` are those of `items_problem`.
        """
        self.shapes, self.size, self.owners = {"observation": observation, **STEP}, size, dict(owners)
        self.choices = choices
        self.streams: dict[str, dict[str, Any]] = {}
        self.waiting: dict[str, dict[str, Any]] = {}  # in the order of their arrival
        self.answers: dict[str, dict[str, Any]] = {}
        self.attend: Callable[[str, Mapping[str, Any]], dict[str, Any]] | None = None
        self.policy: dict[str, Any] | None = None
        self.refusals = Refusals()
        self.latencies: deque[float] = deque(maxlen=KEPT)
        self.gap, self.last = LONGEST, 0.0  # running mean of the seconds between two requests; when the last one came
        self.opened = self.reopened = self.batches = self.answered = 0

    # What actors call.

    def open(self, stream: str, size: int, seed: int, rank: Any, pulls: Sequence[Sequence[float]] = ()) -> str:
        """Begin a stream of `size` environments with a fresh state that knows a bandit's earlier pulls.

        Returns what is wrong, empty if nothing.
        """
        if problem := self._not_own(stream) or self._opening_problem(size, seed, rank, pulls):
            return self.refusals.add("a stream", problem)
        self.refusals.accept()
        self.opened, self.reopened = self.opened + 1, self.reopened + (stream in self.streams)
        begun = {"size": size, "seed": seed, "rank": np.array(rank), "pulls": [*pulls]}
        self.streams[stream] = {**begun, "life": self.opened, "asked": -1}
        self.waiting.pop(stream, None)
        self.answers.pop(stream, None)
        return ""

    def ask(self, stream: str, number: int, what: str, tree: Mapping[str, Any]) -> Mapping[str, Any] | bool:
        """Ask for actions at a step, or for priorities of items; the answer, or True: it waits for its batch."""
        if problem := self._not_own(stream):
            return {"refused": self.refusals.add("a request", problem)}
        if stream not in self.streams:
            return {"unknown": True}
        if problem := self._problem(number, what, tree):
            return {"refused": self.refusals.add("a request", problem)}
        self.refusals.accept()
        now = time.monotonic()
        self.gap += 0.05 * (min(now - self.last, LONGEST) - self.gap)
        self.last = now
        self.streams[stream]["asked"] = number
        request = {"number": number, "what": what, "tree": tree, "since": now, **self.streams[stream]}
        if self.attend is not None:
            return self._answered(stream, request, self.attend(stream, request))
        self.waiting[stream] = {**request, "tree": map_tree(np.array, tree)}  # the caller's memory is its own again
        return True

    def answer(self, stream: str, number: int) -> Mapping[str, Any] | None:
        """The answer to the request with this number; None: not yet."""
        if problem := self._not_own(stream):
            return {"refused": self.refusals.add("a request", problem)}
        if stream not in self.streams or self.streams[stream]["asked"] != number:
            return {"unknown": True}  # it went down with a link or a worker
        found = self.answers.get(stream)
        return found if found is not None and found["number"] == number else None

    def newest(self) -> Mapping[str, Any] | None:
        """Which weights answer: version, steps and period; None: there are none yet."""
        return self.policy

    def _not_own(self, stream: str) -> str:
        """What is wrong with the use of a stream by the present caller, empty if nothing."""
        return "" if self.owners.get(stream) == caller() else f"stream {stream!r:.40} is not its own"

    def _opening_problem(self, size: int, seed: int, rank: Any, pulls: Sequence[Sequence[float]]) -> str:
        """What is wrong with a stream that begins, empty if nothing."""
        if type(size) is not int or size != self.size:
            return f"{size!r:.40} environments, not {self.size}"
        if type(seed) is not int or not 0 <= seed < 1 << 32:
            return f"seed {seed!r:.40}"
        if problem := unlike(rank, [[], "float32"], size, "rank"):
            return problem
        if not ((rank >= 0) & (rank <= 1)).all():
            return f"ranks {rank!r:.80}"
        if not all(
            len(pull) == 2 and all(type(part) in (int, float) and isfinite(part) for part in pull) for pull in pulls
        ):
            return "pulls that are not pairs of numbers"
        return ""

    def _problem(self, number: int, what: str, tree: Mapping[str, Any]) -> str:
        """What is wrong with a request, empty if nothing."""
        if what not in ("act", "score") or not isinstance(tree, Mapping):
            return f"{what!r:.40} is neither act nor score"
        if not (isinstance(number, int) and 0 <= number < FAR):
            return f"number {number!r:.40}"
        if what == "act":
            return unlike(tree, self.shapes, self.size) or next(iter(not_finite(tree)), "")
        if not isinstance(tree.get("record"), Mapping) or "version" not in tree:
            return f"items have {', '.join(sorted(tree))[:80]}, and not a record and version"
        return items_problem(tree, None, self.choices)

    # What the inference worker calls, which lives here.

    def serve(
        self, policy: Mapping[str, Any], attend: Callable[[str, Mapping[str, Any]], dict[str, Any]] | None
    ) -> None:
        """Say which weights answer from now on, and in lockstep by which function."""
        self.policy, self.attend = dict(policy), attend

    def take(self) -> dict[str, dict[str, Any]] | None:
        """The requests of one batch, once it is worth no more waiting; None: not yet."""
        if not self.waiting:
            return None
        now = time.monotonic()
        oldest = next(iter(self.waiting.values()))["since"]
        full = len(self.waiting) >= len(self.streams)
        if not full and now - oldest < LONGEST and now - self.last < PATIENCE * self.gap:
            return None
        taken, self.waiting = self.waiting, {}
        self.batches += 1
        return taken

    def give(self, stream: str, request: Mapping[str, Any], answer: dict[str, Any]) -> None:
        """Answer a request, or say under `problem` why it cannot be, unless its stream began again meanwhile."""
        if (known := self.streams.get(stream)) is not None and known["life"] == request["life"]:
            self.answers[stream] = self._answered(stream, request, answer)

    def _answered(self, stream: str, request: Mapping[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
        if "problem" in answer:
            answer = {"refused": self.refusals.add("a request", answer["problem"], self.owners[stream])}
        self.answered += 1
        self.latencies.append(time.monotonic() - request["since"])
        return {**answer, "number": request["number"]}

    def status(self) -> Mapping[str, float]:
        """Counts so far, and how long the last requests waited, in milliseconds."""
        times = sorted(self.latencies) or [0.0]
        return {
            "streams": float(len(self.streams)),
            "reopened": float(self.reopened),
            "requests": float(self.answered),
            "batches": float(self.batches),
            "refused": float(self.refusals.total),
            **{f"ms_p{share}": 1e3 * times[min(len(times) * share // 100, len(times) - 1)] for share in (50, 99)},
        }

    def refused(self) -> list[str]:
        """What was refused since the last call, in words."""
        return self.refusals.drain()


def unlike(tree: Any, shapes: Any, size: int, name: str = "") -> str:
    """In what a tree of arrays for `size` environments differs from its shapes, empty if in nothing."""
    if isinstance(shapes, Mapping):
        if not isinstance(tree, Mapping) or {*tree} != {*shapes}:
            has = ", ".join(sorted(tree))[:80] if isinstance(tree, Mapping) else "no names"
            return f"{name or 'a step'} has {has}, not {', '.join(sorted(shapes))}"
        parts = (unlike(tree[key], shapes[key], size, f"{name}.{key}".strip(".")) for key in shapes)
        return next(filter(None, parts), "")
    shape, kind = (size, *shapes[0]), shapes[1]
    if not isinstance(tree, np.ndarray):
        return f"{name} is no array"
    if tree.shape != shape or str(tree.dtype) != kind:
        return f"{name} is {tree.shape} of {tree.dtype}, not {shape} of {kind}"
    return ""
