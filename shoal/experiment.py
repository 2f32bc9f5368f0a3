"""The whole configuration of an experiment, loaded from YAML and overridden by dotted keys."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    PlainValidator,
    ValidationError,
    field_serializer,
    field_validator,
    model_validator,
)

from shoal.algorithms import ALGORITHMS
from shoal.algorithms import find as find_algorithm
from shoal.complaints import explain
from shoal.configs import read
from shoal.core.algorithm import (
    Algorithm,
    HasActorPriorities,
    HasCircular,
    HasFeatures,
    HasMaxLag,
    HasMinibatches,
    HasMixture,
    HasReplay,
    HasReplayRatio,
    HasTopology,
)
from shoal.core.codec import Codec
from shoal.core.errors import Fatal, SettingsError, ShoalError, nearest
from shoal.core.machine import cores
from shoal.core.mixing import Mixing, problem_of, queue_of, shares
from shoal.core.recipe import path_of
from shoal.core.settings import Circling, Replaying, Settings
from shoal.engines import ENGINES
from shoal.engines.options import Network, Room
from shoal.envs import Environment, check, spec_of
from shoal.envs.given import check_engine
from shoal.runs import directory

ENVS = 8  # environments per actor where nothing says how many are fast
AHEAD = 4  # batches that a learner prepares ahead where nothing says how many


class Evaluation(Settings):
    """When and how the policy is evaluated."""

    every: int | None = Field(None, ge=1, description="Steps between evaluations; null: a twentieth of the run.")
    episodes: int = Field(20, ge=1, description="Episodes per evaluation.")
    # 30 minutes of an Atari game at 4 frames a step: Hessel et al. 2017, arXiv:1710.02298, Evaluation Methodology.
    max_steps: int | None = Field(
        27_000, ge=1, description="Steps after which an evaluation episode is cut off; null: never."
    )
    target: float | None = Field(
        None, description="Mean evaluation return at which the run ends as solved; null: run all steps."
    )


class Stage(Settings):
    """One stage of a curriculum."""

    arguments: dict[str, Any] = Field(
        default_factory=dict, description="Arguments of the environment in this stage, besides `environment.arguments`."
    )
    target: float | None = Field(
        None, description="Mean evaluation return at which the next stage begins; null in the last stage only."
    )


class Saving(Settings):
    """When checkpoints are saved and how many are kept."""

    every: int | None = Field(
        None,
        ge=1,
        description="Steps between checkpoints; null: a twentieth of the run. "
        "At most 5 minutes apart, except in lockstep.",
    )
    keep: int = Field(3, ge=1, description="Newest checkpoints to keep, besides the best policy.")


class Limits(Settings):
    """Timeouts, and how often a worker is restarted."""

    restarts: int = Field(
        5, ge=0, description="Restarts of a worker that keeps dying; a minute without a crash resets the count."
    )
    deadline: float = Field(60.0, gt=0, description="Timeout of one call to a service, in seconds.")
    stall: float = Field(
        120.0,
        gt=0,
        description="Seconds after which the run fails if no worker makes progress, or one is stuck in a step.",
    )
    silence: float = Field(30.0, gt=0, description="Seconds without a heartbeat after which a worker counts as dead.")


class Federation(Settings):
    """How groups of gradient workers merge their networks."""

    groups: int | None = Field(
        None, ge=1, description="Number of groups, of `actors` workers each; null: one per node."
    )
    round: int = Field(2_000, ge=1, description="Environment steps of a group between two merges.")


def as_count(value: Any) -> Any:
    """Refuse what is neither a number of something nor `auto`."""
    if value in ("auto", None):  # None: the same, in the folders of earlier runs
        return "auto"
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"a whole number ≥ 1, or auto; got {value!r}")
    return value


Count: TypeAlias = Annotated[Annotated[int, Field(ge=1)] | Literal["auto"], BeforeValidator(as_count)]


def as_algorithm(value: Any) -> Algorithm[Any]:
    """Make an algorithm from its `name` and settings."""
    if not isinstance(value, BaseModel):
        if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
            raise ValueError(f"needs a name: {', '.join(ALGORITHMS)}, or your own as package.module:Class")
        try:
            found = find_algorithm(value["name"])
        except ShoalError as error:
            raise ValueError(str(error)) from None
        if not issubclass(found, BaseModel):
            raise ValueError(f"{value['name']} is not an algorithm: derive it from shoal.core.settings.Settings")
        value = found.model_validate({key: item for key, item in value.items() if key != "name"})
    missing = [name for name in vars(Algorithm) if not (name.startswith("_") or hasattr(value, name))]
    if missing:
        raise ValueError(f"{type(value).__name__} is not an algorithm: it has no {', '.join(missing)}")
    replay = value.replay if isinstance(value, HasReplay) else None
    circular = value.circular if isinstance(value, HasCircular) else None
    for name, given, kind in (("replay", replay, Replaying), ("circular", circular, Circling)):
        if not isinstance(given, kind | None):
            raise ValueError(
                f"{type(value).__name__} is not an algorithm: its {name} is a {type(given).__name__}, not a "
                f"shoal.core.settings.{kind.__name__} or None"
            )
    if replay and circular:
        raise ValueError(f"{type(value).__name__} is not an algorithm: it has both a replay and a circular buffer")
    return value  # type: ignore[no-any-return]


class Experiment(Settings):
    """Everything that a run depends on."""

    environment: Environment = Field(description="The environment: `id` and its settings.")
    algorithm: Annotated[Algorithm[Any], PlainValidator(as_algorithm)] = Field(
        description="The algorithm: `name` and its settings."
    )
    curriculum: tuple[Stage, ...] = Field(
        (), description="Stages whose arguments the environment takes one after another; empty: always the same."
    )
    engine: str = Field(
        "processes", description="Where workers run: inline, threads, processes, ray, cluster, or your own."
    )
    topology: Literal["actors_and_learner", "gradient_workers", "federated"] | None = Field(
        None,
        description="Who learns: one learner from its actors; every worker, on one shared network; or groups of such "
        "workers that merge their networks now and then; null: the algorithm's own choice.",
    )
    federation: Federation = Field(default_factory=Federation, description="How federated groups merge.")
    lockstep: bool = Field(
        False, description="Run workers in a fixed order, so that the same seed gives the same weights."
    )
    seed: int = Field(0, ge=0, description="Seed from which every worker's random state is derived.")
    steps: int = Field(1_000_000, ge=1, description="Environment steps to learn from.")
    actors: Count = Field(
        "auto",
        description="Number of actors or gradient workers; auto: one per core, less one for each learner beside them.",
    )
    learners: int = Field(
        1,
        ge=1,
        le=64,
        description="Number of learners, each with an equal share of every batch and of the actors; they average "
        "their gradients and update as one.",
    )
    envs: Count = Field(
        "auto",
        description="Environments per actor; auto: as many as make it faster, tried when the run begins (lockstep: 8).",
    )
    queue: int = Field(2, ge=1, description="Batches of experience that may wait for the learner.")
    weights: Codec = Field(default_factory=Codec, description="How weights are sent to actors and evaluator.")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Device of the learner.")
    actor_device: Literal["auto", "cpu", "cuda"] = Field("cpu", description="Device of actors and evaluator.")
    inference: Literal["local", "central"] = Field(
        "local",
        description="Where actions are chosen: by a network in every actor, or by inference workers for all of them.",
    )
    inference_workers: int = Field(1, ge=1, le=64, description="Inference workers among which actors are divided.")
    threads: int | None = Field(
        None,
        ge=1,
        description="Torch threads of the learner; null: one per core if actors wait for it, else one.",
    )
    prefetch: Annotated[int, Field(ge=0)] | Literal["auto"] = Field(
        "auto",
        description="Batches that the learner prepares ahead while it updates; auto: on a CPU, up to 4 while it waits "
        "for them.",
    )
    nodes: tuple[str, ...] = Field((), description="Addresses HOST:PORT of the nodes of the engine `cluster`.")
    network: Network = Field(default_factory=Network, description="How machines find and trust each other.")
    ray: Room = Field(default_factory=Room, description="What the engine `ray` requests from its cluster.")
    evaluation: Evaluation = Field(default_factory=Evaluation, description="When and how the policy is evaluated.")
    checkpoints: Saving = Field(default_factory=Saving, description="When checkpoints are saved and how many are kept.")
    limits: Limits = Field(default_factory=Limits, description="Timeouts and restarts.")
    loggers: tuple[str, ...] | None = Field(
        None,
        description="Where metrics go besides metrics.jsonl: tensorboard, wandb, mlflow, or your own as "
        "package.module:Class; null: tensorboard where it is installed.",
    )
    log_every: float = Field(2.0, gt=0, description="Seconds between progress lines.")

    @field_serializer("algorithm")
    def _name_algorithm(self, algorithm: Any) -> Any:
        path = path_of(type(algorithm))
        name = next((name for name, known in ALGORITHMS.items() if known == path), path)
        return {"name": name, **algorithm.model_dump(mode="json")}

    @property
    def algorithm_name(self) -> str:
        """The algorithm in one word, for folders and titles."""
        return type(self.algorithm).__name__.lower()

    @field_validator("engine")
    @classmethod
    def _known_engine(cls, value: str) -> str:
        if value not in ENGINES and ":" not in value:
            raise ValueError(f"unknown engine {value!r}: {', '.join(ENGINES)}, or your own as package.module:Class"
                             + nearest(value, ENGINES))  # fmt: skip
        return value

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.engine == "cluster" and not (self.nodes or self.network.listen):
            raise ValueError(
                "engine cluster has no machines: list them in nodes, or set network.listen for nodes to join"
            )
        if self.engine == "cluster" and self.topology_name == "gradient_workers":
            raise ValueError(
                "gradient workers share the memory of one machine: on engine cluster, use topology: federated"
            )
        if self.engine == "cluster" and self.network.link == "torchrpc" and (self.nodes or self.network.world < 2):
            raise ValueError(
                "link torchrpc needs a fixed number of machines that join: leave out nodes, and set network.listen "
                "and network.world"
            )
        if self.engine != "cluster" and self.nodes:
            raise ValueError(f"engine {self.engine} has no nodes: set engine to cluster, or leave out nodes")
        self._fits_curriculum()
        if self.replay:
            self._fits_replay(self.replay)
        if self.shared and self.circular:
            raise ValueError(
                "algorithm.circular applies to topology actors_and_learner only: gradient workers use every item once"
            )
        if self.mixture is not None:
            self._fits_mixture(self.mixture)
        if self.learners > 1:
            self._fits_learners()
        if self.central and self.shared:
            raise ValueError(
                f"inference central: workers of topology {self.topology_name} have the network at hand to learn with; "
                "allowed here: local"
            )
        if self.central and self.inference_workers > self.actor_count:
            raise ValueError(
                f"inference_workers {self.inference_workers}: there are only {self.actor_count} actors to divide"
            )
        if self.shared and self.device == "cuda":
            raise ValueError("device cuda: gradient workers run on the CPU, where their network is shared")
        if self._in_turn and self.prefetch not in ("auto", 0):
            raise ValueError(
                f"prefetch {self.prefetch}: with {self._in_turn}, no batch is prepared before it is needed; allowed "
                "here: 0 or auto"
            )
        if self.envs != "auto" or self.lockstep:  # else a number is found for which this is true
            self._fits_batch()
        return self

    def _fits_curriculum(self) -> None:
        """Refuse stages that would never end, or end the last one."""
        for number, stage in enumerate(self.curriculum, 1):
            last = number == len(self.curriculum)
            if (stage.target is None) != last:
                problem = "the last stage has no target: evaluation.target ends a run" if last else "it needs a target"
                raise ValueError(f"curriculum, stage {number} of {len(self.curriculum)}: {problem}")

    def _fits_learners(self) -> None:
        """Refuse several learners where there is none, or where they would have nothing to share."""
        if self.shared:
            raise ValueError(f"learners {self.learners}: topology {self.topology_name} has none; allowed here: 1")
        if self.replay and self.replay.shards > 1:
            raise ValueError(
                f"learners {self.learners}: each has a replay of its own, so algorithm.replay.shards must be 1"
            )
        if self.mixture is not None or self.circular:
            store = "circular" if self.mixture is None else "mixture"
            raise ValueError(
                f"learners {self.learners}: each has a queue or a replay of its own, so algorithm.{store} needs "
                "learners: 1"
            )
        if self.learners > self.actor_count:
            raise ValueError(
                f"learners {self.learners}: there are only {self.actor_count} actors, and each learner needs one: "
                "lower learners, or raise actors"
            )

    @property
    def _in_turn(self) -> str:
        """Why a batch must not be drawn before it is needed; empty: it may."""
        reasons = {
            "lockstep": self.lockstep,
            "engine inline": self.engine == "inline",
            f"topology {self.topology_name}": self.shared,
            "algorithm.max_lag": self.max_lag is not None,
            "algorithm.circular": self.circular is not None,
            "algorithm.replay.shards": self.replay is not None and self.replay.shards > 1,
        }
        return next((reason for reason, holds in reasons.items() if holds), "")

    def _fits_batch(self) -> None:
        """Refuse numbers of environments from which no batch can be made."""
        if self.batch_size % self.learners:
            raise ValueError(
                f"learners {self.learners}: a batch of {self.batch_size} items cannot be shared equally among them"
            )
        pieces = self.algorithm.minibatches if isinstance(self.algorithm, HasMinibatches) else 1
        if pieces > self.fresh_size and self.algorithm.experience.initial:
            raise ValueError(
                f"algorithm.minibatches {pieces}: a batch has only {self.fresh_size} sequences, which a recurrent "
                "network needs whole: lower minibatches, or raise algorithm.batch, actors or envs"
            )
        if self.replay or self.shared:
            return
        self._fits_lag(self.max_lag)
        # What waits is a multiple of both sizes' common divisor. Were it too much for one more put and still too little
        # for a batch, actors and learner would wait for each other.
        waits = self.mixture is None or self.mixture[queue_of(self.mixture)].when_full == "wait"
        beside = math.gcd(self.env_count, self.fresh_size) if waits else self.fresh_size
        if max(self.env_count - beside, 0) > self.queue_capacity - self.fresh_size:
            room = f"queue × batch = {self.queue_capacity}"
            if self.mixture is not None:
                room = f"the {self.queue_capacity} places of part {queue_of(self.mixture)}"
            raise ValueError(
                f"the {self.env_count} items of one actor do not fit next to an incomplete batch in {room}: raise "
                "queue or algorithm.batch, or lower envs"
            )

    def _fits_lag(self, lag: int | None) -> None:
        """Refuse batches for which experience would be older than allowed, however the actors are slowed down."""
        if lag is not None and (self.env_count - 1) // self.fresh_size > lag:
            raise ValueError(
                f"{self._batch_in_words}: the {self.env_count} items of one actor fill several batches, the "
                f"last more than max_lag {lag} versions old: raise algorithm.batch or max_lag, or lower envs"
            )
        if lag == 0 and self.fresh_size % self.env_count:
            raise ValueError(
                f"{self._batch_in_words}: with max_lag 0 a batch consists of whole rollouts, so it must be "
                f"a multiple of envs {self.env_count}"
            )

    def _fits_replay(self, replay: Replaying) -> None:
        if replay.minimum > replay.capacity:
            raise ValueError(
                f"algorithm.replay.minimum {replay.minimum} is never reached: capacity is {replay.capacity}"
            )
        if replay.shards > 1 and self.shared:
            raise ValueError(
                f"algorithm.replay.shards {replay.shards}: only topology actors_and_learner spreads its replay; "
                "allowed here: 1"
            )
        if replay.shards > min(self.actor_count, replay.capacity):
            raise ValueError(
                f"algorithm.replay.shards {replay.shards}: there are {self.actor_count} actors for {replay.capacity} "
                "items, and a shard without either is of no use: lower shards, or raise actors or capacity"
            )
        if isinstance(self.algorithm, HasReplayRatio) and not self.shared:
            raise ValueError(
                "algorithm.replay_ratio applies to topology gradient_workers only: a learner has a single store"
            )

    def _fits_mixture(self, mixture: Mixing) -> None:
        if self.shared:
            raise ValueError(f"algorithm.mixture needs a learner, which topology {self.topology_name} does not have")
        envs = 0 if self.envs == "auto" else self.env_count
        if problem := problem_of(mixture, self.batch_size, envs, isinstance(self.algorithm, HasFeatures)):
            raise ValueError(f"algorithm.mixture{problem}")

    def environment_in(self, stage: int = -1) -> Environment:
        """The environment in a stage of the curriculum, by default the last."""
        if not self.curriculum:
            return self.environment
        arguments = {**self.environment.arguments, **self.curriculum[stage].arguments}
        return self.environment.model_copy(update={"arguments": arguments})

    @property
    def topology_name(self) -> str:
        """The name of the topology: who exists."""
        made_for = self.algorithm.topology if isinstance(self.algorithm, HasTopology) else "actors_and_learner"
        return self.topology or made_for

    @property
    def shared(self) -> bool:
        """Whether every worker learns, on a shared network."""
        return self.topology_name in ("gradient_workers", "federated")

    @property
    def groups(self) -> int:
        """The number of federated groups."""
        return self.federation.groups or max(len(self.nodes), 1)

    @property
    def actor_count(self) -> int:
        """The number of actors, or of gradient workers in a group."""
        if self.actors != "auto":
            return self.actors
        waits = self.shared or self.lockstep or self.max_lag == 0
        beside = 0 if waits or self.engine not in ("threads", "processes") else self.learners
        return max(cores() - beside, self.learners)

    @property
    def env_count(self) -> int:
        """The number of environments of each actor or gradient worker."""
        return ENVS if self.envs == "auto" else self.envs

    @property
    def central(self) -> bool:
        """Whether inference workers choose the actions of all actors."""
        return self.inference == "central"

    @property
    def env_groups(self) -> int:
        """Groups of an actor's environments: with central inference, one steps while the other waits for actions."""
        return 2 if self.central and not self.lockstep and self.env_count % 2 == 0 else 1

    @property
    def batch_size(self) -> int:
        """Items per update."""
        return self.algorithm.batch or (1 if self.shared else self.actor_count) * self.env_count

    @property
    def fresh_size(self) -> int:
        """Items of each learner's batch that come from its queue."""
        mixture = self.mixture
        return self.share if mixture is None else shares(mixture, self.batch_size)[queue_of(mixture)]

    @property
    def _batch_in_words(self) -> str:
        among = f" among {self.learners} learners, {self.share} each" if self.learners > 1 else ""
        return f"algorithm.batch {self.fresh_size * self.learners}{among}"

    @property
    def queue_capacity(self) -> int:
        """Most items that wait for a learner."""
        own = None if self.mixture is None else self.mixture[queue_of(self.mixture)].capacity
        return own or self.queue * self.fresh_size

    @property
    def share(self) -> int:
        """Items per update of each learner."""
        return self.batch_size // self.learners

    @property
    def prioritized(self) -> bool:
        """Whether items are drawn by priority."""
        return self.mixture is not None or (self.replay is not None and self.replay.alpha > 0)

    @property
    def learner_threads(self) -> int:
        """Torch threads of each learner: while actors wait, their cores are free."""
        waits = self.max_lag == 0 and not self.shared
        return self.threads or (max(cores() // self.learners, 1) if waits else 1)

    @property
    def prefetched(self) -> tuple[int, int]:
        """The least and the most batches that a learner on a CPU prepares ahead."""
        if self.prefetch != "auto":
            return self.prefetch, self.prefetch
        return 0, 0 if self._in_turn else AHEAD

    @property
    def max_lag(self) -> int | None:
        """Most policy versions between acting and learning; 0: actors wait for the learner; None: unlimited."""
        return self.algorithm.max_lag if isinstance(self.algorithm, HasMaxLag) else None

    @property
    def replay(self) -> Replaying | None:
        """How experience is kept and sampled; None: every item is used once."""
        return self.algorithm.replay if isinstance(self.algorithm, HasReplay) else None

    @property
    def circular(self) -> Circling | None:
        """How many batches are held and how often each is used; None: no circular buffer."""
        return self.algorithm.circular if isinstance(self.algorithm, HasCircular) else None

    @property
    def mixture(self) -> Mixing | None:
        """The stores of which each gives its share of a batch; None: there is one store."""
        return self.algorithm.mixture if isinstance(self.algorithm, HasMixture) else None

    @property
    def chunk(self) -> int:
        """Minimum number of items that an actor sends at once; a gradient worker without a replay learns from them."""
        if self.replay:
            return self.replay.chunk
        return (self.algorithm.batch or 1) if self.shared else 1

    @property
    def refresh(self) -> int:
        """Number of times an actor sends before it fetches weights."""
        return self.replay.refresh if self.replay else 1

    @property
    def actor_priorities(self) -> bool:
        """Whether actors compute the first priority of new items."""
        wanted = isinstance(self.algorithm, HasActorPriorities) and self.algorithm.actor_priorities
        return bool(wanted and self.replay and self.replay.alpha)

    @property
    def checkpoint_interval(self) -> int:
        """Steps between checkpoints."""
        return self.checkpoints.every or max(self.steps // 20, 1)

    @property
    def evaluation_interval(self) -> int:
        """Steps between evaluations."""
        return self.evaluation.every or max(self.steps // 20, 1)


def load(config: str | Path | Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> Experiment:
    """Read an experiment from a YAML file, by its name if it comes with Shoal, or from a mapping; then override it."""
    return validate(read(config, overrides))


def load_of(run: Path) -> Experiment:
    """Read the experiment of a run that somebody else may have made."""
    tree = read(run / directory.CONFIG)
    directory.check_code(run, tree)
    return validate(tree)


def configure(config: str | Path | Mapping[str, Any], **overrides: Any) -> Experiment:
    """Read an experiment, with settings overridden by name, as `train` does."""
    return load(config, overrides)


def validate(tree: Mapping[str, Any]) -> Experiment:
    """Turn settings as they were read into an experiment."""
    try:
        return Experiment.model_validate(tree)
    except ValidationError as error:
        raise SettingsError(explain(error, Experiment, tree)) from None


def check_environment(experiment: Experiment) -> None:
    """Refuse an environment that cannot be made, and a curriculum in which one network does not fit all stages."""
    try:
        check(experiment.environment)
        check_engine(experiment.environment.id, experiment.engine)
        specs = [spec_of(experiment.environment_in(stage)) for stage in range(len(experiment.curriculum))]
    except Fatal as error:
        raise SettingsError(f"environment.id: {error}") from None
    for number, spec in enumerate(specs, 1):
        if spec != specs[0]:
            raise SettingsError(f"curriculum: stage {number} shows or takes {spec}, but stage 1 {specs[0]}")
