"""Super Mario Bros. through gym-super-mario-bros, as Gymnasium and NumPy 2 want it."""

from __future__ import annotations

import functools
from collections import deque
from typing import Any, Literal, NamedTuple

import gymnasium
import numpy as np
from pydantic import Field, field_validator

from shoal.core.errors import Fatal, nearest
from shoal.core.settings import Settings
from shoal.core.types import Array

NAME = "SuperMarioBros"
FRAMES_PER_SECOND = 60  # of the console
BRIGHTNESS = np.array([0.299, 0.587, 0.114], np.float32)  # of red, green and blue: ITU-R BT.601
PICTURES = ("vanilla", "downsample", "pixel", "rectangle")  # how much detail is drawn, by the version of an id
STAGES = tuple(f"{part}-{stage}" for part in range(1, 9) for stage in range(1, 5))
# A controller's buttons, as bits.
A, B, UP, DOWN, LEFT, RIGHT = 1, 2, 16, 32, 64, 128
RIGHT_ONLY = (0, RIGHT, RIGHT | A, RIGHT | B, RIGHT | A | B)
SIMPLE = (*RIGHT_ONLY, A, LEFT)
ACTIONS: dict[str, tuple[int, ...]] = {
    "right": (RIGHT, RIGHT | A),
    "right_only": RIGHT_ONLY,
    "simple": SIMPLE,
    "complex": (*SIMPLE, LEFT | A, LEFT | B, LEFT | A | B, DOWN, UP),
}


class Mario(Settings):
    """How Super Mario Bros. is preprocessed and played; the id names the stage."""

    actions: Literal["right", "right_only", "simple", "complex"] = Field(
        "right",
        description="Which buttons can be pressed. right: right, with or without a jump; right_only, simple, complex: "
        "the 5, 7 and 12 actions that gym-super-mario-bros has under these names.",
    )
    # Skip, stack and size as for Atari: Mnih et al. 2015, doi:10.1038/nature14236, Methods.
    frameskip: int = Field(4, ge=1, description="Frames for which each action is repeated; their rewards are added.")
    stack: int = Field(4, ge=1, description="Frames in one observation.")
    height: int = Field(84, ge=1, le=240, description="Height of a frame in pixels.")
    width: int = Field(84, ge=1, le=256, description="Width of a frame in pixels.")
    # Machado et al. 2017, arXiv:1709.06009, section 5: without it a game is always the same, and can be memorised.
    sticky: float = Field(0.0, ge=0, le=1, description="Probability that a frame repeats the previous action.")
    stages: tuple[str, ...] = Field(
        (), description="Stages that SuperMarioBrosRandomStages draws from, such as 1-4; empty: all 32."
    )

    @field_validator("stages")
    @classmethod
    def _known(cls, stages: tuple[str, ...]) -> tuple[str, ...]:
        for stage in stages:
            if stage not in STAGES:
                raise ValueError(f"unknown stage {stage!r}: allowed are 1-1 to 8-4{nearest(stage, STAGES)}")
        return stages


class Game(NamedTuple):
    """What an id stands for."""

    picture: str
    stages: tuple[str, ...] = ()  # one of which is drawn for each episode; empty: the whole game
    lost_levels: bool = False


def is_mario(id: str) -> bool:
    """Whether an id has the form of a Super Mario Bros. game's."""
    return id.startswith(NAME)


def ids() -> dict[str, Game]:
    """Every id, and what it stands for."""
    known = {}
    for version, picture in enumerate(PICTURES):
        known[f"{NAME}-v{version}"] = Game(picture)
        known |= {f"{NAME}-{stage}-v{version}": Game(picture, (stage,)) for stage in STAGES}
        known[f"{NAME}RandomStages-v{version}"] = Game(picture, STAGES)
    return known | {f"{NAME}2-v{version}": Game(PICTURES[version], lost_levels=True) for version in range(2)}


def check(id: str, settings: Mario) -> Game:
    """Return what an id stands for; refuse an unknown one, and stages where none are drawn."""
    known = ids()
    if id not in known:
        raise Fatal(f"unknown Super Mario Bros. game {id!r}{nearest(id, known)}")
    console()
    game = known[id]
    if settings.stages and len(game.stages) < 2:
        raise Fatal(f"environment.mario.stages is for {NAME}RandomStages-v0, and {id} draws none")
    return game._replace(stages=settings.stages or game.stages)


@functools.cache
def console() -> Any:
    """The emulator's class, mended for NumPy 2, where bytes no longer become larger numbers by themselves."""
    try:
        import gym_notices.notices
    except ModuleNotFoundError as error:
        raise Fatal(f"{NAME} needs packages that are not installed: pip install 'shoal[mario]'") from error
    gym_notices.notices.notices.clear()  # else gym prints, when imported, that it should not be used
    try:
        from gym_super_mario_bros import SuperMarioBrosEnv
        from nes_py._rom import ROM
    except ModuleNotFoundError as error:
        raise Fatal(f"{NAME} needs packages that are not installed: pip install 'shoal[mario]'") from error
    ROM.header = property(lambda rom: rom.raw_data[:16].astype(int))  # sizes are computed from these bytes

    class Console(SuperMarioBrosEnv):  # type: ignore[misc]  # the package has no types
        def _ram_buffer(self) -> memoryview:
            return memoryview(super()._ram_buffer())  # its items are Python's numbers

    return Console


@functools.cache
def shrinking(size: int, before: int) -> tuple[tuple[Array, Array], ...]:
    """Which of `before` pixels each of `size` new ones covers, and how much of it they are, one after another.

    Few pixels are covered, so adding these up costs less than a product of matrices, which NumPy spreads over cores
    that other environments use.
    """
    edges = np.linspace(0, before, size + 1)
    parts = []
    for offset in range(-(-before // size) + 1):
        pixel = np.floor(edges[:-1]) + offset
        covered = np.minimum(edges[1:], pixel + 1) - np.maximum(edges[:-1], pixel)
        share = (np.maximum(covered, 0) * size / before).astype(np.float32)
        parts.append((np.minimum(pixel, before - 1).astype(np.intp), share))
    return tuple(parts)


def shrink(picture: Array, height: int, width: int) -> Array:
    """Scale a grey picture [H, W] down; a new pixel is the mean of those it covers."""
    for size in (height, width):  # rows, and then columns as rows
        parts = shrinking(size, len(picture))
        picture = np.sum([picture[pixel] * share[:, None] for pixel, share in parts], axis=0).T
    return picture


class SuperMarioBros(gymnasium.Env[Array, np.int64]):
    """One game: stacked grey frames, and in `info` the position, the score and whether the flag was reached.

    The episode of a stage ends with a lost life or at the flag, that of the whole game with the last life.
    """

    def __init__(self, id: str, settings: Mario, render_mode: str | None = None) -> None:
        """Start no emulator before the first episode, which may be in any of several stages."""
        self.game, self.settings, self.render_mode = check(id, settings), settings, render_mode
        self.metadata = {"render_modes": ["rgb_array"], "render_fps": FRAMES_PER_SECOND / settings.frameskip}
        shape = (settings.stack, settings.height, settings.width)
        self.observation_space = gymnasium.spaces.Box(0, 255, shape, np.uint8)
        self.buttons = ACTIONS[settings.actions]
        self.action_space = gymnasium.spaces.Discrete(len(self.buttons))
        self._frames: deque[Array] = deque(maxlen=settings.stack)
        self._consoles: dict[str, Any] = {}  # by stage; one takes a fifth of a second to start
        self._console: Any = None
        self._pressed = self._farthest = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        """Open an episode, in a stage that is drawn where there are several."""
        super().reset(seed=seed)
        stages = self.game.stages
        stage = stages[self.np_random.integers(len(stages))] if len(stages) > 1 else "".join(stages)
        if stage not in self._consoles:
            self._consoles[stage] = self._start(stage)
        self._console = self._consoles[stage]
        self._console.reset()
        self._console._frame_advance(0)  # the screen still shows the end of the last episode
        self._pressed = self._farthest = 0
        self._frames.extend([self._frame()] * self.settings.stack)
        return np.stack(self._frames), self._info(self._console._get_info())

    def step(self, action: np.int64) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        """Press the buttons of an action for some frames, or until the episode ends."""
        total, done, info = 0.0, False, dict[str, Any]()
        for _ in range(self.settings.frameskip):
            if not (self.settings.sticky and self.np_random.random() < self.settings.sticky):
                self._pressed = self.buttons[int(action)]
            _, reward, done, info = self._console.step(self._pressed)
            total += reward
            if done:
                break
        self._frames.append(self._frame())
        return np.stack(self._frames), total, done, False, self._info(info)

    def render(self) -> Array:
        """Draw the game as a television shows it: uint8 [240, 256, 3]."""
        return np.array(self._console.screen)

    def close(self) -> None:
        """Release the emulators."""
        self._console = None
        while self._consoles:
            self._consoles.popitem()[1].close()

    def _start(self, stage: str) -> Any:
        target = tuple(map(int, stage.split("-"))) if stage else None
        return console()(self.game.picture, self.game.lost_levels, target)

    def _frame(self) -> Array:
        """The screen in grey, and as small as the settings say."""
        red, green, blue = (self._console.screen[..., channel] * BRIGHTNESS[channel] for channel in range(3))
        return (shrink(red + green + blue, self.settings.height, self.settings.width) + 0.5).astype(np.uint8)

    def _info(self, info: dict[str, Any]) -> dict[str, Any]:
        """What the game says of itself, and how far to the right Mario has been."""
        self._farthest = max(self._farthest, info["x_pos"])
        return {**info, "x_max": self._farthest}
