"""Torsos: shapes, layouts, choices and first weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import nn

from shoal.core.errors import ShoalError
from shoal.core.types import ArraySpec
from shoal.nets import torsos
from shoal.nets.actor_critic import ActorCriticArchitecture
from shoal.nets.torsos import Architecture, Torso, mlp, nature, resnet

ATARI = ArraySpec((4, 84, 84), "uint8")
VECTOR = ArraySpec((5,), "float32")


def observe(spec: ArraySpec, size: int) -> torch.Tensor:
    if spec.dtype == "uint8":
        return torch.randint(0, 256, (size, *spec.shape), dtype=torch.uint8)
    return torch.randn(size, *spec.shape).to(getattr(torch, spec.dtype))


def parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(
    ("network", "spec", "features"),
    [
        (Architecture(), ATARI, 512),
        (Architecture(), ArraySpec((1, 37, 45), "uint8"), 512),
        (Architecture(hidden=(8,)), ArraySpec((1, 10, 5), "uint8"), 8),
        (Architecture(torso="resnet"), ATARI, 256),
        (Architecture(torso="resnet"), ArraySpec((3, 11, 7), "uint8"), 256),
        (Architecture(torso="mlp", hidden=(16, 8)), ATARI, 8),
        (Architecture(hidden=(32, 16)), VECTOR, 16),
        (Architecture(hidden=()), VECTOR, 5),
        (Architecture(hidden=(8,)), ArraySpec((2, 3), "float64"), 8),
        (Architecture(hidden=(8,)), ArraySpec((), "int64"), 8),
        (Architecture(torso="nature", hidden=(8,)), {"camera": ATARI, "joints": VECTOR}, 520),
    ],
)
def test_features_have_the_promised_size(network, spec, features):
    torso = Torso(network, spec)
    observation = {key: observe(part, 3) for key, part in spec.items()} if isinstance(spec, dict) else observe(spec, 3)
    result = torso(observation)
    assert result.shape == (3, features)
    assert result.dtype == torch.float32
    assert torso.features == features


def test_the_nature_network_is_the_papers():
    convolutions = [layer for layer in nature(ATARI).modules() if isinstance(layer, nn.Conv2d)]
    assert [(c.out_channels, c.kernel_size[0], c.stride[0]) for c in convolutions] == [
        (32, 8, 4),
        (64, 4, 2),
        (64, 3, 1),
    ]
    assert parameters(nature(ATARI)) == 1_684_128  # counted by hand, with 3136 features before the dense layer


def test_the_residual_network_is_the_papers():
    net = resnet(ATARI)
    layers = [layer for layer in net.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
    assert len(layers) == 16  # fig. 3 right: 15 convolutions and a dense layer
    assert layers[-1].in_features == 32 * 11 * 11


def test_a_mapping_is_read_by_key_not_by_order():
    spec = {"a": ArraySpec((2,), "float32"), "b": ArraySpec((2,), "float32")}
    torso = Torso(Architecture(hidden=(4,)), spec)
    a, b = torch.randn(3, 2), torch.randn(3, 2)
    torch.testing.assert_close(torso({"a": a, "b": b}), torso({"b": b, "a": a}))
    assert not torch.equal(torso({"a": a, "b": b}), torso({"a": b, "b": a}))


@pytest.mark.parametrize("make", [nature, resnet])
def test_pixels_are_divided_by_255_and_weights_lie_channels_last(make):
    net = make(ArraySpec((3, 40, 40), "uint8"))
    image = torch.randint(0, 256, (2, 3, 40, 40), dtype=torch.uint8)
    before = image.clone()
    np.testing.assert_allclose(
        net(image).detach(), net[1:](net[0].body[1:](image.float() / 255)).detach(), rtol=1e-4, atol=1e-5
    )
    assert torch.equal(image, before)
    for layer in net.modules():
        if isinstance(layer, nn.Conv2d):
            assert layer.weight.is_contiguous(memory_format=torch.channels_last)


def test_many_images_give_what_few_do_with_the_same_gradients():
    net = nature(ArraySpec((4, 36, 36), "uint8"))
    images = torch.randint(0, 256, (2 * torsos.PIECE + 5, 4, 36, 36), dtype=torch.uint8)
    gradients = []
    for call in (net, lambda x: net[1:](net[0].body(x))):  # in pieces; at once
        net.zero_grad()
        features = call(images)
        features.square().mean().backward()
        gradients.append([features.detach(), *(weight.grad.clone() for weight in net.parameters())])
    for pieces, whole in zip(*gradients, strict=True):
        np.testing.assert_allclose(pieces, whole, rtol=1e-3, atol=1e-5)


def test_bytes_in_an_mlp_are_divided_by_255_and_floats_are_not():
    net = mlp(6, (), "tanh")
    np.testing.assert_allclose(net(torch.tensor([[0, 51, 255]], dtype=torch.uint8)), [[0, 0.2, 1]], rtol=1e-6)
    np.testing.assert_allclose(net(torch.tensor([[0.0, 51.0, 255.0]])), [[0, 51, 255]])


def test_activation():
    x = torch.randn(100, 4)
    assert (mlp(4, (8,), "relu")(x) >= 0).all()
    assert (mlp(4, (8,), "tanh")(x) < 0).any()


def test_first_weights_are_orthogonal():
    net = mlp(64, (32,), "tanh")
    weight = net[1].weight.detach()
    torch.testing.assert_close(weight @ weight.T, 2 * torch.eye(32), atol=1e-4, rtol=0)
    assert (net[1].bias == 0).all()


def test_first_features_of_the_residual_network_keep_their_scale():
    torch.manual_seed(0)
    image = torch.randint(0, 256, (4, 3, 48, 48), dtype=torch.uint8)
    assert 0.1 < resnet(ArraySpec((3, 48, 48), "uint8"))(image).detach().std() < 3


def test_the_same_seed_gives_the_same_weights():
    def state():
        torch.manual_seed(3)
        return Torso(Architecture(), ATARI).state_dict()

    for one, other in zip(state().values(), state().values(), strict=True):
        assert torch.equal(one, other)


def test_a_vector_cannot_go_through_convolutions():
    with pytest.raises(ShoalError, match=r"resnet is for images.*choose torso auto or mlp"):
        Torso(Architecture(torso="resnet"), VECTOR)


def test_a_small_image_cannot_go_through_the_nature_network():
    with pytest.raises(ShoalError, match=r"35x84 is too small.*36x36.*mlp or resnet"):
        Torso(Architecture(torso="nature"), ArraySpec((1, 35, 84), "uint8"))
    Torso(Architecture(torso="nature"), ArraySpec((1, 36, 36), "uint8"))


def test_separate_torsos_cannot_share_a_memory():
    with pytest.raises(ValidationError, match="separate torsos cannot share an LSTM"):
        ActorCriticArchitecture(separate=True, lstm=8)


class Halves(nn.Module):
    """A torso of one's own: the mean of every half."""

    def __init__(self, spec):
        super().__init__()
        self.spec = spec

    def forward(self, x):
        return x.float().flatten(1).view(len(x), 2, -1).mean(-1)


class Scalar(nn.Module):
    def __init__(self, spec):
        super().__init__()

    def forward(self, x):
        return x.float().mean()


def test_a_torso_of_ones_own_is_named_by_its_import_path():
    torso = Torso(Architecture(torso="tests.nets.test_torsos:Halves"), {"a": ATARI, "b": ArraySpec((4,), "float32")})
    assert torso.features == 4
    assert torso.parts[0].spec == ATARI
    seen = {"a": torch.ones(3, 4, 84, 84, dtype=torch.uint8), "b": torch.tensor([[1.0, 3, 5, 7]] * 3)}
    assert torso(seen).tolist() == [[1, 1, 2, 6]] * 3
    with pytest.raises(ShoalError, match=r"maps \[N, \.\.\.\] to \[\] for N = 1, not to \[N, features\]"):
        Torso(Architecture(torso="tests.nets.test_torsos:Scalar"), ATARI)
    with pytest.raises(ValueError, match=r"unknown torso 'resent'.*did you mean 'resnet'"):
        Architecture(torso="resent")
