"""A long run: memory, descriptors and threads of every process, sampled, plotted, and how fast they grow."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np

from shoal.bench.engines import free_address
from shoal.bench.measuring import Row, library
from shoal.core.errors import SettingsError, ShoalError
from shoal.runs.launching import TIED, launch

EVERY = 5.0  # seconds between samples
WARMUP = 0.25  # of the run, in which replay and caches fill
PATIENCE = 30.0  # seconds in which a program may end in order
START = 300.0  # seconds that a run may take to begin, on a machine with other work
REFRESH = 2.0  # seconds between looks at the page's numbers, as in a browser
NODES = 2
ENDLESS = ("steps=1000000000000", "evaluation.target=null", "evaluation.every=20000", "evaluation.episodes=2",
           "threads=1", "checkpoints.every=100000")  # fmt: skip
APEX = ("apex_dqn_cartpole", "algorithm.replay.capacity=20000", "actors=2")
# A4C: a group of A3C workers on each node.
A4C = ("a4c_cartpole", f"federation.groups={NODES}", "envs=2")
EVERYTHING = "all processes"


class Held(NamedTuple):
    """What a process holds."""

    mb: float
    descriptors: int
    threads: int


Samples = list[tuple[float, dict[str, Held]]]  # seconds since the start, and what each process holds


def sample(programs: Mapping[str, Any]) -> dict[str, Held]:
    """What each program and its descendants hold, by program, kind and number."""
    found = {}
    for name, program in programs.items():
        try:
            family = [program, *program.children(recursive=True)]
        except library().NoSuchProcess:
            continue
        for each in family:
            try:
                title = name if each == program else f"{name}: {named(each)}"
                found[f"{title} {each.pid}"] = Held(each.memory_info().rss / 1e6, each.num_fds(), each.num_threads())
            except (library().NoSuchProcess, library().AccessDenied):
                pass  # it ends at this moment
    return found


def named(process: Any) -> str:
    """The kind of a process; Ray renames its own all the time."""
    words = process.cmdline() or [""]
    return str(words[0].partition(".")[0] if words[0].startswith("ray::") else process.name())


def soak(engine: str, seconds: float, out: Path, leave: float = 240.0, changes: Sequence[str] = ()) -> list[Row]:
    """Train for these seconds, and return a row for each process that lived through all of the run after warm-up."""
    file = "soak_" + engine.replace("/", "_")
    samples, counts = run(engine, seconds, out / f"{file}.log", leave, changes)
    (out / f"{file}.json").write_text(json.dumps({"samples": samples, "counts": counts}))
    settled = [(at, found) for at, found in samples if at >= WARMUP * seconds]
    names = sorted(set.intersection(*(set(found) for _, found in settled)))
    hours = np.array([at / 3600 for at, _ in settled])
    rows = []
    for name in [*names, EVERYTHING]:
        values = np.array([total(found) if name == EVERYTHING else found[name] for _, found in settled], float)
        fitted = np.polyfit(hours, values, 1)
        rest = values[:, 0] - np.polyval(fitted[:, 0], hours)
        error = rest.std(ddof=2) / (np.sqrt(len(hours)) * hours.std())
        (mb, descriptors, threads), slopes = values.mean(axis=0), fitted[0]
        rows.append({"engine": engine, "process": name, "mb": float(mb), "mb_per_hour": float(slopes[0]),
                     "error": float(error), "descriptors": float(descriptors), "descriptors_per_hour": float(slopes[1]),
                     "threads": float(threads), "threads_per_hour": float(slopes[2]), **counts})  # fmt: skip
    plot(engine, samples, names, out / f"{file}.png")
    return rows


def total(found: Mapping[str, Held]) -> tuple[float, ...]:
    """What all processes hold together."""
    return tuple(float(sum(parts)) for parts in zip(*found.values(), strict=True))


def run(name: str, seconds: float, log: Path, leave: float, changes: Sequence[str]) -> tuple[Samples, Row]:
    """Train with the page open and sample; returns the samples, and what was trained, seen and exchanged meanwhile."""
    samples: Samples = []
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        file = stack.enter_context(log.open("w"))
        output: Any = {"stdout": file, "stderr": file}
        engine, _, link = name.partition("/")
        if link == "torchrpc":
            raise SettingsError("nodes cannot come and go over torchrpc: choose cluster/websocket or cluster/grpc")
        if link:
            head = free_address()
            words: tuple[str, ...] = (*A4C, f"network.listen={head}", f"network.link={link}")
        else:
            words = APEX
        process = stack.enter_context(
            started(
                "train", words[0], f"engine={engine}", *words[1:], *ENDLESS, *changes, "--run-dir", str(place), **output
            )
        )
        programs = {"head": library().Process(process.pid)}
        nodes = stack.enter_context(Nodes(head, link, leave, output)) if link else None
        page = stack.enter_context(opened(place, process))
        programs["page"] = library().Process(page.pid)
        began = time.monotonic()
        while (now := time.monotonic() - began) < seconds and process.poll() is None:
            if nodes is not None:
                nodes.exchange(now)
            samples.append((now, sample({**programs, **(nodes.programs if nodes else {})})))
            time.sleep(min(EVERY, seconds / 10))
        if process.poll() is not None:
            raise ShoalError(f"the run ended early: see {log}")
        page.visits.close()
        if page.visits.problem:
            raise ShoalError(f"the page did not stay open: {page.visits.problem}")
        process.send_signal(signal.SIGINT)
        process.wait(PATIENCE + 30)
        steps = json.loads((place / "summary.json").read_text())["steps"]
        counts = {"steps": steps, "looks": page.visits.looks, "frames": page.visits.frames}
        return samples, {**counts, "nodes": nodes.number} if nodes else counts


@contextmanager
def started(*words: str, **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """A command of Shoal's, ended with the block at the latest."""
    process = launch(*words, code=TIED, stdin=subprocess.PIPE, **options)
    try:
        yield process
    finally:
        end(process)


def end(process: subprocess.Popen[Any]) -> None:
    """Let a program end in order, or end it by force."""
    process.terminate()
    try:
        process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


class Nodes:
    """Nodes that join a run; now and then one leaves in its turn, and the next moment another joins."""

    def __init__(self, head: str, link: str, leave: float, output: Mapping[str, Any]) -> None:
        """Start the first ones."""
        self.number, self._head, self._link, self._leave, self._output = 0, head, link, leave, output
        self._left, self._there = 0.0, {}  # type: float, dict[str, subprocess.Popen[Any]]
        for _ in range(NODES):
            self._join()

    def _join(self) -> None:
        self.number += 1
        words = ("node", "--join", self._head, "--link", self._link, "--slots", "2", "--name", f"node{self.number}")
        self._there[f"node {self.number}"] = launch(*words, code=TIED, stdin=subprocess.PIPE, **self._output)

    @property
    def programs(self) -> dict[str, Any]:
        """Those that are there."""
        return {name: library().Process(process.pid) for name, process in self._there.items() if process.poll() is None}

    def exchange(self, now: float) -> None:
        """Let the oldest leave if it is time: in order and by force in turn."""
        if now - self._left < self._leave:
            return
        self._left = now
        process = self._there.pop(next(iter(self._there)))
        if self.number % 2:
            process.kill()
        end(process)
        self._join()

    def __enter__(self) -> Nodes:
        """Use them."""
        return self

    def __exit__(self, *_: object) -> None:
        """End all."""
        for process in self._there.values():
            process.terminate()
        for process in self._there.values():
            end(process)


class Visits(threading.Thread):
    """Somebody who has the page open: its numbers every two seconds, and one frame of the policy after the other."""

    def __init__(self, address: str) -> None:
        """Begin at once."""
        super().__init__(name="visits", daemon=True)
        found = urlsplit(address)
        self.looks = self.frames = 0
        self.problem, self._over = "", threading.Event()
        self.shown = threading.Event()  # whether there was a frame
        self._host, self._path = found.netloc, found.path
        self.start()

    def run(self) -> None:
        """Ask as a browser does."""
        link, looked, number = http.client.HTTPConnection(self._host, timeout=PATIENCE), 0.0, "0"
        tags: dict[str, str] = {}
        try:
            while not self._over.is_set():
                if time.monotonic() - looked >= REFRESH:
                    looked = time.monotonic()
                    for what in ("state", "curves"):
                        answer, _ = self._ask(link, f"{what}?have={tags.get(what, '')}")
                        tags[what] = answer.headers.get("ETag", tags.get(what, ""))
                    self.looks += 1
                answer, _ = self._ask(link, f"frame?run=0&policy=newest&after={number}")
                if answer.status == 200:
                    number = str(json.loads(answer.headers["X-Frame"])["number"])
                    self.frames += 1
                    self.shown.set()
                else:
                    self._over.wait(1.0)
        except (OSError, http.client.HTTPException, ValueError) as error:
            if not self._over.is_set():
                self.problem = f"{type(error).__name__}: {error}"
        finally:
            self.shown.set()  # nobody waits for what will not come
            link.close()

    def _ask(self, link: http.client.HTTPConnection, what: str) -> tuple[http.client.HTTPResponse, bytes]:
        link.request("GET", self._path + what)
        answer = link.getresponse()
        body = answer.read()
        if answer.status not in (200, 202, 204):
            raise ValueError(f"{what.partition('?')[0]} was answered with {answer.status}")
        return answer, body

    def close(self) -> None:
        """Leave."""
        self._over.set()
        self.join()


class Opened(NamedTuple):
    """The page's program, and who looks at it."""

    pid: int
    visits: Visits


@contextmanager
def opened(run: Path, trained: subprocess.Popen[Any]) -> Iterator[Opened]:
    """The page of a run, with somebody who looks at it until the block ends."""
    until = time.monotonic() + START
    while not (run / "config.yaml").exists():
        if trained.poll() is not None or time.monotonic() > until:
            raise ShoalError(f"the run did not begin: there is no {run / 'config.yaml'}")
        time.sleep(0.1)
    with started("watch", str(run), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        address = process.stdout.readline().strip().removeprefix("page: ")  # type: ignore[union-attr]
        visits = Visits(address)
        try:
            yield Opened(process.pid, visits)
        finally:
            visits.close()


def plot(engine: str, samples: Samples, names: list[str], path: Path) -> None:
    """A line for each process that lived through the run, and one for all together."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 9), dpi=110)
    minutes = [at / 60 for at, _ in samples]
    for axes, part, label in zip(
        figure.subplots(3, 1, sharex=True), range(3), ("resident MB", "descriptors", "threads"), strict=True
    ):
        for name in names:
            there = [(at / 60, found[name][part]) for at, found in samples if name in found]
            axes.plot(*zip(*there, strict=True), label=name.rpartition(" ")[0], linewidth=1)
        together = [total(found)[part] for _, found in samples]
        axes.plot(minutes, together, label=EVERYTHING, linewidth=1, color="0.6")
        axes.set(ylabel=label, ylim=(0, None))
        axes.grid(alpha=0.3)
    axes.set(xlabel="minutes")
    figure.axes[0].set_title(f"{'A4C' if engine.startswith('cluster') else 'Ape-X DQN'} on CartPole, engine {engine}")
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=7, ncols=4, loc="upper center", bbox_to_anchor=(0.5, 0.04))
    figure.savefig(path, bbox_inches="tight")
