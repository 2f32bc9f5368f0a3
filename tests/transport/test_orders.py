"""What a node does not do for a head, however well it knows it: other work than agreed, code that is not allowed."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.core import recipe
from shoal.core.errors import ServiceFailed
from shoal.core.recipe import describe
from shoal.experiment import Experiment
from shoal.topology import MODULES, facts
from shoal.transport.session import ANSWERING
from shoal.transport.trust import Terms
from tests.pace import seconds
from tests.transport.conftest import Standing

OPEN = Terms("node"), Terms("head")
OPTIONS = {"deadline": 20.0, "stall": 20.0}
IDLE = ["tests.engines.programs:idle", [], {}, {}]
MARKER = "shoal_marker"
Stand = Callable[..., Standing]


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module outside the allowed packages that leaves a file behind when it is imported."""
    code = f"""
import pathlib
pathlib.Path({str(tmp_path / "imported")!r}).touch()
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv
from pydantic import BaseModel
gymnasium.register(id="Marker-v0", entry_point=CartPoleEnv)
class Settings(BaseModel):
    pass
class Service:
    def hello(self):
        return "hello"
def work(*args):
    while True:
        yield False
"""
    (tmp_path / f"{MARKER}.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path / "imported"
    sys.modules.pop(MARKER, None)


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `shoal node` does before it begins."""
    monkeypatch.setattr(recipe, "_allowed", ("shoal", "tests"))


def experiment(**changes: Any) -> dict[str, Any]:
    """An experiment as a head would describe it."""
    plain = Experiment(environment={"id": "CartPole-v1"}, algorithm={"name": "dqn"}, actors=1, threads=1)
    described = describe(plain)
    return {**described, "fields": {**described["fields"], **changes}}


def hold(standing: Standing, workers: Any, check: Any = (), blocks: Any = None, run: str = "run") -> None:
    standing.session.call("hold", run, OPTIONS, [*check], [], workers, blocks or {}, seconds=60.0)


def holds(standing: Standing) -> None:
    """Show that the node does allowed work, and end it."""
    hold(standing, {"good": IDLE}, run="good")
    assert standing.node.engine is not None
    assert [*standing.node.engine.workers] == ["good"]
    standing.session.call("release", "good", seconds=seconds(20))
    standing.works()


@pytest.mark.parametrize("name", ["architecture hash", "experiment hash"])
def test_a_head_that_builds_something_else_is_refused(stand: Stand, closed: None, name: str) -> None:
    standing = stand(*OPEN)
    described = experiment()
    here = facts(recipe.rebuild(described, lambda name: None))
    there = {**here, name: "0" * 64}
    with pytest.raises(ServiceFailed) as caught:
        hold(standing, {"good": IDLE}, ["shoal.topology:facts", [described], there])
    assert str(caught.value) == f"{name} differs: {here[name]} on this node, {'0' * 64} at the head"
    assert standing.node.engine is None
    hold(standing, {"good": IDLE}, ["shoal.topology:facts", [described], here])
    standing.session.call("release", "run", seconds=seconds(20))
    holds(standing)


def made(path: str, *args: Any) -> dict[str, Any]:
    return {"service": {"make": path, "args": [*args], "seed": 0}}


SETTINGS = {"settings": f"{MARKER}:Settings", "fields": {}}
NAMED = {"name": f"{MARKER}:work"}
OUTSIDE: dict[str, Any] = {
    "worker": [f"{MARKER}:work", [], {}, {}],
    "settings": [IDLE[0], [SETTINGS], {}, {}],
    "name": [IDLE[0], [NAMED], {}, {}],
    "deep": [IDLE[0], [{"list": [{"mapping": {"a": {"list": [NAMED]}}}]}], {}, {}],
    "service": [IDLE[0], [], made(f"{MARKER}:Service"), {}],
    "argument of a service": [IDLE[0], [], made("tests.engines.programs:Shelf", NAMED), {}],
    "prefix of an allowed name": [f"shoal{MARKER.removeprefix('shoal')}:work", [], {}, {}],
}


def test_code_outside_the_allowed_packages_is_not_even_imported(stand: Stand, marker: Path, closed: None) -> None:
    standing = stand(*OPEN)
    for case, worker in OUTSIDE.items():
        with pytest.raises(ServiceFailed) as caught:
            hold(standing, {"bad": worker})
        assert str(caught.value) == (
            f"{MARKER} may not be used on this machine, which allows shoal, tests: "
            f"if you trust it, start the node with --allow {MARKER}"
        ), case
        assert standing.node.engine is None, case
        assert not marker.exists(), case
    holds(standing)


CHECKS: dict[str, Any] = {
    "its settings": ["shoal.topology:facts", [SETTINGS], {}],
    "the algorithm": ["shoal.topology:facts", {"algorithm": {"name": f"{MARKER}:Settings"}}, {}],
    "the environment": ["shoal.topology:facts", {"environment": {"id": f"{MARKER}:Marker-v0"}}, {}],
}


def test_nothing_is_imported_to_compare(stand: Stand, marker: Path, closed: None) -> None:
    standing = stand(*OPEN)
    for case, (path, args, expected) in CHECKS.items():
        args = [experiment(**args)] if isinstance(args, dict) else args
        with pytest.raises(ServiceFailed, match=f"{MARKER} may not be used on this machine"):
            hold(standing, {"good": IDLE}, [path, args, expected])
        assert not marker.exists(), case
    holds(standing)


def failure(standing: Standing, workers: Any) -> str:
    """What a worker says that its process has refused."""
    hold(standing, workers)
    (name,) = workers
    while not (told := standing.node.failures.get(name, "")):
        assert standing.session.call("describe", seconds=seconds(20))["slots"] == 2
        threading.Event().wait(0.02)
    standing.session.call("release", "run", seconds=seconds(20))
    return told


WALKS = [
    "shoal.cli.main:os.system",
    "shoal.cli.main:os",
    "shoal.training:signal.raise_signal",
    "shoal.core.recipe:find.__globals__.get",
    "shoal.core.recipe:find.__globals__.__setitem__",
    "shoal.core.recipe:find.__class__",
    "shoal.core.recipe:importlib.import_module",
    "shoal.core.recipe:Fatal.__base__.__base__",
    "shoal.transport.nursery:subprocess.Popen",
    "shoal.core.wire:MAGIC.decode",
    "shoal.core.wire:np.load",
]


@pytest.mark.parametrize("path", WALKS)
def test_no_path_leads_out_of_the_allowed_packages(closed: None, path: str) -> None:
    with pytest.raises(recipe.Fatal, match="may not be used on this machine"):
        recipe.find(path)


ELSEWHERE: dict[str, tuple[Any, Any, str]] = {
    "check": (IDLE, [f"{MARKER}:work", [], {}], "hold 2"),
    "opening check": (IDLE, ["shoal.core.recipe:allow", [{"value": None}], {}], "hold 2"),
    "worker": (["shoal.workers.recorder:record", [], {}, {}], [], "only shoal.workers.* is for nodes"),
    "service": (
        [IDLE[0], [], made("shoal.core.recipe:allow", {"value": None}), {}],
        [],
        "only shoal.services.* is for",
    ),
    "files": (
        [IDLE[0], [], made("shoal.services.checkpoints:Checkpoints", {"value": "/"}), {}],
        [],
        "only shoal.services.* is",
    ),
}


def test_nothing_of_shoal_is_called_that_is_not_for_nodes(stand: Stand, marker: Path, closed: None) -> None:
    standing = stand(*OPEN)
    for case, (worker, check, told) in ELSEWHERE.items():
        with pytest.raises(ServiceFailed, match=re.escape(told)):
            hold(standing, {"bad": worker}, check)
        assert recipe._allowed == ("shoal", "tests"), case
        assert not marker.exists(), case
    holds(standing)


def test_what_is_closed_stays_closed(closed: None) -> None:
    with pytest.raises(recipe.Fatal, match="is already decided"):
        recipe.allow(None)
    assert recipe._allowed == ("shoal", "tests")


CHILDREN: dict[str, Any] = {
    "walk": ["tests.engines.programs:os.system", [{"value": "true"}], {}],
    "service": [IDLE[0], [], made("tests.engines.programs:os.system", {"value": "true"})],
    "no worker": ["shoal.workers.evaluator:open_envs", [{"value": None}], {}],
    "no service": [IDLE[0], [], made("shoal.services.replay:flat", {"value": None})],
    "algorithm": [IDLE[0], {"algorithm": {"name": f"{MARKER}:Settings"}}, {}],
    "environment": ["shoal.workers.actor:act", {"environment": {"id": f"{MARKER}:Marker-v0"}}, {}],
}


def test_what_only_a_worker_can_find_out_it_refuses(stand: Stand, marker: Path, closed: None) -> None:
    standing = stand(*OPEN, modules=MODULES)
    for case, (path, args, services) in CHILDREN.items():
        if isinstance(args, dict):
            args = [experiment(**args), *([{"value": 0}] * 5 if "act" in path else [])]
        told = failure(standing, {"bad": [path, args, services, {}]})
        assert f"is {case}" in told if case.startswith("no ") else "may not be used on this machine" in told, case
        assert not marker.exists(), case
    holds(standing)


def test_what_the_user_allows_works(stand: Stand, marker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages = ("shoal", "tests", MARKER)
    monkeypatch.setattr(recipe, "_allowed", packages)
    standing = stand(*OPEN, packages=packages)
    hold(standing, {"mine": [f"{MARKER}:work", [SETTINGS, NAMED], made(f"{MARKER}:Service"), {}]})
    assert standing.session.call("service", "service", "hello", [], seconds=seconds(20)) == "hello"
    assert marker.exists()
    standing.session.call("release", "run", seconds=seconds(20))


WRONG: dict[str, tuple[str, list[Any], str]] = {
    "unknown": ("fly", [], "a node does not know 'fly'"),
    "too few": ("hold", [], "hold 0: field required"),
    "too many": ("describe", [1], "tuple should have at most 0 items"),
    "run": ("hold", [5, {}, [], [], {}, {}], "hold 0: input should be a valid string"),
    "options": ("hold", ["r", [], [], [], {}, {}], "hold 1: "),
    "an option": ("hold", ["r", {"deadline": "soon"}, [], [], {}, {}], "option deadline: "),
    "unknown option": ("hold", ["r", {"allow": None, "dead": 1}, [], [], {}, {}], "does not know: allow, dead"),
    "check": ("hold", ["r", {}, ["a"], [], {}, {}], "hold 2"),
    "services": ("hold", ["r", {}, [], [1], {}, {}], "hold 3.0"),
    "worker": ("hold", ["r", {}, [], [], {"a": "b"}, {}], "hold 4.a"),
    "worker's name": ("hold", ["r", {}, [], [], {"\ud800": IDLE}, {}], "hold 4"),
    "worker's services": ("hold", ["r", {}, [], [], {"a": [IDLE[0], [], {"s": {}}, {}]}, {}], "hold 4.a.2.s.make"),
    "worker's rights": ("hold", ["r", {}, [], [], {"a": [IDLE[0], [], {}, {"s": 5}]}, {}], "hold 4.a.3.s"),
    "arguments": ("hold", ["r", {}, [], [], {"a": [IDLE[0], [5], {}, {}]}, {}], "a int that is no recipe"),
    "recipe": ("hold", ["r", {}, [], [], {"a": [IDLE[0], [{"eval": "1"}], {}, {}]}, {}], "of no known form"),
    "name in a recipe": ("hold", ["r", {}, [], [], {"a": [IDLE[0], [{"name": 5}], {}, {}]}, {}], "of no known form"),
    "blocks": ("hold", ["r", {}, [], [], {}, {"b": {"x": [1]}}], "hold 5.b.x"),
    "turn": ("turn", [["a"], 1], "turn 0"),
    "turn of nobody": ("turn", ["nobody", 1], "nobody takes no turns on this node"),
    "service": ("service", [{}, "get", []], "service 0"),
    "service of nobody": ("service", ["shelf", "get", []], "there is no shelf.get on this node"),
    "private": ("service", ["shelf", "_connect", []], "there is no shelf._connect on this node"),
    "release": ("release", [], "release 0"),
}


def test_orders_that_make_no_sense_are_answered_in_one_line(stand: Stand, closed: None) -> None:
    before = {*threading.enumerate()}
    standing = stand(*OPEN)
    answering: list[threading.Thread] = []
    while len(answering) < 2 * ANSWERING:  # the node's are started while it answers already
        answering = [each for each in threading.enumerate() if each.name == "answers" and each not in before]
    for kind, args, told in WRONG.values():
        with pytest.raises(ServiceFailed) as caught:
            standing.session.call(kind, *args, seconds=seconds(20))
        assert told in str(caught.value)
        assert "Traceback" not in str(caught.value)
        assert len(str(caught.value).splitlines()) == 1
    assert (standing.node.engine, standing.node.run, len(standing.node.turns)) == (None, "", 0)
    assert all(each.is_alive() for each in answering)
    holds(standing)
