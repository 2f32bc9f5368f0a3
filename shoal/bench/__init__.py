"""Benchmarks, each a subcommand of `shoal bench`: how fast Shoal is and what it costs, as ratios within one run."""

# What `shoal bench all` runs: functions of an Effort. The others have arguments of their own.
BENCHMARKS = {
    "cartpole": "shoal.bench.tasks:cartpole",
    "pong": "shoal.bench.tasks:pong",
    "dqn": "shoal.bench.tasks:dqn",
    "control": "shoal.bench.tasks:control",
    "inference": "shoal.bench.tasks:inference",
    "still": "shoal.bench.tasks:still",
    "solve": "shoal.bench.tasks:solve",
    "calls": "shoal.bench.calls:calls",
    "links": "shoal.bench.links:links",
    "actors": "shoal.bench.actors:actors",
    "replay": "shoal.bench.replay:replay",
}
