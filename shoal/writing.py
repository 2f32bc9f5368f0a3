"""An experiment written out: as YAML with a comment on every setting, and as a schema for editors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml
from pydantic import BaseModel

from shoal.algorithms import ALGORITHMS
from shoal.algorithms import find as find_algorithm
from shoal.core.recipe import path_of
from shoal.core.settings import Schedule
from shoal.experiment import Experiment


def as_yaml(experiment: Experiment) -> str:
    """The full settings as YAML, each with its description as a comment."""
    path_of(type(experiment.algorithm))  # pydantic would hide its error in one of its own
    return "\n".join(_lines(experiment, experiment.model_dump(mode="json"), 0)) + "\n"


def _lines(settings: BaseModel, dumped: Mapping[str, Any], depth: int, usual: BaseModel | None = None) -> list[str]:
    """The settings line by line; `usual` are the defaults where they are not those of the fields."""
    lines = []
    fields = type(settings).model_fields
    for key, value in dumped.items():
        comment = fields[key].description if key in fields else "The algorithm."
        inner = getattr(settings, key, None)
        default = getattr(usual, key, None) if usual is not None else key in fields and fields[key].default
        if isinstance(inner, Schedule) and isinstance(default, Schedule) and default.changes and not inner.changes:
            comment = f"{comment} Constant here; the default goes from {default.start:g} to {default.end:g}."
        if isinstance(inner, BaseModel) and not isinstance(inner, Schedule):
            lines += [
                f"{'  ' * depth}{key}:  # {comment}",
                *_lines(inner, value, depth + 1, default if isinstance(default, BaseModel) else None),
            ]
        else:
            text = (
                yaml.safe_dump(value, default_flow_style=True, width=10_000, sort_keys=False)
                .removesuffix("\n")
                .removesuffix("\n...")
            )
            lines.append(f"{'  ' * depth}{key}: {text}  # {comment}")
    return lines


def schema() -> dict[str, Any]:
    """A JSON schema of experiments, for editors."""
    document = Experiment.model_json_schema()
    choices: list[Any] = []
    for name in ALGORITHMS:
        part = find_algorithm(name).model_json_schema(ref_template="#/$defs/{model}")
        document["$defs"] |= part.pop("$defs", {})
        part["properties"] = {"name": {"const": name}, **part["properties"]}
        part["required"] = ["name", *part.get("required", [])]
        choices.append(part)
    choices.append({"properties": {"name": {"type": "string", "pattern": ":"}}, "required": ["name"], "type": "object"})
    document["properties"]["algorithm"] = {
        "oneOf": choices,
        "description": "The algorithm: `name` and its settings.",
    }
    return document
