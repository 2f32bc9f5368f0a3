"""Torsos: from an observation tree of [N, ...] to features of [N, F]."""

from __future__ import annotations

import math
from typing import Any, Literal, TypeVar

import torch
from pydantic import Field, field_validator
from torch import Tensor, nn

from shoal.core.errors import ShoalError, nearest
from shoal.core.recipe import find
from shoal.core.settings import Settings
from shoal.core.tree import leaves
from shoal.core.types import SMALLEST_IMAGE, ArraySpec

PIECE = 128  # images of 84 × 84 whose activations a processor's cache holds; measured 15 % faster than 672 at once
RESIDUAL_GAIN = math.sqrt(2 / 6)  # six blocks together then about double the variance, not each of them

TORSOS = ("auto", "mlp", "nature", "resnet")
Layer = TypeVar("Layer", nn.Linear, nn.Conv2d)


class Architecture(Settings):
    """How observations become features."""

    torso: str = Field(
        "auto",
        description="Torso for images: auto, mlp, nature or resnet; auto takes nature, or mlp below 36 pixels; vectors "
        "get an mlp. Or your own for every array, as `package.module:Class`.",
    )
    hidden: tuple[int, ...] = Field((64, 64), description="Units of each layer of an mlp.")
    activation: Literal["tanh", "relu"] = Field("tanh", description="Activation of an mlp.")
    lstm: int = Field(0, ge=0, description="Units of the LSTM after the torso; 0: no LSTM.")
    normalise_observation: bool = Field(
        False, description="Whether to bring observations, but for images of pixels, to mean 0 and variance 1."
    )

    @property
    def capturable(self) -> bool:
        """Whether a GPU can repeat its work unseen: a memory asks where episodes begin, your own torso may ask more."""
        return not self.lstm and ":" not in self.torso

    @field_validator("torso")
    @classmethod
    def _known(cls, torso: str) -> str:
        if torso not in TORSOS and ":" not in torso:
            raise ValueError(
                f"unknown torso {torso!r}: expected one of {', '.join(TORSOS)}, or your own as package.module:Class"
                f"{nearest(torso, TORSOS)}"
            )
        return torso


def orthogonal(layer: Layer, gain: float = math.sqrt(2.0)) -> Layer:
    """Give a layer orthogonal weights and no bias (arXiv:2006.05990, §3.2; arXiv:2005.12729, §3)."""
    nn.init.orthogonal_(layer.weight, gain)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


class Flat(nn.Module):
    """Numbers of any type and shape as float vectors; bytes are brought to [0, 1]."""

    def __init__(self, largest: float = 255.0) -> None:
        super().__init__()
        self.scale = 1 / largest

    def forward(self, x: Tensor) -> Tensor:
        """Map [N, ...] to [N, F]."""
        flat = x.flatten(1) if x.dim() > 1 else x.unsqueeze(1)
        return flat.float().mul_(self.scale) if x.dtype == torch.uint8 else flat.float()


class Pixels(nn.Module):
    """Images of floats, bytes brought to [0, 1], laid out as the convolutions like them."""

    def __init__(self, largest: float = 255.0) -> None:
        super().__init__()
        self.scale = 1 / largest

    def forward(self, x: Tensor) -> Tensor:
        """Map [N, C, H, W] to the same shape."""
        laid_out = x.contiguous(memory_format=torch.channels_last)
        return laid_out.float().mul_(self.scale) if x.dtype == torch.uint8 else laid_out.float()


def mlp(inputs: int, hidden: tuple[int, ...], activation: str, largest: float = 255.0) -> nn.Sequential:
    """Return a multi-layer perceptron."""
    layers: list[nn.Module] = [Flat(largest)]
    for before, after in zip((inputs, *hidden), hidden, strict=False):
        layers += [orthogonal(nn.Linear(before, after)), nn.Tanh() if activation == "tanh" else nn.ReLU()]
    return nn.Sequential(*layers)


class Residual(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.ReLU(),
            orthogonal(nn.Conv2d(channels, channels, 3, padding=1)),
            nn.ReLU(inplace=True),
            orthogonal(nn.Conv2d(channels, channels, 3, padding=1), RESIDUAL_GAIN),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map [N, C, H, W] to the same shape."""
        return x + self.body(x)  # type: ignore[no-any-return]  # nn.Module.__call__ is untyped


class InPieces(nn.Module):
    """A convolutional network that takes its images in pieces small enough for a processor's cache."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        """Map [N, C, H, W] to [N, features]."""
        # What is exported serves batches of any size.
        if torch.compiler.is_compiling() or x.device.type != "cpu" or len(x) <= PIECE:
            return self.body(x)  # type: ignore[no-any-return]  # nn.Module.__call__ is untyped
        return torch.cat([self.body(piece) for piece in x.tensor_split(-(-len(x) // PIECE))])


def _convolutions(layers: list[nn.Module], spec: ArraySpec, units: int) -> nn.Sequential:
    """Close a stack of convolutions with a dense layer, whose inputs a dry run counts."""
    with torch.no_grad():
        size = nn.Sequential(*layers)(torch.zeros(1, *spec.shape)).numel()
    pieces = InPieces(nn.Sequential(Pixels(spec.largest), *layers, nn.Flatten()))
    whole = nn.Sequential(pieces, orthogonal(nn.Linear(size, units)), nn.ReLU(inplace=True))
    whole.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # missing from its stub
    return whole


def nature(spec: ArraySpec) -> nn.Sequential:
    """Return the network of doi:10.1038/nature14236, methods, "Model architecture"."""
    shape = spec.shape
    if min(shape[1:]) < SMALLEST_IMAGE:
        raise ShoalError(
            f"an image of {shape[1]}x{shape[2]} is too small for the nature torso, which needs"
            f" {SMALLEST_IMAGE}x{SMALLEST_IMAGE}: choose torso mlp or resnet"
        )
    layers: list[nn.Module] = []
    channels = shape[0]
    for filters, kernel, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
        layers += [orthogonal(nn.Conv2d(channels, filters, kernel, stride)), nn.ReLU(inplace=True)]
        channels = filters
    return _convolutions(layers, spec, 512)


def resnet(spec: ArraySpec) -> nn.Sequential:
    """Return the deep network of arXiv:1802.01561, fig. 3 right."""
    layers: list[nn.Module] = []
    channels = spec.shape[0]
    for filters in (16, 32, 32):
        layers += [orthogonal(nn.Conv2d(channels, filters, 3, padding=1), gain=1.0)]
        layers += [nn.MaxPool2d(3, 2, padding=1), Residual(filters), Residual(filters)]
        channels = filters
    return _convolutions([*layers, nn.ReLU(inplace=True)], spec, 256)


def is_image(spec: ArraySpec) -> bool:
    """Whether an observation is an image, [C, H, W]."""
    return len(spec.shape) == 3


def _torso(network: Architecture, spec: ArraySpec) -> tuple[nn.Module, int]:
    """Return the torso for one array and the number of its features."""
    if ":" in network.torso:
        own = find(network.torso)(spec)
        with torch.no_grad():
            features = own(torch.zeros(1, *spec.shape, dtype=getattr(torch, spec.dtype)))
        if features.dim() != 2 or len(features) != 1:
            raise ShoalError(
                f"torso {network.torso} maps [N, ...] to {[*features.shape]} for N = 1, not to [N, features]"
            )
        return own, features.shape[1]
    choice = network.torso if is_image(spec) else "mlp"
    if choice == "auto":
        choice = "nature" if min(spec.shape[1:]) >= SMALLEST_IMAGE else "mlp"
    if choice == "nature":
        return nature(spec), 512
    if choice == "resnet":
        return resnet(spec), 256
    inputs = math.prod(spec.shape)
    return mlp(inputs, network.hidden, network.activation, spec.largest), (network.hidden or (inputs,))[-1]


class Torso(nn.Module):
    """Features of an observation, or of each array of a mapping, side by side."""

    def __init__(self, network: Architecture, observation: Any) -> None:
        super().__init__()
        specs: list[ArraySpec] = [*leaves(observation)]
        if network.torso in ("nature", "resnet") and not any(map(is_image, specs)):
            raise ShoalError(
                f"torso {network.torso} is for images ([C, H, W]), but the observation is"
                f" {observation}: choose torso auto or mlp"
            )
        built = [_torso(network, spec) for spec in specs]
        self.parts = nn.ModuleList(part for part, _ in built)
        self.features = sum(size for _, size in built)

    def forward(self, observation: Any) -> Tensor:
        """Map a tree of [N, ...] to [N, F]."""
        pieces = [part(array) for part, array in zip(self.parts, leaves(observation), strict=True)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)
