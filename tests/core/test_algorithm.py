"""The hooks of algorithms: optional, and all of them documented."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import Field

from shoal.core import algorithm as hooks
from shoal.core.errors import SettingsError
from shoal.experiment import configure
from tests.programs import Checker

PAGE = Path(__file__).parents[2] / "docs" / "extend" / "algorithm.md"
HOOKS = {
    member: protocol
    for name, protocol in vars(hooks).items()
    if name.startswith("Has")
    for member in vars(protocol)
    if not member.startswith("_")
}
BASE = {"environment": {"id": "Counting"}, "actors": 1}


def test_every_hook_is_on_the_page_about_algorithms() -> None:
    table = PAGE.read_text().partition("### What an algorithm may have besides")[2].partition("### ")[0]
    assert len(HOOKS) == 20
    assert [name for name in HOOKS if f"`{name}" not in table] == []


def test_an_algorithm_without_hooks_gets_the_defaults() -> None:
    experiment = configure({**BASE, "algorithm": {"name": "tests.programs:Checker"}})
    found = {name for name, protocol in HOOKS.items() if isinstance(experiment.algorithm, protocol)}
    assert found == {"max_lag"}
    assert (experiment.replay, experiment.actor_priorities) == (None, False)
    assert experiment.topology_name == "actors_and_learner"


class Careless(Checker):
    """Writes its replay as it would in YAML."""

    replay: dict[str, int] = Field({"capacity": 10}, description="No settings.")


def test_a_replay_of_another_type_is_refused_in_words() -> None:
    with pytest.raises(SettingsError, match=r"its replay is a dict, not a shoal\.core\.settings\.Replaying or None"):
        configure({**BASE, "algorithm": {"name": "tests.core.test_algorithm:Careless"}})


@pytest.mark.parametrize("name", ["dqn", "apex_dqn", "r2d2", "ngu"])
@pytest.mark.parametrize(
    "setting", ["epochs", "minibatches", "max_lag", "network.separate", "network.normalise_reward"]
)
def test_what_a_replay_leaves_no_choice_about_is_no_setting(name: str, setting: str) -> None:
    with pytest.raises(SettingsError, match=rf"algorithm\.{setting}: unknown setting"):
        configure({**BASE, "algorithm": {"name": name}}, **{f"algorithm.{setting}": 1})
    assert configure({**BASE, "algorithm": {"name": name}}).max_lag is None
