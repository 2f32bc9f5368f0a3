"""Where a run came from is written down at each start, whatever the machine lacks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.runs import provenance
from tests.pace import seconds


def git(folder: Path, *words: str) -> str:
    """Run git as a user whom nothing on this machine configures."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "GIT_CONFIG_NOSYSTEM": "1"}
    identity = ["-c", "user.name=Someone", "-c", "user.email=someone@example.com"]
    done = subprocess.run(["git", *identity, *words], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A working folder with one commit."""
    folder = tmp_path / "work"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "trunk")
    (folder / "code.py").write_bytes(b"first\n")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "First")
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder."""
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


def entries(run: Path) -> list[dict[str, Any]]:
    """What the run knows."""
    return json.loads((run / "provenance.json").read_text())  # type: ignore[no-any-return]


def test_a_start_is_described(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["shoal", "train", "some.yaml"])
    monkeypatch.setenv("SECRET_TOKEN", "do-not-tell")
    found = provenance.collect(work, ["Card 0"])
    moment = datetime.fromisoformat(found["time"])
    assert moment.utcoffset() == timedelta(0)
    assert abs(datetime.now(UTC) - moment) < timedelta(minutes=1)
    assert found["command"] == ["shoal", "train", "some.yaml"]
    assert found["folder"] == str(work)
    assert found["devices"] == ["Card 0"]
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    import numpy
    import torch

    assert found["versions"]["numpy"] == numpy.__version__
    assert found["versions"]["torch"] == torch.__version__
    assert set(found["versions"]) == {"shoal", "torch", "numpy", "gymnasium", "ale-py", "safetensors", "pydantic"}
    assert found["git"] == {"head": git(work, "rev-parse", "HEAD"), "branch": "trunk", "status": []}
    assert found["cores"] == os.cpu_count()
    assert found["memory_bytes"] > 0
    assert found["user"]
    assert found["processor"]
    assert "do-not-tell" not in json.dumps(found)


def test_each_start_adds_an_entry_and_its_difference(run: Path, work: Path) -> None:
    provenance.write(run, work)
    (work / "code.py").write_bytes(b"second \xff\n")
    (work / "new.py").write_text("untracked\n")
    provenance.write(run, work)
    first, second = entries(run)
    assert (first["start"], first["diff"]) == (1, None)
    assert (second["start"], second["diff"]) == (2, "provenance-2.diff")
    assert second["git"]["status"] == [" M code.py", "?? new.py"]
    assert not (run / "provenance-1.diff").exists()
    # The difference brings the last commit to what was run, byte for byte.
    (work / "code.py").write_bytes(b"first\n")
    git(work, "apply", str(run / "provenance-2.diff"))
    assert (work / "code.py").read_bytes() == b"second \xff\n"
    assert sorted(file.name for file in run.iterdir()) == ["provenance-2.diff", "provenance.json"]


@pytest.mark.parametrize("damage", [b"", b"[{", b"{}", b"\xff\xfe", b"[" * 100_000])
def test_a_damaged_file_is_kept_aside(run: Path, work: Path, damage: bytes) -> None:
    (work / "code.py").write_text("second\n")
    provenance.write(run, work)
    whole = (run / "provenance-1.diff").read_bytes()
    for number in (1, 2):
        (run / "provenance.json").write_bytes(damage)
        provenance.write(run, work)
        assert (run / f"provenance-damaged-{number}.json").read_bytes() == damage
        assert [entry["start"] for entry in entries(run)] == [number + 1]  # no difference is overwritten
    assert (run / "provenance-1.diff").read_bytes() == whole


def test_a_crash_while_writing_leaves_the_old_file(run: Path, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    provenance.write(run, work)
    before = (run / "provenance.json").read_bytes()
    write_text = Path.write_text

    def half(path: Path, text: str) -> int:
        write_text(path, text[: len(text) // 2])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(KeyboardInterrupt):
        provenance.write(run, work)
    assert (run / "provenance.json").read_bytes() == before


def test_a_full_or_missing_folder_is_a_warning(tmp_path: Path, work: Path, caplog: pytest.LogCaptureFixture) -> None:
    provenance.write(tmp_path / "missing", work)
    assert "cannot write the run's provenance" in caplog.text


def test_a_long_difference_is_cut_at_a_line(work: Path) -> None:
    line = "x" * 99 + "\n"
    (work / "code.py").write_text(line * 20_000)
    text = provenance.diff(work)
    assert len(text) < provenance.DIFF_LIMIT + 200
    *kept, last = text.decode().splitlines()
    assert last == "# cut here: the diff is longer than 1,048,576 bytes"
    assert kept[-1] == "+" + line[:-1]


def test_a_user_s_own_configuration_does_not_change_the_difference(work: Path) -> None:
    (work / "code.py").write_text("second\n")
    plain = provenance.diff(work)
    for key, value in {"color.ui": "always", "diff.noprefix": "true", "diff.external": "false"}.items():
        git(work, "config", key, value)
    assert provenance.diff(work) == plain
    assert plain.startswith(b"diff --git a/code.py b/code.py\n")


def test_another_repository_named_by_the_environment_is_not_meant(
    tmp_path: Path, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    found = provenance.repository(work)
    assert found is not None
    assert found["branch"] == "trunk"


def test_unusual_repositories(tmp_path: Path, work: Path) -> None:
    git(work, "checkout", "-q", "--detach")
    detached = provenance.repository(work)
    assert detached is not None
    assert detached["head"]
    assert detached["branch"] is None
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    git(fresh, "init", "-q", "-b", "trunk")
    assert provenance.repository(fresh) == {"head": None, "branch": "trunk", "status": []}
    assert provenance.diff(fresh) == b""
    for number in range(provenance.STATUS_LIMIT + 5):
        (fresh / str(number)).touch()
    found = provenance.repository(fresh)
    assert found is not None
    assert found["status"][-1] == "and 5 more"
    assert len(found["status"]) == provenance.STATUS_LIMIT + 1


def test_no_repository_or_no_git_is_no_error(run: Path, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(run.parent))
    assert provenance.repository(run) is None
    assert provenance.repository(run / "missing") is None
    monkeypatch.setenv("PATH", "")
    provenance.write(run, work)
    (entry,) = entries(run)
    assert entry["git"] is None
    assert entry["diff"] is None


def test_a_git_that_does_not_answer_is_ended(tmp_path: Path, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "bin" / "git"
    fake.parent.mkdir()
    fake.write_text("#!/bin/sh\nexec sleep 100\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(provenance, "PATIENCE", 0.05)
    began = time.monotonic()
    assert provenance.repository(work) is None
    assert time.monotonic() - began < seconds(10)


def test_a_user_without_a_name_is_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> str:
        raise KeyError("uid not found")

    monkeypatch.setattr("getpass.getuser", unknown)
    assert provenance.user() == str(os.getuid())


def test_gpus_are_named_only_where_torch_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = SimpleNamespace(
        is_available=lambda: True, device_count=lambda: 2, get_device_name=lambda index: f"Card {index}"
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cards))
    assert provenance.accelerators() == ["Card 0", "Card 1"]
    cards.is_available = lambda: 1 / 0  # a broken driver
    assert provenance.accelerators() == []
    monkeypatch.delitem(sys.modules, "torch")
    assert provenance.accelerators() == []
    assert "torch" not in sys.modules
