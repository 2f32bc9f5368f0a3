"""Memory: an LSTM that forgets where an episode begins."""

from __future__ import annotations

import torch
from torch import Tensor, nn


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
