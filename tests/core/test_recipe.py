"""Calls described as data."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from typing import Any

import numpy as np
import pytest
from pydantic import Field

from shoal.core import wire
from shoal.core.errors import ShoalError
from shoal.core.recipe import describe, find, path_of, rebuild
from shoal.core.settings import Schedule, Settings
from shoal.core.types import NStep
from shoal.services.journal import Journal
from shoal.services.queue import Queue


class Sizes(Settings):
    """Settings with a schedule inside."""

    rate: Schedule = Field(Schedule(start=1e-3, end=0.0), description="Moves.")
    hidden: tuple[int, ...] = Field((64, 64), description="Some numbers.")


class Service:
    """What an engine hands out in a service's place."""

    def __init__(self, name: str) -> None:
        self._service = name


def sent(value: Any) -> Any:
    """What the other process gets."""
    description = wire.decode(b"".join(wire.encode(describe(value))))
    return rebuild(description, lambda name: f"the {name}")


@pytest.mark.parametrize(
    "value", [None, True, 0, -1.5, "", "text", [], [1, [2, None]], {}, {"a": {"b": [1]}}], ids=repr
)
def test_plain_values(value):
    received = sent(value)
    assert received == value
    assert type(received) is type(value)


def test_arrays():
    received = sent({"weights": [np.arange(3), np.ones((2, 2), np.float32)]})["weights"]
    np.testing.assert_array_equal(received[0], np.arange(3))
    assert (received[1].dtype, received[1].shape) == (np.float32, (2, 2))


@pytest.mark.parametrize(
    "settings",
    [Schedule(start=1.0, shape="constant"), Schedule(start=1.0, end=0.0), Schedule(start=1, end=0, shape="polynomial")],
)
def test_settings(settings):
    assert sent(settings) == settings


def test_settings_of_a_test(monkeypatch):
    # This module has a made-up name, under which another process could not import it.
    monkeypatch.setattr("shoal.core.settings.Sizes", Sizes, raising=False)
    monkeypatch.setattr(Sizes, "__module__", "shoal.core.settings")
    settings = Sizes(rate=0.5, hidden=(1, 2, 3))
    received = sent({"settings": [settings]})["settings"][0]
    assert received == settings
    assert type(received.rate) is Schedule
    assert received.hidden == (1, 2, 3)


@pytest.mark.parametrize("target", [find, Queue, Queue.put, len, np.ndarray], ids=lambda each: each.__qualname__)
def test_functions_and_classes_are_named(target):
    assert sent([target]) == [target]


def test_a_name_is_an_import_path():
    assert path_of(Queue) == "shoal.services.queue:Queue"
    assert path_of(Queue.put) == "shoal.services.queue:Queue.put"
    assert find("shoal.services.queue:Queue.put") is Queue.put


def test_services_become_whatever_stands_in_for_them():
    assert sent({"store": Service("store"), "rest": [Service("journal")]}) == {
        "store": "the store",
        "rest": ["the journal"],
    }


def test_tuples_and_other_mappings_become_plain_ones():
    assert sent((1, OrderedDict(a=(2,)))) == [1, {"a": [2]}]


def test_a_mapping_that_looks_like_a_description_is_only_a_mapping():
    value = {"settings": "shoal.core.settings:Schedule", "fields": {}, "name": "os:remove", "service": "store"}
    assert sent(value) == value


def local() -> Any:
    """A function and a class that only exist inside a call."""

    def inside() -> None: ...

    class Inside:
        pass

    return inside, Inside


@pytest.mark.parametrize("target", [lambda: None, *local()], ids=["lambda", "function", "class"])
def test_what_has_no_import_path_is_refused(target):
    for attempt in (path_of, describe, lambda value: describe({"a": [value]})):
        with pytest.raises(ShoalError, match=r"<.* cannot run in another process: define it at the top"):
            attempt(target)


def test_what_is_defined_in_the_script_itself_is_refused(monkeypatch):
    monkeypatch.setattr(Sizes, "__module__", "__main__")
    for value in (Sizes, Sizes()):
        with pytest.raises(ShoalError, match="__main__:Sizes cannot run in another process"):
            describe(value)


@pytest.mark.parametrize("method", [Journal().stop, Sizes.model_validate], ids=["object", "class"])
def test_a_bound_method_is_refused_since_what_it_is_bound_to_would_be_lost(method):
    with pytest.raises(ShoalError, match=f"{method.__qualname__} cannot run in another process"):
        describe(method)


@pytest.mark.parametrize(
    "value", [NStep(), {1, 2}, b"bytes", partial(len), object(), 1j], ids=lambda v: type(v).__name__
)
def test_what_cannot_be_described_is_named(value):
    with pytest.raises(ShoalError, match=f"a {type(value).__name__} cannot be passed to a worker: use settings"):
        describe([value])


@pytest.mark.parametrize(
    ("path", "complaint"),
    [
        ("shoal.nowhere:Queue", r"no module 'shoal\.nowhere'"),
        ("shoal.services.queue:Qeue", r"shoal\.services\.queue has no 'Qeue'; did you mean 'Queue'\?"),
        ("shoal.services.queue:Queue.statut", r"has no 'statut'; did you mean 'status'\?"),
        ("shoal.services.queue", "package.module:name"),
        ("", "package.module:name"),
    ],
)
def test_a_path_that_leads_nowhere_says_where_it_ends(path, complaint):
    with pytest.raises(ShoalError, match=f"cannot find '{path}': .*{complaint}"):
        find(path)


def test_a_module_that_itself_fails_to_import_keeps_its_own_error(tmp_path, monkeypatch):
    (tmp_path / "lacks_something.py").write_text("import something_missing\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="something_missing"):
        find("lacks_something:work")
