"""Trees: nested mappings of arrays or tensors, with the few operations everyone needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

    from shoal.core.types import Array

STAGED = 1 << 16  # bytes from which a copy to a GPU is worth a staging area


def map_tree(function: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """Apply a function to every leaf, in the order of the keys, walking several trees of one shape together."""
    if isinstance(tree, Mapping):
        return {key: map_tree(function, tree[key], *(other[key] for other in rest)) for key in sorted(tree)}
    return function(tree, *rest)


def leaves(tree: Any) -> Iterator[Any]:
    """Every leaf, in the order of the keys, whatever order the mappings were made in."""
    if isinstance(tree, Mapping):
        for key in sorted(tree):
            yield from leaves(tree[key])
    else:
        yield tree


def size_of(tree: Any) -> int:
    """Bytes in all leaves."""
    return sum(leaf.nbytes for leaf in leaves(tree))


def flat(tree: Any, path: str = "", separator: str = ".") -> Iterator[tuple[str, Any]]:
    """Every leaf with its path, keys joined by the separator."""
    if isinstance(tree, Mapping):
        for key in tree:
            yield from flat(tree[key], f"{path}{separator}{key}" if path else key, separator)
    else:
        yield path, tree


def not_finite(tree: Any, path: str = "") -> list[str]:
    """Which arrays or tensors hold a number that is not finite, each as `path holds nan`."""
    found = []
    for name, leaf in flat(tree, path):
        array = leaf if isinstance(leaf, np.ndarray | np.generic) else _numbers(leaf)
        if array.dtype.kind == "f" and not (fine := np.isfinite(array)).all():
            found.append(f"{name} holds {np.extract(~fine, array)[0]}")
    return found


def _numbers(tensor: torch.Tensor) -> Array:
    """A tensor as an array, empty where it is of whole numbers: images need not leave a GPU."""
    return tensor.detach().cpu().numpy() if tensor.is_floating_point() else np.zeros(0, np.uint8)


def to_torch(tree: Any, device: str | torch.device = "cpu") -> Any:
    """Turn arrays into tensors on a device, in memory of torch's own.

    Torch aligns its memory to 64 bytes, and some matrix kernels round differently on other alignments: the
    copy makes the same numbers give the same bits on every engine. Bytes are only ever converted, so they
    are not copied on the CPU.
    """
    import torch

    def one(array: Any) -> torch.Tensor:
        if isinstance(array, torch.Tensor):  # experience that stayed on a GPU
            return array.to(device)
        # Torch takes neither negative strides nor memory that cannot be written.
        tensor = torch.from_numpy(array if array.flags.carray else np.array(array, order="C"))
        if str(device) == "cpu":
            return tensor if array.dtype == np.uint8 else tensor.clone()
        return tensor.to(device)

    return map_tree(one, tree)


def upload(tree: Any, device: torch.device) -> Any:
    """Turn arrays into tensors on a device, images by way of memory from which a GPU copies by itself."""
    import torch

    def one(array: Any) -> torch.Tensor:
        if device.type != "cuda" or array.nbytes < STAGED:
            return to_torch(array, device)  # type: ignore[no-any-return]
        staged = torch.from_numpy(array if array.flags.carray else np.array(array, order="C")).pin_memory()
        return staged.to(device, non_blocking=True)

    return map_tree(one, tree)


def zeros_for(leaf: Any, *shape: int) -> Any:
    """Zeros of a shape, of the kind and in the place of an array or a tensor."""
    return np.zeros(shape, leaf.dtype) if isinstance(leaf, np.ndarray) else leaf.new_zeros(shape)


def copied(leaf: Any) -> Any:
    """A copy of an array or a tensor."""
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf.clone()


def settle(tree: Any) -> None:
    """Wait until tensors on a GPU hold what was written to them: others may read them from another stream."""
    if any(getattr(leaf, "is_cuda", False) for leaf in leaves(tree)):
        import torch

        torch.cuda.current_stream().synchronize()


def to_numpy(tree: Any) -> Any:
    """Turn tensors into arrays, and leave arrays as they are; on the CPU they share memory."""
    return map_tree(lambda leaf: leaf if isinstance(leaf, np.ndarray) else leaf.detach().cpu().numpy(), tree)
