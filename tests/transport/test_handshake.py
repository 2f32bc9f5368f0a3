"""The handshake: who knows the token gets in, nobody else does, and garbage is refused in one line."""

from __future__ import annotations

import copy
import json
import random
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core import wire
from shoal.core.errors import Refused, SettingsError
from shoal.transport.handshake import FACT_LENGTH, FACTS, MESSAGE_LIMIT, Handshake, Session, refusal

TOKEN = "a token that both of them know"
FACTS_HERE = {"wire": 1, "architecture": "1a2b" * 16, "shoal": "0.1.0"}


def joiner(token: str = TOKEN, facts: dict[str, Any] = FACTS_HERE, binding: str = "") -> Handshake:
    """The side that joins."""
    return Handshake("joiner", "node2", token, facts, binding)


def listener(token: str = TOKEN, facts: dict[str, Any] = FACTS_HERE, binding: str = "") -> Handshake:
    """The side that listens."""
    return Handshake("listener", "node1", token, facts, binding)


def drive(joining: Handshake, listening: Handshake) -> list[Any]:
    """Carry messages to and fro as a link does, over the wire format; returns them."""
    told, sides = [joining.begin()], [listening, joining]
    assert listening.begin() is None
    while told[-1] is not None:
        told.append(sides[0].receive(wire.decode(b"".join(wire.encode(told[-1])))))
        sides.reverse()
    return told[:-1]


def test_the_right_token_opens_a_session_on_both_sides() -> None:
    joining, listening = joiner(), listener()
    told = drive(joining, listening)
    assert [message["kind"] for message in told] == ["hello", "hello", "proof", "facts", "facts"]
    assert joining.done
    assert listening.done
    here, there = joining.session(), listening.session()
    assert (here.name, there.name) == ("node1", "node2")
    for payload in (b"one", b"two"):
        assert there.guard.open(here.guard.seal(payload)) == payload
        assert here.guard.open(there.guard.seal(payload)) == payload


def test_sessions_have_keys_of_their_own() -> None:
    def session() -> tuple[Session, Session]:
        joining, listening = joiner(), listener()
        drive(joining, listening)
        return joining.session(), listening.session(limit=100)

    (sender, _), (_, other) = session(), session()
    with pytest.raises(Refused, match="not of this session"):
        other.guard.open(sender.guard.seal(b"payload"))
    assert other.guard.limit == 100


def test_neither_the_token_nor_anything_secret_is_told() -> None:
    joining, listening = joiner(), listener()
    text = json.dumps(drive(joining, listening))
    assert TOKEN not in text
    assert TOKEN.encode().hex() not in text
    assert joining._secret.hex() not in text


@pytest.mark.parametrize("other", ["another token of some length", TOKEN + " ", TOKEN.upper()])
def test_a_wrong_token_is_refused_before_the_listener_tells_anything(other: str) -> None:
    joining, listening = joiner(other), listener()
    hello = listening.receive(joining.begin())
    assert hello is not None
    assert set(hello) == {"kind", "protocol", "role", "name", "nonce"}  # no facts for a stranger
    with pytest.raises(Refused, match="the token is not the same on both sides"):
        listening.receive(joining.receive(hello))


def test_a_listener_with_another_token_is_refused_before_the_joiner_tells_anything() -> None:
    joining, listening = joiner(), listener("another token of some length")
    joining.receive(listening.receive(joining.begin()))
    listening._due = "facts"
    with pytest.raises(Refused, match="the token is not the same on both sides"):
        joining.receive(listening._tell_facts())  # of a listener that let anyone in
    assert not joining.done


@pytest.mark.parametrize("token", ["", "short"])
def test_without_a_token_there_is_no_handshake(token: str) -> None:
    with pytest.raises(SettingsError, match="the token has"):
        joiner(token)


def test_a_proof_cannot_be_left_out() -> None:
    for message in ({"kind": "proof"}, {"kind": "proof", "proof": ""}, {"kind": "proof", "proof": None}, {}):
        listening = listener()
        listening.receive(joiner().begin())
        with pytest.raises(Refused):
            listening.receive(message)
    listening = listener()
    listening.receive(joiner().begin())
    with pytest.raises(Refused, match="proof was due"):  # nor skipped
        listening.receive({"kind": "facts", "facts": FACTS_HERE, "proof": "00" * 32})


def test_a_recorded_handshake_is_refused() -> None:
    hello, _, proof, _, _ = drive(joiner(), listener())
    listening = listener()
    listening.receive(hello)
    with pytest.raises(Refused, match="the token is not the same"):
        listening.receive(proof)
    _, hello, _, facts, _ = drive(joiner(), listener())
    joining = joiner()
    joining.receive(hello)
    with pytest.raises(Refused, match="the token is not the same"):
        joining.receive(facts)


def test_a_message_sent_back_to_its_sender_is_refused() -> None:
    joining = joiner()
    hello = joining.begin()
    with pytest.raises(Refused, match="both sides are joiners"):
        joining.receive(hello)
    joining, listening = joiner(), listener()
    joining.receive(listening.receive(joining.begin()))
    with pytest.raises(Refused, match="the token is not the same"):
        joining.receive(joining._tell_facts())  # its own proof over its own facts


def test_one_who_claims_the_other_role_gets_no_proof_to_pass_on() -> None:
    """A stranger opens a connection to a listener and answers a joiner with what it hears there, roles exchanged."""
    joining, victim = joiner(), listener()
    hello = victim.receive({**joining.begin(), "role": "joiner"})  # type: ignore[dict-item]
    proof = joining.receive(hello)
    with pytest.raises(Refused, match="the token is not the same"):
        joining.receive({"kind": "facts", "facts": {}, "proof": proof["proof"]})  # type: ignore[index]
    other = listener()
    with pytest.raises(Refused, match="both sides are listeners"):
        other.receive(hello)


def test_a_third_in_between_is_refused_by_the_binding() -> None:
    joining, listening = joiner(binding="AB:CD"), listener(binding="12:34")  # each sees another certificate
    proof = joining.receive(listening.receive(joining.begin()))
    with pytest.raises(Refused, match="a third is listening in between"):
        listening.receive(proof)
    drive(joiner(binding="AB:CD"), listener(binding="AB:CD"))


@pytest.mark.parametrize("which", ["name", "nonce"])
@pytest.mark.parametrize("whose", [0, 1])
def test_a_hello_altered_on_the_way_is_refused(which: str, whose: int) -> None:
    joining, listening = joiner(), listener()
    change = {"name": "other", "nonce": "00" * 32}
    first = joining.begin()
    assert first is not None
    second = listening.receive({**first, which: change[which]} if whose == 0 else first)
    assert second is not None
    proof = joining.receive({**second, which: change[which]} if whose == 1 else second)
    with pytest.raises(Refused, match="the token is not the same"):
        listening.receive(proof)


@pytest.mark.parametrize("last", [False, True])
def test_facts_altered_on_the_way_are_refused(last: bool) -> None:
    joining, listening = joiner(), listener()
    proof = joining.receive(listening.receive(joining.begin()))
    facts = listening.receive(proof)
    receiver = joining
    if last:
        facts, receiver = joining.receive(facts), listening
    assert facts is not None
    with pytest.raises(Refused, match="the token is not the same"):
        receiver.receive({**facts, "facts": {**FACTS_HERE, "wire": 2}})
    assert not receiver.done


def test_facts_that_differ_are_named_with_both_values_on_both_sides() -> None:
    joining = joiner(facts={"wire": 2, "architecture": "3c4d" * 16, "shoal": "0.1.0", "extra": "yes"})
    listening = listener()
    drive(joining, listening)
    with pytest.raises(Refused) as here:
        joining.session()
    assert str(here.value) == (
        "architecture: here 3c4d3c4d3c4d…, there 1a2b1a2b1a2b…; extra: here yes, there nothing; wire: here 2, there 1"
    )
    with pytest.raises(Refused, match=r"wire: here 1, there 2$"):
        listening.session()


def test_long_facts_that_differ_late_are_shown_whole() -> None:
    joining, listening = joiner(facts={"hash": "a" * 40 + "1"}), listener(facts={"hash": "a" * 40 + "2"})
    drive(joining, listening)
    with pytest.raises(Refused, match=rf"^hash: here {'a' * 40}1, there {'a' * 40}2$"):
        joining.session()


def test_no_facts_are_facts_too() -> None:
    joining, listening = joiner(facts={}), listener(facts={})
    drive(joining, listening)
    assert joining.session().name == "node1"


def test_there_is_no_session_before_the_end_and_no_message_after_it() -> None:
    joining, listening = joiner(), listener()
    for side in (joining, listening):
        with pytest.raises(Refused, match="not done"):
            side.session()
    told = drive(joining, listening)
    for side in (joining, listening):
        with pytest.raises(Refused, match="the handshake is over"):
            side.receive(told[-1])


def test_a_refused_message_cannot_be_mended() -> None:
    joining, listening = joiner(), listener()
    proof = joining.receive(listening.receive(joining.begin()))
    with pytest.raises(Refused, match="malformed"):
        listening.receive({})
    with pytest.raises(Refused, match="the handshake is over"):
        listening.receive(proof)
    with pytest.raises(Refused, match="not done"):
        listening.session()


def test_another_protocol_is_named_whatever_else_its_hello_holds() -> None:
    with pytest.raises(Refused, match="protocol: here 1, there 7"):
        listener().receive({"kind": "hello", "protocol": 7, "new": "field"})


def test_the_other_side_is_told_why() -> None:
    joining, listening = joiner("another token of some length"), listener()
    proof = joining.receive(listening.receive(joining.begin()))
    with pytest.raises(Refused) as caught:
        listening.receive(proof)
    with pytest.raises(Refused, match="the other side says: the token is not the same on both sides"):
        joining.receive(refusal(caught.value))


@pytest.mark.parametrize("reason", [None, 7, "", "\x1b[2J", "a" * 257, b"x", ["x"]])
def test_a_reason_is_shown_only_where_a_terminal_bears_it(reason: object) -> None:
    with pytest.raises(Refused, match=r"^the other side says: refused$"):
        joiner().receive({"kind": "refused", "reason": reason})


def test_any_refusal_can_be_told() -> None:
    for words in ("", "a\nb", "é…", "x" * 1000):
        with pytest.raises(Refused, match=r"^the other side says: (?!refused$)"):
            joiner().receive(refusal(Refused(words)))


@pytest.mark.parametrize("name", ["", "x" * 65, "a\nb", "é", 7])
def test_names_of_ones_own_are_checked(name: Any) -> None:
    with pytest.raises(SettingsError, match="is no name of a machine"):
        Handshake("joiner", name, TOKEN, {})


BAD_FACTS: list[Any] = [
    {"a": 1.5},
    {"a": None},
    {"a": True},
    {"a": ""},
    {"a": "x" * (FACT_LENGTH + 1)},
    {"a": "new\nline"},
    {"a": 1 << 63},
    {"a": 10**5000},  # cannot even be printed
    {"a": [1]},
    {"$": 1},
    {"": 1},
    {7: 1},
    {"a" * 33: 1},
    {f"a{number}": 1 for number in range(FACTS + 1)},
]


@pytest.mark.parametrize("facts", BAD_FACTS, ids=lambda facts: repr(list(facts))[:20])
def test_facts_are_short_and_few(facts: Any) -> None:
    with pytest.raises(SettingsError, match="malformed facts"):
        joiner(facts=facts)
    with pytest.raises(Refused, match="malformed facts"):
        stage(1).receive({"kind": "facts", "facts": facts, "proof": "00" * 32})


def test_every_message_fits_into_the_limit() -> None:
    facts: dict[str, Any] = {f"{'a' * 30}{number:02}": "\\" * FACT_LENGTH for number in range(FACTS)}
    told = drive(
        Handshake("joiner", '"' * 64, TOKEN, facts),
        Handshake("listener", '"' * 64, TOKEN, facts),
    )
    longest = max(len(json.dumps(message)) for message in told)
    assert MESSAGE_LIMIT / 2 < longest <= MESSAGE_LIMIT
    assert len(json.dumps(refusal(Refused('"' * 1000)))) <= MESSAGE_LIMIT


def stage(number: int) -> Handshake:
    """A side that waits: a listener for hello (0), proof (3) or facts (4), or a joiner for hello (2) or facts (1)."""
    joining, listening = joiner(), listener()
    if number == 0:
        return listening
    if number == 2:
        return joining
    hello = listening.receive(joining.begin())
    if number == 3:
        return listening
    proof = joining.receive(hello)
    if number == 1:
        return joining
    listening.receive(proof)
    return listening


VALID = drive(joiner(), listener())
SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=80) | st.binary(max_size=40)
    | st.sampled_from([1 << 70, np.arange(3), np.float32(1), np.str_("hello"), "\ud800", "00" * 32])
)  # fmt: skip
KEYS = st.sampled_from(["kind", "protocol", "role", "name", "nonce", "proof", "facts", "reason", "$"])
NESTED = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS | st.text(), inner, max_size=5),
    max_leaves=8,
)


@given(st.integers(0, 4), NESTED | st.dictionaries(KEYS | st.integers() | st.none(), NESTED, max_size=6))
def test_anything_at_all_is_refused_in_one_line(number: int, message: Any) -> None:
    with pytest.raises(Refused) as caught:
        stage(number).receive(message)
    assert re.fullmatch(r"[ -~…]{5,600}", str(caught.value))


@given(st.integers(0, 4), st.sampled_from(VALID), KEYS, NESTED)
def test_a_message_with_one_wrong_field_is_refused(number: int, message: Any, key: str, value: Any) -> None:
    changed = {**message, key: value}
    side = stage(number)
    try:
        answer = side.receive(changed)
    except Refused:
        return
    # Only a hello, which claims nothing yet, may be taken from a stranger; it is answered without any fact.
    assert changed["kind"] == "hello"
    assert answer is not None
    assert "facts" not in answer


ODD = [np.arange(3), np.array(["hello"]), np.str_("hello"), [], {}, {"a": 1}, {1}, b"hello", None, True, 1.0, 10**5000]


@pytest.mark.parametrize("number", range(5))
def test_a_field_of_another_type_is_refused(number: int) -> None:
    message = VALID[{0: 0, 1: 3, 2: 1, 3: 2, 4: 4}[number]]  # the one that this side waits for
    for key in message:
        for value in ODD:
            with pytest.raises(Refused, match=r"malformed|the token is not the same"):
                stage(number).receive({**message, key: value})


def mutate(chance: random.Random, message: Any) -> Any:
    """A valid message with a few things wrong."""
    changed = copy.deepcopy(message)
    values = [None, True, -1, 0, 2, 10**5000, 1.5, "", "x", "00" * 32, "0" * 63, "g" * 64, b"", [], {}, {"a": 1}, "\n"]
    for _ in range(chance.randrange(1, 4)):
        key = chance.choice([*changed, "extra"])
        match chance.randrange(4):
            case 0:
                changed.pop(key, None)
            case 1:
                changed[key] = chance.choice(values)
            case 2 if type(changed.get(key)) is str and changed[key]:
                place = chance.randrange(len(changed[key]))
                changed[key] = changed[key][:place] + chr(chance.randrange(300)) + changed[key][place + 1 :]
            case _:
                other = chance.choice(VALID)
                changed[key] = other.get(key, chance.choice(values))
        if not changed:
            break
    return changed


def test_twenty_thousand_mutated_messages_let_nobody_in() -> None:
    chance, taken = random.Random(0), 0
    for _ in range(20_000):
        side = stage(chance.randrange(5))
        message = mutate(chance, chance.choice(VALID))
        try:
            answer = side.receive(message)
        except Refused:
            pass
        else:
            taken += 1
            assert message["kind"] == "hello"
            assert answer is not None
            assert "facts" not in answer
        assert not side.done
    assert 0 < taken < 4000
