"""Runs over several machines, each a network namespace: nodes die, links break and come back, nodes join and leave."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from shoal.transport.certificates import initialise, issue
from tests import pace
from tests.pace import long

pytestmark = pytest.mark.timeout(400)
ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "configs"
PORT = 7700
# Short enough to see a lost machine, and work that moves, within the time that its link is down.
IMPATIENT = ("limits.silence=4", "network.away=4")
MINUTES = float(os.environ.get("SHOAL_MINUTES", "2"))  # for which a link breaks again and again
DOWN = 9.0  # seconds that a link is down: its work has moved after 8
# Of what travels to a node: a few sets of weights a second, so that no machine is fast enough to learn much meanwhile.
SLOW = "tbf rate 800kbit burst 20kb limit 2mb"


def system(command: str) -> str:
    """Have the system change its network."""
    done = subprocess.run(command.split(), capture_output=True, text=True)
    assert not done.returncode, f"{command}: {done.stderr.strip()}"
    return done.stdout


def why_not() -> str:
    """Why this machine cannot play several machines; nothing where it can."""
    for command in ("ip", "tc"):
        if not shutil.which(command):
            return f"the command {command} is not there"
    name = f"shoal-{os.getpid()}-probe"
    try:
        system(f"ip netns add {name}")
    except AssertionError as error:
        return str(error)
    try:
        system(f"ip -n {name} link add br0 type bridge")
        system(f"ip -n {name} link add one type veth peer name two")
        system(f"tc -n {name} qdisc add dev one root {SLOW}")
        return ""
    except AssertionError as error:
        return str(error)
    finally:
        system(f"ip netns del {name}")


def sweep() -> None:
    """Remove what tests left that were killed themselves, and could not."""
    for space in system("ip netns list").split():
        if space.startswith("shoal-") and not psutil.pid_exists(int(space.split("-")[1])):
            clear(space)


def clear(space: str) -> None:
    """Remove a namespace, and all that runs in it."""
    for number in system(f"ip netns pids {space}").split():
        with suppress(ProcessLookupError):
            os.kill(int(number), signal.SIGKILL)
    system(f"ip netns del {space}")


def until(true: Callable[[], object], seconds: float, what: str) -> None:
    """Look again and again, until something is so."""
    limit = time.monotonic() + pace.seconds(seconds)
    while not true():
        assert time.monotonic() < limit, what
        time.sleep(0.05)


class Machine:
    """A machine of its own network, reached over a cable to the switch."""

    def __init__(self, net: Net, name: str, address: str) -> None:
        """Make it and plug it in."""
        self.net, self.name, self.address, self.space = net, name, address, f"{net.switch}-{name}"
        self.log = net.folder / f"{name}.log"
        system(f"ip netns add {self.space}")
        net.spaces.append(self.space)
        system(f"ip -n {self.space} link add eth0 type veth peer name {name} netns {net.switch}")
        system(f"ip -n {net.switch} link set {name} master br0 up")
        system(f"ip -n {self.space} addr add {address}/24 dev eth0")
        for device in ("lo", "eth0"):
            system(f"ip -n {self.space} link set {device} up")

    def plug(self, state: str) -> None:
        """Pull the cable (`down`) or put it in again (`up`), on the switch's side: nobody is told."""
        system(f"ip -n {self.net.switch} link set {self.name} {state}")

    def slow(self, yes: bool) -> None:
        """Make the cable to it a slow one, or a fast one again."""
        change = f"add dev {self.name} root {SLOW}" if yes else f"del dev {self.name} root"
        system(f"tc -n {self.net.switch} qdisc {change}")

    def shoal(self, *words: object) -> subprocess.Popen[bytes]:
        """Run a command there."""
        with self.log.open("ab") as log:
            shoal = [sys.executable, "-c", "from shoal.cli.main import main; main()"]
            return self.net.start(
                ["ip", "netns", "exec", self.space, *shoal, *words],
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "120"},
                cwd=self.net.folder,
            )

    def forget(self) -> None:
        """Empty its log."""
        self.log.write_text("")

    def processes(self) -> list[int]:
        """Who runs there."""
        return [int(number) for number in system(f"ip netns pids {self.space}").split()]

    def says(self, text: str, times: int = 1) -> bool:
        """Whether its log holds a text so often."""
        return self.log.exists() and self.log.read_text().count(text) >= times


class Net:
    """A head and three machines on one switch, that trust each other."""

    def __init__(self, folder: Path, start: Callable[..., subprocess.Popen[bytes]]) -> None:
        """Begin with nothing."""
        self.folder, self.start, self.switch = folder, start, f"shoal-{os.getpid()}"
        self.spaces: list[str] = []
        self.run = folder / "run"

    def build(self) -> None:
        """Make switch, machines and certificates."""
        system(f"ip netns add {self.switch}")
        self.spaces.append(self.switch)
        system(f"ip -n {self.switch} link add br0 type bridge")
        system(f"ip -n {self.switch} link set br0 up")
        self.head = Machine(self, "head", "10.78.0.1")
        self.nodes = [Machine(self, f"node{number}", f"10.78.0.{number + 1}") for number in (1, 2, 3)]
        self.trust = initialise(self.folder / "head", [self.head.address])
        for node in self.nodes:
            issue(self.folder / "head", self.folder / node.name, [node.address])

    def listen(self) -> list[subprocess.Popen[bytes]]:
        """Start a node on every machine, with room for one worker."""
        return [
            node.shoal("node", "--listen", f"{node.address}:{PORT}", "--folder", self.folder / node.name, "--slots", 1)
            for node in self.nodes
        ]

    def train(self, config: str, *words: object) -> subprocess.Popen[bytes]:
        """Start a run at the head."""
        for machine in (self.head, *self.nodes):
            machine.forget()
        shutil.rmtree(self.run, ignore_errors=True)
        settings = ["engine=cluster", f"network.trust={self.folder / 'head'}", "threads=1", "log_every=0.2", *words]
        return self.head.shoal("train", CONFIGS / config, "--run-dir", self.run, *settings)

    @property
    def addresses(self) -> str:
        """The setting that names the nodes."""
        return f"nodes=[{','.join(f'{node.address}:{PORT}' for node in self.nodes)}]"

    def steps(self) -> int:
        """How far the run has come."""
        path = self.run / "metrics.jsonl"
        rows = path.read_text().splitlines() if path.exists() else []
        return max((int(json.loads(row)["steps"]) for row in rows if '"train"' in row), default=0)

    def solved(self, head: subprocess.Popen[bytes], seconds: float) -> dict[str, Any]:
        """Wait for the end of a run that must have reached its target; returns the summary."""
        head.wait(pace.seconds(seconds))
        assert head.returncode == 0, self.head.log.read_text()
        summary: dict[str, Any] = json.loads((self.run / "summary.json").read_text())
        assert summary["solved"]
        return summary

    def end(self, nodes: list[subprocess.Popen[bytes]]) -> None:
        """Ask nodes to end, and see that nobody is left on any machine."""
        for node in nodes:
            node.terminate()
        for node in nodes:
            node.wait(pace.seconds(20))
        for machine in (self.head, *self.nodes):
            assert not machine.processes(), f"left on {machine.name}: {machine.processes()}"

    def remove(self) -> None:
        """Take everything down."""
        for space in self.spaces:
            clear(space)


@pytest.fixture
def net(start: Any, tmp_path: Path) -> Iterator[Net]:
    """A head and three machines, which are gone afterwards."""
    if reason := why_not():
        pytest.skip(f"no network namespaces here: {reason}")
    sweep()
    made = Net(tmp_path, start)
    try:
        made.build()
        yield made
    finally:
        made.remove()


def homes(summary: dict[str, Any], kind: str) -> set[str]:
    """The nodes where workers of a kind were at the end."""
    workers = summary["workers"]
    return {workers[name]["node"].removesuffix(f":{PORT}") for name in workers if name.startswith(kind)}


def break_things(net: Net, head: subprocess.Popen[bytes], node: subprocess.Popen[bytes], down: float = DOWN) -> None:
    """Kill the first node, pull the second's cable for a while, and see that the rest goes on meanwhile."""
    first, second, third = net.nodes
    for machine in net.nodes:
        machine.slow(True)
    for machine in net.nodes:
        until(lambda machine=machine: machine.says("holds"), 60, f"{machine.name} has no work")
    until(lambda: net.steps() > 0, 60, "nothing was learned")
    family = psutil.Process(node.pid).children(recursive=True)
    assert len(family) >= 2  # the nursery and a worker
    node.kill()
    second.plug("down")
    restored = time.monotonic() + down
    assert not psutil.wait_procs(family, timeout=pace.seconds(10))[1]
    assert not first.processes()
    until(lambda: net.head.says(f"{second.address}:{PORT} disconnected"), 10, "the head does not notice a cut link")
    until(lambda: third.says("holds", 2), 20, "nobody takes over")
    seen = net.steps()
    until(lambda: net.steps() > seen, 10, "nobody learns while a link is cut")
    until(lambda: time.monotonic() > restored, down, "")
    assert head.poll() is None, net.head.log.read_text()
    second.plug("up")
    until(lambda: second.says("holds", 2), 40, "a restored link is not used")
    for machine in net.nodes:  # only now, or the run might be over before
        machine.slow(False)
    assert not third.says("failed"), third.log.read_text()  # nobody there is disturbed by what comes back


@pytest.mark.long
def test_federated_groups_solve_cartpole_whatever_breaks(net: Net) -> None:
    nodes = net.listen()
    healthy = net.train("a3c_cartpole.yaml", "topology=federated", "actors=1", net.addresses)
    assert homes(net.solved(healthy, 90), "group-") == {node.address for node in net.nodes}
    more = ("federation.round=100", "steps=400_000", *IMPATIENT)  # a node less, and another for a while
    head = net.train("a3c_cartpole.yaml", "topology=federated", "actors=1", net.addresses, *more)
    break_things(net, head, nodes[0], 30.0)
    assert homes(net.solved(head, 90), "group-") == {node.address for node in net.nodes[1:]}
    net.end(nodes)


@pytest.mark.parametrize("down", [DOWN, long(30.0)])
def test_actors_on_other_machines_fill_a_replay_whatever_breaks(net: Net, down: float) -> None:
    nodes = net.listen()
    head = net.train("apex_dqn_cartpole.yaml", "actors=3", net.addresses, *IMPATIENT)
    break_things(net, head, nodes[0], down)
    alive = {node.address for node in net.nodes[1:]}
    if down == DOWN:  # who came back may not have told anything yet; in the long form it learns to the end
        head.terminate()
        assert head.wait(pace.seconds(20)) == 0, net.head.log.read_text()
        assert homes(json.loads((net.run / "summary.json").read_text()), "actor-") <= alive
    else:
        assert homes(net.solved(head, 150), "actor-") == alive
    net.end(nodes)


@pytest.mark.long
def test_nodes_join_and_leave_while_a_run_goes_on(net: Net) -> None:
    first, second, _ = net.nodes
    (net.folder / "secret").write_text((net.folder / "head" / "token").read_text())

    def join(machine: Machine) -> subprocess.Popen[bytes]:
        machine.slow(True)
        where = f"{net.head.address}:{PORT}"
        trust = ("--pin", net.trust.fingerprint, "--token", net.folder / "secret", "--name", machine.name)
        return machine.shoal("node", "--join", where, *trust, "--slots", 1)

    head = net.train(
        "impala_cartpole.yaml", "actors=2", "steps=500_000", f"network.listen={net.head.address}:{PORT}", *IMPATIENT
    )
    nodes = [join(first)]
    until(lambda: first.says("holds actor-0, actor-1"), 60, "the first node has no work")
    until(lambda: net.steps() > 0, 60, "nothing was learned")
    nodes.append(join(second))
    until(lambda: second.says("holds actor-1"), 60, "a node that joined later has no work")
    until(lambda: first.says("holds actor-0\n"), 10, "the first node keeps what another has taken over")
    nodes[0].terminate()
    nodes[0].wait(pace.seconds(20))
    assert nodes[0].returncode == 0, first.log.read_text()
    assert not first.processes()
    until(lambda: second.says("holds actor-0, actor-1"), 20, "nobody takes over from a node that left")
    second.slow(False)
    assert homes(net.solved(head, 90), "actor-") == {second.name}
    net.end(nodes)


def growth(process: psutil.Process) -> dict[str, dict[str, float]]:
    """What a command and all that it started hold: megabytes, descriptors and threads, by name."""
    found: dict[str, dict[str, float]] = {}
    for each in [process, *process.children(recursive=True)]:
        with suppress(psutil.Error):
            held = {
                "megabytes": each.memory_info().rss / 1e6,
                "descriptors": each.num_fds(),
                "threads": each.num_threads(),
            }
            found[f"{each.pid} {each.name()}"] = held
    return found


@pytest.mark.long
@pytest.mark.timeout(60 * MINUTES + 300)
def test_a_link_that_breaks_every_20_seconds_costs_nothing_in_the_long_run(net: Net, record_property: Any) -> None:
    first, second, _ = net.nodes
    nodes = net.listen()
    for machine in net.nodes:
        machine.slow(True)  # PPO's actors then mostly wait for weights; or it would take both cores for as long
    words = ("evaluation.target=null", "steps=1e12", "limits.silence=8", "network.away=60")
    head = net.train("ppo_cartpole.yaml", "actors=3", "envs=2", net.addresses, *words)
    until(lambda: net.steps() > 0, 60, "nothing was learned")
    families = {"head": psutil.Process(head.pid), "node": psutil.Process(nodes[0].pid)}
    ends, breaks = time.monotonic() + 60 * MINUTES, 0
    before: dict[str, Any] = {}
    while time.monotonic() < ends:
        machine = (first, second)[breaks % 2]
        machine.plug("down")
        time.sleep(10)  # longer than the silence after which a link counts as lost
        machine.plug("up")
        until(lambda count=breaks + 1: net.head.says(" disconnected: ", count), 20, "the link did not break")
        seen, again = net.steps(), time.monotonic() + 10
        until(lambda seen=seen: net.steps() > seen, 60, f"nothing is learned after break {breaks + 1}")
        while time.monotonic() < again:
            time.sleep(0.5)
        breaks += 1
        if breaks == 4:  # all that is made once is there
            before = {name: growth(family) for name, family in families.items()}
    after = {name: growth(family) for name, family in families.items()}
    table = [f"{breaks} breaks in {MINUTES:g} minutes, {net.steps():,} steps"]
    for name, family in after.items():
        for worker, held in family.items():
            was = before[name].get(worker, {})
            table.append(
                f"{name}: {worker}: " + ", ".join(f"{was.get(k, 0):.0f} → {v:.0f} {k}" for k, v in held.items())
            )
    record_property("table", "\n".join(table))
    print("\n".join(table))
    for name, family in before.items():
        for worker, was in family.items():
            held = after[name][worker]  # nobody had to begin again
            assert held["descriptors"] <= was["descriptors"] + 4, table
            assert held["threads"] <= was["threads"] + 4, table
            assert held["megabytes"] < 1.2 * was["megabytes"] + 10, table
    head.terminate()
    assert head.wait(pace.seconds(30)) == 0
    net.end(nodes)
