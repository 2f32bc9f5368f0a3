"""How far a learner has come, and how it reports that."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from shoal.core.means import Means

if TYPE_CHECKING:
    from shoal.services.journal import Journal

GAP = 0.02  # seconds between reports, since each may be a call to another process
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
        self.means, self.reported = Means(), 0.0

    def learned(self, now: Progress, metrics: Mapping[str, float], urgent: bool) -> bool:
        """Add the metrics of an update; True: end the run."""
        self.means.add(metrics)
        if not (self.exact or urgent or time.monotonic() - self.reported >= GAP):
            return False
        self.reported = time.monotonic()
        return self.journal.learned(now.steps, now.updates, self.means.take())
