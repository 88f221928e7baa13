"""Turns stored arrays in host memory into the values that the caller asked for."""

from __future__ import annotations

from typing import Any

import numpy as np

from ckpt_core._devices import placing
from ckpt_core._errors import CheckpointError, Mismatch, StructureMismatch
from ckpt_core._layout.regions import Region
from ckpt_core._lazy import jax
from ckpt_core._load.targets import Target, refuse_narrowing
from ckpt_core._tree import Path, format_path
from ckpt_core._tree.casts import converted
from ckpt_core._tree.leaves import LeafSpec, as_logical, dtype_from_name, from_host_array

Array = np.ndarray[Any, Any]
_PYTHON_FLOATS = ("float", "complex")


def value_of(
    saved: LeafSpec, target: Target, parts: dict[Region, Array], path: Path, *, cast: bool
) -> Any:
    """The value of one leaf.

    Args:
        saved: what was saved.
        target: what it shall become.
        parts: the stored data of each region of ``target.regions``, in host memory.
        path: path of the leaf, for messages.
        cast: whether the caller asked for casts; if not, a Python float becomes no other number.

    Raises:
        StructureMismatch: values do not fit the wanted dtype.
    """
    spec = target.spec
    if spec.kind == "key":
        if target.sharding is None and saved.kind != "key":
            raise CheckpointError(f"{format_path(path)}: not a PRNG key")
        keyed = {region[:-1]: part for region, part in parts.items()}
        return placing.place_key(saved.shape, spec.dtype, target.sharding, keyed)
    if spec.kind == "jax" and parts and spec.dtype == saved.dtype == saved.stored_dtype:
        logical = parts  # stored, saved and wanted dtype are one: no conversion
    else:
        logical = _logical(saved, spec, parts, path, cast)
    if spec.kind == "jax":
        dtype = None if logical else dtype_from_name(spec.dtype or saved.dtype)
        if saved.detail == "weak" and spec.dtype == saved.dtype and logical:
            (part,) = logical.values()
            weak = placing.place_weak(part, target.sharding)
            if weak is not None:
                return weak
        return placing.place(saved.shape, target.sharding, logical, dtype)
    (array,) = logical.values()
    if saved.kind == "key":
        return array
    if spec.kind == "numpy" and saved.kind == "numpy" and spec.detail == "":
        spec = LeafSpec("numpy", spec.dtype, spec.shape, saved.detail)
    return _host_value(array, spec)


def _logical(
    saved: LeafSpec, spec: LeafSpec, parts: dict[Region, Array], path: Path, cast: bool
) -> dict[Region, Array]:
    """The stored parts, converted to the saved dtype, or to that of the target if it has one."""
    made: dict[Region, Array] = {}
    lost: list[Array] = []
    for region, part in parts.items():
        made[region], beyond = _converted(as_logical(part, saved), saved, spec, cast)
        lost += [beyond] if beyond.size else []
    if lost:
        raise _does_not_fit(saved, spec, lost, path, cast)
    return made


def _does_not_fit(
    saved: LeafSpec, spec: LeafSpec, lost: list[Array], path: Path, cast: bool
) -> StructureMismatch:
    count, first = sum(beyond.size for beyond in lost), lost[0].flat[0]
    told = f"{saved}, of which {count:,} do not fit, such as {first}" if saved.shape else str(first)
    advice = "A saved number does not fit the wanted dtype."
    if saved.kind in _PYTHON_FLOATS and not cast:
        advice += " cast=True rounds it, unless it is too large."
    return StructureMismatch([Mismatch(format_path(path), "dtype", told, str(spec))], advice=advice)


def _host_value(array: Array, spec: LeafSpec) -> Any:
    if spec.kind == "numpy":
        return array.astype(array.dtype.newbyteorder(">")) if spec.detail == ">" else array
    if spec.kind == "numpy_scalar":
        return array[()]
    return from_host_array(array, spec)


def _converted(array: Array, saved: LeafSpec, spec: LeafSpec, cast: bool) -> tuple[Array, Array]:
    """The array in the wanted dtype, and the values that are lost by that."""
    if not spec.dtype or spec.kind == "bytes" or saved.kind == "key":
        return array, array.reshape(-1)[:0]
    dtype = dtype_from_name(spec.dtype)
    number = saved.kind in _PYTHON_FLOATS
    # what jit makes of a Python float is weakly typed, and rounded: such a target asks for that
    rounds = not number or cast or spec.detail == "weak"
    return converted(array, dtype, rounds=rounds, overflows=not number)


def as_jax(array: Array, where: str) -> Any:
    """A jax array from a host array; raises instead of narrowing 64-bit data to 32 bits."""
    refuse_narrowing(array.dtype.name, where)
    return jax.device_put(array)
