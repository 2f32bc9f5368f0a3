"""Networks of continuous actions: side by side as one by one, bounds, and where gradients go."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.functional import layer_norm, linear

from shoal.core.errors import Fatal
from shoal.core.types import ActionSpec, ArraySpec, Spec, joint
from shoal.nets.continuous import ContinuousArchitecture, ContinuousNetwork, Towers, make_adam

VECTOR = ArraySpec((3,), "float32")
ACTION = ActionSpec(2, (-2.0, 0.0), (2.0, 1.0))
SPEC = Spec(VECTOR, ACTION)
SMALL = ContinuousArchitecture(hidden=(8,), critic_hidden=(8, 6))
SIMBA = ContinuousArchitecture(torso="simba", hidden=(4,), critic_hidden=(6, 6))


@pytest.fixture(autouse=True)
def seed() -> None:
    """Draw the same weights every time."""
    torch.manual_seed(0)


def one(layer, index, x):
    """What the layer with this index does, alone."""
    return linear(x, layer.weight[index].T, layer.bias[index, 0])


def test_networks_side_by_side_are_each_a_network() -> None:
    towers, x = Towers(SMALL, 3, 5, (8, 6)), torch.randn(7, 5)
    for index, found in enumerate(towers(x)):
        alone = x
        for layer in towers.layers:
            alone = torch.relu(one(layer, index, alone))
        torch.testing.assert_close(found, alone)


def test_residual_blocks_are_those_of_the_paper() -> None:
    """arXiv:2410.09754, section 4: an embedding, x + MLP(LN(x)) with a layer four times as wide, LN at the end."""
    towers, x = Towers(SIMBA, 2, 5, (6, 6)), torch.randn(7, 5)
    with torch.no_grad():
        for part in towers.parameters():
            part.copy_(torch.randn_like(part))
    begin, *blocks, last = towers.layers

    def norm(layer, index, y):
        return layer_norm(y, (6,), layer.weight[index, 0], layer.bias[index, 0])

    assert blocks[1].weight.shape == (2, 6, 24)
    for index, found in enumerate(towers(x)):
        y = one(begin, index, x)
        for block in (blocks[:3], blocks[3:]):
            y = y + one(block[2], index, torch.relu(one(block[1], index, norm(block[0], index, y))))
        torch.testing.assert_close(found, norm(last, index, y), rtol=1e-4, atol=1e-4)


def test_the_blocks_of_a_residual_torso_are_equally_wide() -> None:
    with pytest.raises(Fatal, match=r"equally wide: give one number of units, not \[8, 6\]"):
        Towers(SIMBA, 1, 3, (8, 6))


@pytest.mark.parametrize("network", [SMALL, SIMBA], ids=["mlp", "simba"])
def test_critics_that_are_constants_pass_gradients_to_the_action_only(network: ContinuousArchitecture) -> None:
    net = ContinuousNetwork(network, SPEC, critics=2)
    action = torch.zeros(4, 2, requires_grad=True)
    inputs = torch.randn(4, 3)
    torch.nn.init.normal_(net.values.weight)
    assert torch.equal(net.judge(inputs, action, True), net.judge(inputs, action))
    assert torch.equal(net.judge(inputs, action, first=1), net.judge(inputs, action)[:1])
    net.judge(inputs, action, constant=True).sum().backward()
    assert action.grad.abs().sum() > 0
    assert all(part.grad is None for part in net.parameters())


def test_actions_are_between_the_bounds_and_back() -> None:
    net = ContinuousNetwork(SMALL, SPEC, critics=1)
    inside = torch.tensor([[-1.0, -1.0], [0.0, 0.0], [1.0, 1.0]])
    outside = torch.tensor([[-2.0, 0.0], [0.0, 0.5], [2.0, 1.0]])
    assert torch.equal(net.outside(inside), outside)
    assert torch.equal(net.inside(outside), inside)
    assert torch.equal(net.outside(torch.tensor([[-9.0, 9.0]])), torch.tensor([[-2.0, 1.0]]))


def test_a_drawn_action_has_the_density_of_its_squashed_gaussian() -> None:
    """arXiv:1812.05905, appendix C, eq. 26: log π(a|s) = log μ(u|s) − Σ log(1 − tanh²(u_i))."""
    net = ContinuousNetwork(SMALL, SPEC, critics=1, temperature=1.0).double()
    torch.nn.init.normal_(net.head.linear.weight)
    torch.nn.init.normal_(net.head.log_std.weight)
    inputs = torch.randn(50, 3, dtype=torch.float64)
    action, log_prob = net.drawn(inputs)
    assert action.requires_grad
    mean, log_std = (part.detach().numpy() for part in net.policy(inputs).chunk(2, -1))
    raw = np.arctanh(action.detach().numpy())
    density = -((raw - mean) ** 2) / (2 * np.exp(log_std) ** 2) - log_std - np.log(np.sqrt(2 * np.pi))
    slow = (density - np.log(1 - np.tanh(raw) ** 2)).sum(-1)
    sure = np.abs(raw).max(-1) < 5  # beyond, the inverse of tanh is imprecise
    assert sure.sum() > 10
    np.testing.assert_allclose(log_prob.detach().numpy()[sure], slow[sure], rtol=1e-5, atol=1e-5)


def test_actions_are_random_until_the_first_update() -> None:
    net = ContinuousNetwork(SMALL, SPEC, critics=1)
    given = torch.zeros(1000, 2)
    drawn = net.explored(given)
    assert -1 <= drawn.min() < -0.9 < 0.9 < drawn.max() <= 1
    assert abs(drawn.mean()) < 0.1
    net.updates += 1
    assert torch.equal(net.explored(given), given)


def test_policy_and_temperature_have_a_rate_of_their_own() -> None:
    net = ContinuousNetwork(SMALL, SPEC, critics=2, temperature=0.5)
    critics, acting = make_adam(net, 1e-3, 0.1, 1e-8, 0.0).param_groups
    names = {id(part): name for name, part in net.named_parameters()}
    assert {names[id(part)].partition(".")[0] for part in critics["params"]} == {"critics", "values"}
    assert {names[id(part)].partition(".")[0] for part in acting["params"]} == {"torso", "head", "log_temperature"}
    assert acting["rate"] == 0.1
    assert len(critics["params"]) + len(acting["params"]) == len(names)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (Spec(VECTOR, ActionSpec(3)), "for continuous actions, which this environment does not have"),
        (Spec(VECTOR, joint([ACTION, ActionSpec(2)])), "for continuous actions"),
        (Spec(VECTOR, ActionSpec(1, (-np.inf,), (1.0,))), "needs actions with finite bounds, got low"),
        (Spec(ArraySpec((3, 64, 64), "uint8"), ACTION), r"sees numbers, not images such as \(3, 64, 64\)"),
    ],
    ids=["choices", "joint", "unbounded", "images"],
)
def test_other_environments_are_refused_in_words(spec: Spec, words: str) -> None:
    with pytest.raises(Fatal, match=words):
        ContinuousNetwork(SMALL, spec, critics=1)
