"""The package as it is installed from a wheel, without the clone."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from tests.pace import seconds

ROOT = Path(__file__).parents[1]
CLEAN = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}


def built(folder: Path) -> Path:
    """A wheel of what is committed or not ignored: a build in the tree itself would leave folders behind."""
    source = folder / "source"
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.splitlines():
        if name.startswith(("shoal/", "configs/")) or "/" not in name:
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "wheel", "--no-deps", "-w", folder, source], check=True, env=CLEAN, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def test_a_wheel_holds_every_module_config_and_part_of_the_page(tmp_path: Path) -> None:
    with zipfile.ZipFile(built(tmp_path)) as wheel:
        names = wheel.namelist()
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "shoal").rglob("*.py")}
    page = {str(path.relative_to(ROOT)) for path in (ROOT / "shoal/display/page").glob("*.[hcj]*")}
    assert len(page) == 5
    assert modules | page <= {*names}
    configs = {path.name for path in (ROOT / "configs").glob("*.yaml")}
    assert configs == {Path(name).name for name in names if "share/shoal/configs/" in name}


@pytest.mark.long
def test_a_wheel_trains_where_nothing_else_is_installed(tmp_path: Path) -> None:
    wheel, home = built(tmp_path), tmp_path / "venv"
    venv.create(home, with_pip=True)
    pip = [home / "bin" / "pip", "--disable-pip-version-check", "--quiet", "install", "-c", ROOT / "constraints.txt"]
    subprocess.run([*pip, wheel], check=True, env=CLEAN, cwd=tmp_path, timeout=seconds(600))
    shoal = [home / "bin" / "shoal"]

    def run(*words: str) -> str:
        done = subprocess.run(
            [*shoal, *words], env=CLEAN, cwd=tmp_path, timeout=seconds(300), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "impala_cartpole" in run("list", "configs")
    assert run("train", "impala_cartpole", "--run-dir", "run").startswith("solved: ")
    assert "pip install 'shoal[plots]'" in run("evaluate", "run", "--episodes", "2")
    assert not (tmp_path / "run" / "plots").exists()
    failed = subprocess.run(
        [*shoal, "plot", "run"], env=CLEAN, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (failed.returncode, failed.stderr) == (1, "error: a plot needs Matplotlib: pip install 'shoal[plots]'\n")
