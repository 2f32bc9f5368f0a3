"""The documentation says what the code does: settings, commands, options, messages, links."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import typer

from shoal.algorithms import ALGORITHMS
from shoal.cli.main import app, main
from shoal.cli.reference import reference
from shoal.engines import ENGINES
from shoal.envs import TOYS
from shoal.experiment import Experiment
from shoal.services import STORES

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
SHOAL = typer.main.get_command(app)
COMMANDS = SHOAL.commands  # type: ignore[attr-defined]


def strings(file: Path) -> Iterator[str]:
    """Every piece of text in a file that a user may get to see: no docstrings."""
    tree = ast.parse(file.read_text())
    silent = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in silent:
            yield node.value


def entries() -> list[tuple[str, str]]:
    """The entries of the troubleshooting page: heading and what stands below it."""
    text = (DOCS / "troubleshooting.md").read_text()
    parts = re.split(r"^###? (.+)$", text, flags=re.MULTILINE)
    return [*zip(parts[1::2], parts[2::2], strict=True)]


MESSAGES = [(heading.strip("`"), body) for heading, body in entries() if heading.startswith("`")]


def test_settings_are_those_of_the_code() -> None:
    fresh = (DOCS / "settings.md").read_text() == reference()
    assert fresh, "docs/settings.md is stale; refresh it with: python -m shoal.cli.reference > docs/settings.md"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_page_that_names_its_options(name: str) -> None:
    page = DOCS / "commands" / f"{name}.md"
    assert page.exists(), f"write {page.relative_to(ROOT)}"
    rows = re.findall(r"^\| `(.+?)` \|", page.read_text(), re.MULTILINE)  # the table of arguments and options
    named = {word.strip(".").lower() for row in rows for word in row.split()}
    for parameter in COMMANDS[name].params:
        is_option = parameter.opts[0].startswith("-")
        words = parameter.opts if is_option else [(parameter.metavar or parameter.name).strip(".").lower()]
        for word in words:
            assert word in named, f"{page.relative_to(ROOT)} says nothing of {word}"


def test_the_page_of_benchmarks_names_each_with_its_options() -> None:
    page = (DOCS / "commands" / "bench.md").read_text()
    for name, command in COMMANDS["bench"].commands.items():
        assert f"`{name}`" in page, f"docs/commands/bench.md says nothing of {name}"
        for option in (word for parameter in command.params for word in parameter.opts if word.startswith("--")):
            assert f"`{option}" in page, f"docs/commands/bench.md says nothing of {option}"


def test_no_page_is_about_a_command_that_is_not_there() -> None:
    assert {page.stem for page in (DOCS / "commands").glob("*.md")} == {*COMMANDS}


def test_what_comes_with_shoal_is_listed() -> None:
    page = (DOCS / "commands" / "list.md").read_text()
    for name in (*ALGORITHMS, *ENGINES, *STORES, *TOYS):
        assert re.search(rf"^  {name} ", page, re.MULTILINE), f"docs/commands/list.md lacks {name}: paste `shoal list`"


def test_messages_are_quoted_at_all() -> None:
    assert len(MESSAGES) > 20


@pytest.mark.parametrize(("message", "body"), MESSAGES, ids=[message for message, _ in MESSAGES])
def test_messages_exist(message: str, body: str) -> None:
    """A heading in backticks is the fixed part of a message: it stands in the code, and in the example below it."""
    assert any(message in text for file in (ROOT / "shoal").rglob("*.py") for text in strings(file))
    quoted = re.search(r"```text\n(.*?)```", body, re.DOTALL)
    assert quoted
    assert message in quoted[1]


def typed() -> Iterator[tuple[str, list[str]]]:
    """Every command that a user is told to type, or that `make` types: where, and its words."""
    plain = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "Makefile")]
    programs = r"(?:\$\(BIN\)/)?((?:shoal|make)\b.*)"
    for page, prefix in [*((page, r"\s*") for page in plain), *((page, r"\$ ") for page in DOCS.rglob("*.md"))]:
        for line in page.read_text().splitlines():
            if match := re.match(prefix + programs, line):
                alone = re.split(r" (?:2?>|\||&|…)", match[1])[0]
                yield str(page.relative_to(ROOT)), shlex.split(alone, comments=True)


def test_commands_that_are_written_down_can_be_typed() -> None:
    targets = re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    found = [*typed()]
    assert len(found) > 60
    for where, words in found:
        told = f"{where}: {' '.join(words)}"
        if words[0] == "make":
            assert {*words[1:]} <= {*targets}, told
        else:
            parse(SHOAL, words[1:], told)


def parse(command: Any, words: list[str], told: str) -> None:
    """Have the command line read words, down to the last subcommand, without running anything."""
    while hasattr(command, "commands"):
        assert words, told
        assert words[0] in command.commands, told
        command, words = command.commands[words[0]], words[1:]
    try:
        command.make_context("shoal", [*words])
    except click.exceptions.ClickException as error:
        pytest.fail(f"{told}\n{error.format_message()}")


STATEFUL = re.compile(r"runs/|/home/|latest|maze|node2")  # of examples that need more than the clone


def outputs() -> Iterator[tuple[str, list[str], list[str]]]:
    """Commands with the output that a page shows, of those that only print: page, words, lines."""
    for page in sorted(DOCS.rglob("*.md")):
        for block in re.findall(r"^```text\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE):
            for command, output in re.findall(r"^\$ shoal (.*)\n((?:(?!\$ ).*\n)+)", block, re.MULTILINE):
                prints = output.startswith("error: ") or re.match("(list|config)( [^|>]*)?$", command)
                if prints and not STATEFUL.search(command + output):
                    yield page.name, shlex.split(command), output.strip().splitlines()


OUTPUTS = [*outputs()]


@pytest.mark.parametrize(("page", "words", "shown"), OUTPUTS, ids=[f"{page}: {' '.join(w)}" for page, w, _ in OUTPUTS])
def test_outputs_are_what_the_program_prints(
    page: str, words: list[str], shown: list[str], monkeypatch: pytest.MonkeyPatch, capfd: Any, tmp_path: Path
) -> None:
    """Lines may be left out where the page shows `...`; the numbers of `shoal list` depend on what is installed."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["shoal", *words])
    with pytest.raises(SystemExit):
        main()
    told = capfd.readouterr()
    printed, wanted = "\n".join([*told.out.splitlines(), *told.err.splitlines()]), "\n".join(shown)
    if words[0] == "list":
        printed, wanted = (re.sub(r"\d+ (from|Atari)", r"N \1", text) for text in (printed, wanted))
    pieces = [re.escape(piece.strip("\n")) for piece in re.split(r"^ *\.\.\.$", wanted, flags=re.MULTILINE)]
    assert re.fullmatch("\n(?:.*\n)*?".join(pieces) + "\n?", printed + "\n"), printed


def test_outputs_are_found() -> None:
    assert len(OUTPUTS) > 10


def test_settings_that_are_listed_in_errors_are_those_of_an_experiment() -> None:
    for page in DOCS.rglob("*.md"):
        for listed in re.findall(
            r"unknown setting; allowed: (environment, .*?)(?:;|$)", page.read_text(), re.MULTILINE
        ):
            assert listed.split(", ") == [*Experiment.model_fields], page.name


def test_no_page_has_two_versions_of_a_passage() -> None:
    for page in [*DOCS.rglob("*.md"), *ROOT.glob("*.md"), *(ROOT / "configs").glob("*.yaml")]:
        assert not re.search(r"^(<{7} |>{7} |={7}$)", page.read_text(), re.MULTILINE), page.relative_to(ROOT)


def test_pictures_are_small() -> None:
    for picture in (DOCS / "pictures").iterdir():
        assert picture.stat().st_size < 100_000, picture.name


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="the docs extra is not installed: pip install 'shoal[docs]'")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path / "site")]
    built = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
