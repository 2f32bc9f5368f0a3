"""The handshake: who knows the token gets in, nobody else does, and garbage is refused in one line."""

from __future__ import annotations

import json
import random
import re
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.errors import Refused, SettingsError
from shoal.transport import strangers, trust
from shoal.transport.trust import DIGEST, HELLO, MAGIC, NAME_LENGTH, REFUSED, handshake, refusal

TOKEN = "a token that both of them know"
FACTS_HERE = {"wire": 1, "architecture": "1a2b" * 16, "shoal": "0.1.0"}
DIFFERENT = "the token is not the same on both sides"


class Side:
    """One side of a handshake: takes messages, and keeps what it sends."""

    def __init__(self, role: Any, name: str, token: str = TOKEN, facts: Any = FACTS_HERE, binding: str = "") -> None:
        self.steps = handshake(role, name, token, facts, binding)
        self.sent: list[bytes] = []
        self.name = ""  # of the other side, once it is done
        self._go_on(next(self.steps))

    def receive(self, message: bytes) -> bytes:
        """Take the other side's next message, and return the answer, if there is one."""
        before = len(self.sent)
        try:
            self._go_on(self.steps.send(message))
        except StopIteration as end:
            self.name = end.value
        return b"".join(self.sent[before:])

    def _go_on(self, message: bytes | None) -> None:
        """Send until it waits for a message."""
        while message is not None:
            self.sent.append(message)
            message = next(self.steps)


def joiner(token: str = TOKEN, facts: Any = FACTS_HERE, binding: str = "") -> Side:
    """The side that joins."""
    return Side("joiner", "node2", token, facts, binding)


def listener(token: str = TOKEN, facts: Any = FACTS_HERE, binding: str = "") -> Side:
    """The side that listens."""
    return Side("listener", "node1", token, facts, binding)


def drive(joining: Side, listening: Side, count: int = 5) -> list[bytes]:
    """Carry a number of messages to and fro as a link does; returns them."""
    assert listening.sent == []
    messages, sides = joining.sent[:1], [listening, joining]
    for _ in range(count - 1):
        messages.append(sides[0].receive(messages[-1]))
        sides.reverse()
    return messages


def stage(number: int) -> Side:
    """A side that waits: a listener for hello (0), proof (2) or facts (4), or a joiner for hello (1) or facts (3)."""
    joining, listening = joiner(), listener()
    drive(joining, listening, max(number, 1))
    return joining if number % 2 else listening


def test_the_right_token_is_accepted_on_both_sides() -> None:
    joining, listening = joiner(), listener()
    hello, answer, proof, facts, last = drive(joining, listening)
    assert listening.receive(last) == b""
    assert (joining.name, listening.name) == ("node1", "node2")
    assert (hello[HELLO.size :], answer[HELLO.size :], len(proof)) == (b"node2", b"node1", DIGEST)
    assert json.loads(facts[DIGEST:]) == json.loads(last[DIGEST:]) == FACTS_HERE


def test_every_handshake_has_proofs_of_its_own() -> None:
    proofs = [message[:DIGEST] for _ in range(3) for message in drive(joiner(), listener())]
    assert len(set(proofs)) == 15


def test_neither_the_token_nor_anything_secret_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    secrets, real = [], trust.hmac.digest

    def digest(key: bytes, *rest: Any) -> bytes:
        secrets.append(key)
        return real(key, *rest)

    monkeypatch.setattr(trust.hmac, "digest", digest)
    sent = b"".join(drive(joiner(), listener()))
    assert TOKEN.encode() in secrets
    for secret in secrets:
        assert secret not in sent
        assert secret.hex().encode() not in sent


@pytest.mark.parametrize("other", ["another token of some length", TOKEN + " ", TOKEN.upper()])
def test_a_wrong_token_is_refused_before_the_listener_says_anything(other: str) -> None:
    joining, listening = joiner(other), listener()
    *_, hello, proof = drive(joining, listening, 3)
    assert len(hello) == HELLO.size + len("node1")  # a stranger gets no facts, and no proof to try tokens on
    with pytest.raises(Refused, match=DIFFERENT):
        listening.receive(proof)


def test_a_listener_with_another_token_is_refused_before_the_joiner_sends_facts() -> None:
    joining, listening = joiner(), listener("another token of some length")
    drive(joining, listening, 3)
    let_in = joiner("another token of some length")
    facts = drive(let_in, listener("another token of some length"), 4)[-1]  # of a listener that lets anyone in
    with pytest.raises(Refused, match=DIFFERENT):
        joining.receive(facts)
    assert (joining.name, len(joining.sent)) == ("", 2)


@pytest.mark.parametrize("token", ["", "short"])
def test_without_a_token_there_is_no_handshake(token: str) -> None:
    with pytest.raises(SettingsError, match="the token has"):
        drive(joiner(token), listener(token))


def test_a_proof_cannot_be_left_out_or_skipped() -> None:
    for message in (b"", bytes(DIGEST), bytes(DIGEST - 1), bytes(DIGEST + 1), *drive(joiner(), listener())):
        with pytest.raises(Refused):
            stage(2).receive(message)
    joining, listening = joiner(), listener()
    drive(joining, listening, 2)
    early = joining.receive(listening.sent[0])  # the proof, which the joiner of the same handshake follows by facts
    listening.receive(early)
    with pytest.raises(Refused, match="facts cannot be read"):
        listening.receive(early)  # a proof where facts are due
    assert listening.name == ""


def test_facts_before_the_proof_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    joining, listening = joiner(), listener()
    drive(joining, listening, 2)
    real = trust.hmac.digest
    more = {b"joiner:": b"joiner:{}"}
    monkeypatch.setattr(trust.hmac, "digest", lambda key, data, kind: real(key, more.get(data, data), kind))
    proof = joining.receive(listening.sent[0])  # a good one, over facts that are not due yet
    monkeypatch.undo()
    with pytest.raises(Refused, match="facts came before they were due"):
        listening.receive(proof + b"{}")


def test_a_recorded_handshake_is_refused() -> None:
    hello, answer, proof, facts, _ = drive(joiner(), listener())
    listening = listener()
    listening.receive(hello)
    with pytest.raises(Refused, match=DIFFERENT):
        listening.receive(proof)
    joining = joiner()
    joining.receive(answer)
    with pytest.raises(Refused, match=DIFFERENT):
        joining.receive(facts)


def test_a_message_sent_back_to_its_sender_is_refused() -> None:
    joining = joiner()
    with pytest.raises(Refused, match="both sides are joiners"):
        joining.receive(joining.sent[0])
    joining, listening = joiner(), listener()
    proof = drive(joining, listening, 3)[-1]
    with pytest.raises(Refused, match=DIFFERENT):
        joining.receive(proof)
    facts = listening.receive(proof)
    with pytest.raises(Refused, match=DIFFERENT):
        listening.receive(facts)  # its own proof over its own facts


def test_one_who_claims_the_other_role_gets_no_proof_to_pass_on() -> None:
    """A stranger opens a connection to a listener and answers a joiner with what it hears there, roles exchanged."""
    joining, victim = joiner(), listener()
    _, hello, proof = drive(joining, victim, 3)
    with pytest.raises(Refused, match="both sides are listeners"):
        listener().receive(hello)
    role = HELLO.size - 33
    assert hello[role : role + 1] == b"l"
    other = listener()
    other.receive(hello[:role] + b"j" + hello[role + 1 :])
    with pytest.raises(Refused, match=DIFFERENT):
        other.receive(proof)


def test_one_in_between_is_refused_by_the_binding() -> None:
    joining, listening = joiner(binding="AB:CD"), listener(binding="12:34")  # each sees another certificate
    proof = drive(joining, listening, 3)[-1]
    with pytest.raises(Refused, match="somebody is intercepting the connection"):
        listening.receive(proof)
    joining, listening = joiner(binding="AB:CD"), listener(binding="AB:CD")
    listening.receive(drive(joining, listening)[-1])
    assert listening.name == "node2"


@pytest.mark.parametrize("which", ["name", "nonce"])
@pytest.mark.parametrize("whose", [0, 1])
def test_a_hello_altered_on_the_way_is_refused(which: str, whose: int) -> None:
    def altered(hello: bytes) -> bytes:
        name = HELLO.size
        return hello[:name] + b"other" if which == "name" else hello[: name - 32] + bytes(32) + hello[name:]

    joining, listening = joiner(), listener()
    first = joining.sent[0]
    second = listening.receive(altered(first) if whose == 0 else first)
    proof = joining.receive(altered(second) if whose == 1 else second)
    with pytest.raises(Refused, match=DIFFERENT):
        listening.receive(proof)


@pytest.mark.parametrize("last", [False, True])
def test_facts_altered_on_the_way_are_refused(last: bool) -> None:
    joining, listening = joiner(), listener()
    facts = drive(joining, listening, 5 if last else 4)[-1]
    receiver = listening if last else joining
    altered = facts.replace(b'"wire": 1', b'"wire": 2')
    assert altered != facts
    with pytest.raises(Refused, match=DIFFERENT):
        receiver.receive(altered)
    assert receiver.name == ""


def differing(here: Any, there: Any) -> tuple[str, str]:
    """What a joiner and a listener say where their facts differ."""
    joining, listening = joiner(facts=here), listener(facts=there)
    theirs = drive(joining, listening, 4)[-1]
    with pytest.raises(Refused) as joined:
        joining.receive(theirs)
    with pytest.raises(Refused) as listened:
        listening.receive(joining.sent[-1])
    assert (joining.name, listening.name) == ("", "")
    return str(joined.value), str(listened.value)


def test_facts_that_differ_are_named_with_both_values_on_both_sides() -> None:
    here, there = differing({"wire": 2, "architecture": "3c4d" * 16, "shoal": "0.1.0", "extra": "yes"}, {**FACTS_HERE})
    assert here == (
        "architecture: here 3c4d3c4d3c4d…, there 1a2b1a2b1a2b…; extra: here yes, there nothing; wire: here 2, there 1"
    )
    assert there.endswith("wire: here 1, there 2")


def test_long_facts_that_differ_late_are_shown_whole() -> None:
    here, _ = differing({"hash": "a" * 40 + "1"}, {"hash": "a" * 40 + "2"})
    assert here == f"hash: here {'a' * 40}1, there {'a' * 40}2"


def test_no_facts_are_facts_too() -> None:
    joining, listening = joiner(facts={}), listener(facts={})
    listening.receive(drive(joining, listening)[-1])
    assert (joining.name, listening.name) == ("node1", "node2")


BAD_FACTS: list[Any] = [
    [], 7, None, "text", {"a": "new\nline"}, {"a": 10**4000}, {"a": [1]}, {"\x1b[2J": "\x1b[2J"},
    {"a" * 4000: "b" * 4000}, {f"a{number}": 1 for number in range(1000)},
]  # fmt: skip


@pytest.mark.parametrize("facts", BAD_FACTS, ids=lambda facts: repr(facts)[:20])
def test_odd_facts_of_one_who_knows_the_token_are_refused_in_one_short_line(facts: Any) -> None:
    for number in (3, 4):
        sides = [
            joiner(facts=FACTS_HERE if number == 3 else facts),
            listener(facts=facts if number == 3 else FACTS_HERE),
        ]
        drive(*sides, 4)
        if number == 4:
            with suppress(Refused, AttributeError, TypeError):  # it has sent them, whatever it thinks of ours
                sides[0].receive(sides[1].sent[-1])
        with pytest.raises(Refused) as caught:
            sides[number - 3].receive(sides[4 - number].sent[-1])
        assert re.fullmatch(r"[ -~…]{5,600}", str(caught.value))
        assert not sides[number - 3].name


def test_nothing_is_taken_after_the_end() -> None:
    joining, listening = joiner(), listener()
    last = drive(joining, listening)[-1]
    listening.receive(last)
    for side in (joining, listening):
        side.name = ""
        side.receive(last)
        assert not side.name


def test_a_refused_message_cannot_be_repaired() -> None:
    joining, listening = joiner(), listener()
    proof = drive(joining, listening, 3)[-1]
    with pytest.raises(Refused):
        listening.receive(b"")
    assert listening.receive(proof) == b""
    assert not listening.name


def test_another_protocol_is_named_whatever_else_its_hello_holds() -> None:
    for rest in (bytes(33), bytes(1000), b"?" * 33):
        with pytest.raises(Refused, match="protocol: here 1, there 7"):
            listener().receive(MAGIC + b"\x00\x07" + rest)


def test_the_other_side_is_told_why() -> None:
    joining, listening = joiner("another token of some length"), listener()
    proof = drive(joining, listening, 3)[-1]
    with pytest.raises(Refused) as caught:
        listening.receive(proof)
    with pytest.raises(Refused, match="the other side says: the token is not the same on both sides"):
        joining.receive(refusal(str(caught.value)))


@pytest.mark.parametrize("reason", [b"", b"\x1b[2J", b"a" * 10_000, b"\xff\xfe", "é…".encode(), b"a\nb"])
def test_a_reason_is_shown_as_one_line_that_is_safe_to_print(reason: bytes) -> None:
    for number in (0, 1, 2, 3, 4):
        with pytest.raises(Refused, match=r"^the other side says: [ -~]{0,200}$"):
            stage(number).receive(REFUSED + reason)


def test_any_refusal_can_be_sent() -> None:
    for words in ("", "a\nb", "é…", "x" * 1000):
        message = refusal(words)
        assert len(message) < strangers.LIMIT
        with pytest.raises(Refused, match=r"^the other side says: "):
            joiner().receive(message)


@pytest.mark.parametrize("name", ["", "x" * (NAME_LENGTH + 1), "a\nb", "é", " a"])
def test_names_of_ones_own_are_checked(name: str) -> None:
    with pytest.raises(SettingsError, match="is not a name for a machine"):
        Side("joiner", name)


@pytest.mark.parametrize("name", [b"", b"x" * (NAME_LENGTH + 1), b"a\nb", "é".encode(), b"\x1b[2J", b" a"])
def test_names_of_others_are_checked(name: bytes) -> None:
    for number in (0, 1):
        hello = drive(joiner(), listener())[number][: HELLO.size] + name
        with pytest.raises(Refused, match="malformed handshake"):
            stage(number).receive(hello)


def test_every_message_is_short() -> None:
    facts = {f"{'a' * 30}{number:02}": "\\" * 128 for number in range(16)}
    messages = drive(Side("joiner", '"' * 64, facts=facts), Side("listener", '"' * 64, facts=facts))
    assert max(len(message) for message in messages) < strangers.LIMIT / 5


VALID = drive(joiner(), listener())
MESSAGES = st.binary(max_size=200) | st.sampled_from(VALID)
PIECES = st.lists(st.binary(max_size=40) | st.sampled_from([*VALID, MAGIC, REFUSED, bytes(32)]), max_size=4).map(
    b"".join
)


@given(st.integers(0, 4), MESSAGES | PIECES)
def test_anything_at_all_is_refused_in_one_line(number: int, message: bytes) -> None:
    side = stage(number)
    try:
        answer = side.receive(message)
    except Refused as error:
        assert re.fullmatch(r"[ -~…]{5,600}", str(error))  # noqa: PT017  # each of them is looked at
        return
    # Only a hello, which claims nothing yet, may be taken from a stranger; it is answered without any fact.
    assert number < 2
    assert message.startswith(MAGIC)
    assert b"wire" not in answer
    assert not side.name


def mutate(chance: random.Random, message: bytes) -> bytes:
    """A valid message with a few things wrong."""
    changed = bytearray(message)
    for _ in range(chance.randrange(1, 4)):
        place = chance.randrange(len(changed) + 1)
        match chance.randrange(5):
            case 0:
                del changed[place : place + chance.randrange(1, 40)]
            case 1:
                changed[place:place] = chance.randbytes(chance.randrange(1, 40))
            case 2 if place < len(changed):
                changed[place] ^= 1 << chance.randrange(8)
            case 3:
                changed[place : place + 32] = bytes(32)
            case _:
                changed[place:] = chance.choice(VALID)[place:]
    return bytes(changed)


def test_twenty_thousand_mutated_messages_let_nobody_in() -> None:
    chance, taken = random.Random(0), 0
    for _ in range(20_000):
        number = chance.randrange(5)
        side, message = stage(number), mutate(chance, chance.choice(VALID))
        try:
            answer = side.receive(message)
        except Refused:
            pass
        else:
            taken += 1
            assert number < 2
            assert b"wire" not in answer
        assert not side.name
    assert 0 < taken < 8000
