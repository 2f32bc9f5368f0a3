"""The sections of an experiment: settings that belong together."""

from __future__ import annotations

from pydantic import Field

from shoal.core.settings import Settings


class Evaluation(Settings):
    """When and how the policy is scored."""

    every: int | None = Field(None, ge=1, description="Steps between evaluations; none: a twentieth of the run.")
    episodes: int = Field(20, ge=1, description="Whole episodes per evaluation.")
    # 30 minutes of an Atari game at 4 frames a step: Hessel et al. 2017, arXiv:1710.02298, Evaluation Methodology.
    max_steps: int | None = Field(
        27_000, ge=1, description="Steps after which an episode that is scored is cut off; none: never."
    )
    target: float | None = Field(None, description="Mean return that ends the run as solved; none: never.")


class Saving(Settings):
    """When checkpoints are saved and how many stay."""

    every: int | None = Field(
        None,
        ge=1,
        description="Steps between checkpoints; none: a twentieth of the run. Unless in lockstep, at most 5 minutes.",
    )
    keep: int = Field(3, ge=1, description="Newest checkpoints to keep, beside the best policy.")


class Limits(Settings):
    """How long is too long, and how often is too often."""

    restarts: int = Field(5, ge=0, description="Times a dead actor is started again without a minute of health.")
    deadline: float = Field(60.0, gt=0, description="Seconds that one call to a service may take.")
    stall: float = Field(
        120.0,
        gt=0,
        description="Seconds without any movement, or of one worker inside one step, before the run is given up.",
    )
    silence: float = Field(30.0, gt=0, description="Seconds without a sign of life before a worker counts as dead.")


class Federation(Settings):
    """How groups of gradient workers merge what they learn apart."""

    groups: int | None = Field(None, ge=1, description="Groups of `actors` workers each; none: one for each node.")
    round: int = Field(2_000, ge=1, description="Environment steps of a group between two exchanges of weights.")
