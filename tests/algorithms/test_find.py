"""Finding algorithms by name and by import path."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from shoal.algorithms import ALGORITHMS, find
from shoal.algorithms.impala import Impala
from shoal.core.algorithm import Algorithm
from shoal.core.errors import ShoalError
from shoal.core.types import NStep, Sequence


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_name_of_the_table_is_an_algorithm(name):
    algorithm = find(name)()
    assert isinstance(algorithm.experience, NStep | Sequence)
    assert isinstance(algorithm, Algorithm)


def test_an_import_path_finds_a_users_own(tmp_path, monkeypatch):
    (tmp_path / "my_algorithms.py").write_text(
        "from shoal.algorithms.impala import Impala\nclass Mine(Impala):\n    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert issubclass(find("my_algorithms:Mine"), Impala)
    with pytest.raises(ShoalError, match=r"my_algorithms has no 'Mime'; did you mean 'Mine'\?"):
        find("my_algorithms:Mime")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "impla",
            r"unknown algorithm 'impla': expected one of .*impala, .*ppo.*package\.module:Class.*'impala'\?",
        ),
        ("", "unknown algorithm ''"),
        ("shoal.nowhere:Impala", r"no module 'shoal\.nowhere'"),
        ("nowhere_at_all.inside:Impala", "no module 'nowhere_at_all'"),
        ("shoal.algorithms.impala:impala", r"has no 'impala'; did you mean 'Impala'\?"),
    ],
)
def test_a_wrong_name_says_what_would_be_right(name, message):
    with pytest.raises(ShoalError, match=message):
        find(name)


def test_a_module_that_itself_fails_to_import_keeps_its_own_error(tmp_path, monkeypatch):
    (tmp_path / "needs_something.py").write_text("import something_missing\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="something_missing"):
        find("needs_something:Mine")


def test_the_table_does_not_import_torch():
    code = "import sys, shoal.algorithms; sys.exit('torch' in sys.modules)"
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0
