"""What tells how new a state is: its losses, its statistics, and what learns."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from shoal.core.types import ActionSpec, ArraySpec, Batch, Spec
from shoal.nets.novelty import FOLLOW, Novelty
from shoal.nets.torsos import Architecture

SPEC = Spec(ArraySpec((5,), "float32"), ActionSpec(3))
SIZE = 4


@pytest.fixture
def novelty() -> Novelty:
    torch.manual_seed(0)
    return Novelty(Architecture(hidden=(8,)), SPEC, SIZE)


@pytest.fixture
def batch() -> Batch:
    """Nine steps of four items, some between episodes; what the mask hides is large."""
    torch.manual_seed(1)
    first = torch.zeros(10, 4, dtype=torch.bool)
    first[4, 0] = first[6:, 1] = first[0, 2] = True
    observation = torch.randn(10, 4, 5)
    observation[7:, 1] = 1e3
    steps, keys = torch.randn(9, 4), np.zeros(4, np.int64)
    return Batch(observation, first, torch.randint(3, (9, 4)), steps, steps, {}, steps[0], keys, keys)


def test_losses_are_the_papers(novelty, batch):
    """Inverse dynamics is the surprise at the action, distillation the error of the predictor."""
    inverse, distillation = novelty.loss(batch)
    mask = batch.mask.numpy()
    with torch.no_grad():
        for item in range(4):
            surprise = error = 0.0
            for t in range(9):
                if not mask[t, item]:
                    continue
                now, then = batch.observation[t : t + 1, item], batch.observation[t + 1 : t + 2, item]
                pair = torch.cat([novelty.embedding(now), novelty.embedding(then)], 1)
                logits = novelty.inverse(pair)[0].double().tolist()
                chosen = logits[int(batch.action[t, item])]
                surprise += math.log(sum(math.exp(each) for each in logits)) - chosen
                difference = (novelty.predictor(now) - novelty.random(now))[0].double().tolist()
                error += sum(each**2 for each in difference) / SIZE
            assert inverse[item].item() == pytest.approx(surprise / 9, rel=1e-4)
            assert distillation[item].item() == pytest.approx(error / 9, rel=1e-4)


def test_each_loss_teaches_its_own_networks(novelty, batch):
    def touched(loss: torch.Tensor) -> set[str]:
        novelty.zero_grad(set_to_none=True)
        loss.sum().backward()
        return {
            name.split(".")[0]
            for name, parameter in novelty.named_parameters()
            if parameter.grad is not None and parameter.grad.any()
        }

    inverse, distillation = novelty.loss(batch)
    assert touched(inverse) == {"encoder", "inverse"}
    assert touched(distillation) == {"predictor"}
    assert not any(parameter.requires_grad for parameter in novelty.random.parameters())


def test_the_three_encoders_differ(novelty):
    x = torch.randn(2, 5)
    views = [novelty.embedding(x), novelty.predictor(x), novelty.random(x)]
    assert all(view.shape == (2, SIZE) for view in views)
    assert not torch.equal(views[0], views[1])
    assert not torch.equal(views[1], views[2])


def test_lasting_novelty_compares_with_the_valid_states_seen_of_late(novelty, batch):
    """Mean and mean square follow those of each batch by the same share; the first batch sets them."""
    mean = square = 0.0
    for number in range(4):
        batch = batch._replace(observation=batch.observation * (1 - 0.1 * number))
        novelty.observe(batch)
        with torch.no_grad():
            seen = [
                novelty.error(batch.observation[t : t + 1, item]).item()
                for t in range(9)
                for item in range(4)
                if not batch.first[t + 1, item]
            ]
        share = FOLLOW if number else 1.0
        mean += share * (sum(seen) / len(seen) - mean)
        square += share * (sum(each**2 for each in seen) / len(seen) - square)
    new = torch.randn(50, 5) * torch.linspace(0.1, 5, 50)[:, None]
    with torch.no_grad():
        errors = novelty.error(new).tolist()
    expected = [min(max(1 + (error - mean) / math.sqrt(square - mean**2), 1), 5) for error in errors]
    found = novelty.lasting(new)
    np.testing.assert_allclose(found, expected, rtol=1e-3)
    assert (found.min(), found.max()) == (1, 5)
    assert ((found > 1) & (found < 5)).any()
    assert not found.requires_grad


def test_the_statistics_travel_with_the_weights(novelty, batch):
    novelty.observe(batch)
    other = Novelty(Architecture(hidden=(8,)), SPEC, SIZE)
    other.load_state_dict(novelty.state_dict())
    new = 3 * torch.randn(20, 5)
    assert torch.equal(other.lasting(new), novelty.lasting(new))


def test_learning_makes_a_state_familiar(novelty, batch):
    batch = batch._replace(observation=batch.observation.clamp(-3, 3))
    before = novelty.error(batch.observation[0]).mean()
    optimizer = torch.optim.Adam(novelty.predictor.parameters(), 1e-2)
    for _ in range(50):
        optimizer.zero_grad()
        novelty.loss(batch)[1].sum().backward()
        optimizer.step()
    assert novelty.error(batch.observation[0]).mean() < 0.3 * before
