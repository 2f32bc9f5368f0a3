"""Atari games through ALE's own vector environment, which steps and scales frames in C++."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from pydantic import Field

from shoal.core import doing
from shoal.core.errors import Fatal
from shoal.core.settings import Settings
from shoal.core.types import ActionSpec, Array, ArraySpec, Spec, Step
from shoal.envs.clipping import Clip, clipped
from shoal.envs.vector import Episode, Tally, check_drawn, derive, opening

FRAMES_PER_SECOND = 60  # of the console
PICTURED = {"height": 210, "width": 160, "grayscale": False, "stack": 1, "threads": 1}  # as a television shows it
PATTERN = re.compile(r"ALE/(\w+)-v5|(\w+)NoFrameskip-v4")


class Atari(Settings):
    """How Atari games are preprocessed and played; the id only names the game."""

    # Skip, stack, size, pooling, idle start and clipping: Mnih et al. 2015, doi:10.1038/nature14236, Methods.
    frameskip: int = Field(4, ge=1, description="Frames for which each action is repeated.")
    stack: int = Field(4, ge=1, description="Frames in one observation.")
    height: int = Field(84, ge=1, description="Height of a frame in pixels.")
    width: int = Field(84, ge=1, description="Width of a frame in pixels.")
    grayscale: bool = Field(True, description="Grayscale frames instead of RGB.")
    maxpool: bool = Field(True, description="Pixelwise maximum of the last two frames, against flicker.")
    noop_max: int = Field(30, ge=0, description="Maximum of the random number of no-op frames at the start of a game.")
    clip_rewards: bool = Field(
        True, description="Clip rewards to [-1, 1] where environment.clip_reward is null; scores are not clipped."
    )
    fire_reset: bool = Field(True, description="Press fire at the start of games that wait for it.")
    # Machado et al. 2017, arXiv:1709.06009: episodes should end with the game; where actions stick, 0.25.
    episodic_life: bool = Field(False, description="End training episodes, but not games, at each lost life.")
    sticky: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Probability that a frame repeats the previous action; Gymnasium's own `-v5` ids have 0.25.",
    )
    full_action_space: bool = Field(False, description="Offer all 18 actions instead of those with an effect.")
    # 30 minutes at 60 frames a second: Hessel et al. 2017, arXiv:1710.02298, Evaluation Methodology.
    max_frames: int = Field(108000, ge=1, description="Frames after which a game is cut off.")
    threads: int = Field(1, ge=0, description="Emulator threads per actor; 0: one per core.")


def is_atari(id: str) -> bool:
    """Whether an id has the form of an Atari game's."""
    return PATTERN.fullmatch(id) is not None


def ids() -> list[str]:
    """Every game's id."""
    return [f"ALE/{''.join(map(str.capitalize, name.split('_')))}-v5" for name in _roms().values()]


def rom(id: str) -> str:
    """Return the file name of an id's game, such as `space_invaders` for `ALE/SpaceInvaders-v5`."""
    match = PATTERN.fullmatch(id)
    name = (match[1] or match[2]).lower() if match else id
    roms = _roms()
    if name not in roms:
        near = difflib.get_close_matches(f"ALE/{name}-v5", ids(), n=3, cutoff=0.0)
        raise Fatal(f"unknown Atari game {id!r}; nearest known: {', '.join(near)}")
    return roms[name]


def _roms() -> dict[str, str]:
    from ale_py.roms import get_all_rom_ids

    return {name.replace("_", ""): name for name in sorted(get_all_rom_ids())}


def launch(id: str, settings: Atari, size: int) -> Any:
    """Start ALE's games."""
    from ale_py.vector_env import AtariVectorEnv

    return AtariVectorEnv(
        rom(id),
        size,
        num_threads=settings.threads,
        max_num_frames_per_episode=settings.max_frames,
        repeat_action_probability=settings.sticky,
        full_action_space=settings.full_action_space,
        img_height=settings.height,
        img_width=settings.width,
        grayscale=settings.grayscale,
        stack_num=settings.stack,
        frameskip=settings.frameskip,
        maxpool=settings.maxpool,
        noop_max=settings.noop_max,
        use_fire_reset=settings.fire_reset,
        reward_clipping=False,  # clipped by Games, so that scores are the true ones
    )


class Games:
    """B Atari games stepped together.

    ALE's own `episodic_life` starts a new game at each lost life, so lives are followed here: the game goes
    on under an episode that ended, and its score is the whole game's. The wrapper presses fire or nothing for
    the step that opens the next life.

    Observations are small and mostly grey, so pictures come from a twin of game 0: the same seed and the same
    actions give the same game, here in the console's own size and colours.
    """

    def __init__(
        self,
        id: str,
        settings: Atari,
        size: int,
        seed: int,
        metrics: Mapping[str, str],
        evaluation: bool,
        render: bool = False,
        limit: int | None = None,
        clip: Clip | None = None,
    ) -> None:
        import ale_py

        ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)  # no banner
        self.size = size
        self.fps = FRAMES_PER_SECOND / settings.frameskip
        self._id, self._label = id, f"{size} games ({id})"
        self._cuts = limit is not None and limit * settings.frameskip < settings.max_frames
        if limit is not None and self._cuts:
            settings = settings.model_copy(update={"max_frames": limit * settings.frameskip})
        self._games: Any = launch(id, settings, size)
        self._twin: Any = launch(id, settings.model_copy(update=PICTURED), 1) if render else None
        self._picture: Array | None = None
        buttons = list(self._games.ale.get_action_set())
        fire = settings.fire_reset and ale_py.Action.FIRE in buttons
        self._opening_action = buttons.index(ale_py.Action.FIRE if fire else ale_py.Action.NOOP)
        self._clip: Clip | None = clip or ("clamp" if settings.clip_rewards else None)
        self._lives_end = settings.episodic_life and not evaluation
        self._colour = not settings.grayscale
        channels = settings.stack * (3 if self._colour else 1)
        pixels = ArraySpec((channels, settings.height, settings.width), "uint8", settings.stack)
        self.spec = Spec(pixels, ActionSpec(len(buttons)))
        self._metrics = metrics
        self._tally = Tally(size, metrics)
        self._seeds = [derive(seeds) for seeds in np.random.SeedSequence(seed).spawn(size)]
        self._seeded = False
        self._over = self._lost = np.zeros(size, np.bool_)  # game over; life lost
        self._lives = np.zeros(size, np.int32)
        self.points: Array = np.zeros(size)

    def reset(self) -> Step:
        """Open a game in every environment, leaving those under way."""
        seeds = None if self._seeded else np.array(self._seeds)
        now = doing.here()
        now.begin("the reset", self._label)
        frames, info = self._games.reset(seed=seeds)
        now.end()
        if self._twin is not None:
            self._picture = self._twin.reset(seed=None if seeds is None else seeds[:1])[0][0, -1]
        self._seeded = True
        for index in range(self.size):
            self._tally.forget(index)
        self._over = self._lost = np.zeros(self.size, np.bool_)
        self._lives, self.points = info["lives"], np.zeros(self.size)
        return opening(self._channels_first(frames), self.size)

    def step(self, action: Array) -> Step:
        """Take one action, of shape [B], in every game."""
        from shoal.envs.spaces import check_actions

        check_actions(action, self.spec.action.size)
        chosen = np.where(self._lost, self._opening_action, action).astype(np.int64)
        now = doing.here()
        now.begin("a step", self._label)
        frames, points, terminated, truncated, info = self._games.step(chosen)
        now.end()
        if self._twin is not None:
            self._picture = self._twin.step(chosen[:1])[0][0, -1]
        first = self._over | self._lost
        self._tally.add(points, ~self._over)
        over = terminated | truncated
        lost = self._lives_end & (info["lives"] < self._lives) & ~self._over
        self._count(over, info, truncated & ~terminated if self._cuts else np.zeros_like(over))
        self._over, self._lost, self._lives = over, lost, info["lives"]
        self.points = np.where(first, 0, points)
        # Where the opening step itself ends something, the next step opens once more.
        discount = np.where((terminated | lost) & ~first, 0, 1)
        return Step(
            self._channels_first(frames),
            self.clipped(self.points),
            discount.astype(np.float32),
            first,
        )

    def episodes(self) -> list[Episode]:
        """Hand over the games that ended since the last call."""
        return self._tally.drain()

    def faults(self) -> list[str]:
        """Return nothing: games do not fail one by one."""
        return []

    def render(self) -> Array:
        """Draw game 0 as it stands: uint8 [210, 160, 3]."""
        check_drawn(self._id, self._twin is not None, self._picture is not None)
        return np.array(self._picture)

    def encode(self, observation: Any) -> Array:
        """Turn one stack of frames into an array [1, ...]."""
        frames = np.asarray(observation, np.uint8)
        if frames.shape != self.spec.observation.shape:
            raise ValueError(f"observation of shape {frames.shape}, but the game shows {self.spec.observation.shape}")
        return frames[None]

    def decode(self, action: Array) -> list[int]:
        """Turn actions [B] into one number per game."""
        return [int(number) for number in action]

    def clipped(self, points: Array) -> Array:
        """Turn a game's points [B] into the rewards of a step, which are clipped as the settings say."""
        return clipped(points, self._clip)

    def close(self) -> None:
        """Release the games and their threads."""
        self._games = self._twin = None

    def _count(self, over: Array, info: Mapping[str, Any], cut: Array) -> None:
        if self._metrics:
            for index in np.flatnonzero(~self._over).tolist():
                self._tally.note(index, {key: values[index] for key, values in info.items()})
        for index in np.flatnonzero(over).tolist():
            self._tally.finish(index, bool(cut[index]))

    def _channels_first(self, frames: Array) -> Array:
        """Turn colour frames [B, stack, H, W, 3] into [B, 3·stack, H, W]."""
        if not self._colour:
            return frames
        return np.moveaxis(frames, -1, 2).reshape(self.size, -1, *frames.shape[2:4])
