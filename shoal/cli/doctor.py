"""What this machine has and lacks for training: a finding for each check, with a command where something can be done.

Every check is a function of facts, and `checks` says where the facts come from.
"""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import socket
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.text import Text

from shoal.core import machine
from shoal.core.errors import ShoalError
from shoal.runs import provenance

if TYPE_CHECKING:
    from packaging.requirements import Requirement

MB, GB = 1 << 20, 1 << 30
COLOURS = {"ok": "green", "warning": "yellow", "error": "bold red"}
CODE_EXTRAS = ("dev", "docs")  # for developing Shoal itself

# What a run with one actor per core needs, measured on the processes engine: the learner holds a socket and two blocks
# of shared memory per actor; an actor has four or five threads, and the head and the learner one more for each.
FILES, FILES_PER_ACTOR = 32, 3
TASKS, TASKS_PER_ACTOR = 24, 8
MEMORY, MEMORY_PER_ACTOR = GB, GB // 8
PLENTY_OF_FILES = 1024  # the default of most systems, which libraries rely on
PLENTY_OF_SHARED = GB  # Docker's default is 64 MB, too little for anyone who uses it
BLOCK = 64 * MB  # bytes: a large batch of images
TENSORBOARD = 6006
WIDTH = 80
STATE = 9  # columns of the state


@dataclass(frozen=True)
class Finding:
    """The result of one check; the remedy is one command per line."""

    name: str
    state: Literal["ok", "warning", "error"]
    what: str
    remedy: str = ""


def check() -> list[Finding]:
    """Check everything."""
    return [look(name, examine) for name, examine in checks().items()]


def checks() -> dict[str, Callable[[], Finding]]:
    """Every check with the facts of this machine, by the name of its finding."""
    actors = machine.cores()  # the default of a run
    return {
        "python": lambda: check_python(platform.python_version(), metadata.metadata("shoal")["Requires-Python"]),
        "system": lambda: check_system(platform.system(), platform.release(), hasattr(socket, "send_fds")),
        "libraries": lambda: check_libraries(requirements("shoal")),
        "torch": lambda: check_torch(lambda: importlib.import_module("torch"), has_gpu()),
        "cores": lambda: check_cores(os.cpu_count() or 1, machine.usable_cores()),
        "memory": lambda: check_memory(machine.available_memory() or 0, actors),
        "shared memory": lambda: check_shared(share_block, Path("/dev/shm")),
        "open files": lambda: check_files(file_limit(), actors),
        "processes": lambda: check_tasks(free_tasks(), actors),
        "ports": lambda: check_ports(TENSORBOARD),
        "disk": lambda: check_disk(Path("runs").absolute() if Path("runs").is_dir() else Path.cwd()),
        "terminal": lambda: check_terminal(Console()),
        "git": lambda: check_git(provenance.git(Path.cwd(), "--version")),
        "atari": check_games,
        **{name: partial(check_extra, name) for name in extras()},
    }


def look(name: str, examine: Callable[[], Finding]) -> Finding:
    """Do one check; one that fails is a finding too."""
    try:
        return examine()
    except Exception as error:
        return Finding(name, "warning", f"the check failed: {type(error).__name__}: {first_line(error)}")


def exit_code(findings: Sequence[Finding]) -> int:
    """The exit code of the command: 1 if there is an error."""
    return int(any(finding.state == "error" for finding in findings))


def report(findings: Sequence[Finding], width: int = WIDTH) -> str:
    """The findings as text; sentences are wrapped, commands never."""
    column = max((len(finding.name) for finding in findings), default=0) + 2
    lines = []
    for finding in findings:
        start = f"{finding.state:{STATE}}{finding.name:{column}}"
        words = textwrap.wrap(
            finding.what, max(width, 60) - len(start), break_long_words=False, break_on_hyphens=False
        ) or [""]
        lines += [start + words[0], *(" " * len(start) + line for line in words[1:])]
        lines += [" " * STATE + f"$ {command}" for command in finding.remedy.splitlines()]
    good, warnings, errors = (sum(finding.state == state for finding in findings) for state in COLOURS)
    verdict = "Shoal may fail here" if errors else "Shoal can train here"
    lines += ["", f"{verdict}: {good} ok, {counted(warnings, 'warning')}, {counted(errors, 'error')}."]
    return "\n".join(lines)


def show(findings: Sequence[Finding]) -> None:
    """Print the report, in colour where the terminal can."""
    console = Console(soft_wrap=True)  # a command stays on one line, to be copied
    words = report(findings, min(console.width, 120))
    text = Text(words.encode(console.encoding, "replace").decode(console.encoding))
    for state, style in COLOURS.items():
        text.highlight_regex(rf"(?m)^{state}\b", style)
    text.highlight_regex(r"(?m)^ +\$ .*$", "cyan")
    console.print(text)


def check_python(version: str, wanted: str) -> Finding:
    """Whether this Python is one that Shoal is tested with."""
    from packaging.specifiers import SpecifierSet

    if version in SpecifierSet(wanted):
        return Finding("python", "ok", version)
    return Finding("python", "error", f"{version}; Shoal needs {wanted}", "python3.12 -m pip install shoal")


def check_system(system: str, release: str, passes_files: bool) -> Finding:
    """Whether workers can be processes, and start quickly."""
    if not passes_files:
        what = f"{system} {release} cannot pass open files to another process, which the engine processes needs"
        return Finding("system", "error", what, "shoal train experiment.yaml engine=threads")
    if system != "Linux":
        what = f"{system} {release}: every worker loads its libraries itself, so runs start slower than on Linux"
        return Finding("system", "warning", what)
    return Finding("system", "ok", f"{system} {release}")


def check_libraries(wanted: Sequence[Requirement]) -> Finding:
    """Whether the required libraries are installed."""
    if missing := [text for requirement in wanted for text in unmet(requirement)]:
        commands = "pip install " + " ".join(f"'{text}'" for text in missing)
        return Finding("libraries", "error", f"missing or too old: {', '.join(missing)}", commands)
    versions = [f"{requirement.name} {metadata.version(requirement.name)}" for requirement in wanted]
    return Finding("libraries", "ok", ", ".join(versions))


def check_torch(load: Callable[[], Any], has_gpu: bool) -> Finding:
    """Whether torch loads and computes on the GPU, if there is one."""
    try:
        torch = load()
    except Exception as error:
        return Finding("torch", "error", f"does not load: {first_line(error)}", "pip install --force-reinstall torch")
    name = f"torch {torch.__version__}"
    if torch.version.cuda is None:
        if has_gpu:
            what = f"{name} was built without CUDA, so the NVIDIA GPU of this machine is not used"
            return Finding("torch", "warning", what, "pip install --force-reinstall torch")
        return Finding("torch", "ok", f"{name}; the learner runs on the CPU")
    usable, complaint = try_cuda(torch)
    if complaint and usable:
        what = f"{name} fails on the GPU: {complaint}"
        return Finding("torch", "error", what, "nvidia-smi\nshoal train experiment.yaml device=cpu")
    if usable:
        cards = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        return Finding("torch", "ok", f"{name}, CUDA {torch.version.cuda}: {', '.join(cards)}")
    if has_gpu:
        hidden = f"CUDA_VISIBLE_DEVICES is {os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')!r}"
        what = f"{name} cannot use the NVIDIA GPU of this machine: {complaint or hidden}"
        return Finding("torch", "warning", what, "nvidia-smi")
    return Finding("torch", "ok", f"{name}; no GPU, the learner runs on the CPU")


def try_cuda(torch: Any) -> tuple[bool, str]:
    """Whether a run would use the GPU, and the error if that fails."""
    usable = True  # an error in the question itself would fail a run as well
    with warnings.catch_warnings(record=True) as heard:  # torch reports a broken driver as a warning
        warnings.simplefilter("always")
        try:
            if usable := torch.cuda.is_available():
                assert (torch.ones(2, device="cuda") + 1).sum().item() == 4
                return True, ""
        except Exception as error:
            return usable, first_line(error)
    return usable, first_line(heard[0].message) if heard else ""


def check_cores(total: int, usable: float) -> Finding:
    """Whether this process may use all cores."""
    if usable >= total:
        return Finding("cores", "ok", f"{total}")
    return Finding(
        "cores", "warning", f"this process may use {usable:g} of {total}; by default a run has an actor on each"
    )


def check_memory(free: int, actors: int) -> Finding:
    """Whether a run with this number of actors fits."""
    need = MEMORY + actors * MEMORY_PER_ACTOR
    if free >= need:
        return Finding("memory", "ok", f"{gigabytes(free)} available")
    what = f"{gigabytes(free)} available; a run with {actors} actors needs about {gigabytes(need)}"
    return Finding("memory", "warning", what, "shoal train experiment.yaml actors=1")


def check_shared(share: Callable[[], None], named: Path) -> Finding:
    """Whether processes can share memory; Shoal does so without /dev/shm, other libraries need it."""
    try:
        share()
    except (OSError, MemoryError, ShoalError) as error:
        what = f"processes cannot share {BLOCK // MB} MB: {first_line(error)}"
        return Finding("shared memory", "error", what, "shoal train experiment.yaml engine=threads")
    size = shutil.disk_usage(named).total if named.is_dir() else PLENTY_OF_SHARED
    if size < PLENTY_OF_SHARED:
        what = f"{named} holds {size / MB:,.4g} MB; Shoal does not use it, but torch's DataLoader and Ray need more"
        remedy = f"docker run --shm-size=1g IMAGE\nmount -o remount,size=1G {named}"
        return Finding("shared memory", "warning", what, remedy)
    return Finding("shared memory", "ok", f"processes can share {BLOCK // MB} MB")


def check_files(limit: int, actors: int) -> Finding:
    """Whether enough files may be open at once."""
    need = FILES + actors * FILES_PER_ACTOR
    if limit < need:
        what = f"{limit:,} may be open at once; a run with {actors} actors needs {need}"
        return Finding("open files", "error", what, "ulimit -n 4096")
    if limit < PLENTY_OF_FILES:
        what = f"{limit:,} may be open at once: enough for {actors} actors, few for other libraries"
        return Finding("open files", "warning", what, "ulimit -n 4096")
    return Finding("open files", "ok", f"{limit:,} may be open at once")


def check_tasks(free: int | None, actors: int) -> Finding:
    """Whether enough processes and threads may be started."""
    need = TASKS + actors * TASKS_PER_ACTOR
    if free is None:
        return Finding("processes", "ok", "no limit")
    if free < need:
        what = f"{free:,} more processes and threads may be started; a run with {actors} actors needs {need}"
        return Finding("processes", "error", what, "ulimit -u 4096\ndocker run --pids-limit=4096 IMAGE")
    return Finding("processes", "ok", f"{free:,} more may be started")


def check_ports(board: int) -> Finding:
    """Whether programs on this machine can connect to each other, and TensorBoard's port is free."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), 0.5).close()
    except OSError as error:
        what = f"cannot connect to 127.0.0.1 ({first_line(error)}), which TensorBoard needs"
        return Finding("ports", "warning", what, "ip link set lo up")
    with socket.socket() as caller:
        caller.settimeout(0.5)
        taken = caller.connect_ex(("127.0.0.1", board)) == 0
    if taken:
        what = f"{board}, TensorBoard's default, is in use: perhaps by another TensorBoard"
        return Finding("ports", "warning", what, f"tensorboard --logdir runs --port {board + 1}")
    return Finding("ports", "ok", f"loopback works; {board}, TensorBoard's default, is free")


def check_disk(folder: Path) -> Finding:
    """Whether runs can be written, and how much space there is."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(MB))
    except OSError as error:
        what = f"cannot write to {folder}: {error.strerror}"
        return Finding("disk", "error", what, "shoal train experiment.yaml --run-dir ~/runs/first")
    free = shutil.disk_usage(folder).free
    return Finding("disk", "ok" if free >= GB else "warning", f"{gigabytes(free)} free in {folder}")


def check_terminal(console: Console) -> Finding:
    """Whether the panel can be shown."""
    if "utf" not in console.encoding.lower():
        what = f"its encoding is {console.encoding}, so the panel's symbols cannot be shown"
        return Finding("terminal", "warning", what, "export PYTHONUTF8=1")
    if not console.is_terminal:
        return Finding("terminal", "ok", "none: output goes to a file or a pipe")
    state: Literal["ok", "warning"] = "ok" if console.width >= WIDTH else "warning"
    what = f"{console.width} columns (the panel wants {WIDTH}); colours: {console.color_system or 'none'}"
    return Finding("terminal", state, what)


def check_extra(name: str) -> Finding:
    """Whether the packages of an extra are installed."""
    if missing := [text for requirement in requirements("shoal", name) for text in unmet(requirement)]:
        return Finding(name, "warning", f"missing or too old: {', '.join(missing)}", f"pip install 'shoal[{name}]'")
    return Finding(name, "ok", "installed")


def check_games() -> Finding:
    """Whether the Atari games are installed."""
    from ale_py import roms

    names, folder = roms.get_all_rom_ids(), Path(os.environ.get("ALE_ROMS_DIR") or Path(roms.__file__).parent)
    if missing := [name for name in names if not (folder / f"{name}.bin").is_file()]:
        what = f"{len(missing)} of {len(names)} games are missing in {folder}, such as {missing[0]}"
        return Finding("atari", "warning", what, "pip install --force-reinstall ale-py")
    return Finding("atari", "ok", f"{len(names)} games")


def check_git(version: bytes | None) -> Finding:
    """Whether a run can record which code it ran."""
    if version is None:
        return Finding("git", "warning", "not installed; runs cannot record which code they ran", "apt-get install git")
    return Finding("git", "ok", version.decode().strip().removeprefix("git version "))


def requirements(package: str, extra: str = "") -> list[Requirement]:
    """The requirements of an installed package on this machine, or of one of its extras."""
    from packaging.requirements import Requirement

    def needed(requirement: Requirement, extra: str) -> bool:
        return requirement.marker is None or requirement.marker.evaluate({"extra": extra})

    found = [Requirement(text) for text in metadata.requires(package) or []]
    return [item for item in found if needed(item, extra) and not (extra and needed(item, ""))]


def unmet(requirement: Requirement) -> list[str]:
    """The requirement if it is not met, or those of its extras that are not."""
    version = machine.version(requirement.name)
    if version is None or not requirement.specifier.contains(version, prereleases=True):
        return [f"{requirement.name}{requirement.specifier}"]
    inner = [item for extra in sorted(requirement.extras) for item in requirements(requirement.name, extra)]
    return [missing for item in inner for missing in unmet(item)]


def extras() -> list[str]:
    """The extras that Shoal offers its users."""
    with suppress(metadata.PackageNotFoundError):
        return [name for name in metadata.metadata("shoal").get_all("Provides-Extra", []) if name not in CODE_EXTRAS]
    return []


def has_gpu() -> bool:
    """Whether the driver of an NVIDIA GPU is loaded, under Linux or WSL."""
    return any(Path(name).exists() for name in ("/dev/nvidiactl", "/proc/driver/nvidia/version", "/dev/dxg"))


def share_block() -> None:
    """Send a large array through a pipe as workers do, and read it at the other end."""
    import numpy as np

    from shoal.transport.pipe import Pipe

    here, end = Pipe.pair()
    with closing(here), closing(Pipe(end)) as there:
        here.send({"block": np.ones(BLOCK, np.uint8)})
        value, _ = there.receive(copy=False)
        assert value["block"][BLOCK - 1] == 1


def file_limit() -> int:
    """How many files may be open at once."""
    import resource

    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return soft if soft != resource.RLIM_INFINITY else sys.maxsize


def free_tasks() -> int | None:
    """How many more processes and threads this user may start; None: unlimited."""
    import resource

    pairs = zip(machine.in_groups("pids.max"), machine.in_groups("pids.current"), strict=False)
    free = [int(limit) - int(present) for limit, present in pairs if limit.isdecimal()]
    soft = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if soft != resource.RLIM_INFINITY and os.getuid():  # it does not apply to root
        free.append(soft - own_tasks())
    return min(free, default=None)


def own_tasks() -> int:
    """How many processes and threads this user has."""
    count = 0
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it may have ended
            count += len(os.listdir(process / "task")) if process.stat().st_uid == os.getuid() else 0
    return count


def counted(count: int, noun: str) -> str:
    """A number with its noun."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def gigabytes(size: int) -> str:
    """A number of bytes to read."""
    return f"{size / GB:,.1f} GB"


def first_line(error: object) -> str:
    """The first line of an error message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
