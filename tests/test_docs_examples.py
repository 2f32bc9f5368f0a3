"""The documentation does what it says: its examples are written out and its commands are run.

What a page means to be a file is a fenced block after a line that holds nothing but its name and a colon:

    `my_worlds/__init__.py`:

In a console block, every line that begins with `$ shoal` or `$ pytest` is run, in the order of the page, in the folder
that holds the page's files; other lines are for the reader. That those files can be imported, the test sees to itself.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.pace import seconds

ROOT = Path(__file__).parents[1]
EXTEND = ROOT / "docs" / "extend"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
EVERY_PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))

FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
NAMED = re.compile(r"^`([^`\n]+)`:\n\n```\w+\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
PROGRAMS = {
    "shoal": [sys.executable, "-c", "from shoal.cli.main import main; main()"],
    "pytest": [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"],
}


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a page in one language."""
    return [textwrap.dedent(code) for _, name, code in FENCE.findall(page.read_text()) if name == language]


def commands(page: Path, program: str) -> Iterator[list[str]]:
    """The arguments that a page gives to a program; paths of the clone are those of this one."""
    for line in "\n".join(blocks(page, "console")).splitlines():
        if line.startswith(f"$ {program} "):
            words = shlex.split(line)[2:]
            yield [str(ROOT / word) if word.startswith("tests/") else word for word in words]


def follow(page: Path, program: str, folder: Path) -> list[str]:
    """Write out a page's files, run its commands one after another, and return what they printed."""
    for name, code in NAMED.findall(page.read_text()):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(code)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    printed = []
    for words in commands(page, program):
        done = subprocess.run(
            [*PROGRAMS[program], *words],
            cwd=folder,
            env=environment,
            text=True,
            capture_output=True,
            timeout=seconds(100),
        )
        assert done.returncode == 0, f"{program} {shlex.join(words)}\n{done.stdout}\n{done.stderr}"
        printed.append(done.stdout)
    assert printed, f"{page.name} has no command for {program}"
    return printed


def summary(folder: Path, run: str) -> dict[str, Any]:
    """What came of a run."""
    return json.loads((folder / "runs" / run / "summary.json").read_text())  # type: ignore[no-any-return]


@pytest.mark.long
def test_the_environment_of_the_page_is_learned_and_filmed(tmp_path: Path) -> None:
    follow(EXTEND / "environment.md", "shoal", tmp_path)
    told = summary(tmp_path, "corridor")
    assert told["solved"]
    assert told["best_evaluation"] >= 9.5  # of 9.6; steps at random give 3.2
    assert told["evaluations"][-1]["metrics"]["found"] == 1.0
    assert summary(tmp_path, "short")["best_evaluation"] > 9.7  # fewer steps to the door: the argument was taken
    assert (tmp_path / "corridor.mp4").stat().st_size > 1000


@pytest.mark.long
def test_the_algorithm_of_the_page_solves_cartpole(tmp_path: Path) -> None:
    follow(EXTEND / "algorithm.md", "shoal", tmp_path)
    for run, engine in (("inline", "inline"), ("processes", "processes")):
        told = summary(tmp_path, run)
        assert told["engine"] == engine
        assert told["algorithm"] == "actorcritic"
        assert told["best_evaluation"] >= 475
    told = summary(tmp_path, "dqn")
    assert told["algorithm"] == "dqn"
    assert told["best_evaluation"] >= 475


@pytest.mark.long
def test_the_tests_of_that_algorithm_pass(tmp_path: Path) -> None:
    assert "2 passed" in follow(EXTEND / "algorithm.md", "pytest", tmp_path)[0]


@pytest.mark.long
def test_the_engine_of_the_page_trains_and_keeps_lockstep(tmp_path: Path) -> None:
    follow(EXTEND / "engine.md", "shoal", tmp_path)
    runs = {run: summary(tmp_path, run) for run in ("commands", "turns", "inline")}
    assert all(found["solved"] for found in runs.values())
    assert runs["commands"]["engine"] == runs["turns"]["engine"] == "my_engines:Commands"
    assert runs["turns"]["weights_sha256"] == runs["inline"]["weights_sha256"]


@pytest.mark.long
def test_that_engine_keeps_every_promise_in_its_table(tmp_path: Path) -> None:
    (told,) = follow(EXTEND / "engine.md", "pytest", tmp_path)
    promises = re.findall(r"^\| .* \| yes.* \|$", (EXTEND / "engine.md").read_text(), re.MULTILINE)
    text = (ROOT / "tests" / "engines" / "test_conformance.py").read_text()
    every = re.findall(r"^@(?:EVERY|RAY_TOO)\n(?:@.*\n)*def (\w+)", text, re.MULTILINE)
    assert len(promises) == len(every)
    assert re.search(r"\d+ passed", told)
    assert "failed" not in told


def test_the_worked_example_of_time_prints_what_the_page_shows() -> None:
    page = ROOT / "docs" / "concepts.md"
    (code,), (shown,) = blocks(page, "python"), blocks(page, "text")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True, check=True)
    assert done.stdout == shown


@EVERY_PAGE
def test_python_on_a_page_is_python(page: Path) -> None:
    for code in blocks(page, "python"):
        compile(code, str(page), "exec")


@EVERY_PAGE
def test_links_lead_somewhere(page: Path) -> None:
    text = FENCE.sub("", page.read_text())
    for link in LINK.findall(text):
        if re.match(r"\w+:", link):  # elsewhere on the web
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link}: there is no such file"
        if anchor:
            assert anchor in anchors(target), f"{link}: there is no such heading"


def anchors(page: Path) -> set[str]:
    """The names under which a page's headings can be linked to."""
    headings = HEADING.findall(FENCE.sub("", page.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}
