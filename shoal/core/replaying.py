"""How experience is kept and drawn again, as settings that an algorithm carries."""

from __future__ import annotations

from pydantic import Field

from shoal.core.settings import Schedule, Settings


class Replaying(Settings):
    """How much experience is kept, and how often and how evenly it is drawn."""

    capacity: int = Field(100_000, ge=1, description="Most items that are kept.")
    minimum: int = Field(1_000, ge=1, description="Items to have before the first draw.")
    # Schaul et al. 2015, arXiv:1511.05952, section 3.3 and table 3 (proportional variant).
    alpha: float = Field(0.6, ge=0, le=1, description="How much priorities count in a draw; 0: every item alike.")
    beta: Schedule = Field(
        Schedule(start=0.4, end=1.0, shape="linear"),
        description="How much the weights correct for priorities; 1: fully.",
    )
    samples_per_insert: float | None = Field(
        None, gt=0, description="Times that an item is drawn on average; none: as often as the learner can."
    )
    tolerance: float = Field(
        2.0, ge=0.5, description="Batches by which draws may run ahead of or behind samples_per_insert."
    )
    chunk: int = Field(1, ge=1, description="Items that an actor gathers before it sends them.")
    refresh: int = Field(1, ge=1, description="Sendings of an actor between its looks for new weights.")
    publish: int = Field(1, ge=1, description="Batches between new weights for the actors.")
    compress: bool = Field(False, description="Keep pictures in LZ4: a fraction of the memory, slower draws.")
    save: bool = Field(False, description="Save the items in checkpoints as well; in lockstep they always are.")
