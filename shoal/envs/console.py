"""Super Mario Bros. through gym-super-mario-bros, as Gymnasium and NumPy 2 want it."""

from __future__ import annotations

import functools
from collections import deque
from typing import Any

import gymnasium
import numpy as np

from shoal.core.errors import Fatal
from shoal.core.types import Array
from shoal.envs.mario import ACTIONS, NAME, Mario, check

FRAMES_PER_SECOND = 60  # of the console
BRIGHTNESS = np.array([0.299, 0.587, 0.114], np.float32)  # of red, green and blue: ITU-R BT.601


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
        console()  # refuses at once where the emulator is not installed
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
