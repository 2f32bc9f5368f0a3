"""Runs as programs of their own: several at a time, stopped in order, and continued the next time."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from shoal.core.types import INTERRUPTED
from shoal.runs import checkpoint, directory

log = logging.getLogger("shoal")
SHOAL = "from shoal.cli.main import main; main()"
TIED = f"from shoal.runs.launching import tie; tie(); {SHOAL}"
TICK = 0.2  # seconds between looks at what runs


@dataclass(frozen=True)
class Job:
    """A run to be made: its folder, the config and settings to train it with, and settings for every start of it."""

    folder: Path
    config: str
    settings: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()

    @property
    def log(self) -> Path:
        """Where its program writes what it has to say."""
        return self.folder.parent / f"{self.folder.name}.log"


def launch(*words: str, code: str = SHOAL, text: bool = True, **options: Any) -> subprocess.Popen[Any]:
    """Start a `shoal` command, or other code, in a process that finds the same packages."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen([sys.executable, "-c", code, *words], env=environment, text=text, **options)


@contextmanager
def page_of(run: Path) -> Iterator[None]:
    """Show a run in a browser, by a program of its own that ends with the block; standard error says where."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    process = launch("watch", str(run), code=TIED, start_new_session=True, **pipes)
    output, over = process.stdout, threading.Event()
    assert output is not None

    def announce() -> None:
        line = output.readline().strip()
        if line:
            print(line, file=sys.stderr, flush=True)  # with a token in it, which is not for the file of the log
        if line or not over.is_set():
            log.info("%s", "the page is open" if line else f"the page cannot be shown: see `shoal watch {run}`")

    announcing = threading.Thread(target=announce, daemon=True)
    announcing.start()  # the run does not wait for it
    try:
        yield
    finally:
        over.set()
        process.terminate()
        announcing.join()
        output.close()
        process.wait()
        _close(process)


def tie() -> None:
    """End this process in order when the one that started it is gone: its standard input closes then."""

    def wait() -> None:
        while os.read(0, 1):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()


def ended(run: Path) -> bool:
    """Whether a run has used up its steps, or reached its target."""
    summary = directory.read_summary(run)
    if summary and summary["stopped_by"] != INTERRUPTED:
        return True
    saved = checkpoint.paths(run)
    if not saved or not (run / directory.CONFIG).exists():
        return False
    # Killed after the last step, and before the results were written.
    wanted = yaml.safe_load((run / directory.CONFIG).read_text())["steps"]
    return int(saved[-1].name.rpartition("_")[2]) >= int(wanted)


def start(job: Job) -> subprocess.Popen[str]:
    """Train a run from its beginning, or from its newest checkpoint."""
    if directory.held(job.folder):
        log.info("waiting for another process to leave %s", job.folder)
        while directory.held(job.folder):  # a program whose sweep was killed, and that is about to stop
            time.sleep(TICK)
    if not (job.folder / directory.CONFIG).exists():
        words = ["train", job.config, *job.settings, *job.changes, "--run-dir", str(job.folder)]
    else:
        words = ["resume", str(job.folder), *job.changes]
    job.folder.parent.mkdir(parents=True, exist_ok=True)
    with job.log.open("a") as file:
        # In a group of its own: a Ctrl-C in the terminal reaches it by `stop` only, once.
        return launch(*words, code=TIED, stdin=subprocess.PIPE, stdout=file, stderr=file, process_group=0)


def carry_out(
    jobs: Iterable[Job], at_once: int, watch: Callable[[Job], bool] = lambda job: False
) -> Generator[tuple[Job, bool], None, None]:
    """Yield each job as soon as its run has ended, and whether it got to its end; those that had before cost nothing.

    A job is taken when there is room for it, so that it may depend on those that have ended. `watch` is asked about
    each that runs, again and again; where it answers True the run is stopped in order. So is whatever still runs when
    nobody listens any more, and goes on from there the next time.
    """
    waiting, running, stopped = iter(jobs), dict[Job, subprocess.Popen[str]](), set[Job]()
    try:
        while True:
            while len(running) < at_once and (job := next(waiting, None)) is not None:
                if ended(job.folder) and not job.changes:
                    yield job, True
                else:
                    running[job] = start(job)
            if not running:
                return
            for job, process in [*running.items()]:
                try:
                    process.wait(TICK / len(running))
                except subprocess.TimeoutExpired:
                    if job not in stopped and watch(job):
                        stopped.add(job)
                        process.send_signal(signal.SIGINT)
                    continue
                _close(running.pop(job))
                yield job, ended(job.folder)
    finally:
        stop([*running.values()])


def stop(processes: Sequence[subprocess.Popen[str]]) -> None:
    """End runs in order, so that each saves a checkpoint; at a second Ctrl-C at once, at a third by force."""
    for number in (signal.SIGINT, signal.SIGINT, signal.SIGKILL):
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)
        try:
            for process in processes:
                process.wait()
            break
        except KeyboardInterrupt:
            continue
    for process in processes:
        _close(process)


def _close(process: subprocess.Popen[str]) -> None:
    if process.stdin is not None:
        process.stdin.close()
