"""Leaves of pytrees: what Orbax takes, what a target may hold, and conversions between the two."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ckpt_core import LeafInfo

PLACEHOLDER = ...
"""In a target: leave this leaf out."""

_CONCRETE = (jax.Array, np.ndarray, int, float, np.number, np.bool_, str)
_ZEROS: dict[str, Any] = {"int": 0, "float": 0.0, "bool": False}
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


@dataclass(frozen=True)
class Wanted:
    """What one leaf of a target asks for: ``like`` is ckpt's target, ``finish`` turns what comes into what Orbax returns."""

    like: Any
    finish: Callable[[Any], Any] = lambda value: value


def wanted(path: str, leaf: Any, saved: LeafInfo | None) -> Wanted:
    """What a leaf of a target asks for, given what was saved at its place."""
    if not is_abstract_leaf(leaf):
        raise TypeError(
            f"{path}: Unsupported abstract leaf type for loading: `{type(leaf)}`: give a "
            "jax.ShapeDtypeStruct, an array, a number, a text, or a type of number"
        )
    kind: Any = leaf if isinstance(leaf, type) else type(leaf)
    if issubclass(kind, str):
        number = _ZEROS.get(saved.kind) if saved is not None and isinstance(leaf, type) else None
        return Wanted("") if number is None else Wanted(number, str)
    if isinstance(leaf, type) or issubclass(kind, (int, float, np.generic)):
        return _scalar(path, kind, saved)
    if hasattr(leaf, "sharding"):
        return Wanted(_on_devices(leaf, saved))
    return Wanted(_on_host(leaf, saved))


def _scalar(path: str, kind: type, saved: LeafInfo | None) -> Wanted:
    """A Python number, or one of numpy; also from an array of one element."""
    if saved is None:
        return Wanted(0, kind)  # which the load will name as missing
    if saved.kind in _ZEROS:
        return Wanted(_ZEROS[saved.kind], kind)
    if saved.kind == "bigint":  # of more than 64 bits
        return Wanted(2**64, kind)
    if not saved.dtype or int(np.prod(saved.shape)) != 1:
        raise ValueError(
            f"{path}: saved {saved.dtype or saved.kind}{list(saved.shape)}, wanted a scalar, {kind.__name__}"
        )
    return Wanted(
        _empty(saved.shape, saved.dtype), lambda value: kind(np.asarray(value).reshape(()).item())
    )


def _on_devices(leaf: Any, saved: LeafInfo | None) -> Any:
    """A ``jax.ShapeDtypeStruct`` of the leaf, on a mesh of real devices."""
    shape, dtype, sharding = leaf.shape, leaf.dtype, leaf.sharding
    if saved is not None:  # a description may leave both open
        shape = saved.shape if shape is None else shape
        dtype = saved_dtype(saved) if dtype is None else dtype
    sharding = getattr(sharding, "sharding", sharding)  # a Format has one inside
    named = isinstance(sharding, jax.sharding.NamedSharding)
    if named and isinstance(sharding.mesh, jax.sharding.AbstractMesh):
        sharding = jax.sharding.NamedSharding(jax.sharding.get_mesh(), sharding.spec)
    return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=sharding)


def _on_host(leaf: Any, saved: LeafInfo | None) -> Any:
    """A numpy array of the leaf's shape, which takes no memory; one without elements stands for any shape."""
    shape, dtype = leaf.shape, leaf.dtype
    if saved is not None and not (dtype or saved.dtype):
        # what numpy has no dtype for comes back as it was saved
        return 2**64 if saved.kind == "bigint" else ""
    if saved is not None:
        shape = saved.shape if shape is None or 0 in shape else shape
        dtype = saved.dtype if dtype is None else dtype
    return _empty(tuple(shape), dtype)


def _empty(shape: tuple[int, ...], dtype: Any) -> Any:
    return np.broadcast_to(np.zeros((), dtype), shape)


def described(leaf: LeafInfo, sharding: Any) -> Any:
    """A saved leaf as Orbax's metadata shows it."""
    match leaf.kind:
        case "int" | "float" | "bool":
            return _ZEROS[leaf.kind]
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
