"""The experiments that come with Shoal, found by name."""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path

from shoal.core.errors import SettingsError, nearest

# Of a clone, and where the package installs them.
FOLDERS = (Path(__file__).parents[1] / "configs", Path(sysconfig.get_path("data")) / "share" / "shoal" / "configs")


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
    found = re.match(r"#.*(needs shoal\[\w+\])", shipped(name).read_text(), re.IGNORECASE)
    return found[1].lower() if found else ""
