"""Mutated messages, a million of them in the long form: only declared errors come of them, and the node serves on."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from shoal.core import recipe, wire
from shoal.core.errors import ShoalError
from shoal.engines.node import Node
from shoal.transport import session, websocket
from shoal.transport.session import FACTS
from shoal.transport.trust import OPEN, Terms, handshake
from tests.transport.conftest import Standing

TEST = 0.125  # seconds, by which the test's own reading is known
ENDING = 0.02  # of these, frames that may end their connection; the others can only be refused
ODD: list[Any] = [
    None, True, -1, 2**70, 1.5, float("nan"), "", "hold", "\ud800\x00", [], [[]], {}, {"$": 0}, {"name": "os:system"},
    {"settings": "os:x", "fields": {}}, {"value": 1}, ["os:system", [], {}], {"a": ["b", [], {}]}, "answer", b"",
]  # fmt: skip
IDLE = ["tests.engines.programs:idle", [{"value": 1}], {"s": {"make": "os:system", "args": [], "seed": 0}}]
ORDER: list[list[Any]] = [
    ["describe", []],
    ["hold", ["run", {"deadline": 1.0, "seed": 3}, [], ["shelf"], {"w": IDLE}, {}]],
    [
        "hold",
        ["run", {"restartable": ["a"]}, ["os:system", [], {}], [], {}, {"b": {"x": np.zeros(3), "y": np.ones(9)}}],
    ],
    ["turn", ["w", 1]],
    ["service", ["shelf", "get", ["key"]]],
    ["release", ["run"]],
    ["beat", []],
]


def mutated(rng: random.Random, value: Any) -> Any:
    """A value with something else somewhere in it."""
    if isinstance(value, list | dict) and value and rng.random() < 0.8:
        items = [*value] if isinstance(value, list) else [*value.items()]
        place = rng.randrange(len(items))
        if isinstance(value, dict):
            key, inner = items[place]
            return {**value, rng.choice([key, "", "$x"]): mutated(rng, inner)}
        how = rng.random()
        if how < 0.15:
            del items[place]
        elif how < 0.3:
            items.insert(place, rng.choice(ODD))
        else:
            items[place] = mutated(rng, items[place])
        return items
    return rng.choice([odd for odd in ODD if not isinstance(odd, bytes)])


def spoiled(rng: random.Random, frame: bytes) -> bytes:
    """A frame with flipped bits, cut, or with bytes of something else in it."""
    data, how = bytearray(frame), rng.random()
    if how < 0.5:
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif how < 0.7:
        del data[rng.randrange(len(data)) :]
    elif how < 0.85:
        place = rng.randrange(len(data))
        data[place:place] = rng.randbytes(rng.randint(1, 20))
    else:  # another header under a prefix that fits
        text = bytearray(frame[wire.PREFIX.size :] or frame)
        text[rng.randrange(len(text))] = rng.choice(b'{}[],:"0$\\e9')
        data = bytearray(wire.PREFIX.pack(wire.MAGIC, wire.VERSION, 0, len(text), 0)) + text
    return bytes(data)


def encoded(value: Any) -> bytes:
    try:
        return b"".join(wire.encode(value))
    except ShoalError:  # such as a mapping with the key of a reference
        return b"".join(wire.encode(["call", 0, "describe", []]))


def frame(rng: random.Random) -> bytes:
    """A frame that holds something odd."""
    kind, args = rng.choice(ORDER)
    call = [rng.choice(["call", "tell", "answer"]), rng.randrange(4), kind, args]
    if rng.random() < 0.5:
        return encoded(mutated(rng, call))
    return spoiled(rng, encoded(call))


def order(rng: random.Random) -> list[Any]:
    """An odd order that a session passes on."""
    while True:
        odd = mutated(rng, [*rng.choice(ORDER)])
        if isinstance(odd, list) and [type(part) for part in odd] == [str, list]:
            return odd


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing be made outside these packages."""
    monkeypatch.setattr(recipe, "_allowed", ("shoal", "tests"))


class Silent:
    """A link over which nothing comes but what the test puts there."""

    resumable = True

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.frame = b""

    def receive(self, seconds: float | None = None) -> bytes:
        if seconds == TEST:
            return self.frame
        self.ended.wait()
        raise ShoalError("closed")

    def send(self, *buffers: bytes) -> None:
        pass

    def close(self) -> None:
        self.ended.set()


@pytest.mark.parametrize("count", [20_000, pytest.param(1_000_000, marks=pytest.mark.long)])
def test_mutated_frames_raise_only_what_is_declared(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    rng, taken = random.Random(0), 0
    link = Silent()
    made = session.Session(link, lambda *_: None)
    monkeypatch.setattr(session, "RATE", 1e9)
    made._allowance = float("inf")
    try:
        for _ in range(count):
            try:
                link.frame = frame(rng)
                made._receive(TEST)
                made._held = 0
                taken += 1
            except ShoalError:
                pass
    finally:
        made.close()
        made.join()
    assert 1000 < taken < count  # both ways were taken


@pytest.mark.parametrize("count", [5_000, pytest.param(300_000, marks=pytest.mark.long)])
def test_mutated_orders_raise_only_what_is_declared(closed: None, count: int) -> None:
    rng, node, answered = random.Random(1), Node(1, ("shoal",)), 0  # `tests` is not allowed: no worker ever starts
    try:
        for _ in range(count):
            try:
                node.answer(made_up(), *order(rng))
                answered += 1
            except ShoalError as error:
                assert "\n" not in str(error)  # noqa: PT017  # each of them is looked at
        assert answered > 100
        assert len(node.turns) == 0
        assert node.answer(made_up(), "describe", [])["slots"] == 1
    finally:
        node.session = None
        node.close()


def made_up() -> Any:
    """What stands for a session where none is needed."""

    class Nobody:
        heard = time.monotonic() + 1000
        closed = lost = None

        def tell(self, *_: Any) -> None:
            pass

        def close(self, reason: str = "") -> None:
            pass

    return Nobody()


def handshakes(rng: random.Random, address: str) -> int:
    """Shake hands with one message mutated, and return how many frames that took."""
    link, steps = websocket.dial(address, Terms("head")), handshake("joiner", "head", OPEN, FACTS)
    sent, spoil = 0, rng.randrange(3)
    try:
        message = next(steps)
        while True:
            if message is None:
                message = steps.send(bytes(link.receive(20.0)))
                continue
            link.send(spoiled(rng, message) if sent == spoil else message)
            sent += 1
            message = next(steps)
    except (ShoalError, StopIteration):
        pass
    finally:
        link.close()
    return sent


@pytest.mark.parametrize("count", [10_000, pytest.param(1_000_000, marks=pytest.mark.long)])
def test_a_live_node_outlasts_mutated_frames(stand: Callable[..., Standing], closed: None, count: int) -> None:
    rng, sent = random.Random(2), 0
    head = Terms("head")
    standing = stand(Terms("node"), head, packages=("shoal",))
    for _ in range(40):
        sent += handshakes(rng, standing.address)
    standing.works()
    while sent < count:
        other = standing.meet(head)
        try:
            while not other.closed.is_set() and sent < count:
                ends = rng.random() < ENDING
                other.link.send(frame(rng) if ends else encoded(["tell", 0, *order(rng)]))
                sent += 1
                if sent % 500 == 0:  # it takes only a number of them at once
                    other.call("describe", seconds=20.0)
                    assert standing.session.call("describe", seconds=20.0)["slots"] == 2
        except ShoalError:
            pass  # the node has ended it
        finally:
            other.close()
            other.join()
    assert standing.session.call("describe", seconds=20.0)["slots"] == 2
    last = standing.meet(head)
    assert last.call("describe", seconds=20.0)["slots"] == 2
    last.close()
    last.join()
