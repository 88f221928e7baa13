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
from ckpt_core._tree.leaves import LeafSpec, as_logical, dtype_from_name, from_host_array

Array = np.ndarray[Any, Any]


def value_of(saved: LeafSpec, target: Target, parts: dict[Region, Array], path: Path) -> Any:
    """The value of one leaf.

    Args:
        saved: what was saved.
        target: what it shall become.
        parts: the stored data of each region of ``target.regions``, in host memory.
        path: path of the leaf, for messages.
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
        logical = _logical(saved, spec, parts, path)
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
    saved: LeafSpec, spec: LeafSpec, parts: dict[Region, Array], path: Path
) -> dict[Region, Array]:
    """The stored parts, converted to the saved dtype, or to that of the target if it has one."""
    return {
        region: _converted(as_logical(part, saved), saved, spec, path)
        for region, part in parts.items()
    }


def _host_value(array: Array, spec: LeafSpec) -> Any:
    if spec.kind == "numpy":
        return array.astype(array.dtype.newbyteorder(">")) if spec.detail == ">" else array
    if spec.kind == "numpy_scalar":
        return array[()]
    return from_host_array(array, spec)


def _converted(array: Array, saved: LeafSpec, spec: LeafSpec, path: Path) -> Array:
    """The array in the wanted dtype.

    Raises:
        StructureMismatch: an integer changes its value in the wanted dtype.
    """
    if not spec.dtype or spec.kind == "bytes" or saved.kind == "key":
        return array
    dtype = dtype_from_name(spec.dtype)
    if array.dtype == dtype:
        return array
    with np.errstate(all="ignore"):
        converted = array.astype(dtype)
    # a cast between floats rounds, as the caller asked; a changed integer would be wrong data
    whole_numbers = "iu"
    if array.dtype.kind in whole_numbers and (
        saved.kind in ("int", "bigint") or dtype.kind in whole_numbers
    ):
        lost = np.asarray(converted != array)
        if lost.any():
            difference = Mismatch(
                format_path(path), "dtype", f"{saved} {array[lost].flat[0]}", str(spec)
            )
            raise StructureMismatch(
                [difference], advice="The saved number does not fit the wanted dtype."
            )
    return converted


def as_jax(array: Array, where: str) -> Any:
    """A jax array from a host array; raises instead of narrowing 64-bit data to 32 bits."""
    refuse_narrowing(array.dtype.name, where)
    return jax.device_put(array)
