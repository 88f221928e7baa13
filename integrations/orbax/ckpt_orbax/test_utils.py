"""The few helpers of Orbax's tests that programs call."""

from __future__ import annotations

import logging
import shutil
from typing import Any

import jax
import numpy as np

from ckpt_orbax._paths import as_path, as_text, exists
from ckpt_orbax.multihost import sync_global_processes


def erase_and_create_empty(directory: Any) -> Any:
    """An empty directory at a path, whatever was there; its path."""
    path = as_path(as_text(directory))
    if exists(path):
        shutil.rmtree(path)
    path.mkdir()
    return path


def empty_directory(directory: Any) -> bool:
    """Deletes what is in a directory; whether there is one."""
    path = as_path(as_text(directory))
    if not exists(path):
        return False
    for child in path.iterdir():
        shutil.rmtree(child) if child.is_dir() else child.unlink()
    return True


def print_directory(directory: Any, level: int = 0) -> None:
    """Writes what is in a directory to Python's log."""
    for child in sorted(as_path(as_text(directory)).rglob("*")):
        logging.getLogger("ckpt_orbax").info("%s", child)


def create_sharded_array(arr: Any, mesh: jax.sharding.Mesh, mesh_axes: Any) -> jax.Array:
    """An array or number over a mesh."""
    whole = np.asarray(arr)
    return jax.make_array_from_callback(
        whole.shape, jax.sharding.NamedSharding(mesh, mesh_axes), lambda index: whole[index]
    )


def replicate_sharded_array(arr: jax.Array) -> jax.Array:
    """An array, whole on all devices."""
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()), ("x",))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return jax.jit(lambda value: value, out_shardings=everywhere)(arr)


def apply_function(tree: Any, function: Any) -> Any:
    """A tree with a compiled function applied to each leaf."""
    return jax.tree.map(lambda leaf: jax.jit(function)(leaf), tree)


def is_leaf(x: Any) -> bool:
    """Whether something is a numpy array, a mesh or a PartitionSpec."""
    return isinstance(x, (np.ndarray, jax.sharding.Mesh, jax.sharding.PartitionSpec))


def assert_array_equal(testclass: Any, v_expected: Any, v_actual: Any) -> None:
    """Fails a ``unittest.TestCase`` if two leaves differ in type, dtype, shards or values."""
    if hasattr(v_expected, "dtype"):
        testclass.assertEqual(v_expected.dtype, v_actual.dtype)
    testclass.assertIsInstance(v_actual, type(v_expected))
    if not isinstance(v_expected, jax.Array):
        if isinstance(v_expected, (np.ndarray, jax.numpy.number)):
            np.testing.assert_array_equal(v_expected, v_actual)
        else:
            testclass.assertEqual(v_expected, v_actual)
        return
    if jax.dtypes.issubdtype(v_expected.dtype, jax.dtypes.prng_key):
        testclass.assertEqual(jax.random.key_impl(v_expected), jax.random.key_impl(v_actual))
        v_expected, v_actual = jax.random.key_data(v_expected), jax.random.key_data(v_actual)
    ours, theirs = v_expected.addressable_shards, v_actual.addressable_shards
    testclass.assertEqual(len(ours), len(theirs))
    for expected, actual in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(expected.data, actual.data)


def assert_tree_equal(testclass: Any, expected: Any, actual: Any) -> None:
    """Fails a ``unittest.TestCase`` if two trees differ."""
    assert_tree_same_structure(testclass, expected, actual)
    jax.tree.map(lambda one, other: assert_array_equal(testclass, one, other), expected, actual)


def assert_tree_same_structure(testclass: Any, expected: Any, actual: Any) -> None:
    """Fails a ``unittest.TestCase`` if two trees differ in structure."""
    testclass.assertEqual(jax.tree.structure(expected), jax.tree.structure(actual))


__all__ = [
    "apply_function",
    "assert_array_equal",
    "assert_tree_equal",
    "assert_tree_same_structure",
    "create_sharded_array",
    "empty_directory",
    "erase_and_create_empty",
    "is_leaf",
    "print_directory",
    "replicate_sharded_array",
    "sync_global_processes",
]
