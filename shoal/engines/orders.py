"""What a head may tell a node, checked before anything is done about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from shoal.core import recipe
from shoal.core.errors import Refused
from shoal.engines.options import Options


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
FILES = ("shoal.services.checkpoints:", "shoal.workers.recorder:")  # these write where a run's folder is: at the head
TOLD = {
    "seed",
    "lockstep",
    "restarts",
    "deadline",
    "stall",
    "silence",
    "restartable",
    "relays",
}  # options that a head may set


def read(kind: str, args: list[Any]) -> list[Any]:
    """The arguments of an order, if they have its form."""
    if kind not in ARGUMENTS:
        raise Refused(f"a node does not know {kind!r}")
    try:
        return [*ARGUMENTS[kind].validate_python(args)]
    except ValidationError as error:
        raise Refused(f"{kind} {_wrong(error)}") from None


def inspect(workers: Mapping[str, Any], check: list[Any] | tuple[Any, ...], packages: tuple[str, ...]) -> None:
    """Refuse work that is not made of what the packages hold; of Shoal itself, only its workers and its services."""
    for path, args, made, _ in workers.values():
        for part, inside in [(path, WORKERS), *((service["make"], SERVICES) for service in made.values())]:
            recipe.inspect({"name": part}, packages)
            further = tuple(f"{name}." for name in packages if name != "shoal")
            ours = part.startswith("shoal.") and not part.startswith(further)
            if ours and (part.startswith(FILES) or not part.startswith(inside)):
                raise Refused(
                    f"{part} may not be used on this machine: of Shoal itself, only {inside}* is for nodes, but not "
                    f"{' or '.join(name.strip(':') for name in FILES)}"
                )
        recipe.inspect({"list": [*args, *(arg for service in made.values() for arg in service["args"])]}, packages)
    if check:
        recipe.inspect({"list": check[1]}, packages)


def read_options(told: Mapping[str, Any], packages: tuple[str, ...]) -> Options:
    """The options that a head tells, with what this node allows."""
    if unknown := told.keys() - TOLD:
        raise Refused(f"options that a node does not know: {', '.join(sorted(unknown))}")
    try:
        return replace(OPTIONS.validate_python(dict(told)), allow=packages)
    except ValidationError as error:
        raise Refused(f"option {_wrong(error)}") from None


def _wrong(error: ValidationError) -> str:
    """Where the first fault is, and what it is."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg'].lower()}"
