"""The packer: the only place that shifts time, from a stream of steps and choices to items and batches of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from shoal.core.tree import map_tree, to_torch, zeros_for
from shoal.core.types import Array, Batch, NStep, Sequence, Step

Items = Mapping[str, Any]  # a tree: time along axis 0, items along axis 1


def make(experience: NStep | Sequence, size: int) -> Sequences | Transitions:
    """The packer for a declared kind of experience."""
    return Sequences(experience, size) if isinstance(experience, Sequence) else Transitions(experience, size)


class Sequences:
    """Cut B streams into sequences, overlapping and padded as declared."""

    def __init__(self, experience: Sequence, size: int) -> None:
        """Begin with empty streams."""
        if not 0 <= experience.overlap < experience.length:
            raise ValueError(f"overlap {experience.overlap} must be at least 0 and below length {experience.length}")
        self.experience, self.size = experience, size
        self.row = np.zeros(size, np.int64)  # where each stream writes next
        self.fresh = np.zeros(size, np.int64)  # real transitions not yet returned
        self.buffers: dict[str, Any] = {}
        self.columns = np.arange(size)
        self.restarted = self.columns[:0]  # streams just returned, whose overlap must still move to the front

    def _write(self, key: str, value: Any, row: Array, rows: int) -> None:
        """Write one instant of every stream, making room at the first call."""
        if key not in self.buffers:
            self.buffers[key] = map_tree(lambda x: zeros_for(x, rows, *x.shape), value)
        uniform = bool((row == row[0]).all())
        map_tree(
            lambda buffer, x: buffer.__setitem__(row[0] if uniform else (row, self.columns), x),
            self.buffers[key],
            value,
        )

    def observe(self, step: Step, first: Array | None = None) -> Items | None:
        """Take a step, and return the sequences that it completes; they are valid until the next choice.

        Where its arrays are on a device, `first` is on the host.
        """
        length, across = self.experience.length, self.experience.across
        first = step.first if first is None else first
        items: Items | None = None
        if self.row.any():
            answered = self.row - 1
            self._write("reward", step.reward, answered, length)
            self._write("discount", step.discount, answered, length)
            self.fresh += ~first
            if not across and first.any():
                items = self._close(np.flatnonzero(first))
        self._write("observation", step.observation, self.row, length + 1)
        self._write("first", step.first, self.row, length + 1)
        full = np.flatnonzero(self.row == length)
        if len(full):
            items = joined(items, self._emit(full))
            self.row[full] = self.experience.overlap
            self.fresh[full] = 0
            self.restarted = full
        return items

    def choose(self, action: Array, record: Mapping[str, Array], version: int) -> None:
        """Take the choice made at the step just observed."""
        self._keep_overlap()
        length = self.experience.length
        self._write("action", action, self.row, length)
        for name, value in record.items():
            self._write(f"record {name}", value, self.row, length)
        self._write("version", np.full(self.size, version, np.int64), self.row, length)
        self.row += 1

    def _close(self, ended: Array) -> Items | None:
        """Pad and return the sequences whose episodes ended, unless they hold nothing new."""
        filled = ended[(self.fresh[ended] > 0)]
        for column in filled:
            row = self.row[column]
            for key, buffer in self.buffers.items():
                fill = key == "first"  # padding is a run of `first` steps, which every loss masks
                map_tree(lambda x, row=row, column=column, fill=fill: x[row:, column].fill(fill), buffer)
        items = map_tree(np.copy, self._emit(filled)) if len(filled) else None
        self.row[ended] = 0
        self.fresh[ended] = 0
        return items

    def _emit(self, columns: Array) -> Items:
        every = len(columns) == self.size

        def cut(x: Array) -> Array:
            return x if every else x[:, columns]

        items: dict[str, Any] = {"record": {}}
        for key, buffer in self.buffers.items():
            kind, _, name = key.partition(" ")
            if kind == "record":
                items["record"][name] = cut(buffer[:1] if name in self.experience.initial else buffer)
            elif kind == "version":
                items[kind] = cut(buffer[:1])[0]
            else:
                items[kind] = map_tree(cut, buffer)
        return items

    def _keep_overlap(self) -> None:
        """Move the overlap to the front, in the streams that were returned."""
        if len(self.restarted):
            where = slice(None) if len(self.restarted) == self.size else self.restarted
            for buffer in self.buffers.values():
                map_tree(self._move(where), buffer)
            self.restarted = self.restarted[:0]

    def _move(self, where: Any) -> Any:
        begin = self.experience.length - self.experience.overlap

        def move(x: Array) -> None:
            x[: len(x) - begin, where] = x[begin:, where]

        return move


class Transitions:
    """Cut B streams into n-step transitions, shorter ones where an episode ends."""

    def __init__(self, experience: NStep, size: int) -> None:
        """Begin with empty streams."""
        if experience.n < 1:
            raise ValueError(f"n {experience.n} must be at least 1")
        self.n, self.gamma = experience.n, experience.gamma
        self.rows: deque[dict[str, Any]] = deque(maxlen=self.n + 1)
        self.age = np.zeros(size, np.int64)  # instants of the present episode behind us

    def observe(self, step: Step, first: Array | None = None) -> Items | None:
        """Take a step, and return the transitions that it completes."""
        assert first is None
        items: Items | None = None
        if self.rows:
            self.rows[-1] |= {"reward": step.reward.copy(), "discount": step.discount.copy()}
        going = np.flatnonzero(~step.first & (self.age >= self.n))
        if len(going):
            items = self._cut(self.n, step.observation, 0, going)
        for steps in range(self.n - 1, 0, -1):  # the episode ended at the instant before: its last observation is known
            ended = np.flatnonzero(step.first & (self.age > steps))
            if len(ended):
                items = joined(items, self._cut(steps, self.rows[-1]["observation"], 1, ended))
        self.age = np.where(step.first, 1, self.age + 1)
        self.rows.append({"observation": map_tree(np.copy, step.observation), "first": step.first.copy()})
        return items

    def choose(self, action: Array, record: Mapping[str, Array], version: int) -> None:
        """Take the choice made at the step just observed."""
        versions = np.full(len(action), version, np.int64)
        self.rows[-1] |= {
            "action": action.copy(),
            "record": map_tree(np.copy, dict(record)),
            "version": versions,
        }

    def _cut(self, steps: int, last: Any, back: int, columns: Array) -> Items:
        """Transitions of `steps` steps to the observation `last`, which lies `back` instants before now."""
        rows = [self.rows[k - steps - back] for k in range(steps)]
        reward, discount = np.zeros(len(columns), np.float32), np.ones(len(columns), np.float32)
        for k, row in enumerate(rows):
            reward += discount * row["reward"][columns]
            discount *= row["discount"][columns] * (self.gamma if k < steps - 1 else 1.0)
        start = rows[0]
        return {
            "observation": map_tree(lambda a, b: np.stack([a[columns], b[columns]]), start["observation"], last),
            "first": np.stack([start["first"][columns], np.zeros(len(columns), bool)]),
            "action": start["action"][None, columns],
            "reward": reward[None],
            "discount": discount[None],
            "record": {name: value[None, columns] for name, value in start["record"].items()},
            "version": start["version"][columns],
        }


class Chunk:
    """Collects items until there are enough to send at once."""

    def __init__(self, size: int) -> None:
        """Send no fewer than `size`."""
        self.size, self.waiting = size, list[Items]()

    def add(self, items: Items | None) -> Items | None:
        """Take items, and return all that waited once there are enough."""
        if items is None:
            return None
        if not self.waiting and len(items["version"]) >= self.size:
            return items
        self.waiting.append(map_tree(np.copy, items))  # a packer's memory is soon written again
        if sum(len(part["version"]) for part in self.waiting) < self.size:
            return None
        whole = joined(*self.waiting)
        self.waiting.clear()
        return whole


def joined(*parts: Items | None) -> Items:
    """Items of several parts side by side, without those that are None."""
    there = [part for part in parts if part is not None]
    if len(there) == 1:
        return there[0]
    # Versions are [N]; everything else has time before the items.
    return {
        key: map_tree(
            lambda *each, axis=int(key != "version"): np.concatenate(each, axis), *(part[key] for part in there)
        )
        for key in there[0]
    }


def fresh_batch(items: Items, device: torch.device) -> Batch:
    """Items that no store has seen, as a batch in which all have the same weight."""
    count = len(items["version"])
    return to_batch({**items, "key": np.zeros(count, np.int64), "weight": np.ones(count, np.float32)}, device)


def to_batch(tree: Items, device: torch.device) -> Batch:
    """Move a batch to a device; keys and versions stay where they are."""
    stays = {"key": tree["key"], "version": tree["version"]}
    moves = {name: to_torch(value, device) for name, value in tree.items() if name not in stays}
    return Batch(**moves, **stays)
