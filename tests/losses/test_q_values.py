"""Losses of action values against the papers' formulas, one number at a time."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from shoal.losses.q_values import (
    bootstrap,
    huber,
    mixed_priority,
    n_step_targets,
    pick,
    project,
    quantile_huber,
    rescale,
    retrace_targets,
    share_with_all,
    unscale,
)

GAMMA = 0.9  # of the experience that the fixture draws


def slow_huber(error: float, bound: float) -> float:
    """Eq. (9) of arXiv:1710.10044."""
    return error**2 / 2 if abs(error) <= bound else bound * (abs(error) - bound / 2)


def slow_quantile_huber(quantiles: np.ndarray, samples: np.ndarray) -> float:
    """Eq. (10) and algorithm 1 of arXiv:1710.10044: a sum over quantiles of means over samples, for κ = 1."""
    total = 0.0
    for i, quantile in enumerate(quantiles):
        fraction = (i / len(quantiles) + (i + 1) / len(quantiles)) / 2
        for sample in samples:
            error = sample - quantile
            total += abs(fraction - (1.0 if error < 0 else 0.0)) * slow_huber(error, 1.0) / len(samples)
    return total


def slow_rescale(x: float) -> float:
    """Write h as openreview r1lyTjAqYX, section 2.3, does."""
    return math.copysign(math.sqrt(abs(x) + 1) - 1, x) + 1e-3 * x


def slow_unscale(y: float) -> float:
    """Search for the number that h takes to y, knowing only that h grows."""
    low, high = -1e9, 1e9
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if slow_rescale(middle) < y else (low, middle)
    return (low + high) / 2


def slow_returns(reward, terminated, mask, value, n):
    """Sum up to n rewards from every valid step, then bootstrap unless the episode ended by its own rules."""
    length, items = reward.shape
    result = np.full((length, items), np.nan)
    for b in range(items):
        for start in range(length):
            if not mask[start, b]:
                continue
            total, reached, over = 0.0, start, False
            while reached < length and reached - start < n and mask[reached, b] and not over:
                total += GAMMA ** (reached - start) * reward[reached, b]
                over = terminated[reached, b]
                reached += 1
            result[start, b] = total if over else total + GAMMA ** (reached - start) * value[reached, b]
    return result


def test_pick_takes_the_chosen_actions():
    values = torch.arange(2 * 3 * 4 * 5).view(2, 3, 4, 5)
    action = torch.tensor([[0, 3, 1], [2, 2, 0]])
    picked = pick(values, action)
    for t in range(2):
        for b in range(3):
            assert picked[t, b].tolist() == values[t, b, int(action[t, b])].tolist()


def test_bootstrap_lets_one_network_choose_and_the_other_judge():
    random = np.random.default_rng(0)
    choice, target = random.normal(size=(2, 7, 4, 3))
    found = bootstrap(torch.tensor(choice), torch.tensor(target))
    own = bootstrap(torch.tensor(target), torch.tensor(target))
    for b in range(7):
        means = [sum(choice[b, a]) / 3 for a in range(4)]  # not the largest quantile: the largest mean
        np.testing.assert_array_equal(found[b], target[b, means.index(max(means))])
        np.testing.assert_array_equal(own[b], target[b, max(range(4), key=lambda a, b=b: sum(target[b, a]))])
    assert not torch.equal(found, own)


@pytest.mark.parametrize("bound", [0.5, 1.0, 3.0])
def test_huber(bound):
    errors = np.linspace(-5, 5, 41)
    np.testing.assert_allclose(huber(torch.tensor(errors), bound), [slow_huber(error, bound) for error in errors])


@pytest.mark.parametrize(("count", "samples"), [(1, 1), (1, 6), (5, 5), (4, 7), (8, 1)])
def test_quantile_huber_is_the_papers(count, samples):
    random = np.random.default_rng(count)
    quantiles, target = 2 * random.normal(size=(3, 6, count)), 2 * random.normal(size=(3, 6, samples))
    found = quantile_huber(torch.tensor(quantiles), torch.tensor(target))
    assert found.shape == (3, 6)
    for t in range(3):
        for b in range(6):
            np.testing.assert_allclose(found[t, b], slow_quantile_huber(quantiles[t, b], target[t, b]))


def test_quantile_huber_pulls_the_quantiles_and_not_the_samples():
    random = np.random.default_rng(0)
    start, samples = random.normal(size=4), random.normal(size=6)
    quantiles = torch.tensor(start, requires_grad=True)
    target = torch.tensor(samples, requires_grad=True)
    quantile_huber(quantiles, target).backward()
    assert target.grad is None
    for i in range(4):
        ahead, behind = start.copy(), start.copy()
        ahead[i] += 1e-6
        behind[i] -= 1e-6
        slope = (slow_quantile_huber(ahead, samples) - slow_quantile_huber(behind, samples)) / 2e-6
        np.testing.assert_allclose(quantiles.grad[i], slope, atol=1e-6)


NUMBERS = np.concatenate([-np.logspace(-4, 6, 41), [0.0], np.logspace(-4, 6, 41)])


def test_rescale_is_the_papers():
    expected = [slow_rescale(x) for x in NUMBERS]
    np.testing.assert_allclose(rescale(torch.tensor(NUMBERS)), expected, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(rescale(torch.tensor(NUMBERS, dtype=torch.float32)), expected, rtol=1e-5, atol=2e-7)


def test_unscale_undoes_it():
    scaled = np.array([slow_rescale(x) for x in NUMBERS])
    np.testing.assert_allclose(unscale(torch.tensor(scaled)), NUMBERS, rtol=1e-8, atol=1e-9)
    found = [slow_unscale(y) for y in scaled]
    np.testing.assert_allclose(unscale(torch.tensor(scaled)), found, rtol=1e-6, atol=1e-6)


def test_unscale_undoes_it_in_float32():
    """Small values count as much as large ones: where rewards are rare, most values are near 0."""
    scaled = torch.tensor([slow_rescale(x) for x in NUMBERS], dtype=torch.float32)
    x = torch.tensor(NUMBERS, dtype=torch.float32)
    torch.testing.assert_close(unscale(scaled), x, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(rescale(unscale(scaled)), scaled, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(unscale(rescale(x)), x, rtol=1e-5, atol=1e-6)


def test_unscale_never_goes_backwards():
    x = torch.linspace(-300, 300, 10_001)
    assert (unscale(x).diff() > 0).all()
    assert unscale(torch.zeros(1)) == rescale(torch.zeros(1)) == 0


@pytest.mark.parametrize("n", [1, 2, 3, 5, 50])
def test_n_step_targets_stop_where_the_episode_does(experience, n):
    _, discount, reward, value, mask = experience
    last = np.concatenate([mask[1:] == 0, np.ones((1, mask.shape[1]), bool)])
    found = n_step_targets(*map(torch.tensor, (reward, discount, value, last)), n)
    slow = slow_returns(reward, discount == 0, mask > 0, value, n)
    valid = mask > 0
    np.testing.assert_allclose(found.numpy()[valid], slow[valid])


def test_n_step_targets_by_hand():
    """Step 2 is the dummy between episodes: nothing of it, nor of what follows, reaches the steps before."""
    reward = torch.tensor([[1.0], [2.0], [1e6], [4.0], [8.0]])
    value = torch.tensor([[1e6], [1e6], [16.0], [1e6], [32.0], [64.0]])
    last = torch.tensor([[False], [True], [False], [False], [True]])
    for alive in (1.0, 0.0):  # cut off, or ended by its own rules
        discount = torch.tensor([[0.5], [0.5 * alive], [0.5], [0.5], [0.5]])
        found = n_step_targets(reward, discount, value, last, 3)[:, 0].tolist()
        assert found[0] == 1 + 2 / 2 + alive * 16 / 4
        assert found[1] == 2 + alive * 16 / 2
        assert found[3] == 4 + 8 / 2 + 64 / 4  # the sequence ends: it bootstraps early
        assert found[4] == 8 + 64 / 2
    assert n_step_targets(reward, discount, value, last, 1)[3, 0] == 4 + 32 / 2


@pytest.mark.parametrize("eta", [0.0, 0.3, 0.9, 1.0])
def test_mixed_priority_looks_at_valid_steps_only(eta):
    random = np.random.default_rng(0)
    error, mask = random.normal(size=(9, 6)), (random.random((9, 6)) < 0.6).astype(float)
    mask[:, 0], mask[:, 1] = 0, 1
    error[mask == 0] = 1e6
    found = mixed_priority(torch.tensor(error), torch.tensor(mask), eta)
    assert found[0] == 0
    for b in range(1, 6):
        sizes = [abs(error[t, b]) for t in range(9) if mask[t, b]]
        np.testing.assert_allclose(found[b], eta * max(sizes) + (1 - eta) * sum(sizes) / len(sizes))


def slow_retrace(reward, discount, chosen, value, ratio, last, lambda_):
    """Sum eq. (3) of arXiv:1606.02647 from every step: products of traces, never a recursion."""
    length, items = reward.shape
    goals = np.zeros((length, items))
    for b in range(items):
        for start in range(length):
            total, weight = chosen[start, b], 1.0
            for t in range(start, length):
                total += weight * (reward[t, b] + discount[t, b] * value[t + 1, b] - chosen[t, b])
                if last[t, b] or t + 1 == length:
                    break
                weight *= discount[t, b] * lambda_ * min(1.0, ratio[t + 1, b])
            goals[start, b] = total
    return goals


@pytest.mark.parametrize("lambda_", [0.0, 0.7, 1.0])
def test_retrace_is_the_papers(lambda_):
    rng = np.random.default_rng(0)
    shape = (9, 5)
    reward, chosen, value = rng.normal(size=shape), rng.normal(size=shape), rng.normal(size=(10, 5))
    discount = 0.9 * (rng.random(shape) > 0.2)
    ratio, last = rng.random(shape) * 2, rng.random(shape) < 0.2
    arrays = reward, discount, chosen, value, ratio, last
    goals = retrace_targets(*(torch.tensor(array) for array in arrays), lambda_)
    np.testing.assert_allclose(goals, slow_retrace(*arrays, lambda_), rtol=1e-9)


def slow_project(support, goals, probability):
    """Algorithm 1 of arXiv:1707.06887, atom by atom."""
    count, low, high = len(support), support[0], support[-1]
    width, found = (high - low) / (count - 1), np.zeros(count)
    for goal, chance in zip(goals, probability, strict=True):
        b = (min(max(goal, low), high) - low) / width
        lower, upper = math.floor(b), math.ceil(b)
        if lower == upper:  # the algorithm as printed would lose it
            found[lower] += chance
        else:
            found[lower] += chance * (upper - b)
            found[upper] += chance * (b - lower)
    return found


def test_projection_is_the_papers():
    rng = np.random.default_rng(0)
    support = np.linspace(-2.0, 3.0, 11)
    goals = np.concatenate([rng.normal(size=(6, 11)) * 3, support[None] * 1.0, np.full((1, 11), 0.5)])
    chances = rng.dirichlet(np.ones(11), len(goals))
    found = project(*(torch.tensor(each) for each in (support, goals, chances)))
    expected = [slow_project(support, *pair) for pair in zip(goals, chances, strict=True)]
    np.testing.assert_allclose(found, expected, atol=1e-12)
    np.testing.assert_allclose(found.sum(-1), 1.0)
    place = (torch.tensor(goals).clamp(-2.0, 3.0) + 2.0) / 0.5
    np.testing.assert_allclose(share_with_all(place, torch.tensor(chances)), found, atol=1e-12)  # as on a GPU
    goals[0, 3] = np.nan  # which must reach the loss, where it is refused
    spoilt = project(*(torch.tensor(each) for each in (support, goals, chances))).sum(-1)
    assert spoilt.isnan().tolist() == [True] + [False] * (len(goals) - 1)
