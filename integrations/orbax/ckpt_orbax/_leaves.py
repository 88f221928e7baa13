"""Leaves of pytrees: what Orbax takes, what a target may hold, and conversions between the two."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ckpt_core import LeafInfo

PLACEHOLDER = ...
"""In a target: leave this leaf out."""

_CONCRETE = (jax.Array, np.ndarray, int, float, np.number, np.bool_, str)
ZEROS: dict[str, Any] = {"int": 0, "float": 0.0, "bool": False}
"""For each kind of Python number, one that stands for any."""


@dataclass(frozen=True)
class AbstractArray:
    """Shape and dtype of a numpy array."""

    shape: tuple[int, ...] | None
    dtype: Any


def is_leaf(value: Any) -> bool:
    """Whether Orbax saves this value as a leaf."""
    return isinstance(value, _CONCRETE)


def is_abstract_leaf(value: Any) -> bool:
    """Whether this value can stand in a target."""
    if isinstance(value, type):
        return issubclass(value, (int, float, str, np.generic))
    array = hasattr(value, "shape") and hasattr(value, "dtype")
    return array or value is PLACEHOLDER or is_leaf(value)


def converted(value: Any, dtype: Any) -> Any:
    """An array in another dtype; other leaves as they are."""
    if dtype is None or not hasattr(value, "dtype") or is_key(value):
        return value
    return value if value.dtype == dtype else value.astype(dtype)


def is_key(value: Any) -> bool:
    """Whether an array or its description is of random keys."""
    return jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)


def saved_dtype(leaf: LeafInfo) -> Any:
    """The dtype of a saved array or key; None without one."""
    if leaf.kind == "key":
        return jax.eval_shape(lambda: jax.random.key(0, impl=leaf.dtype)).dtype
    return np.dtype(leaf.dtype) if leaf.dtype else None


def as_sharding(given: Any) -> Any:
    """A sharding of jax, also out of the sharding of a metadata or a ``Format``."""
    convert = getattr(given, "to_jax_sharding", None)
    return given if convert is None else convert()


def to_shape_dtype_struct(
    arr: Any, dtype: Any = None, scalar_dtype: Any = None, support_format: bool = False
) -> Any:
    """Shape, dtype and sharding of an array or random key, as a target of ``load``; a number is its own target.

    Args:
        dtype, scalar_dtype: instead of the array's; a type of number, for numbers.
        support_format: accepted; a target's layout in memory is of no effect.
    """
    if isinstance(arr, (int, float, np.number)):
        return arr if scalar_dtype is None else scalar_dtype(arr)
    sharding = as_sharding(getattr(arr, "sharding", None))
    return jax.ShapeDtypeStruct(arr.shape, arr.dtype if dtype is None else dtype, sharding=sharding)
