"""Which worker lives on which machine."""

from __future__ import annotations

from collections.abc import Mapping

HERE = ""  # the head itself


def group_of(worker: str) -> str:
    """Workers named `group/…` stay together, since they share memory."""
    return worker.rpartition("/")[0] or worker


def place(
    workers: list[str],
    before: Mapping[str, str],
    nodes: Mapping[str, int],
    here: int = 0,
    away: frozenset[str] = frozenset(),
) -> dict[str, str]:
    """Spread workers over nodes by their slots, and leave those alone whose node is still there.

    The head takes up to `here` workers; nodes that are `away` keep theirs and take no more. Without any machine that
    has slots, some workers have no place yet.
    """
    slots = {name: count for name, count in nodes.items() if count > 0}
    if here > 0:
        slots[HERE] = here
    places = {worker: before[worker] for worker in workers if before.get(worker) in slots}
    load = {name: sum(place == name for place in places.values()) for name in slots}
    room = sum(max(slots[name] - load[name], 0) for name in slots if name not in away)
    for worker in reversed(workers):  # a machine that came later takes over what is too much for the others
        if room > 0 and worker in places and load[places[worker]] > slots[places[worker]]:
            load[places.pop(worker)] -= 1
            room -= 1
    groups: dict[str, list[str]] = {}
    for worker in workers:
        groups.setdefault(group_of(worker), []).append(worker)
    for members in groups.values():
        if all(worker in places for worker in members):
            continue
        ready = [name for name in slots if name not in away]
        free = [name for name in ready if name != HERE or load[name] + len(members) <= here]
        if not free:
            continue
        chosen = min(free, key=lambda name: ((load[name] + len(members)) / slots[name], name))
        for worker in members:
            if worker in places:  # it follows its group
                load[places[worker]] -= 1
            places[worker] = chosen
        load[chosen] += len(members)
    return {worker: places[worker] for worker in workers if worker in places}
