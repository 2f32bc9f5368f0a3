"""How far a learner has come, and how it reports that."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from shoal.core.means import Means

if TYPE_CHECKING:
    from shoal.core.types import Batch, Store, Tree
    from shoal.experiment import Experiment
    from shoal.services.journal import Journal

ASK = 0.2  # seconds between questions whether to stop, while there is nothing to learn from
GAP = 0.02  # seconds between reports, since each may be a call to another process
SLOW = 20  # times as long as the last report took: on a busy machine reports are rarer
LONGEST = 1.0  # seconds between reports, whatever they take
PUBLICATIONS = 10  # of weights between two evaluations, where there is no learner: none is evaluated late


@dataclass
class Progress:
    """How far a learner has come; this is what a checkpoint keeps of it beside the arrays."""

    steps: int = 0
    updates: int = 0
    version: int = 0
    period: int = 0  # scheduled checkpoints so far under lockstep; each restarts everyone's randomness

    @classmethod
    def of(cls, saved: Mapping[str, Any] | None) -> Progress:
        """That of a checkpoint, or of the beginning."""
        return Progress(**{field.name: saved["state"][field.name] for field in fields(cls)}) if saved else Progress()


class Reports:
    """Reports updates to the journal: each one under lockstep, else every now and then their means."""

    def __init__(self, journal: Journal, exact: bool) -> None:
        """Begin with nothing to report."""
        self.journal, self.exact = journal, exact
        self.means, self.reported, self.gap, self.asked = Means(), 0.0, GAP, time.monotonic()

    def learned(self, now: Progress, metrics: Mapping[str, float], urgent: bool) -> bool:
        """Add the metrics of an update; True: end the run."""
        self.means.add(metrics)
        start = time.monotonic()
        if not (self.exact or urgent or start - self.reported >= self.gap):
            return False
        stop = self.journal.learned(now.steps, now.updates, self.means.take())
        self.reported = time.monotonic()
        self.gap = min(max(GAP, SLOW * (self.reported - start)), LONGEST)
        return stop

    def waiting(self, now: Progress) -> bool:
        """Ask now and then while there is nothing to learn from, or under lockstep each time; True: end the run."""
        if not self.exact and time.monotonic() - self.asked <= ASK:  # the clock must not decide what lockstep learns
            return False
        self.asked = time.monotonic()
        return self.journal.learned(now.steps, now.updates, {})


def draw(experiment: Experiment, store: Store, now: Progress) -> Mapping[str, Tree] | None:
    """A learner's batch, or its share of one; None: not enough yet."""
    beta = experiment.replay.beta.at(now.steps, experiment.steps).now if experiment.replay else 1.0
    return store.get(experiment.share, now.version, beta)


class Count:
    """Counts environment steps: a replay reports those it received, others' are counted when first learned from."""

    def __init__(self, store: Store, steps: int) -> None:
        """Begin to count, after the steps that there were before."""
        self.begin, self.own = steps, 0
        self.first = int(store.status().get("steps", 0))

    def received(self, status: Mapping[str, float]) -> int:
        """The steps since the beginning, when there was nothing to learn from."""
        return int(status["steps"]) - self.first if "steps" in status else self.own

    def learned(self, status: Mapping[str, float], batch: Batch) -> int:
        """The steps since the beginning, with those of a batch."""
        self.own = self.received(status) if "steps" in status else self.own + int(batch.news.sum())
        return self.own
