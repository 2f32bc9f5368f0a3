"""Count, mean and variance of samples, merged and separated; for NumPy's arrays and torch's alike.

Chan et al., doi:10.1080/00031305.1983.10483115, with the variance M2 / count instead of M2.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple


class Moments(NamedTuple):
    """How many samples there were, their mean and their variance."""

    count: Any
    mean: Any
    var: Any


def merge(one: Moments, two: Moments) -> Moments:
    """The moments of the samples of both, of which there is at least one."""
    total = one.count + two.count
    share, delta = two.count / total, two.mean - one.mean
    spread = one.var * (1 - share) + two.var * share + delta * delta * share * (1 - share)
    return Moments(total, one.mean + delta * share, spread)


def without(after: Moments, before: Moments) -> Moments:
    """The moments of the samples added between two states of running moments; a count of 0 or less: none."""
    new = after.count - before.count
    if not new > 0:
        return Moments(after.count * 0, after.mean * 0, after.var * 0)
    share = new / after.count
    delta = (after.mean - before.mean) / share
    spread = (after.var - before.var * (1 - share)) / share - delta * delta * (1 - share)
    return Moments(new, before.mean + delta, spread.clip(0))  # which rounding may lead below 0


def found_in(names: Iterable[str]) -> list[str]:
    """The prefixes under which running moments lie among named arrays."""
    known = {*names}
    prefixes = [name.removesuffix("count") for name in known if name.rpartition(".")[2] == "count"]
    return sorted(prefix for prefix in prefixes if all(prefix + part in known for part in Moments._fields))


def at(arrays: Any, prefix: str) -> Moments:
    """The running moments under a prefix."""
    return Moments(*(arrays[prefix + part] for part in Moments._fields))


def named(prefix: str, moments: Moments) -> dict[str, Any]:
    """The arrays of running moments under a prefix."""
    return {prefix + part: value for part, value in zip(Moments._fields, moments, strict=True)}
