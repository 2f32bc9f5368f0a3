"""The parts that come with Shoal, each with a sentence."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from shoal.core.errors import SettingsError, nearest
from shoal.core.recipe import find


def catalogue(what: str | None) -> list[str]:
    """The lines of one part, or of all of them; environments and configs are listed in full only on request."""
    parts: dict[str, Callable[[], list[str]]] = {
        "algorithms": algorithms,
        "engines": engines,
        "stores": stores,
        "environments": lambda: environments(full=what == "environments"),
        "configs": lambda: experiments(full=what == "configs"),
    }
    if what is not None and what not in parts:
        raise SettingsError(f"cannot list {what!r}: choose from {', '.join(parts)}{nearest(what, parts)}")
    if what is not None:
        return parts[what]()
    return [line for name, lines in parts.items() for line in (f"{name}:", *(f"  {line}" for line in lines()), "")][:-1]


def algorithms() -> list[str]:
    """Every built-in algorithm."""
    from shoal.algorithms import ALGORITHMS

    return described(ALGORITHMS, "your own as package.module:Class")


def engines() -> list[str]:
    """Every built-in engine."""
    from shoal.engines import ENGINES

    return described(ENGINES, "your own as package.module:Class")


def stores() -> list[str]:
    """Every kind of store."""
    from shoal.services import STORES

    return described(STORES)


def environments(full: bool) -> list[str]:
    """Toy environments, and every id that Gymnasium and ALE have here."""
    import gymnasium

    from shoal.envs import TOYS, atari, mario

    registered = [id for id in gymnasium.registry if not atari.is_atari(id) and "/" not in id]
    lines = [f"{name:12} {sentence}" for name, sentence in TOYS.items()]
    if full:
        return [
            *lines,
            *registered,
            *atari.ids(),
            *mario.ids(),
            "my_package:MyEnv-v0  your own, registered with Gymnasium there",
        ]
    return [
        *lines,
        f"{len(registered)} from Gymnasium, such as CartPole-v1 and LunarLander-v3",
        f"{len(atari.ids())} Atari games, such as ALE/Pong-v5",
        f"{len(mario.ids())} of Super Mario Bros., such as SuperMarioBros-1-1-v0 (needs shoal[mario])",
        "your own as my_package:MyEnv-v0",
        "(`shoal list environments` lists them all)",
    ]


def experiments(full: bool) -> list[str]:
    """Every config that comes with Shoal, for `shoal train NAME`."""
    from shoal import configs

    names = configs.names()
    if not full:
        return [f"{len(names)} to train by name, such as impala_cartpole", "(`shoal list configs` lists them all)"]
    lines = []
    for name in names:
        tree, needed = configs.read(name), configs.needs(name)
        about = f"{tree['algorithm']['name']} on {tree['environment']['id'].rpartition(':')[2]}"
        lines.append(f"{name:22} {about}{f' ({needed})' if needed else ''}")
    return lines


def described(table: Mapping[str, str], *more: str) -> list[str]:
    """Names, each with the first sentence of its docstring."""
    lines = [f"{name:12} {str(find(path).__doc__).splitlines()[0]}" for name, path in table.items()]
    return [*lines, *more]
