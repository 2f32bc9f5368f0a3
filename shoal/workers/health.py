"""Watching for losses and gradients that are not finite."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from shoal.core.doing import Seldom
from shoal.core.errors import Fatal
from shoal.core.tree import flat, not_finite
from shoal.core.types import Batch

if TYPE_CHECKING:
    from shoal.services.checkpoints import Checkpoints
    from shoal.workers.saving import Saver

ROW = 10  # skipped updates in a row that end the run


class Health:
    """Counts updates that were skipped because a number in them was not finite; too many in a row end the run."""

    def __init__(self, checkpoints: Checkpoints | None, saver: Saver | None = None) -> None:
        """Begin healthy; the batch that ends a run is saved with the checkpoints, if there are any."""
        self.checkpoints, self.saver = checkpoints, saver
        self.row, self.skipped = 0, Seldom()

    def look(self, metrics: dict[str, float], net: nn.Module, batch: Batch, updates: int) -> str:
        """Look at the metrics of an update, and return what to report of it, if anything."""
        skipped = metrics.pop("skipped", 0.0)
        due = bool(skipped) and self.skipped.due()
        self.row = self.row + 1 if skipped else 0
        if self.skipped.count:
            metrics["skipped"] = float(self.skipped.count)
        where = f"update {updates + 1:,}: loss or gradient is not finite"
        if self.row >= ROW:
            raise Fatal(self._last_words(where, net, batch))
        return f"{where}; it was skipped ({self.skipped.count:,} so far): {wrong_in(net, batch)}" if due else ""

    def _last_words(self, where: str, net: nn.Module, batch: Batch) -> str:
        words = [f"{where}, {self.row} times in a row: {wrong_in(net, batch)}"]
        if self.checkpoints is not None:
            arrays = {
                name: value.cpu().numpy() if isinstance(value, torch.Tensor) else value
                for name, value in flat(batch.arrays())
            }
            words.append(f"its batch is in {self.checkpoints.save_batch(arrays)}")
        if self.saver is not None and self.saver.good is not None:
            words.append(f"the last good checkpoint is step_{self.saver.good}")
        return "; ".join(words)


def wrong_in(net: nn.Module, batch: Batch) -> str:
    """The arrays of a batch, the weights and the gradients that hold a number which is not finite."""
    gradients = {name: part.grad for name, part in net.named_parameters() if part.grad is not None}
    found = not_finite({"batch": batch.arrays(), "weights": net.state_dict(), "gradient": gradients})
    return ", ".join(found) or "only the loss"
