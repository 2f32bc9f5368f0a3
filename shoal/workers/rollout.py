"""Rollouts: episodes written down step by step, each beside its film."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from shoal.core.types import Act, Array, Step
from shoal.display.video import Video


class Rollout:
    """Hears every choice and sees every picture of one environment, and writes a film and a JSON per episode."""

    def __init__(self, folder: Path, fps: float, algorithm: Any, net: Any) -> None:
        """Ask the algorithm's `values(net, step, carry)`, where it has one, for what a choice was made by."""
        self.folder, self.fps, self.net = folder, fps, net
        self.values: Callable[..., Mapping[str, Any]] | None = getattr(algorithm, "values", None)
        self.inner = {*getattr(algorithm.experience, "initial", ())} - {"arm"}  # states of the network say nothing
        self.written: list[Path] = []
        self.steps: list[dict[str, Any]] = []
        self.ended = 0
        self.film: Video | None = None

    def __enter__(self) -> Self:
        """Nothing is open yet."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give up a film that is not finished."""
        if self.film is not None:
            self.film.__exit__(kind or KeyboardInterrupt, error, trace)

    def chosen(self, step: Step, carry: Any, choice: Act) -> None:
        """Take a choice, and with it the reward for the one before."""
        if step.first[0]:
            self.steps.clear()  # what was chosen after the end of an episode leads nowhere
        elif self.steps:
            self.steps[-1]["reward"] = float(step.reward[0])
        told = {**choice.record, **(self.values(self.net, step, carry) if self.values else {})}
        numbers = {name: value[0].tolist() for name, value in told.items() if name not in self.inner}
        self.steps.append({"action": choice.action[0].tolist(), **numbers})

    def show(self, picture: Array, ended: Sequence[Any]) -> None:
        """Take a picture; where one more episode has ended, finish its files."""
        if self.film is None:
            self.film = Video(self.folder / f"episode_{self.ended + 1}.mp4", self.fps)
            self.film.__enter__()
        self.film.add(picture)
        if len(ended) > self.ended:
            self.ended = len(ended)
            self._finish(ended[-1], self.film)

    def _finish(self, episode: Any, film: Video) -> None:
        film.__exit__(None, None, None)
        # The reward of the last choice would only be told at the next.
        self.steps[-1]["reward"] = round(episode.score - sum(step["reward"] for step in self.steps[:-1]), 6)
        path = self.folder / f"episode_{self.ended}.json"
        path.write_text(
            json.dumps({"score": episode.score, "length": episode.length, "steps": self.steps}, indent=1) + "\n"
        )
        self.written += [path.with_suffix(".mp4"), path]
        self.film, self.steps = None, []
