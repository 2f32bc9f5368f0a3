"""What a head orders and a node reports, checked where it arrives, before anything is done about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from shoal.core import recipe
from shoal.core.errors import Refused
from shoal.core.spans import LONGEST, Chunk
from shoal.engines.options import Options

LATEST = 1e10  # seconds that a monotonic clock may show, which counts from the start of a machine
LINE, TEXT = 2000, 100_000  # letters of what a worker is doing, and of why it failed


class Made(TypedDict):
    """A service to make in a worker's process."""

    make: str
    args: list[Any]
    seed: int


Name = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[ -~]+$")]  # it names memory and shows in logs
Granted = dict[Name, list[Name] | None]  # service → methods that the worker may call; none: all public ones
Wanted = tuple[str, list[Any], dict[Name, Made], Granted]
Check = tuple[()] | tuple[Literal["shoal.topology:facts"], list[Any], dict[str, str]]
Blocks = dict[Name, dict[str, np.ndarray]]
FORMS: Mapping[str, Any] = {
    "describe": tuple[()],
    "hold": tuple[Name, dict[str, Any], Check, list[Name], dict[Name, Wanted], Blocks],
    "turn": tuple[str, int],
    "service": tuple[str, str, list[Any]],
    "stacks": tuple[()],
    "release": tuple[str],
    "beat": tuple[()],
    "refused": tuple[Annotated[str, Field(max_length=1000)]],
}
ARRAYS = ConfigDict(arbitrary_types_allowed=True)
ARGUMENTS: Mapping[str, TypeAdapter[Any]] = {kind: TypeAdapter(form, config=ARRAYS) for kind, form in FORMS.items()}
OPTIONS: TypeAdapter[Options] = TypeAdapter(Options)
WORKERS, SERVICES = "shoal.workers.", "shoal.services."
WRITERS = ("shoal.services.checkpoints:", "shoal.workers.recorder:")  # these write where a run's folder is: at the head
LIMITS = ("restarts", "deadline", "stall", "silence")
SENT = {"seed", "lockstep", "spans", *LIMITS, "restartable", "relays"}  # options that a head may set


def read_order(kind: str, args: list[Any]) -> list[Any]:
    """The arguments of an order, if they have its form."""
    if kind not in ARGUMENTS:
        raise Refused(f"a node does not know {kind!r}")
    try:
        return [*ARGUMENTS[kind].validate_python(args)]
    except ValidationError as error:
        raise Refused(f"{kind} {_wrong(error)}") from None


def inspect_work(workers: Mapping[str, Any], check: list[Any] | tuple[Any, ...], packages: tuple[str, ...]) -> None:
    """Refuse work that is not made of what the packages hold; of Shoal itself, only its workers and its services."""
    for path, args, made, _ in workers.values():
        for part, inside in [(path, WORKERS), *((service["make"], SERVICES) for service in made.values())]:
            recipe.inspect({"name": part}, packages)
            further = tuple(f"{name}." for name in packages if name != "shoal")
            ours = part.startswith("shoal.") and not part.startswith(further)
            if ours and (part.startswith(WRITERS) or not part.startswith(inside)):
                raise Refused(
                    f"{part} may not be used on this machine: of Shoal itself, only {inside}* is for nodes, but not "
                    f"{' or '.join(name.strip(':') for name in WRITERS)}"
                )
        recipe.inspect({"list": [*args, *(arg for service in made.values() for arg in service["args"])]}, packages)
    if check:
        recipe.inspect({"list": check[1]}, packages)


def read_options(received: Mapping[str, Any], packages: tuple[str, ...]) -> Options:
    """The options that a head sends, with what this node allows."""
    if unknown := received.keys() - SENT:
        raise Refused(f"options that a node does not know: {', '.join(sorted(unknown))}")
    try:
        return replace(OPTIONS.validate_python(dict(received)), allow=packages)
    except ValidationError as error:
        raise Refused(f"option {_wrong(error)}") from None


def _wrong(error: ValidationError) -> str:
    """Where the first fault is, and what it is."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg'].lower()}"


class About(TypedDict):
    """What a node says of itself."""

    slots: Annotated[int, Field(strict=True, ge=0, le=65536)]
    life: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]  # another for each start of a node, and sent to heads only
    busy: Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]  # seconds left to a head that is disconnected
    clock: Annotated[float, Field(strict=True, ge=0, le=LATEST)]  # what its monotonic clock shows


ABOUT = TypeAdapter(About)


def read_about(received: Any) -> About:
    """What a node says of itself, if it makes sense."""
    try:
        return ABOUT.validate_python(received)
    except ValidationError as error:
        raise Refused(f"the node describes itself wrongly: {error.errors()[0]['msg'].lower()}") from None


Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)]
Count = Annotated[int, Field(ge=0, lt=1 << 63, strict=True)]


def shown(text: str) -> str:
    """Text that changes nothing about the terminal where it is shown."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "?" for letter in text)


Waited = Annotated[str, Field(max_length=200, pattern=r"^[ -~]*$")]  # for a service; empty: for none
Line = Annotated[str, Field(max_length=LINE), AfterValidator(shown)]
Text = Annotated[str, Field(max_length=TEXT), AfterValidator(shown)]


class WorkerReport(TypedDict, total=False):
    """How one worker has spent its time; nothing yet while it starts."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]

    moves: Count
    seconds: Seconds
    working: Seconds
    computing: Seconds
    waits: Annotated[dict[Waited, Seconds], Field(max_length=1000)]
    parts: Annotated[dict[Waited, Seconds], Field(max_length=1000)]
    busy: Seconds
    doing: Line
    restarts: Count
    refused: Count
    pid: Count


class Report(NamedTuple):
    """What a node reports twice a second."""

    run: str
    workers: dict[Name, WorkerReport]
    lines: dict[Name, Line]
    ended: list[Name]
    failures: dict[Name, Text]
    starting: Annotated[bool, Field(strict=True)]

    def names(self) -> set[str]:
        """The workers that it is about."""
        return {*self.workers, *self.lines, *self.ended, *self.failures}


FORM: TypeAdapter[Report] = TypeAdapter(Report)


def read_report(args: list[Any]) -> Report:
    """The report, if it has the form of one."""
    try:
        return FORM.validate_python(args)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place, *inside = first["loc"] or ("its form",)
        name = Report._fields[place] if isinstance(place, int) and place < len(Report._fields) else "its form"
        raise Refused(f"{'.'.join(map(str, [name, *inside]))}: {first['msg'].lower()}"[:LINE]) from None


class Received(TypedDict):
    """Spans of a worker's time, as arrays of one length; `which` is the number of a name."""

    __pydantic_config__ = ConfigDict(extra="forbid", arbitrary_types_allowed=True)  # type: ignore[misc]

    names: Annotated[list[Waited], Field(max_length=1000)]
    which: np.ndarray
    start: np.ndarray
    end: np.ndarray
    left_out: Count


SPANS: TypeAdapter[tuple[str, Name, Received]] = TypeAdapter(tuple[str, Name, Received])


def read_spans(args: list[Any]) -> tuple[str, str, Chunk]:
    """A run, one of its workers, and what that did, if it makes sense."""
    try:
        run, name, chunk = SPANS.validate_python(args)
    except ValidationError as error:
        raise Refused(f"spans: {_wrong(error)}"[:LINE]) from None
    which, start, end = chunk["which"], chunk["start"], chunk["end"]
    types = [(array.dtype.str, array.shape) for array in (which, start, end)]
    if types != [(kind, (which.size,)) for kind in ("<u2", "<f8", "<f8")] or which.size > LONGEST:
        raise Refused(f"spans of {name}: three arrays of one length, at most {LONGEST:,}, were expected")
    if which.size and which.max() >= len(chunk["names"]):
        raise Refused(f"spans of {name}: one has a name that is not among the names")
    if not ((start >= 0) & (start <= end) & (end <= LATEST)).all():
        raise Refused(f"spans of {name}: one does not end after its start, or is at an impossible time")
    return run, name, {**chunk}
