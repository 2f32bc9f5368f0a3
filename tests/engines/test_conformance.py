"""What every engine must do, through one suite."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from shoal.core.errors import DeadlineExceeded, ShoalError, Stalled, WorkerFailed
from shoal.core.recipe import find
from shoal.engines import ENGINES, Options, make, prepare, supervisor
from shoal.engines.node import Node, listen
from shoal.engines.options import Machines, Network, Room
from shoal.services.parameters import Parameters
from shoal.services.queue import Queue
from shoal.transport import LINKS
from shoal.transport.trust import Terms
from tests.engines import programs
from tests.pace import long, seconds

# Every engine, and `cluster` by every link; a run on all of them is in tests/test_engines_alike.py.
LINKED = [long(f"cluster/{link}") for link in LINKS if link != "websocket"]
EVERY = pytest.mark.parametrize("name", [*(name if name != "ray" else long(name) for name in ENGINES), *LINKED])
RAY_TOO = pytest.mark.parametrize("name", [*ENGINES, *LINKED])  # whose workers take seconds to start
LOADED = ("torch",)  # once for all workers of a test
OWN_PROCESSES = pytest.mark.parametrize(
    "name", [name for name, path in ENGINES.items() if not find(path).shared and name != "cluster"]
)


@pytest.fixture
def build(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Make engines that are closed whatever happens."""
    open_ones = ExitStack()

    def build(name: str, remote: list[str] | None = None, **options: Any) -> Any:
        """Make one; where there are nodes, only workers that are `remote` live there, or all."""
        name, _, link = name.partition("/")
        placed = None if remote is None else frozenset(remote)
        if link == "torchrpc":  # of which there is one in a process
            address = request.getfixturevalue("counted_node")
            options["machines"] = Machines(network=Network(link=link, listen=address, world=2), remote=placed)
        elif name == "cluster":
            link = link or "websocket"
            node = Node(2, ("shoal", "tests"), LOADED)
            gate = listen(node, "127.0.0.1:0", Terms("node", link=link))
            open_ones.callback(node.close)
            open_ones.callback(gate.close)
            options["machines"] = Machines(nodes=(gate.address,), network=Network(link=link), remote=placed)
        if name == "ray":
            options["room"] = Room(address=request.getfixturevalue("ray_cluster").address)
        chosen = Options(**{"stall": seconds(20.0), "deadline": seconds(20.0), **options})
        engine = make(name, chosen, prepare(name, LOADED))
        open_ones.callback(engine.close)
        return engine

    with open_ones:
        yield build


@RAY_TOO
def test_trees_arrive_bit_equal(build: Any, name: str) -> None:
    engine = build(name, homes={"shelf": "host"})
    shelf = engine.serve("shelf", programs.Shelf)
    rng = np.random.default_rng(0)
    question = {
        "big": rng.standard_normal((300, 100)).astype(np.float32),
        "deep": {"small": rng.integers(0, 255, 7).astype(np.uint8), "scalar": np.float64(1 / 3)},
        "odd": np.asfortranarray(rng.standard_normal((50, 70)))[::2],
        "empty": np.empty((0, 3), np.int16),
        "nan": np.array([np.nan, np.inf, -0.0], np.float32),
        "text": "Ünïcode",
        "none": None,
        "list": [1, 2.5, True, np.arange(5000)],
    }
    engine.run("host", programs.idle)
    engine.run("echo", programs.echo, shelf)
    shelf.put("question", question)
    engine.wait("echo")
    answer = shelf.get("answer")

    def same(one: Any, two: Any) -> None:
        if isinstance(one, dict):
            assert [*one] == [*two]
            for key in one:
                same(one[key], two[key])
        elif isinstance(one, list):
            for left, right in zip(one, two, strict=True):
                same(left, right)
        elif isinstance(one, np.ndarray):
            assert (one.dtype, one.shape) == (two.dtype, two.shape)
            assert one.tobytes() == two.tobytes()
        else:
            assert one == two

    same(question, answer)


@EVERY
def test_results_of_consecutive_calls_do_not_overwrite_each_other(build: Any, name: str) -> None:
    engine = build(name, homes={"shelf": "host"})
    shelf = engine.serve("shelf", programs.Shelf)
    engine.run("host", programs.idle)
    for value in range(3):
        shelf.put(str(value), np.full(100_000, value))
    results = [shelf.get(str(value)) for value in range(3)]
    assert [int(result[0]) for result in results] == [0, 1, 2]


@EVERY
def test_weights_reach_all_who_follow_them_and_stay_as_they_were(build: Any, name: str) -> None:
    engine = build(name, homes={"parameters": "publisher"}, relays=frozenset({"parameters"}))
    parameters, board = engine.serve("parameters", Parameters), engine.serve("board", programs.Shelf)
    readers = ["one", "two"]
    engine.run("publisher", programs.publishes, parameters, board, readers, 4)
    for reader in readers:
        engine.run(reader, programs.follows, parameters, board, reader, 4)
    engine.wait("publisher", *readers)
    assert [board.get(reader) for reader in readers] == [[0, 1, 2, 3]] * 2


@RAY_TOO
def test_a_failing_worker_ends_the_run_with_its_traceback(build: Any, name: str) -> None:
    engine = build(name)
    shelf = engine.serve("shelf", programs.Shelf)
    engine.run("broken", programs.raises, shelf)
    engine.run("idle", programs.idle)
    with pytest.raises((ValueError, WorkerFailed)) as caught:
        engine.wait("broken", "idle")
    assert "a worker broke" in str(caught.value)
    trace = str(caught.value) + "".join(str(entry) for entry in caught.traceback)
    assert "programs.py" in trace


@EVERY
def test_an_error_in_a_service_reaches_its_caller(build: Any, name: str) -> None:
    engine = build(name, homes={"shelf": "host"})
    shelf = engine.serve("shelf", programs.Shelf)
    engine.run("host", programs.idle)
    engine.run("caller", programs.calls_failing, shelf)
    with pytest.raises(Exception, match="the shelf broke"):
        engine.wait("caller")


@EVERY
@pytest.mark.parametrize("work", ["oversteps", "looks_aside"])
def test_a_worker_may_call_only_what_its_recipe_names(build: Any, name: str, work: str) -> None:
    engine = build(name, homes={"shelf": "host"})
    shelf, kept = engine.serve("shelf", programs.Shelf), engine.serve("kept", programs.Shelf)
    engine.run("host", programs.idle)
    engine.run("caller", getattr(programs, work), shelf, kept)
    told = {
        "oversteps": r"shelf\.get: its recipe names shelf\.put",
        "looks_aside": r"kept\.put: its recipe names shelf",
    }
    with pytest.raises(ShoalError, match=rf"caller may not call {told[work]}"):
        engine.wait("caller")
    assert shelf.get("declared") == (1 if work == "oversteps" else None)
    assert kept.get("undeclared") is None


@EVERY
def test_a_service_knows_who_calls(build: Any, name: str) -> None:
    engine = build(name, homes={"near": "host"})
    shelves = [engine.serve("near", programs.Shelf), engine.serve("here", programs.Shelf)]
    engine.run("host", programs.idle)
    for worker in ("one", "two"):
        engine.run(worker, programs.sign, shelves, worker)
    engine.wait("one", "two")
    assert [shelf.get(worker) for shelf in shelves for worker in ("one", "two")] == ["one", "two"] * 2


@EVERY
def test_placement_decides_the_process_of_a_service(build: Any, name: str) -> None:
    engine = build(name, homes={"there": "host"})
    here, there = engine.serve("here", programs.Shelf), engine.serve("there", programs.Shelf)
    engine.run("host", programs.idle)
    assert (here.pid() == os.getpid()) == (name != "ray")  # whose actors cannot call the head itself
    assert (there.pid() != os.getpid()) == (not engine.launcher.shared)
    assert name != "ray" or here.pid() != there.pid()


@EVERY
def test_a_worker_that_waits_is_woken(build: Any, name: str) -> None:
    engine = build(name, homes={"shelf": "second"})
    shelf = engine.serve("shelf", programs.Shelf)
    engine.run("second", programs.until, shelf, "a", 4)
    engine.run("first", programs.answer, shelf, "a", 2)
    engine.wait("second")
    assert shelf.get("a") == 4


@RAY_TOO
def test_nothing_moving_is_reported_and_ends_the_run(build: Any, name: str) -> None:
    stall = seconds(2.0)  # in which both have called, and said so
    engine = build(name, stall=stall, homes={"shelf": "two"})
    shelf = engine.serve("shelf", programs.Shelf)
    engine.run("two", programs.until, shelf, "never", 1)
    engine.run("one", programs.until, shelf, "neither", 1)
    with pytest.raises(Stalled) as caught:
        engine.wait("one")
    report = str(caught.value)
    assert f"no worker made progress for {stall:g} s" in report
    assert "one: 0 moves, last called shelf.get" in report
    assert "two: 0 moves, last called shelf.get" in report
    assert "programs.py" in report  # where they stand
    assert "in wait" in report  # the stacks


@pytest.fixture
def released() -> Iterator[None]:
    """Let go of what is stuck in a thread of this process, when all is said."""
    programs.RELEASED.clear()
    yield
    programs.RELEASED.set()


@EVERY
@pytest.mark.parametrize("lockstep", [False, True], ids=["free", "lockstep"])
def test_one_stuck_worker_ends_the_run_whoever_else_moves(build: Any, released: Any, name: str, lockstep: bool) -> None:
    engine = build(name, stall=seconds(1.0), lockstep=lockstep)
    shelf = engine.serve("shelf", programs.Shelf)
    engine.run("busy", programs.count_up, shelf, "count")
    engine.run("stuck", programs.stuck, shelf)
    with pytest.raises((Stalled, WorkerFailed)) as caught:
        engine.wait("stuck")
    report = str(caught.value)
    assert lockstep or caught.type is Stalled
    assert "stuck has been inside one unit of work for" in report
    assert "stuck: 1 moves" in report
    assert "RELEASED.wait(3600)" in report  # the stacks


@pytest.mark.parametrize("silent", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_process_that_nothing_can_interrupt_says_where_it_stands_and_ends(silent: bool) -> None:
    code = (
        "from shoal.engines import Options, make; from tests.engines import programs;"
        f"engine = make('inline', Options(stall=1.0)); engine.run('stuck', programs.stuck_in_a_library, {silent});"
        "engine.wait('stuck')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=seconds(60))
    assert done.returncode == 1
    assert "programs.py" in done.stderr
    assert "stuck_in_a_library" in done.stderr
    if not silent:
        assert "stuck has been inside one unit of work for" in done.stderr
        assert "it cannot be interrupted: the process ends" in done.stderr


def test_workers_do_not_inherit_what_is_done_with_signals(build: Any) -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        engine = build("processes")
        shelf = engine.serve("shelf", programs.Shelf)
        engine.run("one", programs.tell_signals, shelf)
        engine.wait("one")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert shelf.get("SIGINT") == signal.SIG_IGN  # the head ends its workers in order
    assert shelf.get("SIGTERM of what it forked") == -signal.SIGTERM  # which the worker itself survived


def test_a_thread_of_a_notebook_is_interrupted_as_well(build: Any) -> None:
    engine, caught = build("inline", stall=0.5), []
    engine.run("stuck", programs.spins)

    def wait() -> None:
        with pytest.raises(Stalled) as found:
            engine.wait("stuck")
        caught.append(str(found.value))

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    assert "stuck has been inside one unit of work" in caught[0]


@EVERY
def test_what_is_stuck_does_not_delay_a_run_that_was_asked_to_end(build: Any, released: Any, name: str) -> None:
    engine = build(name, stall=10.0)  # a tenth of which is waited for
    shelf = engine.serve("shelf", programs.Shelf)
    engine.run("stuck", programs.stuck_in, shelf, "a step")
    asking = threading.Timer(0.5, engine.hurry)
    asking.start()
    with pytest.raises(Stalled, match="asked to end, but stuck has been inside a step of a thing for"):
        engine.wait("stuck")
    asking.join()


@EVERY
def test_what_takes_long_is_said_now_and_then(
    build: Any, released: Any, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervisor, "FIRST", 0.3)
    engine = build(name, stall=3.0)
    shelf = engine.serve("shelf", programs.Shelf)
    engine.run("slow", programs.stuck_in, shelf, "a step")
    with pytest.raises(Stalled):
        engine.wait("slow")
    said = [line for line in caplog.messages if "takes long" in line]
    assert len(said) == 1  # the next after 20 seconds
    assert said[0].startswith("slow: a step of a thing takes long, ")


@EVERY
def test_an_observer_does_not_count_as_movement(build: Any, name: str) -> None:
    engine = build(name, stall=seconds(1.0), observers=frozenset({"watcher"}))
    shelf = engine.serve("shelf", programs.Shelf)
    engine.run("watcher", programs.count_up, shelf, "watched")
    engine.run("one", programs.until, shelf, "neither", 1)
    with pytest.raises(Stalled):
        engine.wait("one")


@EVERY
def test_a_full_store_holds_the_caller_back(build: Any, name: str) -> None:
    engine = build(name, stall=seconds(1.0), homes={"store": "host"})
    store = engine.serve("store", Queue, 10)
    engine.run("host", programs.idle)
    engine.run("filler", programs.fill, store, 4)
    with pytest.raises(Stalled):
        engine.wait("filler")
    assert store.status()["filled"] == 8


@RAY_TOO
def test_lockstep_takes_turns_with_randomness_of_ones_own(build: Any, name: str) -> None:
    engine = build(name, lockstep=True, seed=7, homes={"shelf": "b"})
    shelf = engine.serve("shelf", programs.Shelf)
    for worker in "abc":
        engine.run(worker, programs.draw, shelf, worker, 5)
    engine.wait(*"abc")
    draws = shelf.get("draws")
    assert [row[0] for row in draws] == list("abc") * 5
    alone = build("inline", seed=7)
    other = alone.serve("shelf", programs.Shelf)
    alone.run("b", programs.draw, other, "b", 5)
    alone.wait("b")
    assert [row for row in draws if row[0] == "b"] == other.get("draws")
    assert shelf.drawn() == other.drawn()


@pytest.mark.parametrize("name", [name for name in ENGINES if name != "cluster"])
def test_what_one_writes_into_a_shared_block_all_others_see(build: Any, name: str) -> None:
    engine = build(name, homes={"reader": "a"})
    if not engine.shares:
        pytest.skip(f"{name} has no shared memory, which an engine may do without")
    given = {
        "odd": np.array(3, np.uint8),
        "cells": np.zeros(3, np.float32),
        "sums": np.zeros(3, np.float64),
        "none": np.zeros((0, 2), np.int64),
    }
    block = engine.share("numbers", given)
    reader = engine.serve("reader", programs.Reader, block)
    for index, worker in enumerate("ab"):
        engine.run(worker, programs.write_block, block, index, 1.5)
    block["cells"][2] = 4.0  # the head is one of them
    engine.wait("a", "b")
    np.testing.assert_array_equal(block["sums"], [7.0, 7.0, 0.0])
    np.testing.assert_array_equal(reader.read("cells"), [1.5, 1.5, 4.0])  # so is a service, wherever it lives
    assert not given["cells"].any()  # a copy was taken
    assert {*block} == {*given}
    for key, array in given.items():
        assert (block[key].dtype, block[key].shape) == (array.dtype, array.shape)
        assert block[key].ctypes.data % 64 == 0
    assert block["odd"] == 3


def test_workers_of_a_group_share_a_block_on_their_node(build: Any) -> None:
    engine = build("cluster", homes={"reader": "group/a"})
    block = engine.share("group/numbers", {"cells": np.zeros(2, np.float32), "sums": np.zeros(2, np.float64)})
    reader = engine.serve("reader", programs.Reader, block)
    for index, worker in enumerate("ab"):
        engine.run(f"group/{worker}", programs.write_block, block, index, 1.5)
    engine.wait("group/a", "group/b")
    np.testing.assert_array_equal(reader.read("cells"), [1.5, 1.5])


@EVERY
def test_reports_say_where_the_time_went(build: Any, name: str) -> None:
    engine = build(name)
    shelf = engine.serve("shelf", programs.Shelf)
    engine.run("one", programs.answer, shelf, "a", 2)
    engine.wait("one")
    report = engine.report()["one"]
    assert report["moves"] == 1
    assert 0 <= report["working"] <= report["seconds"] + 0.01


@EVERY
def test_reports_say_what_the_work_was_and_what_cores_it_took(build: Any, name: str) -> None:
    engine = build(name)
    shelf = engine.serve("shelf", programs.Shelf)
    engine.run("one", programs.toils, shelf, 0.2)
    engine.wait("one")
    report = engine.report()["one"]
    assert 0.19 <= report["parts"]["toil"] <= report["working"] + 0.01
    assert ("computing" in report) == (not find(ENGINES[name]).shared)  # else it would be everyone's
    assert report.get("computing", 0.2) >= 0.19


@OWN_PROCESSES
def test_a_call_has_a_deadline(build: Any, name: str) -> None:
    engine = build(name, deadline=0.5, homes={"shelf": "host"})
    shelf = engine.serve("shelf", programs.Shelf)
    engine.run("host", programs.idle)
    engine.run("caller", programs.calls_hanging, shelf)
    with pytest.raises(WorkerFailed, match=r"shelf\.hang[\s\S]*no answer"):
        engine.wait("caller")
    with pytest.raises(DeadlineExceeded):
        shelf.hang()


def test_a_killed_worker_is_named_with_its_signal(build: Any) -> None:
    engine = build("processes")
    shelf = engine.serve("shelf", programs.Shelf)
    engine.run("victim", programs.dies_at_once, shelf)
    with pytest.raises(WorkerFailed, match="victim was killed by SIGKILL"):
        engine.wait("victim")


@OWN_PROCESSES
def test_a_killed_worker_is_started_again_and_the_run_goes_on(build: Any, name: str) -> None:
    engine = build(name, restartable=frozenset({"victim"}), homes={"shelf": "host"})
    shelf = engine.serve("shelf", programs.Shelf)
    engine.run("host", programs.until_longer, shelf, "victim pids", 2)
    engine.run("victim", programs.count_up, shelf, "victim")
    engine.run("killer", programs.kill_once, shelf, "victim pids")
    engine.wait("host")
    first, second = shelf.get("victim pids")
    assert first != second
    assert not psutil.pid_exists(first)
    assert engine.report()["victim"]["restarts"] == 1


@pytest.mark.parametrize("name", ["processes", long("cluster"), long("ray")])
def test_services_that_can_be_done_without_come_back_for_those_who_called_them(build: Any, name: str) -> None:
    spare = frozenset({"host"})
    engine = build(name, remote=[], restartable=spare, expendable=spare, homes={"shelf": "host"})
    notes, shelf = engine.serve("notes", programs.Shelf), engine.serve("shelf", programs.Shelf)
    engine.run("host", programs.idle)
    engine.run("caller", programs.outlives, notes, shelf)
    engine.wait("caller")
    assert (notes.get("lost"), notes.get("kept")) == (True, None)  # it was gone, and began again empty
    assert len(notes.get("caller pids")) == 1
    assert [engine.report()[worker]["restarts"] for worker in ("host", "caller")] == [1, 0]


def test_a_shared_block_is_there_once_and_outlives_a_worker(build: Any) -> None:
    engine = build("processes", restartable=frozenset({"one", "two"}))
    shelf = engine.serve("shelf", programs.Shelf)
    block = engine.share("numbers", {"count": np.zeros(()), "room": np.zeros(1 << 20)})
    engine.run("one", programs.watch_block, shelf, block)
    engine.run("killer", programs.kill_once, shelf, "block pids")
    engine.run("two", programs.watch_block, shelf, block)
    engine.run("last", programs.until_longer, shelf, "inodes", 3)
    engine.wait("last")
    (inode,) = {inode for found in shelf.get("inodes") for inode in found}  # one file behind all three mappings
    assert inode == os.fstat(block.descriptor).st_ino
    assert [len(found) for found in shelf.get("inodes")] == [1, 1, 1]
    assert shelf.get("found")[-1] > 0  # what had been counted before the last of them began


def test_a_worker_that_does_not_name_a_block_does_not_get_it(build: Any) -> None:
    engine = build("processes")
    shelf = engine.serve("shelf", programs.Shelf)
    engine.share("numbers", {"count": np.zeros(())})
    engine.run("stranger", programs.watch_block, shelf, {"count": np.zeros(())})
    engine.run("last", programs.until_longer, shelf, "inodes", 1)
    engine.wait("last")
    assert shelf.get("inodes") == [[]]


def test_workers_are_started_again_even_when_what_started_them_was_killed(build: Any) -> None:
    engine = build("processes", restartable=frozenset({"victim"}), homes={"shelf": "host"})
    shelf = engine.serve("shelf", programs.Shelf)
    engine.run("host", programs.until_longer, shelf, "victim pids", 2)
    engine.run("victim", programs.count_up, shelf, "victim")
    nursery = next(child for child in psutil.Process().children() if child.cmdline()[-1] == "shoal nursery")
    nursery.kill()
    engine.run("killer", programs.kill_once, shelf, "victim pids")
    engine.wait("host")
    assert engine.report()["victim"]["restarts"] == 1


def test_restarts_have_a_limit(build: Any) -> None:
    engine = build("processes", restartable=frozenset({"victim"}), restarts=2)
    shelf = engine.serve("shelf", programs.Shelf)
    engine.run("victim", programs.dies_at_once, shelf)
    with pytest.raises(WorkerFailed, match="victim was killed"):
        engine.wait("victim")
    assert len(shelf.get("lives")) == 3


def test_what_restarting_cannot_mend_is_not_restarted(build: Any) -> None:
    engine = build("processes", restartable=frozenset({"victim"}))
    shelf = engine.serve("shelf", programs.Shelf)
    engine.run("victim", programs.raises_fatally, shelf)
    with pytest.raises(WorkerFailed, match="no use trying again"):
        engine.wait("victim")


@OWN_PROCESSES
def test_the_death_of_a_host_is_told_before_its_callers_losses(build: Any, name: str) -> None:
    engine = build(name, restartable=frozenset({"caller"}), homes={"shelf": "host"})
    shelf = engine.serve("shelf", programs.Shelf)
    notes = engine.serve("notes", programs.Shelf)
    engine.run("host", programs.count_up, notes, "host")
    engine.run("caller", programs.count_up, shelf, "caller")
    engine.run("killer", programs.kill_once, notes, "host pids")
    with pytest.raises(WorkerFailed, match="host died: The actor" if name == "ray" else "host was killed by SIGKILL"):
        engine.wait("caller")


@OWN_PROCESSES
def test_a_frozen_worker_is_noticed(build: Any, name: str) -> None:
    engine = build(name, silence=1.5)
    shelf = engine.serve("shelf", programs.Shelf)
    engine.run("frozen", programs.freezes, shelf)
    with pytest.raises(WorkerFailed, match="frozen gave no sign of life"):
        engine.wait("frozen")


@EVERY
def test_close_ends_workers_in_order_even_in_the_middle_of_calls(build: Any, name: str, tmp_path: Path) -> None:
    counters = [f"counter-{number}" for number in range(2)]
    engine = build(name, counters, homes={"shelf": "host"})
    shelf = engine.serve("shelf", programs.Shelf)
    engine.run("host", programs.idle)
    for each in counters:
        engine.run(each, programs.count_to_the_end, shelf, each, str(tmp_path / each))
    for each in counters:
        engine.run(f"saw {each}", programs.until_longer, shelf, f"{each} pids", 1)
    engine.wait(*(f"saw {each}" for each in counters))
    engine.close()
    assert {path.name for path in tmp_path.iterdir()} == {*counters}


@OWN_PROCESSES
def test_close_takes_a_workers_own_children_along(build: Any, name: str) -> None:
    engine = build(name)
    shelf = engine.serve("shelf", programs.Shelf)
    engine.run("parent", programs.starts_a_child, shelf)
    engine.watch(0.0)
    while shelf.get("grandchild") is None:
        engine.listen(0.05)
    grandchild = psutil.Process(shelf.get("grandchild"))
    engine.close()
    while grandchild.is_running() and grandchild.status() != psutil.STATUS_ZOMBIE:
        psutil.wait_procs([grandchild], timeout=0.05)  # the test's own limit ends an endless wait


def test_a_function_that_cannot_be_imported_elsewhere_is_refused(build: Any) -> None:
    engine = build("processes")
    with pytest.raises(ShoalError, match="importable module"):
        engine.run("lambda", lambda: iter([True]))


HEAD = """
import sys
sys.path.insert(0, {root!r})
from tests.engines import programs
from tests.pace import long, seconds
from shoal.engines import Options, make
engine = make("processes", Options(homes={{"shelf": "one"}}, stall=60))
shelf = engine.serve("shelf", programs.Shelf)
engine.run("one", programs.count_up, shelf, "one")
engine.run("two", programs.count_up, shelf, "two")
while not shelf.get("two"):
    engine.listen(0.05)
print("ready", flush=True)
engine.wait("one")
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_survives_the_head(start: Any, number: int, tmp_path: Path) -> None:
    root = str(Path(__file__).parents[2])
    head = start(
        [sys.executable, "-c", HEAD.format(root=root)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert head.stdout.readline() == b"ready\n"
    family = psutil.Process(head.pid).children(recursive=True)
    assert len(family) == 3  # two workers and the nursery
    head.send_signal(number)
    head.wait()
    _, alive = psutil.wait_procs(family, timeout=seconds(10))
    assert not alive
    assert not list(tmp_path.iterdir())
