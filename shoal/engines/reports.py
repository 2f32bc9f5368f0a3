"""What a node may tell the head of its workers, checked before anything is believed."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from shoal.core.errors import Refused
from shoal.engines.orders import Name

LINE, TEXT = 2000, 100_000  # letters of what a worker is doing, and of why it failed
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)]
Count = Annotated[int, Field(ge=0, lt=1 << 63, strict=True)]


def shown(text: str) -> str:
    """Text that changes nothing about the terminal where it is shown."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "?" for letter in text)


Waited = Annotated[str, Field(max_length=200, pattern=r"^[ -~]*$")]  # for a service; empty: for none
Line = Annotated[str, Field(max_length=LINE), AfterValidator(shown)]
Text = Annotated[str, Field(max_length=TEXT), AfterValidator(shown)]


class Told(TypedDict, total=False):
    """How one worker has spent its time; nothing yet while it starts."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]

    moves: Count
    seconds: Seconds
    working: Seconds
    waits: Annotated[dict[Waited, Seconds], Field(max_length=1000)]
    busy: Seconds
    doing: Line
    restarts: Count
    refused: Count
    pid: Count


class Report(NamedTuple):
    """What a node tells again and again."""

    run: str
    workers: dict[Name, Told]
    lines: dict[Name, Line]
    ended: list[Name]
    failures: dict[Name, Text]
    starting: Annotated[bool, Field(strict=True)]

    def names(self) -> set[str]:
        """The workers that it is about."""
        return {*self.workers, *self.lines, *self.ended, *self.failures}


FORM: TypeAdapter[Report] = TypeAdapter(Report)


def read(args: list[Any]) -> Report:
    """The report, if it has the form of one."""
    try:
        return FORM.validate_python(args)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place, *inside = first["loc"] or ("its form",)
        name = Report._fields[place] if isinstance(place, int) and place < len(Report._fields) else "its form"
        raise Refused(f"{'.'.join(map(str, [name, *inside]))}: {first['msg'].lower()}"[:LINE]) from None
