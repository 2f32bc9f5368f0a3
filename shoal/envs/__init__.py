"""Environments: many of them stepped together, under one time convention."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from pydantic import Field, model_validator

from shoal.core.errors import Fatal
from shoal.core.settings import Settings
from shoal.core.types import Spec
from shoal.envs.atari import Atari, is_atari
from shoal.envs.clipping import Clip
from shoal.envs.mario import Mario, is_mario
from shoal.envs.toy import TOYS
from shoal.envs.vector import Envs, Episode

__all__ = ["TOYS", "Atari", "Environment", "Envs", "Episode", "Mario", "check", "chosen", "make", "spec_of"]
POOLED = ("arguments", "wrappers", "mask")  # settings that EnvPool's environments do not have


class Wrapper(Settings):
    """A wrapper around an environment."""

    name: str = Field(description="One of Gymnasium's own, such as `FlattenObservation`, or `package.module:Class`.")
    arguments: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of the wrapper.")

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value


class Environment(Settings):
    """The environment, and how it is run."""

    id: str = Field(
        description="A Gymnasium id, `module:id` for your own, `ALE/Pong-v5` for Atari, "
        "`SuperMarioBros-1-1-v0`, or a toy: `Catch`."
    )
    arguments: dict[str, Any] = Field(
        default_factory=dict, description="Keyword arguments of the environment; for Atari see `atari`."
    )
    wrappers: tuple[Wrapper, ...] = Field(
        (), description="Gymnasium wrappers, the innermost first: `name` or `{name: …, arguments: {…}}` each."
    )
    backend: Literal["auto", "gymnasium", "envpool"] = Field(
        "auto",
        description="Who steps MuJoCo's environments: gymnasium, or envpool, which is faster; one seed gives other "
        "episodes there. auto: envpool where it is installed and has the id, unless another setting needs gymnasium.",
    )
    mask: str | None = Field(
        None,
        description="Key of `info` under which the environment says which actions are allowed; a part `action_mask` of "
        "the observation does so without this.",
    )
    clip_reward: Clip | None = Field(
        None,
        description="How rewards are clipped for learning; scores are not. sign: to -1, 0 or 1; clamp: to [-1, 1]; "
        "soft_asymmetric: to 5 tanh r, or 0.3 tanh r where negative; null: not, but see atari.clip_rewards.",
    )
    atari: Atari = Field(default_factory=Atari, description="How Atari games are preprocessed and played.")
    mario: Mario = Field(default_factory=Mario, description="How Super Mario Bros. is preprocessed and played.")
    max_faults: int = Field(
        5,
        ge=0,
        description="Consecutive faults of one environment that are allowed before the run fails; "
        "a finished episode or 100 steps without a fault reset the count.",
    )
    metrics: dict[str, Literal["sum", "average", "last"]] = Field(
        default_factory=dict, description="Keys of `info` to report per episode, and how to aggregate each."
    )

    @property
    def sticky(self) -> float | None:
        """The chance that a game repeats an action, without which a score means little; None: no such game."""
        if is_mario(self.id):
            return self.mario.sticky
        return self.atari.sticky if is_atari(self.id) else None


def make(
    environment: Environment,
    size: int,
    seed: int,
    evaluation: bool = False,
    render: bool = False,
    limit: int | None = None,
) -> Envs:
    """Make `size` environments that are stepped together.

    In an evaluation a lost life does not end an episode. Only environments made with `render` can be drawn. After
    `limit` steps an episode is cut off.
    """
    from shoal.envs import atari, envpool, gymnasium, toy
    from shoal.envs.console import SuperMarioBros
    from shoal.envs.vector import Vector

    _refuse_unused(environment)
    clip, stack = environment.clip_reward, 1
    if atari.is_atari(environment.id):
        return atari.Games(
            environment.id, environment.atari, size, seed, environment.metrics, evaluation, render, limit, clip
        )
    if not render and chosen(environment) == "envpool":
        return envpool.Pool(environment.id, size, seed, environment.max_faults, environment.metrics, limit, clip)
    create: Callable[[], Any]
    if environment.id in toy.ENVS:
        create = partial(toy.ENVS[environment.id], **environment.arguments)
    elif is_mario(environment.id):
        create, stack = partial(SuperMarioBros, environment.id, environment.mario), environment.mario.stack
    else:
        around = [(one.name, one.arguments) for one in environment.wrappers]
        create = partial(gymnasium.create, environment.id, environment.arguments, render, around, environment.mask)
    faults, metrics = environment.max_faults, environment.metrics
    return Vector(environment.id, create, size, seed, faults, metrics, render, limit, clip, stack)


def check(environment: Environment) -> None:
    """Refuse an id that does not exist, without making the environment."""
    from shoal.envs import atari, console, envpool, gymnasium, mario, toy

    _refuse_unused(environment)
    if environment.backend == "envpool":
        envpool.check(environment.id)
    if atari.is_atari(environment.id):
        atari.rom(environment.id)
    elif is_mario(environment.id):
        mario.check(environment.id, environment.mario)
        console.console()
    elif environment.id not in toy.ENVS:
        gymnasium.check(environment.id)


def chosen(environment: Environment) -> str:
    """The backend that `auto` stands for on this machine."""
    from shoal.envs import envpool

    if environment.backend != "auto":
        return environment.backend
    plain = not any(getattr(environment, name) for name in POOLED)
    return "envpool" if plain and envpool.installed() and envpool.knows(environment.id) else "gymnasium"


def _refuse_unused(environment: Environment) -> None:
    """Refuse settings that would be ignored, so that nobody counts on them."""
    if environment.backend == "envpool":
        for name in POOLED:
            if getattr(environment, name):
                raise Fatal(f"environment.{name} needs Gymnasium's own environments: set environment.backend=gymnasium")
    games: dict[str, type[Settings]] = {"atari": Atari} if is_atari(environment.id) else {}
    games |= {"mario": Mario} if is_mario(environment.id) else {}
    for name, settings in games.items():
        if environment.arguments:
            taken = [*settings.model_fields]
            raise Fatal(f"{environment.id} takes no arguments; its settings are in `{name}`: {taken}")
    if games or environment.id in TOYS:
        for name in ("wrappers", "mask"):
            if getattr(environment, name):
                kind = f"a game: see `{next(iter(games))}`" if games else "a toy environment"
                raise Fatal(f"`environment.{name}` is for Gymnasium's environments, and {environment.id} is {kind}")


def spec_of(environment: Environment) -> Spec:
    """What an environment shows and takes, read off one that is made for it."""
    envs = make(environment, 1, seed=0)
    try:
        return envs.spec
    finally:
        envs.close()
