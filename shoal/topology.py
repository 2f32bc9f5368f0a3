"""Who exists, and who talks to whom."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal import envs
from shoal.core.errors import SettingsError, nearest
from shoal.core.randomness import derive
from shoal.core.recipe import describe, path_of
from shoal.core.tree import map_tree
from shoal.core.types import Engine, Spec, Store
from shoal.engines.options import Machines, Options, Room
from shoal.experiment import Experiment
from shoal.runs.trace import Trace
from shoal.services.averager import Averager
from shoal.services.checkpoints import Checkpoints
from shoal.services.circular import Circular
from shoal.services.journal import Journal
from shoal.services.mixture import Mixture
from shoal.services.parameters import Parameters
from shoal.services.queue import Queue
from shoal.services.reduction import Reduction
from shoal.services.replay import Replay
from shoal.services.requests import Requests
from shoal.services.shard import Shard
from shoal.workers.recorder import record
from shoal.workers.sharding import hold

PLENTY = 1_000_000  # steps by which a group may pass the end of a run
MODULES = (
    "torch",
    "gymnasium",
    "shoal.experiment",
    "shoal.workers.actor",
    "shoal.workers.evaluator",
    "shoal.workers.gradient",
    "shoal.workers.inference",
    "shoal.workers.learner",
)


def options(experiment: Experiment, resumed_at: int = 0) -> Options:
    """Placement and limits: what a learner works with lives with it, so only actors' calls travel.

    What gradient workers work with is in shared memory or in the head, so that any of them may die.
    """
    # A resumed run must not draw the same random numbers again; under lockstep, periods take care of that.
    again = resumed_at and not experiment.lockstep
    # One that begins again empty repeats nothing.
    spare = [] if experiment.lockstep else [*shard_names(experiment), *inference_names(experiment)]
    return Options(
        seed=derive(experiment.seed, "resumed", resumed_at) if again else experiment.seed,
        lockstep=experiment.lockstep,
        homes=homes(experiment),
        observers=frozenset({"recorder"}),
        relays=frozenset({"parameters"}),
        restartable=frozenset({"evaluator", *players(experiment), *spare}),
        expendable=frozenset(spare),
        # A learner goes back to its checkpoint; under lockstep that would not repeat what the others did since.
        revivable=frozenset() if experiment.lockstep else frozenset(learner_names(experiment)),
        machines=machines(experiment) if experiment.engine == "cluster" else None,
        room=room(experiment) if experiment.engine == "ray" else None,
        **experiment.limits.model_dump(),
    )


def room(experiment: Experiment) -> Room:
    """What the workers ask of a Ray cluster: by default a learner that computes on a GPU asks for one."""
    from shoal.workers.model import pick_device

    asked = experiment.ray
    leads = {"federated": "overseer", "actors_and_learner": "learner"}.get(experiment.topology_name)
    shards = ["shard"] if shard_names(experiment) else []
    shards += ["inference"] if experiment.central else []
    roles = [*filter(None, [leads]), *shards, "gradient" if experiment.shared else "actor", "evaluator"]
    for setting in ("cpus", "gpus", "custom"):
        for role in getattr(asked, setting):
            if role not in roles:
                raise SettingsError(f"ray.{setting}: no worker is a {role!r}: {', '.join(roles)}{nearest(role, roles)}")
    gpus = {"learner": 1.0} if leads == "learner" and pick_device(experiment.device).type == "cuda" else {}
    for role in ("inference" if experiment.central else "actor", "evaluator"):
        if role in roles and experiment.actor_device == "cuda" and not asked.gpus.get(role):
            raise SettingsError(f"ray.gpus: an {role} on actor_device cuda needs a share of a GPU, such as {role}: 0.1")
    return asked.model_copy(update={"gpus": {**gpus, **asked.gpus}})


def machines(experiment: Experiment) -> Machines:
    """Actors may live on other machines, if these would build what is built here."""
    return Machines(
        nodes=experiment.nodes,
        network=experiment.network,
        remote=frozenset(players(experiment)),
        check=(path_of(facts), [describe(experiment)], facts(experiment)),
    )


def facts(experiment: Experiment) -> dict[str, str]:
    """What two machines must agree on before they work together."""
    net = experiment.algorithm.build(envs.spec_of(experiment.environment))
    shapes = [[name, str(value.dtype), list(value.shape)] for name, value in net.state_dict().items()]
    settings = experiment.model_dump(mode="json", exclude={"nodes", "network", "ray"})
    return {"architecture hash": _digest(shapes), "experiment hash": _digest(settings)}


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def homes(experiment: Experiment) -> dict[str, str]:
    """Services that live with a worker."""
    if experiment.topology_name == "federated":
        stores = {f"{group}/store": f"{group}/gradient-0" for group in groups(experiment)} if experiment.replay else {}
        return stores | dict.fromkeys(("averager", "parameters", "checkpoints"), "overseer")
    if experiment.shared:
        return {}
    shards = {f"store-{index}": name for index, name in enumerate(shard_names(experiment))}
    own = {store_of(name): name for name in learner_names(experiment)}
    asked = {name.replace("inference", "requests"): name for name in inference_names(experiment)}
    return dict.fromkeys(("reduction", "parameters", "checkpoints"), "learner") | own | shards | asked


def learner_names(experiment: Experiment) -> list[str]:
    """The names of the learners, the first of which leads."""
    return ["learner", *(f"learner-{index}" for index in range(1, experiment.learners))]


def store_of(learner: str) -> str:
    """The name of a learner's store."""
    return learner.replace("learner", "store")


def shard_names(experiment: Experiment) -> list[str]:
    """The names of the workers that hold shards of the replay; none: it lives with the learner."""
    count = experiment.replay.shards if experiment.replay else 1
    return [f"shard-{index}" for index in range(count)] if count > 1 else []


def inference_names(experiment: Experiment) -> list[str]:
    """The names of the inference workers; none: every actor has a network."""
    return [f"inference-{index}" for index in range(experiment.inference_workers)] if experiment.central else []


def groups(experiment: Experiment) -> list[str]:
    """The names of the federated groups."""
    return [f"group-{index}" for index in range(experiment.groups)]


def players(experiment: Experiment) -> list[str]:
    """The names of the workers that act: actors, or gradient workers."""
    kind = "gradient" if experiment.shared else "actor"
    names = [f"{kind}-{index}" for index in range(experiment.actor_count)]
    if experiment.topology_name == "federated":
        return [f"{group}/{name}" for group in groups(experiment) for name in names]
    return names


def serve_store(experiment: Experiment, engine: Engine, name: str = "store") -> Store:
    """A queue where every item is used once, a ring of batches used in turn, a replay, or a mixture."""
    spec = envs.spec_of(experiment.environment)
    choices = [*spec.action.choices]
    size, room, lockstep = experiment.share, experiment.queue_capacity, experiment.lockstep
    shape = replay_shape(experiment, spec)
    store: Store
    if experiment.mixture is not None:
        own = experiment.mixture, size, room, experiment.max_lag, *shape, choices, lockstep, experiment.seed
        store = engine.serve(name, Mixture, *own)
    elif experiment.circular:
        store = engine.serve(name, Circular, experiment.circular, room, size, choices, lockstep)
    elif experiment.replay is None:
        store = engine.serve(name, Queue, room, size, experiment.max_lag, choices, lockstep)
    else:
        kept = {key: -(-getattr(experiment.replay, key) // experiment.learners) for key in ("capacity", "minimum")}
        store = engine.serve(name, Replay, experiment.replay.model_copy(update=kept), size, *shape, choices)
    return store


def serve_shards(experiment: Experiment, engine: Engine) -> list[Shard]:
    """The shards of the replay, each with a worker that does nothing else; none: the replay is not spread."""
    names = shard_names(experiment)
    if not names or experiment.replay is None:
        return []
    spec = envs.spec_of(experiment.environment)
    given = (experiment.replay, experiment.batch_size, *replay_shape(experiment, spec), [*spec.action.choices])
    shards = [engine.serve(f"store-{index}", Shard, *given) for index in range(len(names))]
    for name in names:
        engine.run(name, hold)
    return shards


def serve_requests(experiment: Experiment, engine: Engine, desk: Desk) -> list[Requests]:
    """Where actors ask for actions, each with the worker that answers; none: every actor has a network."""
    from shoal.workers.inference import infer

    spec = envs.spec_of(experiment.environment)
    shapes = map_tree(lambda leaf: [list(leaf.shape), str(leaf.dtype)], spec.observation)
    groups, names, found = experiment.env_groups, inference_names(experiment), []
    for index, name in enumerate(names):
        asking = [*enumerate(players(experiment))][index :: len(names)]
        owners = {f"{number}/{group}": actor for number, actor in asking for group in range(groups)}
        given = shapes, experiment.env_count // groups, owners, [*spec.action.choices]
        found.append(engine.serve(name.replace("inference", "requests"), Requests, *given))
        engine.run(name, infer, experiment, found[-1], desk.parameters, desk.journal)
    return found


def replay_shape(experiment: Experiment, spec: Spec) -> tuple[int, Any]:
    """The overlap of items, and the instants in each observation: from these a replay knows what is new."""
    stack = map_tree(lambda leaf: leaf.stack, spec.observation)
    return experiment.algorithm.experience.overlap, stack


@dataclass(frozen=True)
class Desk:
    """The services that every run has."""

    journal: Journal
    parameters: Parameters
    checkpoints: Checkpoints


def start(
    experiment: Experiment, engine: Engine, run: Path, state: Mapping[str, Any], trace: Trace | None = None
) -> tuple[Journal, Parameters, list[str]]:
    """Start everyone; returns the journal, the weights, and the workers whose end is the run's.

    `state` is that of the checkpoint from which the run continues, empty at its beginning.
    """
    from shoal.workers.evaluator import evaluate

    desk = Desk(
        engine.serve(
            "journal",
            Journal,
            experiment.evaluation.target,
            state.get("journal"),
            [stage.target for stage in experiment.curriculum[:-1]],
        ),
        engine.serve("parameters", Parameters, experiment.weights),
        engine.serve("checkpoints", Checkpoints, str(run.resolve()), experiment.checkpoints.keep),
    )
    last = TOPOLOGIES[experiment.topology_name](experiment, engine, run, state, desk)
    engine.run("evaluator", evaluate, experiment, desk.parameters, desk.journal, desk.checkpoints)
    engine.run("recorder", record, experiment, run, state.get("steps", 0), desk.journal, engine.report, trace)
    return desk.journal, desk.parameters, [last, "evaluator"]


def actors_and_learner(experiment: Experiment, engine: Engine, run: Path, state: Mapping[str, Any], desk: Desk) -> str:
    """Actors fill a store, a learner takes from it; returns who ends last, as the others do."""
    from shoal.workers.actor import act
    from shoal.workers.joint import assist
    from shoal.workers.learner import learn

    names = learner_names(experiment)
    shards = serve_shards(experiment, engine)
    stores = [] if shards else [serve_store(experiment, engine, store_of(name)) for name in names]
    others = stores[1:]
    reduction = engine.serve("reduction", Reduction, names) if others else None
    given = (desk.parameters, desk.journal, desk.checkpoints, others, reduction)
    engine.run("learner", learn, experiment, shards or stores[0], *given)
    for name, store in zip(names[1:], others, strict=True):
        engine.run(name, assist, experiment, store, reduction, desk.journal)
    requests = serve_requests(experiment, engine, desk)
    for index, name in enumerate(players(experiment)):
        own = shards[index % len(shards)] if shards else stores[index % len(stores)]
        asked = requests[index % len(requests)] if requests else None
        begun = state.get("period", 0)
        engine.run(name, act, experiment, index, begun, own, desk.parameters, desk.journal, asked)
    return "learner"


def gradient_workers(experiment: Experiment, engine: Engine, run: Path, state: Mapping[str, Any], desk: Desk) -> str:
    """Every worker acts and learns, on one network and one optimizer in shared memory."""
    from shoal.workers.gradient import gradient
    from shoal.workers.shared_model import initial_block

    check_shared_memory(experiment, engine)
    store = serve_store(experiment, engine) if experiment.replay else None
    saved = desk.checkpoints.load(experiment.lockstep)
    if store is not None and saved is not None:
        store.restore(saved.get("store", {}))
    block = engine.share("block", initial_block(experiment, saved))
    given = (block, desk.parameters, desk.journal, desk.checkpoints, store)
    for index, name in enumerate(players(experiment)):
        engine.run(name, gradient, experiment, index, *given)
    return players(experiment)[-1]


def federated(experiment: Experiment, engine: Engine, run: Path, state: Mapping[str, Any], desk: Desk) -> str:
    """Groups of gradient workers learn apart, each on one machine, and merge their networks now and then."""
    from shoal.workers.federation import oversee
    from shoal.workers.gradient import gradient
    from shoal.workers.shared_model import initial_block

    check_shared_memory(experiment, engine)
    saved = Checkpoints(str(run.resolve()), experiment.checkpoints.keep).load(experiment.lockstep)
    tree = initial_block(experiment, saved)
    weights = {name.removeprefix("net/"): array for name, array in tree.items() if name.startswith("net/")}
    begun = [int(tree[name].sum()) for name in ("steps", "updates")]
    most = experiment.steps + PLENTY  # of one change: a group that cannot reach the others continues for a while
    averager = engine.serve("averager", Averager, weights, experiment.weights, *begun, most)
    engine.run("overseer", oversee, experiment, averager, desk.parameters, desk.journal, desk.checkpoints)
    for name in ("steps", "updates"):  # each group counts its own
        tree[name][...] = 0
    for group in groups(experiment):
        store = serve_store(experiment, engine, f"{group}/store") if experiment.replay else None
        block = engine.share(f"{group}/block", tree)
        given = (block, None, desk.journal, None, store, averager, group)  # the overseer publishes and saves
        for index in range(experiment.actor_count):
            engine.run(f"{group}/gradient-{index}", gradient, experiment, index, *given)
    return "overseer"


def check_shared_memory(experiment: Experiment, engine: Engine) -> None:
    """Refuse an engine without memory that workers can share."""
    if not engine.shares:
        topology = experiment.topology_name
        raise SettingsError(f"engine {experiment.engine} has no shared memory, which topology {topology} needs")


TOPOLOGIES = {
    "actors_and_learner": actors_and_learner,
    "gradient_workers": gradient_workers,
    "federated": federated,
}
