"""What is wrong with settings, in words."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from shoal.algorithms import find as find_algorithm
from shoal.core.errors import ShoalError, nearest

SYNONYMS = {"gpu": "cuda"}  # what people write → what it is called here
CLOSE = 0.75  # how near a name must be to be suggested where it does not stand


def explain(error: ValidationError, root: type[BaseModel], tree: Any) -> str:
    """Say for each mistake where it is, what is allowed, and the nearest name; `root` is the model of the tree."""
    lines = []
    for problem in error.errors():
        path = [str(part) for part in problem["loc"]]
        lines.append(f"{'.'.join(path) or 'settings'}: {_complaint(problem, path, root, tree)}")
    return "\n".join(lines)


def _complaint(problem: Any, path: list[str], root: type[BaseModel], tree: Any) -> str:
    """What is wrong in one place."""
    kind, message = problem["type"], problem["msg"].removeprefix("Value error, ")
    model = _model_at(path[:-1], root, tree)
    if kind == "extra_forbidden" and model is not None:
        known = [name for name, field in model.model_fields.items() if not field.exclude]
        known += ["name"] if path[:-1] == ["algorithm"] else []
        return f"unknown setting; allowed: {', '.join(known)}{_suggested(path, known, root, tree)}"
    if kind == "missing" and model is not None:
        return f"missing; {model.model_fields[path[-1]].description}"
    if kind == "value_error":
        return message  # type: ignore[no-any-return]
    choices = re.findall(r"'([^']*)'", problem["ctx"]["expected"]) if kind == "literal_error" else []
    given = SYNONYMS.get(str(problem["input"]).lower(), str(problem["input"]))
    return f"{message}, got {problem['input']!r}{nearest(given, choices)}"


def _suggested(path: list[str], known: list[str], root: type[BaseModel], tree: Any) -> str:
    """A suggestion: a setting of this name that belongs to a part, else the nearest one here, else in a part."""
    name = path[-1]
    inside = {place.rpartition(".")[2]: place for place in _below(path[:-1], root, tree)}
    if name not in inside and (near := nearest(name, known)):
        return near
    match = difflib.get_close_matches(name, inside, n=1, cutoff=CLOSE)
    return f"; did you mean {inside[match[0]]!r}?" if match else ""


def _below(path: list[str], root: type[BaseModel], tree: Any) -> Iterator[str]:
    """The settings of all parts of what a path leads to, those near to it last."""
    model = _model_at(path, root, tree)
    for name in model.model_fields if model else ():
        if (part := _model_at([*path, name], root, tree)) is not None:
            yield from _below([*path, name], root, tree)
            yield from (".".join([*path, name, inner]) for inner in part.model_fields)


def _model_at(path: list[str], root: type[BaseModel], tree: Any) -> type[BaseModel] | None:
    """The settings model that a path leads to."""
    model: Any = root
    for part in path:
        if part == "algorithm" and model is root:
            try:
                model = find_algorithm(tree["algorithm"]["name"])
            except (KeyError, TypeError, ShoalError):  # which has a complaint of its own
                return None
            continue
        if part.isdigit():  # one of several
            continue
        if get_origin(model) is dict:  # the names in it are the user's
            model = get_args(model)[1]
            continue
        field = getattr(model, "model_fields", {}).get(part)
        model = field and field.annotation
        if get_origin(model) is not dict:
            model = next(iter(get_args(model)), model)
    return model if isinstance(model, type) and issubclass(model, BaseModel) else None
