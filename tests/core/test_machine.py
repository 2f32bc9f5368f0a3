"""What a machine has, whatever its control groups allow."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.core import machine


def test_a_library_that_is_missing_has_no_version() -> None:
    assert machine.version("no-such-library") is None


def control_groups(root: Path, listing: str, files: dict[str, str]) -> Path:
    """A machine with control groups."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(listing)
    (root / "proc/meminfo").write_text("MemTotal: 9000000 kB\nMemFree: 1 kB\nMemAvailable:    8000000 kB\n")
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def test_quotas_of_the_second_version(tmp_path: Path) -> None:
    root = control_groups(tmp_path, "0::/user/task\n", {
        "user/cpu.max": "50000 100000", "user/task/cpu.max": "max 100000",
        "user/memory.max": "1000000", "user/task/memory.max": "max",
    })  # fmt: skip
    assert machine.usable_cores(root) == 0.5
    assert machine.available_memory(root) == 1_000_000


def test_quotas_of_the_first_version(tmp_path: Path) -> None:
    root = control_groups(tmp_path, "2:cpu,cpuacct:/docker/1\n1:memory:/\n0::/\n", {
        "cpu,cpuacct/cpu.cfs_quota_us": "25000", "cpu,cpuacct/cpu.cfs_period_us": "100000",
        "cpu,cpuacct/docker/1/cpu.cfs_quota_us": "-1", "cpu,cpuacct/docker/1/cpu.cfs_period_us": "100000",
        "memory/memory.limit_in_bytes": "9223372036854771712",
    })  # fmt: skip
    assert machine.usable_cores(root) == 0.25
    assert machine.available_memory(root) == 8_000_000 << 10


def test_without_control_groups_the_machine_is_the_limit(tmp_path: Path) -> None:
    assert machine.usable_cores(tmp_path) == len(os.sched_getaffinity(0))
    assert machine.available_memory(tmp_path) == machine.memory()


@pytest.mark.parametrize("leads", [True, False])
def test_who_gives_way_does_so_to_other_sessions_where_it_leads_its_own(leads: bool, tmp_path: Path) -> None:
    file = tmp_path / "proc/self/autogroup"
    file.parent.mkdir(parents=True)
    file.write_text("/autogroup-1 nice 0\n")
    code = (
        "import os; from pathlib import Path; from shoal.core.machine import give_way; before = os.nice(0);"
        f"give_way(3, Path({str(tmp_path)!r})); print(os.nice(0) - before)"
    )
    done = subprocess.run([sys.executable, "-c", code], start_new_session=leads, capture_output=True, text=True)
    assert done.stdout == "3\n", done.stderr
    assert file.read_text() == ("3" if leads else "/autogroup-1 nice 0\n")


@pytest.mark.skipif(sys.platform != "linux", reason="torch comes with another OpenMP there")
@pytest.mark.parametrize(
    ("given", "spins"),
    [({}, 5_000), ({"GOMP_SPINCOUNT": "7"}, 7), ({"OMP_WAIT_POLICY": "PASSIVE"}, 0)],
)
def test_torchs_threads_spin_for_microseconds_unless_they_are_asked_to(given: dict[str, str], spins: int) -> None:
    """OpenMP prints its settings as it is loaded, which is with torch."""
    others = {key: value for key, value in os.environ.items() if key not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    code = "import shoal, torch"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=others | given | {"OMP_DISPLAY_ENV": "verbose"},
        capture_output=True,
        text=True,
    )
    assert f"GOMP_SPINCOUNT = '{spins}'" in done.stderr
