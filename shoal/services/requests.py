"""Requests of actors that hold no network, until an inference worker has answered them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from shoal.core.tree import flat, leaves, map_tree, not_finite
from shoal.services.inspection import Refusals

LONGEST = 0.01  # seconds for which a request may wait for others to share its batch
PATIENCE = 2.0  # gaps between requests, by their running mean, after which no other is expected
KEPT = 4096  # waiting times of the last requests, for percentiles
FAR = 1 << 62


class Requests:
    """Holds at most one request and one answer of each stream; a stream is some environments of one actor.

    In lockstep a request is answered inside the call, by a function of the worker that lives with this service: so
    actors take the same turns as with a network of their own.
    """

    def __init__(self, shapes: Mapping[str, Any], most: int) -> None:
        """Take observations with arrays of these shapes, as `[shape, type]`, for at most `most` streams."""
        self.shapes, self.most = dict(shapes), most
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

    def open(self, stream: str, size: int, seed: int, rank: Any) -> str:
        """Begin a stream of `size` environments with a fresh state; returns what is wrong, empty if nothing."""
        if stream not in self.streams and len(self.streams) >= self.most:
            return self.refusals.add("a stream", f"there are {self.most} already")
        if not (0 < size <= 1 << 20 and getattr(rank, "shape", None) == (size,)) or not_finite(rank):
            return self.refusals.add("a stream", f"{size} environments with ranks {rank!r:.80}")
        self.refusals.accept()
        self.opened, self.reopened = self.opened + 1, self.reopened + (stream in self.streams)
        self.streams[stream] = {"size": size, "seed": seed, "rank": rank, "life": self.opened, "asked": -1}
        self.waiting.pop(stream, None)
        self.answers.pop(stream, None)
        return ""

    def ask(self, stream: str, number: int, what: str, tree: Mapping[str, Any]) -> Mapping[str, Any] | bool:
        """Ask for actions at a step, or for priorities of items; the answer, or True: it waits for its batch."""
        if stream not in self.streams:
            return {"unknown": True}
        if problem := self._problem(stream, number, what, tree):
            return {"refused": self.refusals.add("a request", problem)}
        self.refusals.accept()
        now = time.monotonic()
        self.gap += 0.05 * (min(now - self.last, LONGEST) - self.gap)
        self.last = now
        self.streams[stream]["asked"] = number
        request = {"number": number, "what": what, "tree": tree, "since": now, **self.streams[stream]}
        if self.attend is not None:
            return self._answered(request, self.attend(stream, request))
        self.waiting[stream] = {**request, "tree": map_tree(np.array, tree)}  # the caller's memory is its own again
        return True

    def answer(self, stream: str, number: int) -> Mapping[str, Any] | None:
        """The answer to the request with this number; None: not yet."""
        if (
            stream not in self.streams or self.streams[stream]["asked"] != number
        ):  # it went down with a link or a worker
            return {"unknown": True}
        found = self.answers.get(stream)
        return found if found is not None and found["number"] == number else None

    def newest(self) -> Mapping[str, Any] | None:
        """Which weights answer: version, steps and period; None: there are none yet."""
        return self.policy

    def _problem(self, stream: str, number: int, what: str, tree: Mapping[str, Any]) -> str:
        """What is wrong with a request, empty if nothing."""
        if what not in ("act", "score") or not isinstance(tree, Mapping):
            return f"{what!r:.40} is neither act nor score"
        if not (isinstance(number, int) and 0 <= number < FAR):
            return f"number {number!r:.40}"
        if what == "score":
            return next(iter(not_finite({key: value for key, value in tree.items() if key != "record"})), "")
        if {*tree} != {"observation", "reward", "discount", "first"}:
            return f"a step has {', '.join(sorted(tree))[:80]}, not discount, first, observation, reward"
        size = self.streams[stream]["size"]
        for name, leaf in flat({"observation": tree["observation"]}):
            shape, kind = self.shapes.get(name, ((), ""))
            if leaf.shape != (size, *shape) or str(leaf.dtype) != kind:
                return f"{name} is {leaf.shape} of {leaf.dtype}, not {(size, *shape)} of {kind or 'nothing known'}"
        if len([*leaves(tree["observation"])]) != len(self.shapes):
            return "its observation is not whole"
        for name, kinds in (("reward", "f"), ("discount", "f"), ("first", "b")):
            if tree[name].shape != (size,) or tree[name].dtype.kind not in kinds:
                return f"{name} is {tree[name].shape} of {tree[name].dtype}"
        return next(iter(not_finite(tree)), "")

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
        """Answer a request, unless its stream began again meanwhile."""
        if (known := self.streams.get(stream)) is not None and known["life"] == request["life"]:
            self.answers[stream] = self._answered(request, answer)

    def _answered(self, request: Mapping[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
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
