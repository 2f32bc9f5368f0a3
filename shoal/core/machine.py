"""What this machine has: installed libraries, cores, memory, and the limits of control groups."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path


def version(name: str) -> str | None:
    """The version of an installed library."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def processor() -> str:
    """The model of the processor."""
    with suppress(OSError), open("/proc/cpuinfo", errors="replace") as file:
        for line in file:
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def memory() -> int | None:
    """The bytes of memory of the machine."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def available_memory(root: Path = Path("/")) -> int | None:
    """The bytes of memory that this process may still allocate, by the machine and its control groups."""
    free = memory()
    with suppress(OSError), open(root / "proc/meminfo") as file:
        free = next((int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable:")), free)
    texts = [text for name in ("memory.max", "memory.limit_in_bytes") for text in in_groups(name, root)]
    return min([int(text) for text in texts if text.isdecimal()] + ([] if free is None else [free]), default=None)


def usable_cores(root: Path = Path("/")) -> float:
    """The cores that this process may use: those it may run on, or the quota of a control group."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    pairs = [text.split() for text in in_groups("cpu.max", root)]
    pairs += map(list, zip(in_groups("cpu.cfs_quota_us", root), in_groups("cpu.cfs_period_us", root), strict=False))
    return min([allowed, *(int(quota) / int(period) for quota, period in pairs if quota.isdecimal())])


@cache
def cores() -> int:
    """Whole cores that this process may use."""
    return max(int(usable_cores()), 1)


def in_groups(name: str, root: Path = Path("/")) -> Iterator[str]:
    """The content of a file in each of this process's control groups, of either version, and in their parents."""
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            top = root / "sys/fs/cgroup" / controllers
            own = top / path.lstrip("/")
            for folder in (own, *own.parents):
                if folder.is_relative_to(top):
                    with suppress(OSError):
                        yield (folder / name).read_text().strip()


def give_way(niceness: int, root: Path = Path("/")) -> None:
    """Let the work of others come first; in a session of its own, that of other sessions too.

    Linux shares cores among sessions before it compares the niceness of processes in one (`man 7 sched`, autogroup).
    """
    os.nice(niceness)
    if os.getsid(0) == os.getpid():
        with suppress(OSError):
            (root / "proc/self/autogroup").write_text(str(niceness))
