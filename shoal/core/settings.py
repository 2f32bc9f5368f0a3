"""What every settings model is: frozen, typed, closed to unknown keys."""

from __future__ import annotations

from typing import Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler, model_serializer, model_validator
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import CoreSchema

POWER = 2.0  # of the polynomial shape, where none is given
Moved = TypeVar("Moved")  # an algorithm is settings too, but its protocol cannot say so


class Settings(BaseModel):
    """Frozen settings; an unknown key is an error."""

    # Without "constants", an infinity would be written down as nothing.
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=False, ser_json_inf_nan="constants")

    @model_validator(mode="before")
    @classmethod
    def _keep_the_rest(cls, value: Any) -> Any:
        """Settings that are given in part keep the rest of their own default, such as SAC's of its replay."""
        return {name: cls._completed(name, given) for name, given in value.items()} if type(value) is dict else value

    @classmethod
    def _completed(cls, name: str, given: Any) -> Any:
        default = cls.model_fields[name].default if name in cls.model_fields else None
        if isinstance(given, dict) and isinstance(default, Settings) and not isinstance(default, Schedule):
            return {**default.model_dump(exclude_unset=True), **given}
        return given


class Schedule(Settings):
    """A number that may change over the run; a bare number is a constant."""

    start: float = Field(description="Value at the beginning.")
    end: float | None = Field(None, description="Value at the end; null: the start.")
    shape: Literal["constant", "linear", "polynomial"] = Field("linear", description="How it goes from start to end.")
    power: float = Field(POWER, gt=0, description="Exponent of the polynomial shape.")
    until: float = Field(1.0, gt=0, description="When the end is reached: a share of the run, or above 1 its steps.")
    warmup: float = Field(
        0.0, ge=0, description="How long it first rises from 0: a share of the run, or above 1 its steps."
    )
    now: SkipJsonSchema[float] = Field(default=float("nan"), exclude=True, description="Value at the present moment.")

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """A bare number, or the whole."""
        return {"anyOf": [{"type": "number"}, handler.resolve_ref_schema(handler(core))]}

    @model_validator(mode="before")
    @classmethod
    def _from_number(cls, value: Any) -> Any:
        if isinstance(value, int | float | str) and not isinstance(value, bool):
            return {"start": value, "shape": "constant"}
        return value

    @model_validator(mode="after")
    def _begin(self) -> Self:
        if self.now != self.now:  # NaN: never set
            object.__setattr__(self, "now", self.start)
        return self

    @model_serializer(mode="plain")
    def _short(self) -> Any:
        more: dict[str, Any] = {"power": self.power} if self.shape == "polynomial" or self.power != POWER else {}
        more |= {"until": self.until} if self.until != 1 else {}
        more |= {"warmup": self.warmup} if self.warmup else {}
        if self.shape == "constant" and self.end is None and not more:
            return self.start
        return {"start": self.start, "end": self.end, "shape": self.shape, **more}

    def at(self, steps: float, total: float) -> Schedule:
        """Return the schedule with `now` set for some of a run's steps."""
        if not self.changes:
            return self
        done = max(steps, 0.0)
        left = 1.0 - min(done / _in_steps(self.until, total), 1.0)
        share = left if self.shape == "linear" else left**self.power
        end = self.start if self.end is None or self.shape == "constant" else self.end
        rise = min(done / _in_steps(self.warmup, total), 1.0) if self.warmup else 1.0
        return self.model_copy(update={"now": rise * (end + (self.start - end) * share)})

    @property
    def changes(self) -> bool:
        """Whether it is not the same number all the time."""
        return bool(self.warmup) or not (self.shape == "constant" or self.end is None)


def _in_steps(length: float, total: float) -> float:
    """A share of a run up to 1, or a number of steps, as steps."""
    return length if length > 1 else length * total


def moving(settings: object) -> dict[str, float]:
    """The present values of the schedules in settings that change over a run, by name."""
    assert isinstance(settings, BaseModel)
    named = ((name, getattr(settings, name)) for name in type(settings).model_fields)
    return {name: value.now for name, value in named if isinstance(value, Schedule) and value.changes}


def at(settings: Moved, steps: float, total: float) -> Moved:
    """Return settings whose schedules, also those of settings inside them, stand at some of a run's steps."""
    assert isinstance(settings, BaseModel)
    moved = {}
    for name in type(settings).model_fields:
        value = getattr(settings, name)
        if isinstance(value, Schedule):
            new: Any = value.at(steps, total)
        else:
            new = at(value, steps, total) if isinstance(value, Settings) else value
        if new is not value:
            moved[name] = new
    return settings.model_copy(update=moved) if moved else settings


class Circling(Settings):
    """How many batches are held, and how often each is learned from."""

    # Luo et al. 2019, arXiv:1912.00167, section 3.2: N and K.
    batches: int = Field(4, ge=1, description="Batches that are used in turn.")
    times: int = Field(2, ge=1, description="Times that each batch is used; then a fresh one takes its place.")


class Replaying(Settings):
    """How much experience is kept, and how often and by what chance it is drawn."""

    capacity: int = Field(100_000, ge=1, description="Most items that are kept.")
    minimum: int = Field(1_000, ge=1, description="Items in the replay before the first draw.")
    # Schaul et al. 2015, arXiv:1511.05952, section 3.3 and table 3 (proportional variant).
    alpha: float = Field(0.6, ge=0, le=1, description="How much priorities count in a draw; 0: uniform.")
    beta: Schedule = Field(
        Schedule(start=0.4, end=1.0, shape="linear"),
        description="How far importance weights correct for priorities; 1: fully.",
    )
    samples_per_insert: float | None = Field(
        None, gt=0, description="Times that an item is drawn on average; null: as often as the learner can."
    )
    tolerance: float = Field(
        2.0, ge=0.5, description="Batches by which draws may run ahead of or behind samples_per_insert."
    )
    chunk: int = Field(1, ge=1, description="Items that an actor collects before it sends them.")
    refresh: int = Field(1, ge=1, description="Puts of an actor between two checks for new weights.")
    publish: int = Field(1, ge=1, description="Batches between two publications of weights.")
    compress: bool = Field(False, description="Compress images with LZ4: a fraction of the memory, slower draws.")
    shards: int = Field(
        1, ge=1, le=1024, description="Processes over which the items are spread; 1: they live with the learner."
    )
    save: bool = Field(False, description="Save the items in checkpoints too; lockstep always does.")
