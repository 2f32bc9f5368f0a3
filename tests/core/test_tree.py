"""Trees of arrays and tensors."""

from __future__ import annotations

from types import MappingProxyType

import numpy as np
import pytest
import torch

from shoal.core.tree import leaves, map_tree, size_of, to_numpy, to_torch

TREE = {"b": np.arange(3.0), "a": MappingProxyType({"c": np.zeros((2, 2), np.uint8), "d": np.array(True)})}


def test_map_keeps_the_shape_and_walks_trees_together():
    assert map_tree(lambda x: x.shape, TREE) == {"b": (3,), "a": {"c": (2, 2), "d": ()}}
    other = {"a": {"d": 3, "c": 2}, "b": 1}
    assert map_tree(lambda x, number: (x.size, number), TREE, other) == {"b": (3, 1), "a": {"c": (4, 2), "d": (1, 3)}}
    assert map_tree(lambda x, y: x + y, 1, 2) == 3


def test_leaves_come_in_the_order_of_the_keys_whatever_order_the_mapping_has():
    one = {"b": {"z": 1, "a": 2}, "a": 3}
    assert [*leaves(one)] == [3, 2, 1]
    assert [*leaves({"a": 3, "b": {"a": 2, "z": 1}})] == [3, 2, 1]
    seen = []
    map_tree(seen.append, one)
    assert seen == [3, 2, 1]
    assert list(leaves(5)) == [5]
    assert list(leaves({})) == []


def test_size_counts_bytes():
    assert size_of(TREE) == 3 * 8 + 4 + 1
    assert size_of(to_torch(TREE)) == 3 * 8 + 4 + 1


@pytest.mark.parametrize("kind", ["bool", "uint8", "int64", "float32"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3, 4)], ids=str)
def test_tensors_have_the_same_type_shape_and_values(kind, shape):
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(kind)
    tensor = to_torch(array)
    assert (str(tensor.dtype), tuple(tensor.shape)) == (f"torch.{kind}", shape)
    assert (to_numpy(tensor) == array).all()


def test_tensors_lie_in_aligned_memory_of_their_own():
    memory = np.zeros(1000, np.uint8)
    array = memory[4:404].view(np.float32)
    tensor = to_torch(array)
    assert tensor.data_ptr() % 64 == 0
    tensor += 1
    assert not array.any()


def test_bytes_are_not_copied():
    array = np.zeros(10, np.uint8)
    to_torch(array).add_(1)
    assert array.all()


@pytest.mark.parametrize("kind", ["uint8", "float32"])
def test_arrays_that_are_reversed_or_read_only_become_tensors_too(kind):
    array = np.arange(6).astype(kind)
    assert to_torch(array[::-1]).tolist() == [5, 4, 3, 2, 1, 0]
    array.flags.writeable = False
    assert to_torch(array).tolist() == [0, 1, 2, 3, 4, 5]


def test_arrays_share_the_memory_of_tensors():
    tensor = torch.zeros(3, requires_grad=True)
    array = to_numpy({"a": tensor})["a"]
    array += 1
    assert tensor.tolist() == [1, 1, 1]
