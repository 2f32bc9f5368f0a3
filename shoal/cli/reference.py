"""Every setting as Markdown: `python -m shoal.cli.reference > docs/settings.md`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeAlias, Union, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from shoal.algorithms import ALGORITHMS, find
from shoal.core.settings import Schedule
from shoal.experiment import Experiment

Model: TypeAlias = type[BaseModel]

OPENING = """\
# Every setting

This page is generated: `python -m shoal.cli.reference > docs/settings.md`. A YAML file or the command line overrides
the defaults given here; `shoal config FILE` prints the result.

In YAML, dots are nesting: `evaluation.target` is `evaluation: {target: 475}`. On the command line, write
`evaluation.target=475`, and in Python `**{"evaluation.target": 475}`.

A number that may change over the run is a [Schedule](#schedule): `lr: 3e-4` is a constant, and
`lr: {start: 3e-4, end: 0}` decreases linearly to 0 at the last step.
"""
NUMBERS = {int: "whole number", float: "number"}
WORDS = {bool: "`true` or `false`", str: "text", NoneType: "`null`", Any: "any value"}
SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def reference() -> str:
    """The whole page; new models and algorithms appear in it by themselves."""
    sections = [*tables(Experiment, "Experiment", "", None)]
    shown: dict[str, str] = {}
    for name in ALGORITHMS:
        for title, text in tables(find(name), f"Algorithm {name}", "algorithm.", None, f" ({name})"):
            # A table that equals an earlier one, defaults included, is a link to it.
            twin = shown.setdefault(text, title)
            sections.append((title, text if twin == title else f"The same as {link(twin)}.\n"))
    sections += tables(Schedule, "Schedule", "", None)
    return "\n".join([OPENING, *(f"## {title}\n\n{text}" for title, text in sections)])


def tables(model: Model, title: str, path: str, given: BaseModel | None, label: str = "") -> Iterator[tuple[str, str]]:
    """A model's title and table, then those of the models in it; `given` is the instance whose values are defaults."""
    rows = [["setting", "allowed", "default", "meaning"], ["---"] * 4]
    inner: list[tuple[str, str]] = []
    for name, field in model.model_fields.items():
        if field.exclude:
            continue
        below = [part for part in models_in(field.annotation) if part is not Schedule]
        titles = {part: f"{path}{name}{f': {part.__name__}' if len(below) > 1 else ''}{label}" for part in below}
        default = getattr(given, name) if given is not None else field.get_default(call_default_factory=True)
        inside = f"{path}{name}.NAME." if named(field.annotation) else f"{path}{name}."
        for part, heading in titles.items():
            inner += tables(part, heading, inside, default if isinstance(default, part) else None, label)
        allowed = " or ".join(kinds(field.annotation, titles, bounds(field)))
        if model is Experiment and name == "algorithm":
            names = ", ".join(f"[{known}](#algorithm-{known})" for known in ALGORITHMS)
            allowed = f"`name` ({names}, or your own as `package.module:Class`) and its settings"
        value = "required" if field.is_required() and given is None else written(default, titles)
        rows.append([f"`{path}{name}`", allowed, value, field.description or ""])
    sentence = inspect.cleandoc(model.__doc__ or "").splitlines()[0]
    body = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)
    yield title, f"{sentence}\n\n{body}\n"
    yield from inner


def models_in(annotation: Any) -> list[Model]:
    """The settings models inside an annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in models_in(part)]


def named(annotation: Any) -> bool:
    """Whether its models stand under names of the user's."""
    return any(get_origin(part) is dict for part in (annotation, *get_args(annotation)))


def kinds(annotation: Any, titles: Mapping[Model, str], limits: str = "") -> Iterator[str]:
    """The kinds of value that are allowed, in words; `limits` are those of a number."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        for part in parts:
            yield from kinds(part, titles, limits)
    elif origin is Annotated:
        own = "".join(bounds(part) for part in parts[1:] if isinstance(part, FieldInfo))
        yield from kinds(parts[0], titles, own or limits)
    elif origin is Literal:
        yield " or ".join(f"`{part}`" for part in parts)
    elif annotation is Schedule:
        yield f"number or {link('Schedule')}"
    elif annotation in titles:
        yield link(titles[annotation])
    elif isinstance(origin, type) and issubclass(origin, Mapping):
        yield f"mapping of names to {' or '.join(kinds(parts[1], titles))}"
    elif parts:
        yield f"list of {NUMBERS[parts[0]]}s" if parts[0] in NUMBERS else f"list of {next(kinds(parts[0], titles))}"
    elif annotation in NUMBERS:
        yield NUMBERS[annotation] + limits
    else:
        yield WORDS.get(annotation, f"`{getattr(annotation, '__name__', annotation)}`")


def bounds(field: FieldInfo) -> str:
    """The limits of a number."""
    found = {
        sign: f"{limit:g}"
        for part in field.metadata
        for name, sign in SIGNS.items()
        if (limit := getattr(part, name, None)) is not None
    }
    if found.get("≥", "") == found.get("≤"):
        return f" = {found['≥']}"
    return f" {' and '.join(f'{sign} {limit}' for sign, limit in found.items())}" if found else ""


def written(value: Any, titles: Mapping[Model, str]) -> str:
    """A default as YAML; a model has a table of its own."""
    if type(value) in titles:
        return ""
    text = yaml.safe_dump(to_jsonable_python(value), default_flow_style=True, width=10_000, sort_keys=False)
    return f"`{text.strip().removesuffix('...').strip()}`"


def link(title: str) -> str:
    """A link to a section, by the anchor that both GitHub and mkdocs give it."""
    words = "".join(letter for letter in title.lower() if letter.isalnum() or letter in " -_")
    return f"[{title}](#{words.replace(' ', '-')})"


if __name__ == "__main__":
    print(reference(), end="")
