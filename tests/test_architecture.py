"""The rules of the tree: who may import whom, that every setting is read, and that files stay short."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "shoal"
FILES = sorted(PACKAGE.rglob("*.py"))

# What each part may import of the others; experiment, topology, training and cli may import anything.
ALLOWED: dict[str, set[str]] = {
    "core": set(),
    "losses": {"core"},
    "nets": {"core", "losses"},
    "envs": {"core"},
    "algorithms": {"core", "losses", "nets"},
    "services": {"core", "runs"},
    "transport": {"core"},
    "engines": {"core", "transport"},
    "workers": {"core", "envs", "runs", "display"},
    "runs": {"core"},
    "display": {"core", "runs"},
    "cli": {
        "",
        "algorithms",
        "bench",
        "core",
        "display",
        "engines",
        "envs",
        "runs",
        "services",
        "sweeps",
        "transport",
        "workers",
    },
    "sweeps": {"", "core", "display", "envs", "runs"},
    "bench": {"", "core", "display", "engines", "envs", "runs", "services", "transport", "workers"},
}
# What a part may name as a type besides, under `if TYPE_CHECKING`: the settings that workers read, and the services
# behind the stand-ins that they call.
NAMED = {"workers": {"shoal.experiment", "services"}}
FORBIDDEN_WORDS = ("policy", "reward", "learner", "actor", "episode", "observation", "experience")


def part_of(module: str) -> str:
    """The part of the package that a module belongs to, `` for its top."""
    pieces = module.split(".")
    return pieces[1] if len(pieces) > 1 and (PACKAGE / pieces[1]).is_dir() else ""


def imports(file: Path, types: bool = True) -> Iterator[str]:
    """Every module of the package that a file imports, lazily or not, with or without those for type checking only."""
    nodes = [ast.parse(file.read_text())]
    for node in nodes:
        checked = isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        if checked and not types:
            continue
        nodes += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("shoal"))
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("shoal"):
            for alias in node.names:
                inner = PACKAGE.parent / (node.module + "." + alias.name).replace(".", "/")
                found = inner.with_suffix(".py").exists() or inner.is_dir()
                yield f"{node.module}.{alias.name}" if found else node.module


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_imports_run_one_way(file: Path) -> None:
    relative = file.relative_to(PACKAGE)
    part = relative.parts[0] if len(relative.parts) > 1 else ""
    if part:
        run = {*imports(file, types=False)}
        for module in imports(file):
            target = part_of(module)
            named = module not in run and {module, target} & NAMED.get(part, set())
            assert target == part or target in ALLOWED[part] or named, f"{relative} imports {module}"


def test_algorithms_do_not_import_each_other() -> None:
    for file in (PACKAGE / "algorithms").glob("*.py"):
        assert not [module for module in imports(file, types=False) if part_of(module) == "algorithms"], file.name


def test_nodes_make_nothing_that_writes_files() -> None:
    from shoal.engines.messages import WRITERS

    for part in ("services", "workers"):
        for file in (PACKAGE / part).glob("*.py"):
            if any(part_of(module) == "runs" for module in imports(file)):
                assert f"shoal.{part}.{file.stem}:" in WRITERS


def test_engines_know_no_word_of_reinforcement_learning() -> None:
    for file in [*(PACKAGE / "engines").glob("*.py"), *(PACKAGE / "transport").glob("*.py")]:
        names = {node.id for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Name)}
        assert not [name for name in names for word in FORBIDDEN_WORDS if word in name.lower()], file.name


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_files_stay_short(file: Path) -> None:
    assert len(file.read_text().splitlines()) <= 600


def settings() -> Iterator[tuple[Path, str, str]]:
    """Every field of every settings model: file, class, name."""
    models = {"Settings", "Architecture"}  # and what derives from them
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef) and any(
                isinstance(base, ast.Name) and base.id in models for base in node.bases
            ):
                for item in node.body:
                    if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                        yield file, node.name, item.target.id


def test_every_setting_is_read_somewhere() -> None:
    read = set()
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                read.add(node.attr)
    # Limits travel to the engine as a whole, under the same names.
    unread = [f"{name}.{field}" for _, name, field in settings() if field not in read]
    assert not unread


def test_every_setting_has_a_sentence() -> None:
    from shoal.core.settings import Settings
    from shoal.experiment import Experiment
    from shoal.writing import schema

    schema()  # loads every algorithm
    assert Experiment
    waiting, seen = [Settings], 0
    while waiting:
        model = waiting.pop()
        waiting += model.__subclasses__()
        for name, field in model.model_fields.items():
            if model.__module__.startswith("shoal"):
                assert field.description, f"{model.__name__}.{name}"
                assert field.description.rstrip().endswith("."), f"{model.__name__}.{name}"
                seen += 1
    assert seen > 50


def test_nothing_is_unpickled() -> None:
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                forbidden = {"pickle", "dill", "cloudpickle"}
                # A benchmark compares with the bare pipes of this module, between processes of its own.
                forbidden |= set() if file.parent.name == "bench" else {"multiprocessing"}
                assert not {alias.name for alias in node.names} & forbidden
            if isinstance(node, ast.Attribute) and node.attr == "load":
                assert not (isinstance(node.value, ast.Name) and node.value.id == "torch"), file
