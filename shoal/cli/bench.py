"""`shoal bench`: every benchmark as a command."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from shoal.core.errors import SettingsError, nearest

app = typer.Typer(help="Measure how fast Shoal is on this machine, and what it costs.", no_args_is_help=True)

Seconds = Annotated[float, typer.Option(help="Length of each measured window.", min=0.05)]
Rounds = Annotated[int, typer.Option(help="Times that training is measured, with the peers in turn.", min=1)]
Peers = Annotated[Path | None, typer.Option(help="Folder of the peers' drivers and virtual environments.")]
Smallest = Annotated[bool, typer.Option("--smallest", help="Just enough to see that it runs; ignore the numbers.")]
Json = Annotated[bool, typer.Option("--json", help="Print one line of JSON for each row instead of tables.")]


@app.callback()
def prepare() -> None:
    """End whatever a benchmark started when it is ended itself."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


@app.command()
def cartpole(
    seconds: Seconds = 30.0, rounds: Rounds = 1, peers: Peers = None, smallest: Smallest = False, json: Json = False
) -> None:
    """Training speed, start-up and memory of IMPALA on CartPole."""
    run(["cartpole"], json, seconds=seconds, rounds=rounds, peers=peers, smallest=smallest)


@app.command()
def pong(
    seconds: Seconds = 30.0, rounds: Rounds = 1, peers: Peers = None, smallest: Smallest = False, json: Json = False
) -> None:
    """Training speed, start-up and memory of IMPALA and PPO on Pong."""
    run(["pong"], json, seconds=seconds, rounds=rounds, peers=peers, smallest=smallest)


@app.command()
def dqn(
    seconds: Seconds = 30.0, rounds: Rounds = 1, peers: Peers = None, smallest: Smallest = False, json: Json = False
) -> None:
    """Training speed, start-up and memory of DQN on Pong."""
    run(["dqn"], json, seconds=seconds, rounds=rounds, peers=peers, smallest=smallest)


@app.command()
def control(
    seconds: Seconds = 30.0, rounds: Rounds = 1, peers: Peers = None, smallest: Smallest = False, json: Json = False
) -> None:
    """Training speed, start-up and memory of SAC and TD3 on HalfCheetah."""
    run(["control"], json, seconds=seconds, rounds=rounds, peers=peers, smallest=smallest)


@app.command()
def inference(seconds: Seconds = 30.0, rounds: Rounds = 1, smallest: Smallest = False, json: Json = False) -> None:
    """Central beside local inference, with 1, 8 and 64 environments per actor."""
    run(["inference"], json, seconds=seconds, rounds=rounds, smallest=smallest)


@app.command()
def still(
    seconds: Seconds = 30.0, rounds: Rounds = 1, peers: Peers = None, smallest: Smallest = False, json: Json = False
) -> None:
    """What the training loop itself can carry, on an environment that costs nothing."""
    run(["still"], json, seconds=seconds, rounds=rounds, peers=peers, smallest=smallest)


@app.command()
def solve(peers: Peers = None, smallest: Smallest = False, json: Json = False) -> None:
    """Seconds until CartPole is solved, for PPO and IMPALA, on three seeds."""
    run(["solve"], json, peers=peers, smallest=smallest)


@app.command()
def calls(seconds: Seconds = 30.0, json: Json = False) -> None:
    """Calls through the engine `processes`, beside a bare pipe and bare shared memory."""
    run(["calls"], json, seconds=seconds)


@app.command()
def links(seconds: Seconds = 30.0, json: Json = False) -> None:
    """Calls over each link of the engine `cluster`, beside the bare library."""
    run(["links"], json, seconds=seconds)


@app.command()
def actors(seconds: Seconds = 30.0, json: Json = False) -> None:
    """Calls through the engine `ray`, beside a bare Ray actor."""
    run(["actors"], json, seconds=seconds)


@app.command()
def replay(seconds: Seconds = 3.0, peers: Peers = None, smallest: Smallest = False, json: Json = False) -> None:
    """Inserts, draws and updates of the replay, and bytes per item."""
    run(["replay"], json, seconds=seconds, peers=peers, smallest=smallest)


@app.command("all")
def all_(
    seconds: Seconds = 30.0, rounds: Rounds = 1, peers: Peers = None, smallest: Smallest = False, json: Json = False
) -> None:
    """All of the above, one after another."""
    from shoal.bench import BENCHMARKS

    run(BENCHMARKS, json, seconds=seconds, rounds=rounds, peers=peers, smallest=smallest)


@app.command()
def engines(
    names: Annotated[
        list[str] | None, typer.Argument(help="Engines, such as processes or cluster/grpc; default: all installed.")
    ] = None,
    seconds: Annotated[float, typer.Option(help="Seconds for each kind of call.", min=0.05)] = 3.0,
    json: Json = False,
) -> None:
    """Calls, arrays and a small training run on every engine, with the same work on each."""
    from shoal.bench import engines
    from shoal.bench.tables import show

    chosen = engines.chosen(names or [])
    show("engines", engines.measure(chosen, seconds), json, len(chosen))


@app.command()
def scale(
    engine: Annotated[str, typer.Option(help="The engine, such as processes or cluster/grpc.")] = "processes",
    env: Annotated[str, typer.Option(help="Whose experience is sent: cartpole or pong.")] = "cartpole",
    actors: Annotated[str, typer.Option(help="Numbers of actors, separated by commas.")] = "1,2,4,8,16,32,64,128,256",
    rate: Annotated[float, typer.Option(help="Items that each actor sends per second.", min=0.01)] = 5.0,
    seconds: Annotated[float, typer.Option(help="Seconds for each number of actors.", min=0.05)] = 10.0,
    shards: Annotated[
        int, typer.Option(help="Fill a prioritized replay of this many shards; 0: fill a queue.", min=0, max=1024)
    ] = 0,
    json: Json = False,
) -> None:
    """The head against more and more actors, which send recorded experience and play nothing."""
    from shoal.bench import engines, scale
    from shoal.bench.tables import show

    (name,) = engines.chosen([engine])
    if env not in scale.ENVIRONMENTS:
        known = scale.ENVIRONMENTS
        raise SettingsError(f"--env {env}: choose one of {', '.join(known)}{nearest(env, known)}")
    counts = whole(actors, "--actors")
    show(f"scale: {env} on {name}", scale.measure(name, env, counts, rate, seconds, shards), json, len(counts))


@app.command()
def learn(
    names: Annotated[list[str] | None, typer.Argument(help="Tasks; default: all.", metavar="[TASKS]...")] = None,
    seeds: Annotated[int, typer.Option(help="Train with seeds 0, 1, … of this number.", min=1)] = 3,
    folder: Annotated[Path, typer.Option(help="Where the runs are; those that are there are continued.")] = Path(
        "learn"
    ),
    page: Annotated[Path | None, typer.Option(help="Write the results of all runs in the folder to this page.")] = None,
    at_once: Annotated[int, typer.Option(help="Runs at a time.", min=1)] = 1,
    episodes: Annotated[int, typer.Option(help="Episodes over which the last policy is scored.", min=1)] = 100,
    change: Annotated[list[str] | None, typer.Option(help="A setting for every run, such as steps=1e6.")] = None,
    json: Json = False,
) -> None:
    """Train tasks over seeds, and hold their scores to published ones."""
    from shoal.bench import learning
    from shoal.bench.tables import show

    tasks = learning.chosen(names or [])
    rows = learning.learn(tasks, range(seeds), folder, change or [], at_once, episodes)
    show("learn", rows, json, len(tasks) * seeds)
    if page is not None:
        learning.write_page(folder, page)


@app.command()
def gpu(
    configs: Annotated[
        list[str] | None, typer.Argument(help="Experiments; default: impala_pong and ppo_pong.", metavar="[CONFIGS]...")
    ] = None,
    seconds: Seconds = 30.0,
    rounds: Rounds = 1,
    seeds: Annotated[int, typer.Option(help="Seeds that are trained to the target; 0: none.", min=0)] = 3,
    target: Annotated[float, typer.Option(help="Mean return of 30 games to be reached.")] = 18.0,
    folder: Annotated[Path, typer.Option(help="Where the runs to the target are; it must not hold any yet.")] = Path(
        "gpu"
    ),
    change: Annotated[list[str] | None, typer.Option(help="A setting for every run, such as actors=4.")] = None,
    json: Json = False,
) -> None:
    """Training on a GPU: speed beside the bare environments' and the CPU's, how busy it is, and seconds to a score."""
    from shoal.bench import gpu
    from shoal.bench.tables import about, show
    from shoal.configs import parse_overrides

    overrides, names = parse_overrides(change or []), configs or ["impala_pong", "ppo_pong"]
    gpu.check()
    show("machine", [about()], json)
    show("gpu", gpu.speed(names, seconds, rounds, overrides), json, len(names))
    show("gpu: seconds to a score", gpu.to_score(names, seeds, target, folder, overrides), json, len(names) * seeds)


@app.command()
def advice(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Situations, such as 'use all cores'; default: all.", metavar="[NAMES]..."),
    ] = None,
    seconds: Seconds = 30.0,
    rounds: Annotated[int, typer.Option(help="Times that each is measured with and without.", min=1)] = 1,
    json: Json = False,
) -> None:
    """Runs that could be faster: what `shoal explain` advises, and how much faster they are with it."""
    from shoal.bench import advice
    from shoal.bench.tables import about, show

    situations = advice.chosen(names or [])
    show("machine", [about()], json)
    show("advice", advice.measure(situations, seconds, rounds), json, len(situations))


@app.command()
def page(
    configs: Annotated[
        list[str] | None, typer.Argument(help="Experiments; default: impala_cartpole.", metavar="[CONFIGS]...")
    ] = None,
    seconds: Seconds = 20.0,
    rounds: Annotated[int, typer.Option(help="Times that it is measured with the page open and closed.", min=1)] = 5,
    change: Annotated[list[str] | None, typer.Option(help="A setting for every run, such as actors=1.")] = None,
    json: Json = False,
) -> None:
    """What the live page costs a run: its speed with somebody who looks and without, in turn within one run."""
    from shoal.bench import page
    from shoal.bench.tables import about, show
    from shoal.configs import parse_overrides

    names = configs or ["impala_cartpole"]
    show("machine", [about()], json)
    show("page", page.cost(names, seconds, rounds, parse_overrides(change or [])), json, len(names))


@app.command()
def learners(
    configs: Annotated[
        list[str] | None, typer.Argument(help="Experiments; default: impala_cartpole.", metavar="[CONFIGS]...")
    ] = None,
    counts: Annotated[str, typer.Option("--learners", help="Numbers of learners, separated by commas.")] = "1,2",
    prefetch: Annotated[str, typer.Option(help="Values of the setting prefetch, separated by commas.")] = "0,auto",
    seconds: Seconds = 30.0,
    rounds: Annotated[int, typer.Option(help="Times that each is measured, in turn and backwards.", min=1)] = 3,
    change: Annotated[list[str] | None, typer.Option(help="A setting for every run, such as actors=4.")] = None,
    smallest: Smallest = False,
    json: Json = False,
) -> None:
    """Updates of one learner beside several, with batches prepared ahead and without."""
    from shoal.bench.learners import compare
    from shoal.bench.tables import about, show
    from shoal.configs import parse_overrides

    names, ahead, overrides = configs or ["impala_cartpole"], prefetch.split(","), parse_overrides(change or [])
    numbers = whole(counts, "--learners")
    show("machine", [about()], json)
    rows = compare(names, numbers, ahead, seconds, rounds, overrides, smallest)
    show("learners", rows, json, len(names) * len(numbers) * len(ahead))


@app.command()
def soak(
    names: Annotated[list[str], typer.Argument(help="Engines, one after another.", metavar="ENGINES...")],
    seconds: Annotated[float, typer.Option(help="Length of each run.", min=1)] = 1200.0,
    leave: Annotated[float, typer.Option(help="On cluster: seconds after which a node leaves.", min=1)] = 240.0,
    out: Annotated[Path, typer.Option(help="Folder for the log, the samples and the plot of each run.")] = Path("."),
    change: Annotated[list[str] | None, typer.Option(help="A setting for every run, such as actors=1.")] = None,
    json: Json = False,
) -> None:
    """What every process holds over a long run, and how fast it grows; the run's page is open all the while."""
    from shoal.bench import engines
    from shoal.bench.soak import soak
    from shoal.bench.tables import show

    for name in engines.chosen(names):
        show(f"soak: {name}", soak(name, seconds, out, leave, change or []), json)


def whole(text: str, option: str) -> tuple[int, ...]:
    """Whole numbers, as they are typed."""
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        counts = (0,)
    if min(counts) < 1:
        raise SettingsError(f"{option} {text}: give whole numbers from 1 up, separated by commas")
    return counts


def run(names: Iterable[str], json: bool, **effort: Any) -> None:
    """Run benchmarks, and show the tables of each as soon as it is done."""
    from shoal.bench import BENCHMARKS
    from shoal.bench.measuring import Effort
    from shoal.bench.tables import about, show
    from shoal.core.recipe import find

    show("machine", [about()], json)
    for name in names:
        for title, rows in find(BENCHMARKS[name])(Effort(**effort)).items():
            show(name if title == name else f"{name}: {title}", rows, json)
