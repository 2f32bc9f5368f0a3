"""Policy losses against their formulas."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shoal.losses.policy import approximate_kl, clipped_surrogate, implied_kl, outside, policy_gradient


def test_policy_gradient_pushes_the_log_probability_by_the_advantage():
    log_prob = torch.randn(3, 2, requires_grad=True)
    advantage = torch.randn(3, 2, requires_grad=True)
    policy_gradient(log_prob, advantage).sum().backward()
    torch.testing.assert_close(log_prob.grad, -advantage.detach())
    assert advantage.grad is None


def test_clipped_surrogate_is_equation_7():
    random = np.random.default_rng(0)
    log_ratio, advantage = random.normal(scale=0.4, size=(2, 20, 5))
    loss = clipped_surrogate(torch.tensor(log_ratio), torch.tensor(advantage), 0.2)
    ratio = np.exp(log_ratio)
    np.testing.assert_allclose(loss, -np.minimum(ratio * advantage, np.clip(ratio, 0.8, 1.2) * advantage))


def test_clipped_surrogate_stops_the_gradient_only_where_it_would_go_further():
    log_ratio = torch.tensor([[1.3, 0.7, 1.3, 0.7]]).log().requires_grad_()
    advantage = torch.tensor([[1.0, -1.0, -1.0, 1.0]])
    clipped_surrogate(log_ratio, advantage, 0.2).sum().backward()
    np.testing.assert_array_equal(log_ratio.grad == 0, [[True, True, False, False]])


def test_approximate_kl_has_the_mean_of_the_kl():
    """Sampled from μ, r − 1 − log r averages to KL(μ‖π)."""
    mu, pi = np.array([0.2, 0.8]), np.array([0.5, 0.5])
    estimate = approximate_kl(torch.tensor(np.log(pi / mu))).numpy()
    assert (estimate >= 0).all()
    np.testing.assert_allclose((mu * estimate).sum(), (mu * np.log(mu / pi)).sum())


def test_outside_counts_both_sides():
    ratio = torch.tensor([0.7, 0.9, 1.0, 1.1, 1.3])
    np.testing.assert_array_equal(outside(ratio.log(), 0.2), [1, 0, 0, 0, 1])


def test_clipped_surrogate_takes_the_advantage_as_given():
    log_ratio = torch.zeros(1, 2, requires_grad=True)
    advantage = torch.ones(1, 2, requires_grad=True)
    clipped_surrogate(log_ratio, advantage, 0.2).sum().backward()
    torch.testing.assert_close(log_ratio.grad, -torch.ones(1, 2))
    assert advantage.grad is None


@pytest.mark.parametrize("rho_bar", [0.5, 1.0, 2.0])
def test_implied_kl_is_from_the_policy_that_vtrace_evaluates(rho_bar):
    """Eq. (3) of arXiv:1909.11583, state by state and action by action."""
    pi, mu = np.random.default_rng(0).dirichlet(np.ones(4), (2, 30))
    pi[0] = mu[0]
    kl = implied_kl(torch.tensor(pi.T), torch.tensor(np.log(pi / mu).T), rho_bar)
    for state in range(30):
        implied = np.minimum(rho_bar * mu[state], pi[state])
        implied /= implied.sum()
        expected = sum(pi[state, a] * np.log(pi[state, a] / implied[a]) for a in range(4))
        np.testing.assert_allclose(kl[state], expected, atol=1e-9)
    if rho_bar >= 1:
        assert abs(kl[0]) < 1e-9  # on policy, nothing is cut
