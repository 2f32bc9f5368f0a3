"""Memory: an LSTM that forgets where an episode begins."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shoal.core.types import Batch


class Lstm(nn.Module):
    """An LSTM over [T, B, F] whose state [B, 2·units] holds its output and its cell side by side."""

    def __init__(self, inputs: int, units: int) -> None:
        super().__init__()
        self.units = units
        self.lstm = nn.LSTM(inputs, units)
        for name, parameter in self.lstm.named_parameters():
            if "weight" in name:
                nn.init.orthogonal_(parameter)
            else:
                nn.init.zeros_(parameter)

    def initial_state(self, size: int) -> Tensor:
        """Return the state of `size` fresh episodes, [B, 2·units]."""
        return torch.zeros(size, 2 * self.units, device=next(self.parameters()).device)

    def forward(self, features: Tensor, first: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Map [T, B, F] and the state before them to [T, B, units] and the state after them.

        A step with `first` sees an empty state. The sequence is cut only where some item's episode begins.
        """
        length = len(features)
        cuts = [0]
        if length > 1:
            cuts += [t for t, begins in enumerate(first[1:].any(dim=1).tolist(), start=1) if begins]
        outputs = []
        for start, end in zip(cuts, [*cuts[1:], length], strict=True):
            state = state * (~first[start]).unsqueeze(1)
            hidden, cell = state[None, :, : self.units], state[None, :, self.units :]
            output, (hidden, cell) = self.lstm(features[start:end], (hidden.contiguous(), cell.contiguous()))
            outputs.append(output)
            state = torch.cat([hidden[0], cell[0]], dim=1)
        return torch.cat(outputs), state


def previous(action: Tensor, reward: Tensor, first: Tensor, choices: Sequence[int]) -> Tensor:
    """What a memory sees of the last step, [..., E]: action, choices as one-hot, and reward; zeros where one begins.

    `choices` has the number of choices for each number of an action, 0 where it is continuous.
    """
    columns = action.unsqueeze(-1) if action.dim() == first.dim() else action
    parts = [
        nn.functional.one_hot(column.long(), count).to(reward.dtype) if count else column.unsqueeze(-1)
        for column, count in zip(columns.unbind(-1), choices, strict=True)
    ]
    return torch.cat([*parts, reward.unsqueeze(-1)], -1) * (~first).unsqueeze(-1)


def all_previous(batch: Batch, choices: Sequence[int]) -> Tensor:
    """`previous` at every step [T + 1, B, E] of a sequence; that of the first step is on record."""
    return torch.cat([batch.record["previous"], previous(batch.action, batch.reward, batch.first[1:], choices)])
