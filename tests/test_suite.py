"""The suite itself: what a test leaves is ended and blamed on that test alone, however the suite was started."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests import leftovers
from tests.engines import simulated
from tests.pace import seconds, slowness

TESTS = Path(__file__).parent
ROOT = TESTS.parent


def suite(folder: Path, code: str, *words: str, processes: int = 0) -> dict[str, set[str]]:
    """Run tests beside a copy of this suite's fixtures; returns the verdicts on each."""
    (folder / "conftest.py").write_text(
        "from tests.conftest import *\nfrom tests import conftest\nconftest.GRACE = 0.2\n"
    )
    (folder / "test_inner.py").write_text(textwrap.dedent(code))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n",
        str(processes),
        "-rA",
        "--tb=short",
        "-p",
        "no:cacheprovider",
        "-c",
    ]
    done = subprocess.run(
        [*words, *command, str(ROOT / "pyproject.toml"), "--rootdir", str(folder), str(folder)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=seconds(100),
    )
    told = [line.split(" - ")[0].split() for line in done.stdout.splitlines() if "test_inner.py::" in line]
    assert told, done.stdout + done.stderr
    found: dict[str, set[str]] = {}
    for verdict, name, *_ in told:
        if verdict in ("PASSED", "FAILED", "ERROR"):
            found.setdefault(name.split("::")[1], set()).add(verdict)
    return found


def test_what_a_test_leaves_is_ended_and_only_that_test_fails(tmp_path: Path) -> None:
    code = """
        import os, signal, subprocess, sys, threading, time
        import pytest
        from pathlib import Path
        from tests import leftovers

        HERE, LEFT = Path(__file__).parent, []
        SPIN = "import os, sys; os.setsid(); print(os.getpid(), flush=True); exec('while True: pass')"

        def spin(*words):
            return subprocess.Popen([*words, sys.executable, "-c", SPIN], stdout=subprocess.PIPE, text=True)

        def note(pid):
            with (HERE / "pids").open("a") as file:
                file.write(f"{pid} ")

        def test_leaves_a_child():
            LEFT.append(spin())
            with LEFT[-1].stdout as told:
                note(int(told.readline()))

        def test_leaves_an_orphan():
            process = spin("bash", "-c", '"$@" & sleep 600', "bash")
            with process.stdout as told:
                note(int(told.readline()))
            process.kill()
            process.wait()

        @pytest.mark.timeout(60)
        def test_takes_too_long():
            LEFT.append(spin())
            note(LEFT[-1].pid)
            signal.setitimer(signal.ITIMER_REAL, 0.01)  # the time is up, however long it took to get here
            while True:
                time.sleep(0.01)

        def test_leaves_a_thread():
            threading.Thread(target=threading.Event().wait, daemon=True).start()

        def test_leaves_nothing():
            pids = [int(line) for line in (HERE / "pids").read_text().split()]
            assert len(pids) == 3
            assert not [pid for pid in pids if leftovers.running(pid)]
    """
    assert suite(tmp_path, code) == {
        "test_leaves_a_child": {"PASSED", "ERROR"},  # it did what it should, but left something
        "test_leaves_an_orphan": {"PASSED", "ERROR"},
        "test_takes_too_long": {"FAILED", "ERROR"},
        "test_leaves_a_thread": {"PASSED", "ERROR"},
        "test_leaves_nothing": {"PASSED"},
    }
    assert not [pid for pid in map(int, (tmp_path / "pids").read_text().split()) if leftovers.running(pid)]


@pytest.mark.parametrize("number", ["INT", "TERM"])
def test_signals_that_a_background_job_ignores_arrive(number: str, tmp_path: Path) -> None:
    code = f"""
        import os, signal, subprocess, sys

        def test_here():
            assert signal.getsignal(signal.SIG{number}) is not signal.SIG_IGN

        def test_in_what_is_started(start):
            process = start(["sleep", "600"])
            process.send_signal(signal.SIG{number})
            assert process.wait() == -signal.SIG{number}
    """
    found = suite(tmp_path, code, "bash", "-c", f'trap "" {number}; exec "$@"', "bash")
    assert found == {"test_here": {"PASSED"}, "test_in_what_is_started": {"PASSED"}}


def test_a_cleaning_up_that_hangs_is_cut_short(tmp_path: Path) -> None:
    code = """
        import time
        import pytest
        from tests import conftest
        conftest.LIMIT = 0.2

        @pytest.fixture
        def hangs():
            yield
            while True:
                time.sleep(0.01)

        @pytest.mark.timeout(0.2)
        def test_hangs_twice(hangs):
            while True:
                time.sleep(0.01)

        def test_goes_on():
            pass
    """
    assert suite(tmp_path, code) == {"test_hangs_twice": {"FAILED", "ERROR"}, "test_goes_on": {"PASSED"}}


def test_programs_are_started_where_they_are_ended() -> None:
    """Whatever else calls `Popen` could leave it running; `start` does not."""
    may = {"conftest.py", "simulated.py", "programs.py"}
    for file in TESTS.rglob("*.py"):
        calls = [node.func for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
        started = [one for one in calls if isinstance(one, ast.Attribute) and one.attr == "Popen"]
        assert not started or file.name in may, f"{file.relative_to(TESTS)}: use the fixture `start`"


def test_limits_grow_with_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.pace._measured", (-1e9, 1.0))
    monkeypatch.setattr("os.getloadavg", lambda: (6.0 * (os.cpu_count() or 1), 0.0, 0.0))
    assert slowness() >= 6.0
    assert seconds(2.0) == 2.0 * slowness()


def test_marks_are_inherited_by_tests_that_run_tests() -> None:
    assert os.environ[leftovers.VARIABLE] == leftovers.MARK


@pytest.mark.long
def test_one_process_has_all_tests_of_a_group(tmp_path: Path) -> None:
    """There is one Ray on a machine at a time: it would be started in every process that runs one of these tests."""
    code = """
        import os
        from pathlib import Path
        import pytest

        @pytest.mark.parametrize("engine", ["ray"])
        @pytest.mark.parametrize("number", range(8))
        def test_engine(engine, number):
            (Path(__file__).parent / f"ray-{os.environ['PYTEST_XDIST_WORKER']}").touch()
    """
    found = suite(tmp_path, code, processes=2)
    assert all(verdicts == {"PASSED"} for verdicts in found.values()), found
    assert len([*tmp_path.glob("ray-*")]) == 1


def test_who_wants_a_ray_waits_for_the_one_that_is_there(
    start: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(simulated, "LOCK", tmp_path / "lock")
    attempt = ["flock", "--nonblock", tmp_path / "lock", "true"]
    with simulated.alone():
        assert start(attempt).wait() == 1
    assert start(attempt).wait() == 0
