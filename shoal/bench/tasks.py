"""Whole tasks, by us and by peers in turn: training speed beside its limit, and the time to solve CartPole."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from pathlib import Path
from statistics import median, median_low

from shoal.bench import peers, training
from shoal.bench.limits import limits
from shoal.bench.measuring import Effort, Row, Tables


def cartpole(effort: Effort) -> Tables:
    """IMPALA on CartPole."""
    return train(effort, "impala_cartpole")


def pong(effort: Effort) -> Tables:
    """IMPALA and PPO on Pong."""
    return train(effort, "impala_pong", "ppo_pong")


def dqn(effort: Effort) -> Tables:
    """DQN on Pong."""
    return train(effort, "dqn_pong")


def control(effort: Effort) -> Tables:
    """SAC and TD3 on HalfCheetah, with one update of 256 per step."""
    return train(effort, "sac_halfcheetah", "td3_halfcheetah")


QUEUE = 6  # batches that may wait, so that the items of 64 environments fit


def inference(effort: Effort) -> Tables:
    """Central beside local inference with 2 actors, by the number of environments of each."""
    rows: list[Row] = []
    for config, envs in product(("impala_cartpole", "impala_pong")[: 1 if effort.smallest else 2], (1, 8, 64)):
        ways = ("local", "central")
        rates: dict[str, list[float]] = {way: [] for way in ways}
        metrics: Row = {}
        for turn in range(effort.rounds):
            for way in ways[:: -1 if turn % 2 else 1]:
                overrides = {"inference": way, "actors": 2, "envs": envs, "engine": "processes", "queue": QUEUE}
                found = training.measure(config, effort.seconds, effort.smallest, overrides)
                rates[way].append(found["steps_per_s"])
                if way == "central":
                    metrics = found["metrics"]
        ratios = [central / local for central, local in zip(rates["central"], rates["local"], strict=True)]
        row = {"config": config, "envs": envs, **{f"{way}_steps_per_s": median(rates[way]) for way in ways}}
        row |= {"x": median(ratios), "least_x": min(ratios), "most_x": max(ratios)}
        rows.append(row | {key: metrics.get(f"inference_{key}") for key in ("ms_p50", "ms_p99", "batch")})
        if effort.smallest:
            break
    return {"inference": rows}


STILL: dict[str, dict[str, object]] = {
    "impala_cartpole": {},
    "impala_pong": {"environment.arguments": {"shape": [4, 84, 84]}, "envs": 16},
    # What Stable-Baselines3 does by default with 8 environments.
    "ppo_cartpole": {"algorithm.unroll": 2048, "algorithm.minibatches": 256},
}


def still(effort: Effort) -> Tables:
    """Networks for CartPole and Pong on an environment that costs nothing: what the loop itself can carry."""
    chosen = [*STILL][: 1 if effort.smallest else None]
    changes = {config: {"environment.id": "Still", **STILL[config]} for config in chosen}
    return compare(effort, changes, peers.STILL)


def train(effort: Effort, *configs: str) -> Tables:
    """Training speed on the task of each config."""
    return compare(effort, {config: {} for config in configs}, peers.TRAINING)


def compare(
    effort: Effort, runs: Mapping[str, Mapping[str, object]], against: Mapping[str, list[peers.Peer]]
) -> Tables:
    """Training speed of configs with changes, beside their limits and peers; a row is the round of the median rate."""
    bounds = {
        config: limits(config, min(effort.seconds, 5.0), effort.smallest, changes) for config, changes in runs.items()
    }
    rivals = [(config, *peer) for config in runs for peer in against.get(config, ()) if effort.peers]
    found: Tables = {name: [] for name in (*runs, *(rival[1] for rival in rivals))}
    folder = effort.peers or Path()
    for _ in range(effort.rounds):
        for config, changes in runs.items():
            found[config].append(training.measure(config, effort.seconds, effort.smallest, changes))
        for _, name, virtual, words in rivals:
            found[name].append(peers.train(folder, virtual, words, effort.seconds))
    tables: Tables = {"training": [], "limits": [], "workers": [], "peers": []}
    for config in runs:
        row = _middle(found[config])
        del row["metrics"]
        tables["workers"] += [{"config": config, **worker} for worker in row.pop("workers")]
        for name in ("environment_one_core", "environment_all_cores", "limit"):
            row[f"x_{name}"] = row["steps_per_s"] / bounds[config][name]
        tables["training"].append({"config": config, **row})
        tables["limits"].append({"config": config, **bounds[config]})
    for config, name, *_ in rivals:
        pairs = [*zip(found[config], found[name], strict=True)]
        ratios = {
            f"x_{key}": median(our[key] / their[key] for our, their in pairs)
            for key in ("steps_per_s", "first_update_s", "pss_mb")
        }
        tables["peers"].append({"peer": name, **_middle(found[name]), "ours": config, **ratios})
    return tables


def _middle(rounds: list[Row]) -> Row:
    rate = median_low(found["steps_per_s"] for found in rounds)
    return dict(next(found for found in rounds if found["steps_per_s"] == rate))


def solve(effort: Effort) -> Tables:
    """CartPole to its target, each seed by everyone in turn."""
    rows: list[Row] = []
    seeds, changes = ((0,), ("steps=1000",)) if effort.smallest else ((0, 1, 2), ())
    for seed in seeds:
        rows += [training.solve(config, seed, *changes) for config in ("ppo_cartpole", "impala_cartpole")]
        rows += [peers.solve(effort.peers, seed)] if effort.peers else []
    names = dict.fromkeys(row["who"] for row in rows)
    middle = {name: median(row["seconds"] for row in rows if row["who"] == name) for name in names}
    rival = middle.get(peers.SOLVING)
    medians = [{"who": who, "seconds": s, "x_peer": rival and s / rival} for who, s in middle.items()]
    return {"seeds": rows, "medians": medians}
