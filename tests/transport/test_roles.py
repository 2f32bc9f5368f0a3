"""What a certificate is good for: a role, until it is revoked; and a token, until it is replaced."""

from __future__ import annotations

import os
import queue
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from shoal.cli.main import app
from shoal.core.errors import Refused, ServiceLost, SettingsError, ShoalError
from shoal.transport.certificates import issue, revoke, roles_in, rotate
from shoal.transport.session import Gate, meet
from shoal.transport.trust import Terms, fingerprint, read_revoked, read_token
from tests.pace import seconds

HEAD_FIRST = pytest.mark.parametrize("certificates", [False, True], ids=["head listens", "node listens"])
BOTH_LINKS = pytest.mark.parametrize("link", ["websocket", "grpc"])


@pytest.fixture(scope="module")
def issued(folders: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds `both`, `head`, `node` and `none`, an authority's own folder and those it issued in so many roles."""
    root = tmp_path_factory.mktemp("roles")
    shutil.copytree(folders / "here", root / "both")
    for name in ("head", "node"):
        issue(root / "both", root / name, ["127.0.0.1"], roles=(name,))
    issue(root / "both", root / "none", ["127.0.0.1"], roles=())
    return root


@pytest.fixture
def trust(issued: Path, tmp_path: Path) -> Path:
    """A copy of them, to be changed."""
    return Path(shutil.copytree(issued, tmp_path / "trust"))


class Meeting:
    """A gate of a head or of a node, and those who come to it."""

    def __init__(self, stack: ExitStack, terms: Terms, certificates: bool) -> None:
        """Listen."""
        self.refusals: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.terms = terms
        self.gate = Gate(
            "127.0.0.1:0",
            terms,
            lambda _: lambda *_: "hello",
            lambda _, session: session.closed.wait() and session.join(),
            lambda _, reason: self.refusals.put(reason),
            certificates=certificates,
        )
        stack.callback(self.gate.close)

    def come(self, folder: Path, role: Any = None, **changes: Any) -> None:
        """Come as the other side, and ask for something."""
        terms = replace(self.terms, trust=str(folder), role=role or self.terms.other, **changes)
        _, session = meet(self.gate.address, terms, lambda *_: None)
        try:
            assert session.call("hello", seconds=seconds(20)) == "hello"
        finally:
            session.close()
            session.join()


@pytest.fixture
def opened() -> Iterator[Callable[..., Meeting]]:
    with ExitStack() as stack:

        def opened(folder: Path, certificates: bool, link: str = "websocket") -> Meeting:
            role: Any = "node" if certificates else "head"
            return Meeting(stack, Terms(role, str(folder), link=link, role=role), certificates)

        yield opened


def test_folders_say_what_they_are_for(issued: Path) -> None:
    found = {name: roles_in(issued / name / "node.pem") for name in ("both", "head", "node", "none")}
    assert found == {"both": {"head", "node"}, "head": {"head"}, "node": {"node"}, "none": set()}


@BOTH_LINKS
@HEAD_FIRST
def test_machines_of_the_right_roles_meet(opened: Any, issued: Path, certificates: bool, link: str) -> None:
    listening, coming = ("node", "head") if certificates else ("head", "node")
    meeting = opened(issued / listening, certificates, link)
    meeting.come(issued / coming)
    meeting.come(issued / "both")
    opened(issued / "both", certificates, link).come(issued / coming)
    assert meeting.refusals.empty()


@BOTH_LINKS
@HEAD_FIRST
def test_who_listens_in_another_role_is_refused(opened: Any, issued: Path, certificates: bool, link: str) -> None:
    listening, coming = ("head", "head") if certificates else ("node", "node")
    meeting = opened(issued / listening, certificates, link)
    wanted = "node" if certificates else "head"
    with pytest.raises(Refused, match=rf"is for a {listening}; a {wanted} needs one of its own: .*--role {wanted}"):
        meeting.come(issued / coming)
    with pytest.raises(Refused, match="names neither head nor node"):
        opened(issued / "none", certificates, link).come(issued / coming)


@pytest.mark.parametrize(
    ("certificates", "link"), [(False, "websocket"), (True, "websocket"), (True, "grpc")], ids=str
)  # by gRPC a head cannot ask for certificates that need not be there
def test_who_comes_in_another_role_is_refused_and_both_sides_say_why(
    opened: Any, issued: Path, certificates: bool, link: str
) -> None:
    listening = "node" if certificates else "head"
    meeting = opened(issued / listening, certificates, link)
    for folder, told in ((listening, f"is for a {listening}; a {meeting.terms.other} needs"), ("none", "neither head")):
        with pytest.raises((Refused, ServiceLost), match=told):
            meeting.come(issued / folder)
        assert told in meeting.refusals.get(timeout=seconds(20))  # which may come after the other side has heard it
    assert meeting.refusals.empty()


def test_a_head_takes_those_who_pin_it_and_show_nothing(opened: Any, issued: Path) -> None:
    meeting = opened(issued / "head", False)
    pin, token = fingerprint(issued / "head" / "node.pem"), read_token(issued / "head")
    _, session = meet(meeting.gate.address, Terms("node", pin=pin, token=token), lambda *_: None)
    assert session.call("hello", seconds=seconds(20)) == "hello"
    session.close()
    session.join()


@BOTH_LINKS
def test_a_revoked_machine_is_shut_out_from_then_on(opened: Any, trust: Path, link: str) -> None:
    meeting = opened(trust / "node", True, link)
    meeting.come(trust / "head")
    assert revoke(trust / "node", str(trust / "head")) == fingerprint(trust / "head" / "node.pem")
    with pytest.raises((Refused, ServiceLost), match="is revoked"):
        meeting.come(trust / "head")
    meeting.come(trust / "both")
    (trust / "node" / "revoked").write_text("no fingerprint\n")  # rather nobody than one who was to be shut out
    with pytest.raises((Refused, ServiceLost), match="is not a fingerprint"):
        meeting.come(trust / "both")


def test_nobody_goes_to_a_revoked_machine(opened: Any, trust: Path) -> None:
    meeting = opened(trust / "node", True)
    revoke(trust / "head", fingerprint(trust / "node" / "node.pem").replace(":", "").lower())
    with pytest.raises(Refused, match="is revoked"):
        meeting.come(trust / "head")


@BOTH_LINKS
def test_a_new_token_counts_at_once(opened: Any, trust: Path, link: str) -> None:
    meeting = opened(trust / "both", True, link)
    meeting.come(trust / "head")
    before = read_token(trust / "both")
    rotate(trust / "both")
    assert read_token(trust / "both") != before
    with pytest.raises((Refused, ServiceLost), match="the token is not the same on both sides"):
        meeting.come(trust / "head")
    shutil.copy(trust / "both" / "token", trust / "head" / "token")
    meeting.come(trust / "head")


def test_files_are_replaced_whole_and_for_their_owner_only(trust: Path) -> None:
    before = fingerprint(trust / "both" / "node.pem")
    assert rotate(trust / "both") == before
    assert rotate(trust / "both", ["node7.example.org"]) != before
    revoke(trust / "both", before)
    revoke(trust / "both", before)
    assert read_revoked(trust / "both") == {before}
    for name in ("token", "node.key", "node.pem", "revoked"):
        assert os.stat(trust / "both" / name).st_mode & 0o777 == 0o600
    assert sorted(path.name for path in (trust / "both").iterdir()) == [
        "ca.key", "ca.pem", "node.key", "node.pem", "revoked", "token",
    ]  # fmt: skip
    issue(trust / "both", trust / "further")
    assert read_revoked(trust / "further") == {before}  # it knows as well
    with pytest.raises(SettingsError, match="only the machine where the authority was created"):
        rotate(trust / "node")
    with pytest.raises(ShoalError, match="is not a fingerprint"):
        revoke(trust / "both", "nobody")
    with pytest.raises(SettingsError, match="is the certificate of"):
        revoke(trust / "both", str(trust / "both"))


def test_the_command_issues_roles_rotates_and_revokes(trust: Path) -> None:
    def shoal(*words: object) -> str:
        result = CliRunner().invoke(app, ["node", "--folder", str(trust / "both"), *map(str, words)])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.output

    shoal("--init", "--for", trust / "second", "--role", "head")
    assert roles_in(trust / "second" / "node.pem") == {"head"}
    shoal("--init", "--for", trust / "third", "--role", "node,head")
    assert roles_in(trust / "third" / "node.pem") == {"head", "node"}
    with pytest.raises(SettingsError, match=r"unknown role 'haed': choose from head, node; did you mean 'head'\?"):
        shoal("--init", "--for", trust / "fourth", "--role", "haed")
    before = read_token(trust / "both")
    assert "new token" in shoal("--rotate")
    assert read_token(trust / "both") != before
    mark = fingerprint(trust / "second" / "node.pem")
    told = shoal("--revoke", trust / "second")
    assert mark in told
    assert "shoal node --rotate" in told
    assert read_revoked(trust / "both") == {mark}
    with pytest.raises(SettingsError, match="choose what to do"):
        shoal("--rotate", "--init")
