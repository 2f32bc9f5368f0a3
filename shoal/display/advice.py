"""What to change about a run: one table of rules on its speed and its learning, each with what it found and why."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.display.facts import CONTENDED, FEWEST, Facts, between
from shoal.display.page.reading import Curves, number

ENOUGH = 5.0  # seconds after which shares of time mean something
WORTHWHILE = 1.1  # times as fast: less is not worth a line
LONG_WAIT = 0.25  # of a worker's time
BUSY = 0.75
SPARE = 0.75  # cores that must be idle before one more worker is advised
OVERHEAD = 3e-4  # seconds per action: below this a choice costs as much for one environment as for several
QUICK, SLOW = 5e-3, 2e-2  # seconds per update: mostly overhead below the first, worth several threads above the second
SHARED = 0.7  # of its speed with one thread that each further thread of the learner adds
HIGHEST_LAG = 20.0  # docs/learning.md: 5 to 15 versions were borne
MOST_CLIPPED = 0.4
COLLAPSED, UNTOUCHED = 0.05, 0.98  # of the entropy of the first policy
MOST = 64  # environments of an actor, and actors, up to which advice goes

Changes = Mapping[str, Any]


@dataclass(frozen=True)
class Advice:
    """What limits a run, and what to set instead."""

    rule: str
    found: str
    changes: Changes
    before: Changes
    gain: float | None  # times as many steps per second; None: it is about learning
    hint: str

    def __str__(self) -> str:
        """One sentence or two."""
        words = [f"{key}={shown(value)} (now {shown(self.before[key])})" for key, value in self.changes.items()]
        faster = "" if self.gain is None else f": about {self.gain:.1f} times as fast"
        advised = f" Set {' and '.join(words)}{faster}." if words else ""
        return f"{self.found}.{advised}{f' {self.hint}.' if self.hint else ''}"

    def as_dict(self) -> dict[str, Any]:
        """For programs."""
        return {"rule": self.rule, "found": self.found, "set": {**self.changes}, "now": {**self.before},
                "gain": self.gain, "hint": self.hint}  # fmt: skip


@dataclass(frozen=True)
class Rule:
    """When something is wrong, what to say of it, and what to set instead."""

    name: str
    when: Callable[[Facts], bool]
    found: Callable[[Facts], str]
    change: Callable[[Facts], Changes]
    gain: Callable[[Facts], float] | None = None  # None: a rule on learning
    hint: str = ""

    def __call__(self, run: Facts) -> Advice | None:
        """The advice, if the rule applies and is worth it."""
        if not self.when(run):
            return None
        gain = None if self.gain is None else self.gain(run)
        if gain is not None and not WORTHWHILE <= gain < math.inf:
            return None
        changes = self.change(run)
        return Advice(self.name, self.found(run), changes, {key: run.written(key) for key in changes}, gain, self.hint)


# Speed.


def actors(run: Facts) -> int:
    """How many there are."""
    return max(len(run.role(run.players)), 1)


def more_actors(run: Facts) -> int:
    """As many as feed the learner, or as the idle cores have room for, by the core-time that one takes."""
    now, each = actors(run), max(run.used(run.players) / actors(run), 0.02)
    needed = math.ceil(now / (1 - min(run.starved, 0.95))) if run.players == "actor" else MOST
    return max(min(needed, now + int(run.idle_cores / each + 0.25), MOST), now)


def gain_of_actors(run: Facts) -> float:
    """Until the learner does not wait any more."""
    more = more_actors(run) / actors(run)
    return min(more, 1 / (1 - min(run.starved, 0.95))) if run.players == "actor" else more


def seconds_per_choice(run: Facts) -> float:
    """Seconds in which a player chooses one action, by its share of a run's steps."""
    rate = run.counts.get("steps_per_s", 0.0) / actors(run)
    return run.part(run.players, "infer") / rate if rate > 0 else math.inf


def seconds_per_update(run: Facts) -> float:
    """Seconds of the learner's work for one update."""
    rate = run.counts.get("updates_per_s", 0.0)
    return run.working("learner") / rate if rate > 0 else math.inf


def overlapped(run: Facts) -> float:
    """Learner and actors at the same time instead of one after the other; no faster than the cores allow."""
    longer = max(run.working("learner"), run.working("actor"))
    used = run.used("learner") + run.used("actor")
    return min(1 / max(longer, 0.05), run.cores / max(used, 0.05))


def apart(run: Facts) -> float:
    """What one thread does in turn, on all cores at once."""
    learning, acting = run.working("learner"), run.working("actor")
    cores = int(run.cores)
    if run.count("algorithm.max_lag", 1) == 0:
        return 1 / max(learning + acting / cores, 0.05)
    return 1 / max(learning, acting / max(cores - 1, 1), 0.05)


def of_evaluations(run: Facts) -> float:
    """The share of the run's cores that evaluations take."""
    return run.used("evaluator") / run.cores if run.apart else run.working("evaluator")


def rarer(run: Facts) -> int:
    """How many times as seldom evaluations take a twentieth of the time."""
    return min(max(math.ceil(of_evaluations(run) / 0.05), 2), 10)


def less(share: float, times: float) -> float:
    """How many times as fast everything is when a share of the time becomes this many times shorter."""
    return 1 / (1 - between(share) * (1 - 1 / times))


def the_learner_limits(run: Facts) -> bool:
    """Whether actors wait for a learner that always works."""
    return run.apart and run.blocked > LONG_WAIT and run.working("learner") > BUSY


def percent(share: float) -> str:
    """A share of time."""
    return f"{share:.0%}"


SPEED = (
    Rule(
        "more actors",
        when=lambda run: run.apart and not alternates(run) and run.starved > LONG_WAIT and run.idle_cores >= SPARE
        and run.working("actor") > 0.5,
        found=lambda run: f"The learner waits {percent(run.starved)} of its time for experience, while "
        f"{run.idle_cores:.1f} of {run.cores:g} cores are idle",
        change=lambda run: {"actors": more_actors(run)},
        gain=gain_of_actors,
    ),
    Rule(
        "more gradient workers",
        when=lambda run: run.apart and run.players == "gradient" and bool(run.role("gradient"))
        and run.idle_cores >= SPARE,
        found=lambda run: f"{run.idle_cores:.1f} of {run.cores:g} cores are idle",
        change=lambda run: {"actors": more_actors(run)},
        gain=gain_of_actors,
    ),
    Rule(
        "more environments",
        when=lambda run: (run.starved > LONG_WAIT or not run.apart) and 4 * run.count("envs", MOST) <= MOST
        and seconds_per_choice(run) < OVERHEAD,
        found=lambda run: f"Actors spend {percent(run.part(run.players, 'infer'))} of their time choosing actions for "
        f"{run.count('envs'):g} environment{'s' if run.count('envs') > 1 else ''} at a time, which costs little more "
        "for several",
        change=lambda run: {"envs": int(4 * run.count("envs"))},
        gain=lambda run: less(run.part(run.players, "infer"), 4),
        hint="envs=auto tries which number suits the machine",
    ),
    Rule(
        "act while learning",
        when=lambda run: run.apart and alternates(run)
        and min(run.working("learner"), run.working("actor")) > 0.15,
        found=lambda run: f"Actors and learner take turns: actors work {percent(run.working('actor'))} of the time, "
        f"the learner {percent(run.working('learner'))}",
        change=lambda run: {"algorithm.max_lag": 1},
        gain=overlapped,
        hint="Experience is then up to one policy old",
    ),
    Rule(
        "use the GPU",
        when=lambda run: run.gpus > 0 and run.setting("device") == "cpu" and run.working("learner") > 0.3,
        found=lambda run: f"The learner works {percent(run.working('learner'))} of its time on the CPU, beside a GPU "
        "that nobody uses",
        change=lambda run: {"device": "auto"},
        gain=lambda run: less(run.working("learner") if not run.apart or alternates(run) else run.blocked, 5),
    ),
    Rule(
        "more threads",
        when=lambda run: the_learner_limits(run) and not run.on_gpu and run.idle_cores >= SPARE
        and seconds_per_update(run) > SLOW,
        found=lambda run: f"Actors wait {percent(run.blocked)} of their time for the learner, which computes on "
        f"{run.learner_threads:g} thread{'s' if run.learner_threads > 1 else ''} while {run.idle_cores:.1f} of "
        f"{run.cores:g} cores are idle",
        change=lambda run: {"threads": threads(run)},
        gain=lambda run: min(1 + SHARED * (threads(run) / run.learner_threads - 1), 1 / (1 - min(run.blocked, 0.95))),
    ),
    Rule(
        "larger batches",
        when=lambda run: the_learner_limits(run) and run.count("algorithm.batch") > 0
        and seconds_per_update(run) < QUICK,
        found=lambda run: f"Actors wait {percent(run.blocked)} of their time for the learner, whose updates are so "
        f"small ({1000 * seconds_per_update(run):.1f} ms) that most of the time is overhead",
        change=lambda run: {"algorithm.batch": int(2 * run.count("algorithm.batch"))},
        gain=lambda run: min(1.6, 1 / (1 - min(run.blocked, 0.95))),
        hint="That is half as many updates: watch the score",
    ),
    Rule(
        "rarer weights",
        when=lambda run: run.apart and run.waiting("actor", "parameters.fetch") > 0.1,
        found=lambda run: f"Actors spend {percent(run.waiting('actor', 'parameters.fetch'))} of their time on fetching "
        "weights",
        change=lambda run: {"algorithm.replay.refresh": int(4 * run.count("algorithm.replay.refresh", 1))}
        if run.setting("algorithm.replay") else {"algorithm.unroll": int(2 * run.count("algorithm.unroll", 1))},
        gain=lambda run: less(
            run.waiting("actor", "parameters.fetch"), 4 if run.setting("algorithm.replay") else 2
        ) if run.blocked < LONG_WAIT else 1.0,
    ),
    Rule(
        "rarer evaluations",
        when=lambda run: of_evaluations(run) > 0.15 and (run.idle_cores < SPARE or not run.apart),
        found=lambda run: f"Evaluations take {percent(of_evaluations(run))} of the time of "
        f"{'the cores' if run.apart else 'the run'}",
        change=lambda run: {"evaluation.every": int(rarer(run) * run.count("evaluation.every"))},
        gain=lambda run: less(of_evaluations(run), rarer(run)),
    ),
    Rule(
        "use all cores",
        when=lambda run: run.setting("engine") == "inline" and not run.setting("lockstep") and run.cores >= 2
        and bool(run.role("actor")),
        found=lambda run: f"One thread does everything in turn: acting {percent(run.working('actor'))} and learning "
        f"{percent(run.working('learner'))} of the time, on a machine with {run.cores:g} cores",
        change=lambda run: {"engine": "processes", "actors": "auto"},
        gain=apart,
    ),
    Rule(
        "others use the cores",
        when=lambda run: run.granted < CONTENDED,
        found=lambda run: f"The learner gets {percent(run.granted)} of the core-time that it asks for: other programs "
        "use this machine, or more workers than it has cores",
        change=lambda run: {},
        gain=lambda run: 1 / max(run.granted, 0.1),
        hint="Fewer actors or fewer other programs would leave it its core",
    ),
    Rule(
        "local inference",
        when=lambda run: run.setting("inference") == "central" and run.gpus == 0
        and run.waiting("actor", "requests.ask", "requests.answer") > LONG_WAIT,
        found=lambda run: "Actors wait "
        f"{percent(run.waiting('actor', 'requests.ask', 'requests.answer'))} of their time for actions that an "
        "inference worker chooses",
        change=lambda run: {"inference": "local"},
        gain=lambda run: 1 / (1 - min(run.waiting("actor", "requests.ask", "requests.answer"), 0.75)),
    ),
    Rule(
        "rarer checkpoints",
        when=lambda run: run.waiting("learner", "checkpoints.save") > 0.1,
        found=lambda run: f"The learner spends {percent(run.waiting('learner', 'checkpoints.save'))} of its time on "
        "saving checkpoints",
        change=lambda run: {"checkpoints.every": int(4 * run.count("checkpoints.every", 1))},
        gain=lambda run: less(run.waiting("learner", "checkpoints.save"), 4),
    ),
)  # fmt: skip


def alternates(run: Facts) -> bool:
    """Whether actors wait while the learner learns from what they sent."""
    return number(run.setting("algorithm.max_lag")) == 0


def threads(run: Facts) -> int:
    """As many for the learner as there are idle cores."""
    return int(run.learner_threads + run.idle_cores + 0.25)


# Learning. A run that reaches its target, or still rises, is left alone.


def scaled(run: Facts, path: str, factor: float, otherwise: float) -> Changes:
    """A setting multiplied, at its start where it moves; or another value where it is 0."""
    name = f"{path}.start" if isinstance(run.written(path), Mapping) else path
    now = run.count(path)
    return {name: float(f"{now * factor:.3g}") if now else otherwise}


def entropy(run: Facts) -> float | None:
    """The entropy of the policy, as a part of that of the first policy."""
    first, now = run.opening("entropy"), run.recent("entropy")
    return None if first is None or now is None or first <= 0 else now / first


def above(value: float | None, bound: float) -> bool:
    """Whether a number is known and above a bound."""
    return value is not None and value > bound


def below(value: float | None, bound: float) -> bool:
    """Whether a number is known and below a bound."""
    return value is not None and value < bound


UNREWARDED = (
    Rule(
        "nothing is ever rewarded",
        when=lambda run: run.stuck and run.done > 0.3 and run.spread == 0,
        found=lambda run: (
            f"All {len(run.scores)} evaluations have the same score, {run.scores[0]:.4g}: the policy "
            "never meets a reward that it could learn from"
        ),
        change=lambda run: {},
        hint="Explore more: a larger algorithm.entropy_cost or algorithm.epsilon, or the algorithm ngu",
    ),
)  # everything else about learning follows from that


LEARNING = (
    Rule(
        "entropy collapsed",
        when=lambda run: run.stuck and below(entropy(run), COLLAPSED),
        found=lambda run: f"The policy hardly tries anything new: its entropy is {percent(max(entropy(run) or 0, 0))} "
        "of what it was at the beginning, and scores do not rise",
        change=lambda run: scaled(run, "algorithm.entropy_cost", 3, 0.01),
    ),
    Rule(
        "entropy at its maximum",
        when=lambda run: run.stuck and above(entropy(run), UNTOUCHED),
        found=lambda run: f"The policy is still as random as at the beginning (entropy {percent(entropy(run) or 0)}), "
        "and scores do not rise",
        change=lambda run: scaled(run, "algorithm.entropy_cost", 0.1, 0.0) if run.count("algorithm.entropy_cost")
        else scaled(run, "algorithm.lr", 3, 1e-3),
        hint="A large bonus for entropy drowns small advantages",
    ),
    Rule(
        "values explain nothing",
        when=lambda run: run.stuck and below(run.recent("explained_variance"), 0.0),
        found=lambda run: "The critic predicts returns no better than their mean does (explained variance "
        f"{run.recent('explained_variance') or 0:.2f}), and scores do not rise",
        change=lambda run: {"algorithm.network.separate": True}
        if run.setting("algorithm.network.separate") is False else scaled(run, "algorithm.lr", 1 / 3, 3e-4),
        hint="algorithm.network.normalise_reward helps where returns are large",
    ),
    Rule(
        "updates too large",
        when=lambda run: not run.reached and above(run.recent("clip_fraction"), MOST_CLIPPED),
        found=lambda run: f"Updates move the policy too far: {percent(run.recent('clip_fraction') or 0)} of the ratios "
        "are clipped",
        change=lambda run: scaled(run, "algorithm.lr", 0.5, 3e-4),
        hint="Fewer epochs have the same effect",
    ),
    Rule(
        "experience too old",
        when=lambda run: run.algorithm == "impala" and not run.reached and above(run.recent("lag"), HIGHEST_LAG)
        and not run.setting("algorithm.mixture"),
        found=lambda run: f"Experience is {run.recent('lag') or 0:.0f} policies old when it is learned from, more than "
        f"{run.algorithm} was seen to bear",
        change=lambda run: {"algorithm.batch": int(2 * run.count("algorithm.batch", 1))},
        hint="Fewer environments have the same effect",
    ),
    Rule(
        "a normaliser that never moved",
        when=lambda run: run.counts.get("updates", 0) > 0 and run.counted is not None
        and min(run.counted, default=math.inf) <= 1,
        found=lambda run: "A running mean has seen nothing after "
        f"{run.counts.get('updates', 0):,.0f} updates, so what should be normalised is not",
        change=lambda run: {},
        hint="An algorithm's `prepare` must update its network's statistics",
    ),
    Rule(
        "explores too long",
        when=lambda run: run.stuck and above(run.recent("epsilon"), 0.3) and run.done > 0.5,
        found=lambda run: f"Actions are still random with a chance of {percent(run.recent('epsilon') or 0)}, after "
        f"{percent(run.done)} of the steps",
        change=lambda run: {"algorithm.epsilon": {"start": run.count("algorithm.epsilon"), "end": 0.05, "until": 0.3}},
    ),
    Rule(
        "forgets what it learned",
        when=lambda run: run.fell and not run.reached and isinstance(number(run.written("algorithm.lr")), float),
        found=lambda run: f"Scores have fallen: {run.best_third:.4g} in the mean at their best, "
        f"{run.last_third:.4g} now",
        change=lambda run: {"algorithm.lr": {"start": run.count("algorithm.lr"), "end": 0.0}},
        hint="A falling learning rate keeps what was learned",
    ),
)  # fmt: skip

FLAT = (
    Rule(
        "returns flat",
        when=lambda run: run.stuck and run.done > 0.3 and run.spread > 0,
        found=lambda run: f"Scores do not rise over {len(run.scores)} evaluations, and no metric says why",
        change=lambda run: scaled(run, "algorithm.lr", 1 / 3, 3e-4),
        hint="A learning rate three times as high is the other thing to try",
    ),
)  # said where no metric says more


def advise(run: Facts) -> list[Advice]:
    """What to change, the most rewarding for its speed first, then what is about learning."""
    rules = SPEED if run.lasted >= ENOUGH else ()
    faster = sorted(filter(None, (rule(run) for rule in rules)), key=lambda one: -(one.gain or 0))
    groups = ([*filter(None, (rule(run) for rule in group))] for group in (UNREWARDED, LEARNING, FLAT))
    return [*faster, *next(filter(None, groups), [])]


def of(folder: Path, curves: Curves | None = None) -> list[Advice]:
    """What to change about the run in a folder."""
    return advise(Facts.of(folder, curves))


def lines(folder: Path) -> list[str]:
    """The same in words, a line each."""
    return [*map(str, of(folder))]


def shown(value: Any) -> str:
    """A setting as it is typed."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {shown(each)}" for key, each in value.items()) + "}"
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


def enough(run: Facts) -> str:
    """Why a run cannot be advised on yet; empty: it can."""
    if run.lasted < ENOUGH and len(run.scores) < FEWEST:
        return f"too early to say: it takes {ENOUGH:g} seconds of training, and {FEWEST} evaluations"
    return ""
