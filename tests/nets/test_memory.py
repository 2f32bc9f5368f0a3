"""The LSTM forgets where episodes begin, and nowhere else."""

from __future__ import annotations

import pytest
import torch

from shoal.nets.memory import Lstm


@pytest.fixture
def memory() -> Lstm:
    torch.manual_seed(0)
    return Lstm(3, 5)


def test_without_beginnings_it_is_the_lstm(memory):
    features, state = torch.randn(7, 4, 3), torch.randn(4, 10)
    output, after = memory(features, torch.zeros(7, 4, dtype=torch.bool), state)
    expected, (hidden, cell) = memory.lstm(features, (state[None, :, :5].contiguous(), state[None, :, 5:].contiguous()))
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(after, torch.cat([hidden[0], cell[0]], 1))


def test_episodes_in_one_sequence_are_as_episodes_apart(memory):
    """Items begin episodes at times of their own, also at the first and the last step."""
    features, state = torch.randn(9, 4, 3), torch.randn(4, 10)
    beginnings = {0: [0, 3, 4], 1: [5], 2: [], 3: [8]}
    first = torch.zeros(9, 4, dtype=torch.bool)
    for item, times in beginnings.items():
        first[times, item] = True
    output, after = memory(features, first, state)
    for item, times in beginnings.items():
        cuts = sorted({0, *times})
        for start, end in zip(cuts, [*cuts[1:], 9], strict=True):
            fresh = torch.zeros(1, 10) if first[start, item] else state[item : item + 1]
            none = torch.zeros(end - start, 1, dtype=torch.bool)
            expected, last = memory(features[start:end, item : item + 1], none, fresh)
            torch.testing.assert_close(output[start:end, item : item + 1], expected)
        torch.testing.assert_close(after[item : item + 1], last)


def test_one_step_at_a_time_is_as_all_at_once(memory):
    features, state = torch.randn(9, 4, 3), memory.initial_state(4)
    first = torch.rand(9, 4) < 0.2
    whole, after = memory(features, first, state)
    for t in range(9):
        step, state = memory(features[t : t + 1], first[t : t + 1], state)
        torch.testing.assert_close(step[0], whole[t])
    torch.testing.assert_close(state, after)


def test_gradients_do_not_cross_a_beginning(memory):
    features = torch.randn(6, 1, 3, requires_grad=True)
    first = torch.zeros(6, 1, dtype=torch.bool)
    first[3] = True
    memory(features, first, memory.initial_state(1))[0][-1].sum().backward()
    assert (features.grad[:3] == 0).all()
    assert (features.grad[3:] != 0).all()
