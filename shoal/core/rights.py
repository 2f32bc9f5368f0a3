"""Rights: which methods of which services a worker may call, as its recipe names them."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from shoal.core.errors import Refused
from shoal.core.recipe import Standin, services_in

log = logging.getLogger("shoal")
Named: TypeAlias = Mapping[str, Sequence[str] | None]  # service → methods; None: all its public ones
Function = TypeVar("Function", bound=Callable[..., Any])
DECLARED = "_calls"  # under which a worker's function keeps its declaration


def calls(**methods: Sequence[str]) -> Callable[[Function], Function]:
    """Declare which methods a worker calls of each service among its parameters; it may then call no others."""

    def declare(work: Function) -> Function:
        known = inspect.signature(work).parameters
        if unknown := [name for name in methods if name not in known]:
            raise TypeError(f"{work.__qualname__} has no parameter {unknown[0]!r}: {', '.join(known)}")
        setattr(work, DECLARED, methods)
        return work

    return declare


def rights_of(work: Callable[..., Any], args: Sequence[Any]) -> dict[str, Sequence[str] | None]:
    """What a worker may call: what it declares, else every public method of the services among its arguments."""
    declared: Mapping[str, Sequence[str]] | None = getattr(work, DECLARED, None)
    if declared is None:
        return dict.fromkeys(_services(args))
    given = inspect.signature(work).bind(*args).arguments
    found: dict[str, Sequence[str] | None] = {}
    for parameter, methods in declared.items():
        for service in _services(given.get(parameter)):
            found[service] = [*dict.fromkeys([*(found.get(service) or ()), *methods])]
    return found


def with_services(named: Named, made: Mapping[str, Mapping[str, Any]]) -> dict[str, Sequence[str] | None]:
    """The rights of a worker's process: its own, and the services that those made there were given."""
    return {**{name: None for each in made.values() for arg in each["args"] for name in services_in(arg)}, **named}


def _services(value: Any) -> Iterator[str]:
    """The names of the stand-ins in an argument."""
    if isinstance(value, Mapping):
        value = [*value.values()]
    if isinstance(value, list | tuple):
        for item in value:
            yield from _services(item)
    elif isinstance(value, Standin):
        yield value._service


class Rights:
    """What one caller may call."""

    def __init__(self, caller: str, named: Named, refused: dict[str, int]) -> None:
        """Grant what a recipe names; `refused` counts the other calls of each caller."""
        self.caller, self.named, self._refused = caller, named, refused
        self._listed = [
            f"{service}.{method}"
            for service, methods in named.items()
            for method in (["*"] if methods is None else methods)
        ]
        self._open = {service for service, methods in named.items() if methods is None}
        self._methods = {(service, method) for service, methods in named.items() for method in methods or ()}

    def check(self, service: str, method: str) -> None:
        """Refuse a call that the caller's recipe does not name; its first attempt is logged."""
        if (service, method) in self._methods or (service in self._open and method[:1] != "_"):
            return
        self._refused[self.caller] = count = self._refused.get(self.caller, 0) + 1
        shown = "".join(letter if letter.isprintable() else "?" for letter in f"{service:.60}.{method:.60}")
        message = f"{self.caller} may not call {shown}: its recipe names {', '.join(self._listed) or 'no service'}"
        if count == 1:
            log.warning("refused: %s", message)
        raise Refused(message)
