"""Which games of Super Mario Bros. there are, and how they are preprocessed and played."""

from __future__ import annotations

from typing import Literal, NamedTuple

from pydantic import Field, field_validator

from shoal.core.errors import Fatal, nearest
from shoal.core.settings import Settings

NAME = "SuperMarioBros"
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
    game = known[id]
    if settings.stages and len(game.stages) < 2:
        raise Fatal(f"environment.mario.stages is for {NAME}RandomStages-v0, and {id} draws none")
    return game._replace(stages=settings.stages or game.stages)
