"""Experiments as files: those that come with Shoal, found by name, and what YAML and overrides say."""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from shoal.core.errors import SettingsError, nearest

# Of a clone, and where the package installs them.
FOLDERS = (Path(__file__).parents[1] / "configs", Path(sysconfig.get_path("data")) / "share" / "shoal" / "configs")
SHORT = {"algorithm": "name", "environment": "id"}  # parts that one word may stand for, and what it is


def names() -> list[str]:
    """The names of all of them."""
    return sorted({path.stem for folder in FOLDERS for path in folder.glob("*.yaml")})


def shipped(name: str) -> Path:
    """The file of one, by its name."""
    for folder in FOLDERS:
        if (path := folder / f"{name}.yaml").is_file():
            return path
    raise SettingsError(f"no experiment {name!r} comes with Shoal{nearest(name, names())} (`shoal list configs`)")


def located(config: str | Path) -> Path:
    """A file, or one that comes with Shoal by its name: `impala_cartpole`."""
    path = Path(config)
    by_name = not path.exists() and path.name == str(config) and not path.suffix
    return shipped(path.name) if by_name else path


def needs(name: str) -> str:
    """What the first line of an experiment says that it needs, if anything."""
    found = re.match(r"#.*(needs shoal\[[\w-]+\])", shipped(name).read_text(), re.IGNORECASE)
    return found[1].lower() if found else ""


def read(config: str | Path | Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Read settings and apply overrides, without validating them."""
    if isinstance(config, Mapping):
        tree = dict(config)
    else:
        try:
            tree = read_yaml(located(config).read_text())
        except OSError as error:
            raise SettingsError(f"cannot read {config}: {error.strerror}{nearest_file(Path(config))}") from None
        except (yaml.YAMLError, ValueError) as error:  # ValueError: bytes that are not text, invalid dates
            raise SettingsError(f"{config} is not YAML: {error}") from None
        if not isinstance(tree, dict):
            raise SettingsError(f"{config} must contain a mapping of settings, such as `steps: 100000`")
    tree = {key: _whole(key, value) for key, value in tree.items()}
    # The whole before its parts, so that the order of overrides does not matter.
    for key, value in sorted(
        (overrides or {}).items(), key=lambda pair: (pair[0].count("."), pair[0] != "algorithm.name")
    ):
        if key == "algorithm.name":
            tree = merged(tree, ["algorithm"], {"name": value})  # drops the settings of another algorithm
        elif key == "environment" and isinstance(value, str):
            tree = {**tree, key: _whole(key, value)}  # arguments of another one would hardly fit
        else:
            tree = merged(tree, key.split("."), _whole(key, value))
    return tree


def _whole(key: str, value: Any) -> Any:
    """A part of an experiment that may be written as one word: `algorithm: ppo` is `algorithm: {name: ppo}`."""
    return {SHORT[key]: value} if key in SHORT and isinstance(value, str) else value


NUMBER = re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$")


class Loader(yaml.SafeLoader):
    """Safe YAML that reads 1e6 and 1e-3 as numbers, which YAML 1.1 takes for text, and refuses a key given twice."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """A mapping, of whose equal keys all but the last would be lost without a word."""
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"{key.value} is set twice", key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


Loader.yaml_implicit_resolvers = {key: list(value) for key, value in yaml.SafeLoader.yaml_implicit_resolvers.items()}
Loader.add_implicit_resolver("tag:yaml.org,2002:float", NUMBER, [*"-+.0123456789"])
Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile("^[Nn]one$"), ["N", "n"])  # Python's word for it


def read_yaml(text: str) -> Any:
    """Read a YAML document."""
    return yaml.load(text, Loader)


def nearest_file(path: Path) -> str:
    """A suggestion: the nearest file name in the same folder, or the name of an experiment that comes with Shoal."""
    beside = [item.name for item in path.parent.glob("*.yaml")] if path.parent.is_dir() else []
    return nearest(path.name, beside) or (nearest(path.stem, names()) if path.name == str(path) else "")


def parse_overrides(words: list[str]) -> dict[str, Any]:
    """Read `a.b=c` words; values are YAML."""
    overrides = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key:
            raise SettingsError(f"{word!r} is not a setting: write key=value, such as algorithm.lr=1e-3")
        try:
            overrides[key] = read_yaml(text)
        except (yaml.YAMLError, ValueError):
            raise SettingsError(f"{key}: {text!r} is not a YAML value") from None
    return overrides


def merged(tree: Any, path: list[str], value: Any) -> Any:
    """A copy of the tree with one value set; mappings are merged."""
    if not path:
        if (
            isinstance(value, Mapping)
            and isinstance(tree, Mapping)
            and value.get("name", tree.get("name")) == tree.get("name", value.get("name"))
        ):
            for key, item in value.items():
                tree = merged(tree, [key], item)
            return tree
        return value
    below = tree if isinstance(tree, Mapping) else {}
    return {**below, path[0]: merged(below.get(path[0]), path[1:], value)}
