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
_SCALAR_TYPES = (int, float, str, np.generic)


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
    if value is PLACEHOLDER or is_leaf(value):
        return True
    if isinstance(value, type):
        return issubclass(value, _SCALAR_TYPES)
    return hasattr(value, "shape") and hasattr(value, "dtype")


def converted(value: Any, dtype: Any) -> Any:
    """An array in another dtype; other leaves as they are."""
    if dtype is None or not hasattr(value, "dtype") or _is_key(value.dtype):
        return value
    return value if value.dtype == dtype else value.astype(dtype)


def _is_key(dtype: Any) -> bool:
    return jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)


def described(leaf: LeafInfo, sharding: Any) -> Any:
    """A saved leaf as Orbax's metadata shows it."""
    match leaf.kind:
        case "int" | "float" | "bool":
            return ZEROS[leaf.kind]
        case "str":
            return ""
        case "jax" | "key":
            return jax.ShapeDtypeStruct(leaf.shape, saved_dtype(leaf), sharding=sharding)
        case _:
            return AbstractArray(leaf.shape, saved_dtype(leaf))


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
    """Shape, dtype and sharding of an array or random key, as a target of ``load``.

    Args:
        arr: an array, its description, or a number, which is its own target.
        dtype: instead of the array's.
        scalar_dtype: a type of number, for numbers.
        support_format: accepted; a target's layout in memory is of no effect.
    """
    if isinstance(arr, (int, float, np.number)):
        return arr if scalar_dtype is None else scalar_dtype(arr)
    given = getattr(arr, "sharding", None)
    sharding = None if given is None else as_sharding(given)
    return jax.ShapeDtypeStruct(arr.shape, arr.dtype if dtype is None else dtype, sharding=sharding)
