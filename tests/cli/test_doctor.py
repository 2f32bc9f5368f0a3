"""The doctor, on facts that are given to it and on machines that really lack something."""

from __future__ import annotations

import io
import json
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement
from rich.console import Console

from shoal.cli import doctor
from shoal.cli.doctor import GB, Finding
from shoal.core import machine
from tests.pace import seconds

ROOT = Path(__file__).parents[2]
TELL = """
import dataclasses, json, sys
from shoal.cli.doctor import checks, look
print(json.dumps([dataclasses.asdict(look(name, checks()[name])) for name in sys.argv[1:]]))
"""


def told(*words: str, **options: Any) -> list[Finding]:
    """What a new interpreter finds; the words before `--` start it."""
    start, names = list(words[: words.index("--")]), list(words[words.index("--") + 1 :])
    options.setdefault("env", {**os.environ, "PYTHONPATH": str(ROOT)})
    command = [*start, sys.executable, *options.pop("flags", []), "-c", TELL, *names]
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stderr
    return [Finding(**found) for found in json.loads(done.stdout)]


def within_namespace(flags: str, preparation: str) -> list[str]:
    """The words that start a program in a namespace of its own, where this machine allows one."""
    shell = f'{preparation} && exec "$@"'
    words = ["unshare", flags, "bash", "-c", shell, "bash"]
    if not shutil.which("unshare") or subprocess.run([*words, "true"], capture_output=True).returncode:
        pytest.skip("this machine does not let its user make namespaces, as many containers do not")
    return words


def test_few_open_files_are_found_for_real() -> None:
    need = doctor.FILES + machine.cores() * doctor.FILES_PER_ACTOR
    (found,) = told("bash", "-c", 'ulimit -n 64; exec "$@"', "bash", "--", "open files")
    assert found.state == ("error" if need > 64 else "warning")
    assert found.what.startswith("64 may be open at once")
    assert found.remedy == "ulimit -n 4096"
    (found,) = told("bash", "-c", 'ulimit -n 30; exec "$@"', "bash", "--", "open files")
    assert found.state == "error"
    assert f"needs {need}" in found.what


def test_a_tiny_shared_memory_folder_is_noted_for_real() -> None:
    words = within_namespace("-rm", "mount -t tmpfs -o size=64k tmpfs /dev/shm")
    (found,) = told(*words, "--", "shared memory")
    assert found.state == "warning"
    assert "/dev/shm holds 0.0625 MB" in found.what
    assert found.remedy.splitlines() == ["docker run --shm-size=1g IMAGE", "mount -o remount,size=1G /dev/shm"]


def test_memory_that_cannot_be_shared_is_found_for_real() -> None:
    (found,) = told("bash", "-c", 'ulimit -f 1024; exec "$@"', "bash", "--", "shared memory")
    assert found.state == "error"
    assert "cannot share 64 MB" in found.what
    assert "engine=threads" in found.remedy


def test_a_machine_without_loopback_is_noted_for_real() -> None:
    (found,) = told(*within_namespace("-rn", "true"), "--", "ports")
    assert (found.state, found.remedy) == ("warning", "ip link set lo up")


def test_missing_extras_are_found_for_real(tmp_path: Path) -> None:
    absent = {"av", "pygame", "pygame_ce", "box2d", "box2d_py", "mujoco", "imageio"}
    for item in Path(sysconfig.get_path("purelib")).iterdir():
        if item.name.split("-")[0].split(".")[0].lower() not in absent:
            (tmp_path / item.name).symlink_to(item)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    found = told("--", "video", "box2d", "mujoco", "libraries", env=environment, flags=["-S"])
    assert [finding.state for finding in found] == ["warning", "warning", "warning", "ok"]
    assert [finding.remedy for finding in found[:3]] == [
        "pip install 'shoal[video]'",
        "pip install 'shoal[box2d]'",
        "pip install 'shoal[mujoco]'",
    ]
    assert "av>=13" in found[0].what
    assert "box2d" in found[1].what  # gymnasium's own extra is looked into
    assert "mujoco" in found[2].what


def test_the_whole_examination_is_quick_and_reads_well_on_80_columns(tmp_path: Path) -> None:
    code = "import sys; from shoal.cli.doctor import *; found = check(); show(found); sys.exit(exit_code(found))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80", "CUDA_VISIBLE_DEVICES": ""}
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert time.monotonic() - began < seconds(10)  # on an idle machine it takes two seconds
    assert not done.stderr
    lines = done.stdout.splitlines()
    assert all(len(line) <= 80 for line in lines if "$ " not in line and str(tmp_path) not in line)
    assert done.returncode == ("Shoal may fail here" in lines[-1])
    for name in (
        "python",
        "torch",
        "cores",
        "memory",
        "open files",
        "disk",
        "git",
        "atari",
        "video",
        "box2d",
        "mujoco",
    ):
        assert any(line[doctor.STATE :].startswith(f"{name}  ") for line in lines), name
    assert not any(line[doctor.STATE :].startswith(("dev ", "docs ")) for line in lines)
    assert not list(tmp_path.iterdir())


def test_the_report_keeps_commands_whole_and_counts() -> None:
    command = "pip install " + "x" * 200
    findings = [Finding("good thing", "ok", "word " * 40), Finding("thing", "error", "missing", command + "\nsecond")]
    lines = doctor.report(findings).splitlines()
    assert lines[0].startswith("ok       good thing  word word")
    assert all(len(line) <= 80 for line in lines[:3])
    assert lines[-5:] == ["error    thing       missing", f"         $ {command}", "         $ second", "",
                          "Shoal may fail here: 1 ok, 0 warnings, 1 error."]  # fmt: skip
    assert doctor.report(findings[:1]).endswith("Shoal can train here: 1 ok, 0 warnings, 0 errors.")


def test_only_what_is_bad_fails_the_command() -> None:
    assert doctor.exit_code([]) == 0
    assert doctor.exit_code([Finding("a", "ok", ""), Finding("b", "warning", "")]) == 0
    assert doctor.exit_code([Finding("a", "ok", ""), Finding("b", "error", "")]) == 1


def test_showing_works_on_a_terminal_that_takes_only_ascii() -> None:
    code = "from shoal.cli.doctor import *; show([Finding('disk', 'error', 'nothing in /höme')])"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert "nothing in /h?me" in done.stdout, done.stderr


def test_showing_keeps_commands_whole_on_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    command = "pip install " + "x " * 60 + "end"
    doctor.show([Finding("thing", "error", "word " * 40, command)])
    lines = capsys.readouterr().out.splitlines()
    assert f"         $ {command}" in lines
    assert all(len(line) <= 70 for line in lines if "$" not in line)


def test_a_check_that_fails_is_a_finding() -> None:
    def broken() -> Finding:
        raise RuntimeError("no such sensor\nand more")

    assert doctor.look("sensor", broken) == Finding(
        "sensor", "warning", "the check failed: RuntimeError: no such sensor"
    )


@pytest.mark.parametrize(
    ("version", "state"), [("3.10.4", "error"), ("3.11.0", "ok"), ("3.13.9", "ok"), ("3.14.0", "error")]
)
def test_python_versions(version: str, state: str) -> None:
    assert doctor.check_python(version, ">=3.11,<3.14").state == state


def test_systems() -> None:
    assert doctor.check_system("Linux", "6.1", True).state == "ok"
    assert doctor.check_system("Darwin", "24", True).state == "warning"
    assert doctor.check_system("Windows", "11", False).state == "error"


def test_libraries_that_are_missing_or_old_come_with_a_command() -> None:
    wanted = [Requirement("numpy>=1"), Requirement("rich>=1000"), Requirement("no-such-library>=2")]
    found = doctor.check_libraries(wanted)
    assert found.state == "error"
    assert found.remedy == "pip install 'rich>=1000' 'no-such-library>=2'"
    assert doctor.check_libraries(wanted[:1]).what.startswith("numpy ")


def fake_torch(cuda: str | None, available: Any, compute: Any = None) -> Any:
    """A torch whose GPU behaves as told."""

    def ask(behaviour: Any, *_: Any, **__: Any) -> Any:
        if isinstance(behaviour, Warning):
            warnings.warn(behaviour, stacklevel=2)
            return False
        if isinstance(behaviour, Exception):
            raise behaviour
        return behaviour

    import torch

    cards = SimpleNamespace(
        is_available=lambda: ask(available), device_count=lambda: 2, get_device_name=lambda index: f"Card {index}"
    )
    return SimpleNamespace(
        __version__="9.9",
        version=SimpleNamespace(cuda=cuda),
        cuda=cards,
        ones=lambda size, device: ask(torch.ones(size) if compute is None else compute),
    )


@pytest.mark.parametrize(
    ("torch", "has_gpu", "state", "says"),
    [
        (fake_torch(None, False), False, "ok", "runs on the CPU"),
        (fake_torch(None, False), True, "warning", "built without CUDA"),
        (fake_torch("13.0", True), True, "ok", "CUDA 13.0: Card 0, Card 1"),
        (fake_torch("13.0", False), False, "ok", "no GPU"),
        (fake_torch("13.0", False), True, "warning", "CUDA_VISIBLE_DEVICES is ''"),
        (fake_torch("13.0", UserWarning("driver too old")), True, "warning", "driver too old"),
        (fake_torch("13.0", RuntimeError("no driver\nlong story")), False, "error", "no driver"),
        (fake_torch("13.0", True, RuntimeError("no kernel image\nlong story")), True, "error", "no kernel image"),
    ],
)
def test_a_broken_gpu_is_a_line(torch: Any, has_gpu: bool, state: str, says: str) -> None:
    found = doctor.check_torch(lambda: torch, has_gpu)
    assert found.state == state
    assert says in found.what
    assert "story" not in found.what


def test_a_torch_that_does_not_load_is_a_line() -> None:
    def load() -> Any:
        raise OSError("libcudart.so.12: cannot open shared object file")

    found = doctor.check_torch(load, False)
    assert (found.state, found.remedy) == ("error", "pip install --force-reinstall torch")
    assert "libcudart" in found.what


def test_cores_that_are_not_this_process_s() -> None:
    assert doctor.check_cores(8, 8).state == "ok"
    found = doctor.check_cores(64, 2.5)
    assert (found.state, found.remedy) == ("warning", "")
    assert "2.5 of 64" in found.what


def test_cores_of_a_process_that_may_not_run_on_all_for_real() -> None:
    total = os.cpu_count() or 1
    if total < 2 or not hasattr(os, "sched_setaffinity"):
        pytest.skip("a machine with one core has none to forbid")
    (found,) = told("--", "cores", preexec_fn=lambda: os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}))
    assert found.state == "warning"
    assert f"1 of {total}" in found.what


def test_little_memory_is_noted() -> None:
    assert doctor.check_memory(16 * GB, 8).state == "ok"
    found = doctor.check_memory(GB, 8)
    assert found.state == "warning"
    assert "1.0 GB available" in found.what
    assert "2.0 GB" in found.what


def test_open_files() -> None:
    assert doctor.check_files(1024, 64).state == "ok"
    assert doctor.check_files(1023, 64).state == "warning"
    assert doctor.check_files(doctor.FILES + 64 * doctor.FILES_PER_ACTOR - 1, 64).state == "error"


def test_processes() -> None:
    assert doctor.check_tasks(None, 64).what == "no limit"
    assert doctor.check_tasks(10_000, 64).state == "ok"
    found = doctor.check_tasks(100, 64)
    assert found.state == "error"
    assert "ulimit -u" in found.remedy


def test_a_taken_port_is_noted() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = doctor.check_ports(port)
        assert (found.state, found.remedy) == ("warning", f"tensorboard --logdir runs --port {port + 1}")
    assert doctor.check_ports(port).state == "ok"


def test_folders_that_cannot_be_written(tmp_path: Path) -> None:
    assert doctor.check_disk(tmp_path).state in ("ok", "warning")
    assert not list(tmp_path.iterdir())
    found = doctor.check_disk(tmp_path / "missing")
    assert found.state == "error"
    assert "--run-dir" in found.remedy
    assert doctor.check_disk(Path("/proc")).state == "error"


def test_terminals() -> None:
    def state(**options: Any) -> tuple[str, str]:
        found = doctor.check_terminal(Console(**options))
        return found.state, found.what

    wide = state(file=io.StringIO(), force_terminal=True, width=100, color_system="256")
    assert wide == ("ok", "100 columns (the panel wants 80); colours: 256")
    assert state(file=io.StringIO(), force_terminal=True, width=60, color_system=None)[0] == "warning"
    assert state(file=io.StringIO())[1].startswith("none")
    assert state(file=io.TextIOWrapper(io.BytesIO(), encoding="ascii"))[0] == "warning"


def test_games_that_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.check_games().state == "ok"
    monkeypatch.setenv("ALE_ROMS_DIR", str(tmp_path))
    found = doctor.check_games()
    assert found.state == "warning"
    assert str(tmp_path) in found.what


def test_git() -> None:
    assert doctor.check_git(b"git version 2.39.5\n") == Finding("git", "ok", "2.39.5")
    assert doctor.check_git(None).state == "warning"


def test_a_process_that_shares_memory_leaves_nothing_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    doctor.share_block()
    assert len(os.listdir("/proc/self/fd")) == before


def test_extras_come_from_the_package() -> None:
    assert {"box2d", "mujoco", "video"} <= set(doctor.extras())
    assert not {"dev", "docs"} & set(doctor.extras())
    names = {requirement.name for requirement in doctor.requirements("gymnasium", "box2d")}
    assert "box2d" in names
    assert "numpy" not in names  # which every user of gymnasium has


def test_limits_of_processes_count_those_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = {"pids.max": ["300", "max"], "pids.current": ["40", "41"]}
    monkeypatch.setattr("shoal.core.machine.in_groups", lambda name: iter(groups[name]))
    monkeypatch.setattr("os.getuid", lambda: 0)
    assert doctor.free_tasks() == 260
    monkeypatch.undo()
    assert doctor.own_tasks() >= 1


def test_an_own_limit_of_processes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.core.machine.in_groups", lambda name: iter(()))
    monkeypatch.setattr("resource.getrlimit", lambda kind: (100, 100))
    monkeypatch.setattr(doctor, "own_tasks", lambda: 30)
    monkeypatch.setattr("os.getuid", lambda: 1000)
    assert doctor.free_tasks() == 70
    monkeypatch.setattr("os.getuid", lambda: 0)
    assert doctor.free_tasks() is None
