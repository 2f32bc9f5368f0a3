"""Values that lie in shared memory once, for many who ask."""

from __future__ import annotations

import gc
import os
from contextlib import suppress
from typing import Any

import numpy as np

from shoal.transport.pipe import MessageCache, Pipe


def memories() -> int:
    """Blocks of shared memory that this process holds, whatever the number of descriptors and maps."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if "memfd:shoal" in os.readlink(f"/proc/self/fd/{name}"):
                found.add(os.stat(f"/proc/self/fd/{name}").st_ino)
    return len(found)


def test_a_kept_value_is_written_once_and_nobody_changes_it_for_others() -> None:
    before, shelf = memories(), MessageCache()
    value: Any = {"numbers": np.arange(100_000), "few": np.arange(3), "name": "weights"}
    answers = []
    for _ in range(3):
        here, end = Pipe.pair()
        there = Pipe(end)
        here.send_kept(shelf.keep(value, (True, value)))
        here.send("and then")  # the pipe's own memory is as it was
        (went_well, answer), _ = there.receive()
        assert went_well
        assert there.receive()[0] == "and then"
        answers.append(answer)
        here.close()
        there.close()
    assert memories() == before + 1
    answers[0]["numbers"][:] = 0
    for answer in answers[1:]:
        np.testing.assert_array_equal(answer["numbers"], value["numbers"])
        assert (answer["few"].tolist(), answer["name"]) == ([0, 1, 2], "weights")
    others: Any = [{"numbers": np.full(100_000, number)} for number in range(2)]
    for other in others:
        shelf.keep(other, other)
    gc.collect()
    assert memories() == before + 3
    np.testing.assert_array_equal(answers[1]["numbers"], value["numbers"])  # not kept any more, but in use
    del answers, answer
    gc.collect()
    assert memories() == before + 2
    del shelf
    gc.collect()
    assert memories() == before


def test_arrays_through_the_pipes_own_memory_go_on_around_a_kept_one() -> None:
    shelf, value = MessageCache(), {"numbers": np.arange(100_000)}
    here, end = Pipe.pair()
    there = Pipe(end)
    for number in range(3):
        here.send(np.full(50_000, number))
        here.send_kept(shelf.keep(value, value))
        first, second = there.receive()[0], there.receive()[0]
        np.testing.assert_array_equal(first, np.full(50_000, number))
        np.testing.assert_array_equal(second["numbers"], value["numbers"])
    here.close()
    there.close()
