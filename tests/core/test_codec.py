"""Weights on the wire: what every receiver holds, what it costs, and what is refused."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core import wire
from shoal.core.codec import LINKS, Codec, Receiver, Sender
from shoal.core.errors import Diverged, SettingsError, WireError
from shoal.core.tree import leaves, map_tree
from shoal.experiment import load

KINDS = ("float32", "float16", "int8")
EVERY = pytest.mark.parametrize("codec", [Codec(kind=kind, delta=delta) for kind in KINDS for delta in (False, True)],
                                ids=lambda codec: codec.kind + "-delta" * codec.delta)  # fmt: skip
DELTA = Codec(kind="int8", delta=True)


def network(seed: int = 0) -> dict[str, Any]:
    """Weights of every shape that a network has, and arrays of other types."""
    random = np.random.default_rng(seed)
    return {
        "torso": {
            "convolution": random.normal(size=(8, 3, 4, 4)).astype(np.float32),
            "dense": random.normal(size=(16, 40)).astype(np.float32),
            "bias": np.zeros(16, np.float32),
            "frozen": random.normal(size=(4, 5)).astype(np.float32),
        },
        "scale": np.array(1.5, np.float32),
        "empty": np.zeros((0, 3), np.float32),
        "count": np.array(7),
        "moments": random.normal(size=3),
        "mask": np.array([True, False, True]),
    }


def training(versions: int, seed: int = 0) -> list[dict[str, Any]]:
    """The weights of a network that learns: each channel at a pace of its own, one layer not at all."""
    random, history = np.random.default_rng(seed), [network(seed)]

    def pace_of(array: np.ndarray) -> Any:
        return 10.0 ** -random.integers(1, 5, size=array.shape[:1] + (1,) * (array.ndim - 1))

    def changed(array: np.ndarray, pace: Any) -> np.ndarray:
        if array.dtype == np.float32:
            return (array + pace * random.normal(size=array.shape)).astype(np.float32)
        return ~array if array.dtype == bool else array + array.dtype.type(1)

    paces = map_tree(pace_of, history[0])
    paces["torso"]["frozen"] = 0.0
    while len(history) < versions:
        history.append(map_tree(changed, history[-1], paces))
    return history


def travelled(message: Any) -> Any:
    """A message after it went over the wire."""
    return wire.decode(b"".join(wire.encode(message)))


def bits(weights: Any) -> list[Any]:
    """Types, shapes and bytes of all arrays."""
    return [(leaf.dtype, leaf.shape, leaf.tobytes()) for leaf in leaves(weights)]


def cost(message: Any) -> int:
    """Bytes of a message's links."""
    return sum(link.nbytes for link in message["links"])


def test_the_default_leaves_weights_as_they_are():
    assert Codec().plain
    assert not Codec(delta=True).plain
    assert not Codec(kind="float16").plain


def test_settings_that_are_none_are_refused():
    config = {"environment": {"id": "CartPole-v1"}, "algorithm": {"name": "ppo"}}
    assert load(config, {"weights.kind": "int8"}).weights == Codec(kind="int8")
    with pytest.raises(SettingsError, match=r"weights\.kind: .*did you mean 'int8'"):
        load(config, {"weights.kind": "int9"})
    with pytest.raises(SettingsError, match=r"weights\.anchors: unknown setting; .*did you mean 'anchor'"):
        load(config, {"weights.anchors": 3})


@EVERY
def test_receivers_hold_the_same_bits_whenever_they_joined_and_whatever_they_skipped(codec: Codec):
    codec = codec.model_copy(update={"anchor": 17})
    sender, dice = Sender(codec), np.random.default_rng(3)
    receivers = [Receiver(network()) for _ in range(5)]
    newest: list[Any] = [None] * 5
    for version, weights in enumerate(training(60)):
        sender.publish(3 * version, weights)  # versions need not follow each other directly
        for index, receiver in enumerate(receivers):
            joins_late, skips = version < 10 * index, index and dice.random() < 0.2 * index
            if not joins_late and not skips:
                newest[index] = receiver.take(travelled(sender.message(receiver.version)))
                assert bits(newest[index]) == bits(sender.weights())
    assert all(weights is not None for weights in newest)


@EVERY
def test_what_is_not_float32_travels_exactly(codec: Codec):
    sender, receiver = Sender(codec), Receiver(network())
    for version, weights in enumerate(training(5)):
        sender.publish(version, weights)
        taken = receiver.take(travelled(sender.message(receiver.version)))
        for name in ("count", "moments", "mask", "empty"):
            assert bits(taken[name]) == bits(weights[name])


@pytest.mark.parametrize("delta", [False, True])
def test_float32_loses_nothing(delta: bool):
    sender, receiver = Sender(Codec(delta=delta)), Receiver(network())
    for version, weights in enumerate(training(5)):
        sender.publish(version, weights)
        message = sender.message(receiver.version)
        assert (message["base"] is not None) == (delta and version > 0)
        assert bits(receiver.take(message)) == bits(weights)


def test_without_deltas_int8_is_the_nearest_of_255_steps_of_each_channel_with_the_error_of_the_version_before():
    sender, receiver = Sender(Codec(kind="int8")), Receiver(network())
    error = 0.0
    for version, weights in enumerate(training(6)):
        sender.publish(version, weights)
        dense = receiver.take(sender.message())["torso"]["dense"]
        if version == 0:  # exact
            assert np.array_equal(dense, weights["torso"]["dense"])
            continue
        target = weights["torso"]["dense"] + error
        for row, wanted in zip(dense, target, strict=True):
            share, exponent = np.frexp(np.abs(wanted).max() / 127)
            step = np.ceil(share * 256) / 256 * 2.0**exponent  # sent in 16 bits, 8 of them for this share
            np.testing.assert_allclose(row, np.rint(wanted / step) * step, atol=1e-6)
        error = target - dense


@pytest.mark.parametrize("codec", [Codec(kind="int8"), Codec(kind="float16")], ids=lambda codec: codec.kind)
def test_the_sum_of_what_arrived_tracks_the_sum_of_the_true_weights(codec: Codec):
    sender, receiver = Sender(codec), Receiver(network())
    arrived = true = 0.0
    for version, weights in enumerate(training(80)):
        sender.publish(version, weights)
        arrived = arrived + receiver.take(sender.message())["torso"]["dense"].astype(np.float64)
        true = true + weights["torso"]["dense"].astype(np.float64)
    largest = np.abs(weights["torso"]["dense"]).max()
    step = largest / 127 if codec.kind == "int8" else largest / 2**10
    assert np.abs(arrived - true).max() < step


@pytest.mark.parametrize("kind", ["float16", "int8"])
def test_the_sum_of_deltas_stays_within_a_step_of_the_true_weights(kind: str):
    sender, receiver = Sender(Codec(kind=kind, delta=True, anchor=10**6)), Receiver(network())
    history = training(150)
    for version, weights in enumerate(history):
        sender.publish(version, weights)
        taken = receiver.take(sender.message(receiver.version))["torso"]["dense"]
    change = history[-1]["torso"]["dense"] - history[-2]["torso"]["dense"]
    wrong = np.abs(taken - history[-1]["torso"]["dense"])
    for row, error in zip(change, wrong, strict=True):
        assert error.max() < np.abs(row).max()  # of one update; without feedback it would be that of many
    assert wrong.max() > 0
    for version in range(150, 200):  # once nothing changes any more, what was owed arrives
        sender.publish(version, weights)
        taken = receiver.take(sender.message(receiver.version))["torso"]["dense"]
    np.testing.assert_allclose(taken, weights["torso"]["dense"], atol=1e-6)


def test_an_anchor_comes_after_so_many_versions_and_is_exact():
    sender, receiver = Sender(Codec(kind="int8", delta=True, anchor=4)), Receiver(network())
    for version, weights in enumerate(training(13)):
        sender.publish(version, weights)
        message = sender.message(receiver.version)
        assert (message["base"] is None) == (version % 4 == 0)
        exact = bits(receiver.take(message)) == bits(weights)
        assert exact == (version % 4 == 0)


def test_one_that_is_a_little_behind_gets_links_and_one_far_behind_the_whole():
    sender, history = Sender(DELTA), training(100)
    receivers = {}
    for version, weights in enumerate(history):
        sender.publish(version, weights)
        receivers[version] = Receiver(network())
        receivers[version].take(sender.message())
    whole = cost(sender.message())
    near, far = sender.message(97), sender.message(20)
    assert (near["base"], len(near["links"])) == (97, 2)
    assert far["base"] is None
    for held, receiver in receivers.items():
        assert cost(sender.message(held)) <= whole
        assert bits(receiver.take(sender.message(held))) == bits(sender.weights())
    still = Sender(Codec(kind="int8", delta=True, anchor=10**6))
    for version in range(3 * LINKS):  # links that cost next to nothing are not kept without bound
        still.publish(version, {"w": np.zeros((64, 400), np.float32)})
    assert len(still.message(2 * LINKS)["links"]) == LINKS - 1
    assert still.message(LINKS)["base"] is None


def test_an_exact_version_owes_nothing_to_those_before_it():
    history = training(12)
    for codec in (DELTA, Codec(kind="int8"), Codec(kind="float16")):
        long, short = Sender(codec), Sender(codec)
        for version, weights in enumerate(history):
            long.publish(version, weights, exact=version == 5)
            if version >= 5:
                short.publish(version, weights)
                assert bits(long.weights()) == bits(short.weights())
                assert long.digest == short.digest
        assert bits(long.weights()) != bits(history[-1])


def test_bytes_over_a_whole_run():
    random = np.random.default_rng(0)
    weights = random.normal(size=(64, 300)).astype(np.float32)
    total = {}
    for kind, delta in [("float32", False), ("float32", True), ("float16", False), ("int8", False), ("int8", True)]:
        sender, receiver = Sender(Codec(kind=kind, delta=delta, anchor=50)), Receiver({"w": weights})
        now, total[kind, delta] = weights, 0
        for version in range(150):
            sender.publish(version, {"w": now})
            message = sender.message(receiver.version)
            total[kind, delta] += sum(len(part) for part in wire.encode(message))
            receiver.take(message)
            now = now + (1e-3 * random.normal(size=now.shape)).astype(np.float32)
    plain = 150 * weights.nbytes
    assert plain <= total["float32", False] < 1.02 * plain
    assert total["float32", True] < 0.8 * plain
    assert total["float16", False] < plain / 2
    assert total["int8", False] < plain / 3.8
    assert total["int8", True] < plain / 7


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30])
@EVERY
def test_numbers_that_the_kind_cannot_hold_travel_as_they_are(codec: Codec, value: float):
    sender, receiver, history = Sender(codec), Receiver(network()), training(6)
    for version, weights in enumerate(history):
        if version in (2, 3):
            weights["torso"]["dense"][1, 2] = value
        sender.publish(version, weights)
        taken = receiver.take(travelled(sender.message(receiver.version)))
        if version in (2, 3):
            np.testing.assert_array_equal(taken["torso"]["dense"][1, 2], np.float32(value))
        if version == 2:
            assert bits(taken) == bits(weights)
    np.testing.assert_allclose(taken["torso"]["dense"], weights["torso"]["dense"], atol=0.1)


@pytest.mark.parametrize("size", [1e-44, 1e-38, 1e-20, 1e15])
@pytest.mark.parametrize("kind", ["float16", "int8"])
def test_numbers_of_any_size_can_be_deltas(kind: str, size: float):
    sender, receiver = Sender(Codec(kind=kind, delta=True)), Receiver({"w": np.zeros(3, np.float32)})
    for version in range(40):
        weights = {"w": np.array([1, -2, 0], np.float32) * np.float32(size) * min(version, 20)}
        sender.publish(version, weights)
        taken = receiver.take(sender.message(receiver.version))["w"]
    np.testing.assert_allclose(taken, weights["w"], atol=max(1e-10 if kind == "float16" else 1e-36, 1e-5 * size))


def test_weights_of_another_shape_begin_a_new_chain():
    sender = Sender(DELTA)
    for version, size in enumerate((3, 3, 4)):
        sender.publish(version, {"w": np.ones((2, size), np.float32)})
    assert sender.message(1)["base"] is None
    assert Receiver({"w": np.ones((2, 4), np.float32)}).take(sender.message())["w"].shape == (2, 4)


def test_what_the_learner_changes_later_changes_nothing():
    sender, weights = Sender(DELTA), network()
    for version in range(2):
        sender.publish(version, weights)
        before = bits(sender.weights())
        weights["torso"]["dense"] += 1
        assert bits(sender.weights()) == before
        assert bits(Receiver(network()).take(sender.message())) == before


@pytest.fixture
def behind() -> tuple[Receiver, dict[str, Any], Any]:
    """A receiver at version 1, the message to version 2 that it has yet to take, and what that gives."""
    sender, receiver = Sender(DELTA), Receiver(network())
    for version, weights in enumerate(training(3)):
        sender.publish(version, weights)
        if version < 2:
            receiver.take(sender.message(receiver.version))
    return receiver, sender.message(1), bits(sender.weights())


def test_a_message_that_goes_on_from_other_weights_is_refused_and_the_whole_mends_it():
    sender, other, receiver = Sender(DELTA), Sender(DELTA), Receiver(network())
    for version, (mine, yours) in enumerate(zip(training(3, seed=0), training(3, seed=1), strict=True)):
        sender.publish(version, mine)
        other.publish(version, yours)
    with pytest.raises(Diverged, match="build on version 1, but the receiver holds none"):
        receiver.take(sender.message(1))
    receiver.take(sender.message())
    for version, weights in enumerate(training(4, seed=1)[3:], 3):
        other.publish(version, weights)
    with pytest.raises(Diverged, match="build on version 1, but the receiver holds 2"):
        receiver.take(other.message(1))
    with pytest.raises(Diverged, match="version 3 of the weights does not match"):
        receiver.take(other.message(2))  # the right number, but of another history
    assert receiver.version == 2
    assert bits(receiver.take(other.message())) == bits(other.weights())


def test_what_was_refused_leaves_the_receiver_as_it_was(behind: Any):
    receiver, message, wanted = behind
    for change in (
        {"digest": "0" * 64},
        {"digest": ""},
        {"version": 3},
        {"links": message["links"] * 2},
        {"base": 0},
    ):
        with pytest.raises(Diverged):
            receiver.take({**message, **change})
        assert receiver.version == 1
    assert bits(receiver.take(message)) == wanted


@pytest.mark.parametrize(
    "change",
    [
        {"version": None},
        {"version": -1},
        {"version": True},
        {"version": 1.0},
        {"version": 10**5000},
        {"base": "1"},
        {"base": 1 << 64},
        {"kind": "int4"},
        {"kind": ["int8"]},
        {"kind": "float16"},
        {"kind": "float32"},
        {"links": None},
        {"links": []},
        {"links": [b""]},
        {"links": [np.zeros(3)]},
        {"links": [np.zeros((3, 3), np.uint8)]},
        {"links": [np.zeros(0, np.uint8)]},
        {"links": [np.zeros(40, np.uint8)]},
        {"links": [np.zeros(9, np.uint8)] * (LINKS + 1)},
        {"digest": None},
        {"digest": "é"},
        {"base": None},
        {"base": None, "kind": "float32"},
    ],
    ids=" ".join,
)
def test_malformed_messages_are_refused(behind: Any, change: Any):
    receiver, message, wanted = behind
    with pytest.raises((WireError, Diverged) if change == {"base": None} else WireError):
        receiver.take({**message, **change})
    assert bits(receiver.take(message)) == wanted


def test_more_links_than_a_sender_sends_are_not_read(behind: Any):
    receiver, message, _ = behind
    for change in ({"links": message["links"] * (LINKS + 1)}, {"base": None, "links": message["links"] * 2}):
        with pytest.raises(WireError, match="no proper list of links"):
            receiver.take({**message, **change})


def test_what_is_no_message_is_refused():
    for value in (None, 3, "x", [], {}, np.zeros(3)):
        with pytest.raises(WireError):
            Receiver(network()).take(value)


def test_a_bomb_is_never_unpacked():
    receiver = Receiver({"w": np.zeros((2, 8), np.float32)})
    bomb = np.frombuffer(bytes(4) + zlib.compress(bytes(1 << 26)), np.uint8)
    with pytest.raises(WireError, match="not 16 × int8"):
        receiver.take({"version": 0, "base": None, "kind": "int8", "links": [bomb], "digest": ""})
    trailing = np.frombuffer(bytes(4) + zlib.compress(bytes(16)) + b"more", np.uint8)
    with pytest.raises(WireError, match="not 16 × int8"):
        receiver.take({"version": 0, "base": None, "kind": "int8", "links": [trailing], "digest": ""})


ANYTHING = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from(KINDS),
    st.binary(max_size=80).map(lambda data: [np.frombuffer(data, np.uint8)]),
    st.lists(st.integers(), max_size=2),
)


@given(
    kind=st.sampled_from(KINDS),
    delta=st.booleans(),
    field=st.sampled_from(["version", "base", "kind", "links", "digest"]),
    value=ANYTHING,
)
def test_any_value_in_any_field_is_refused_or_right(kind: str, delta: bool, field: str, value: Any):
    refused_or_right(Codec(kind=kind, delta=delta), lambda message: {**message, field: value})


@given(kind=st.sampled_from(KINDS), delta=st.booleans(), data=st.data())
def test_any_damage_to_the_bytes_is_refused(kind: str, delta: bool, data: Any):
    def damaged(message: Any) -> Any:
        link = message["links"][-1].copy()
        if data.draw(st.booleans()):
            place = data.draw(st.integers(0, link.size - 1))
            link[place] ^= data.draw(st.integers(1, 255))
        else:
            link = link[: data.draw(st.integers(0, link.size - 1))]
        return {**message, "links": [*message["links"][:-1], link]}

    refused_or_right(Codec(kind=kind, delta=delta), damaged)


def refused_or_right(codec: Codec, damage: Any) -> None:
    """A message, whatever is done to it, gives the weights that were sent or a refusal that changes nothing."""
    sender, receiver = Sender(codec), Receiver(network())
    for version, weights in enumerate(training(3)):
        sender.publish(version, weights)
        if version < 2:
            receiver.take(sender.message(receiver.version))
    message = sender.message(1)
    try:
        taken = receiver.take(damage(message))
    except (WireError, Diverged):
        assert receiver.version == 1
        taken = receiver.take(message)
    assert bits(taken) == bits(sender.weights())
