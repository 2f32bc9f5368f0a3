"""Novelty against slow transcriptions of arXiv:2002.06038."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from shoal.losses.novelty import betas, episodic_novelty, gammas, lasting_novelty, nearest_distances


def slow_nearest(point: np.ndarray, memory: list[np.ndarray], neighbours: int) -> list[float]:
    """The squared distances to the nearest that are remembered, as many as there are."""
    return sorted(float(sum((a - b) ** 2 for a, b in zip(point, other, strict=True))) for other in memory)[:neighbours]


def slow_episodic(distances: list[float], average: float) -> float:
    """Algorithm 1, after its update of the moving average."""
    kernels = 0.0
    for distance in distances:
        normalised = distance / average
        normalised = max(normalised - 0.008, 0.0)
        kernels += 1e-4 / (normalised + 1e-4)
    similarity = math.sqrt(kernels) + 1e-3
    return 0.0 if similarity > 8 else 1 / similarity


@pytest.mark.parametrize(("room", "neighbours"), [(20, 10), (7, 10), (10, 10), (20, 3), (0, 4)])
def test_nearest_distances_are_those_of_what_is_remembered(room, neighbours):
    random = np.random.default_rng(0)
    counts = [0, 1, room // 2, room, room + 5]
    point, memory = random.normal(size=(5, 3)), random.normal(size=(5, room, 3))
    for item, count in enumerate(counts):
        memory[item, count:] = point[item]  # left from an earlier episode: near, but not to be seen
    found = nearest_distances(torch.tensor(point), torch.tensor(memory), torch.tensor(counts), neighbours)
    assert found.shape == (5, neighbours)
    for item, count in enumerate(counts):
        slow = slow_nearest(point[item], list(memory[item, :count]), neighbours)
        np.testing.assert_allclose(found[item], slow + [math.inf] * (neighbours - len(slow)))


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_episodic_novelty_is_the_papers(scale):
    random = np.random.default_rng(0)
    distances = np.sort(scale * 10 ** random.uniform(-4, 1, size=(40, 10)), axis=1)
    average = scale * random.uniform(0.2, 3, size=40)
    assert (distances / average[:, None] < 0.008).any()  # some are in one cluster
    known = random.integers(1, 11, size=40)
    padded = np.where(np.arange(10) < known[:, None], distances, math.inf)
    found = episodic_novelty(torch.tensor(padded), torch.tensor(average))
    expected = [slow_episodic(list(distances[i, : known[i]]), average[i]) for i in range(40)]
    np.testing.assert_allclose(found, expected)
    single = episodic_novelty(torch.tensor(padded).float(), torch.tensor(average).float())
    np.testing.assert_allclose(single, expected, rtol=1e-4)


def test_what_is_too_familiar_is_not_rewarded():
    """A similarity above 8 takes 64 copies of the same state among the neighbours."""
    average = torch.ones(1)
    assert episodic_novelty(torch.zeros(1, 63), average) == pytest.approx(1 / (math.sqrt(63) + 1e-3))
    assert episodic_novelty(torch.zeros(1, 64), average) == 0


def test_without_neighbours_there_is_no_reward_and_with_copies_only_no_division_by_zero():
    alone, copies = torch.full((1, 10), math.inf), torch.zeros(1, 10)
    assert episodic_novelty(alone, torch.zeros(1)) == 0
    assert episodic_novelty(alone, torch.ones(1)) == 0
    assert episodic_novelty(copies, torch.zeros(1)) == pytest.approx(1 / (math.sqrt(10) + 1e-3))


def test_farther_is_newer():
    distances = torch.logspace(-3, 3, 50)[:, None].expand(-1, 10)
    found = episodic_novelty(distances, torch.ones(50))
    near = distances[:, 0] <= 0.008
    assert (found[near] == found[0]).all()
    assert (found[~near].diff() > 0).all()


def test_lasting_novelty_is_between_one_and_five():
    random = np.random.default_rng(0)
    error = np.concatenate([random.exponential(2.0, size=200), [0.0, 100.0]])
    mean, deviation = 2.0, 1.5
    found = lasting_novelty(*map(torch.tensor, (error, mean, deviation)))
    expected = [min(max(1 + (each - mean) / deviation, 1), 5) for each in error]
    np.testing.assert_allclose(found, expected)
    assert (found.min(), found.max()) == (1, 5)
    still = lasting_novelty(*map(torch.tensor, ([1.0, 2.0, 3.0], 2.0, 0.0)))  # until now all errors were alike
    assert still.tolist() == [1, 1, 5]


@pytest.mark.parametrize("arms", [2, 3, 4, 8, 32])
def test_betas_are_the_appendixs(arms):
    found = betas(arms, 0.3)
    for i in range(arms):
        if i == 0:
            expected = 0.0
        elif i == arms - 1:
            expected = 0.3
        else:
            expected = 0.3 / (1 + math.exp(-10 * (2 * i - (arms - 2)) / (arms - 2)))
        assert found[i] == pytest.approx(expected, rel=1e-5)
    assert (found.diff() > 0).all()


@pytest.mark.parametrize("arms", [2, 3, 8, 32])
@pytest.mark.parametrize(("largest", "smallest"), [(0.997, 0.99), (0.9999, 0.9)])
def test_gammas_are_the_appendixs(arms, largest, smallest):
    found = gammas(arms, largest, smallest)
    for i in range(arms):
        weighted = (arms - 1 - i) * math.log(1 - largest) + i * math.log(1 - smallest)
        assert found[i] == pytest.approx(1 - math.exp(weighted / (arms - 1)), rel=1e-6)
    assert found[0] == pytest.approx(largest)
    assert found[-1] == pytest.approx(smallest)
    assert (found.diff() < 0).all()


def test_a_single_arm_exploits_and_looks_far():
    assert betas(1, 0.3).tolist() == [0]
    assert gammas(1, 0.997, 0.99).tolist() == pytest.approx([0.997])
