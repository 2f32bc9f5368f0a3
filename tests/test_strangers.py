"""The folder of a stranger's run: looking at it runs none of its code and writes nothing elsewhere."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import shoal
from shoal.core.errors import SettingsError
from shoal.runs import directory, provenance
from tests.pace import seconds

TRAP = "from pathlib import Path\nPath({!r}).touch()\n"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a moment."""
    config = {
        "environment": {"id": "Catch"},
        "algorithm": {"name": "ppo", "unroll": 8, "network": {"hidden": [4]}},
        "engine": "inline",
        "actors": 1,
        "threads": 1,
        "steps": 200,
        "evaluation": {"episodes": 2, "every": 100},
    }
    return shoal.train(config, tmp_path_factory.mktemp("runs") / "run").directory


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of it, to be tampered with."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def rewrite(run: Path, **settings: Any) -> None:
    """Change the settings of a run as they stand in its folder."""
    tree = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump({**tree, **settings}))


def test_nothing_in_the_working_directory_replaces_a_library(command: Any, tmp_path: Path) -> None:
    sprung = tmp_path / "sprung"
    for module in ("torch", "gymnasium", "yaml", "rich"):
        (tmp_path / f"{module}.py").write_text(TRAP.format(str(sprung)))
    (tmp_path / "config.yaml").write_text(
        yaml.safe_dump(
            {
                "environment": {"id": "Catch"},
                "algorithm": {"name": "ppo", "unroll": 8, "network": {"hidden": [4]}},
                "actors": 1,
                "envs": 2,
                "steps": 100,
                "evaluation": {"episodes": 1},
            }
        )
    )
    process = command("train", "config.yaml", "--run-dir", "run")  # workers in processes of their own
    _, told = process.communicate(timeout=seconds(120))
    assert process.returncode == 0, told
    assert not sprung.exists()


@pytest.mark.parametrize(
    "settings",
    [
        {"algorithm": {"name": "trap:Algorithm"}},
        {"environment": {"id": "trap:World-v0"}},
        {"engine": "trap.inner:Engine"},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_code_in_the_folder_of_a_run_is_not_imported(
    run: Path, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewrite(run, **settings)
    (run / "trap").mkdir()
    for name in ("__init__", "inner"):
        (run / "trap" / f"{name}.py").write_text(TRAP.format(str(tmp_path / "sprung")))
    monkeypatch.syspath_prepend(str(run))  # as it is for who works in that folder
    for use in (lambda: shoal.load(run), lambda: shoal.Run(run).evaluate(1), lambda: shoal.resume(run, steps=400)):
        with pytest.raises(SettingsError, match=r"names trap.*is in the run's own folder"):
            use()
    assert not (tmp_path / "sprung").exists()


def test_code_elsewhere_is_named_and_imported(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "shoal")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "shoal_own.py").write_text("from shoal.algorithms.ppo import Ppo as Mine\n")
    monkeypatch.syspath_prepend(str(tmp_path / "own"))
    tree = yaml.safe_load((run / "config.yaml").read_text())
    rewrite(run, algorithm={**tree["algorithm"], "name": "shoal_own:Mine"})
    assert len(shoal.Run(run).evaluate(2).scores) == 2
    assert "names code outside shoal, which is imported: shoal_own:Mine" in caplog.text


def test_plots_import_nothing_that_a_run_names(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trap.py").write_text(TRAP.format(str(tmp_path / "sprung")))
    monkeypatch.syspath_prepend(str(tmp_path))
    rewrite(run, algorithm={"name": "trap:Algorithm"}, environment={"id": "trap:World-v0"}, engine="trap:Engine")
    title = shoal.Run(run).title
    assert title == "algorithm on trap:World-v0 · trap:Engine"
    assert shoal.Run(run).plot(tmp_path / "curve.png")
    assert title in repr(shoal.Run(run)) or "ppo" in repr(shoal.Run(run))
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("name", [".lock", "log.txt", "config.tmp", "plots", "checkpoints/step_7", "provenance.json"])
def test_a_link_out_of_the_folder_is_refused_and_its_target_stays(run: Path, name: str, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("years of work")
    path = run / name
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.symlink_to(precious)
    with pytest.raises(SettingsError, match=r"is a symbolic link to .*precious, outside the run"):
        shoal.resume(run, steps=400)
    with pytest.raises(SettingsError, match="symbolic link"):
        shoal.Run(run).plot()
    assert precious.read_text() == "years of work"


def test_a_link_within_the_folder_is_the_users_own_affair(run: Path) -> None:
    (run / "logs").symlink_to("log.txt")
    with directory.locked(run):
        assert (run / ".lock").read_text() == str(os.getpid())


@pytest.mark.parametrize(
    "settings",
    [
        {"core.fsmonitor": "{}"},
        {"core.hooksPath": "hooks"},
        {"diff.external": "{}"},
        {"filter.a=b.clean": "{}", "filter.a=b.required": "true"},
        {"filter.trap.process": "{}"},
        {"diff.trap.textconv": "{}", "diff.trap.command": "{}"},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_git_runs_nothing_that_a_repository_names(settings: dict[str, str], tmp_path: Path) -> None:
    def git(*words: str) -> None:
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True, capture_output=True)

    sprung, trap = tmp_path.with_name(f"{tmp_path.name}-sprung"), tmp_path / "trap.sh"
    trap.write_text(f"#!/bin/sh\ntouch {sprung}\ncat\n")
    trap.chmod(0o755)
    git("init", "-q")
    (tmp_path / "file").write_text("one\n")
    git("add", "file")
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "one")
    (tmp_path / "hooks").mkdir()
    shutil.copy(trap, tmp_path / "hooks" / "post-index-change")
    (tmp_path / ".gitattributes").write_text("file filter=trap diff=trap\n")
    if "filter.a=b.clean" in settings:
        (tmp_path / ".gitattributes").write_text("file filter=a=b\n")
    for key, value in settings.items():
        git("config", key, value.format(trap))
    (tmp_path / "file").write_text("two\n")
    told = provenance.collect(tmp_path, [])["git"]
    changes = provenance.diff(tmp_path)
    assert not sprung.exists()
    assert " M file" in told["status"]
    assert b"+two" in changes
    assert json.dumps(told)
