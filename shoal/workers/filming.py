"""Filming: episodes as videos, with what was chosen at each step beside them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import nn

from shoal.core.algorithm import Algorithm, HasValues
from shoal.core.types import Act, Array, Step
from shoal.display.video import Video
from shoal.envs import Envs, Episode


class EpisodeWriter:
    """Receives every choice and every frame of one environment, and writes a video and a JSON file per episode."""

    def __init__(self, folder: Path, envs: Envs, algorithm: Algorithm[Any], net: nn.Module) -> None:
        """Write into a folder what happens in the first environment."""
        self.folder, self.envs, self.algorithm, self.net = folder, envs, algorithm, net
        self.hidden = {*algorithm.experience.initial} - {"arm"}  # recurrent states, which mean nothing to people
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
        """Discard a video that is not finished."""
        if self.film is not None:
            self.film.__exit__(kind or KeyboardInterrupt, error, trace)

    def chosen(self, step: Step, carry: Any, choice: Act) -> None:
        """Take a choice, and with it the reward for the previous one."""
        if step.first[0]:
            self.steps.clear()  # what was chosen after the end of an episode leads nowhere
        elif self.steps:
            self.steps[-1]["reward"] = float(self.envs.points[0])
        values = self.algorithm.values(self.net, step, carry) if isinstance(self.algorithm, HasValues) else {}
        tensors = {**choice.record, **values}
        numbers = {name: value[0].tolist() for name, value in tensors.items() if name not in self.hidden}
        self.steps.append({"action": choice.action[0].tolist(), **numbers})

    def show(self, frame: Array, ended: Sequence[Episode]) -> None:
        """Take a frame; when another episode has ended, finish its files."""
        if self.film is None:
            self.film = Video(self.folder / f"episode_{self.ended + 1}.mp4", self.envs.fps)
            self.film.__enter__()
        self.film.add(frame)
        if len(ended) > self.ended:
            self.ended = len(ended)
            self._finish(ended[-1], self.film)

    def _finish(self, episode: Episode, film: Video) -> None:
        film.__exit__(None, None, None)
        # The reward of the last choice would only arrive with the next.
        self.steps[-1]["reward"] = round(episode.score - sum(step["reward"] for step in self.steps[:-1]), 6)
        path = self.folder / f"episode_{self.ended}.json"
        path.write_text(
            json.dumps({"score": episode.score, "length": episode.length, "steps": self.steps}, indent=1) + "\n"
        )
        self.written += [path.with_suffix(".mp4"), path]
        self.film, self.steps = None, []
