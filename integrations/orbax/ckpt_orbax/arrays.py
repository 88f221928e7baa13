"""Shapes and shardings of arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from ckpt_orbax.v1.arrays import to_shape_dtype_struct

Index = tuple[slice, ...]
Shape = tuple[int, ...]


def construct_maximal_shardings(abstract_state: Any, devices: Sequence[Any] | None = None) -> Any:
    """For each leaf the sharding that divides it over as many devices as its dimensions allow.

    Args:
        abstract_state: tree of ``jax.ShapeDtypeStruct``.
        devices: by default all.
    """
    chosen = list(devices or jax.devices())
    return jax.tree.map(lambda leaf: _maximal(tuple(leaf.shape), chosen), abstract_state)


def _maximal(shape: Shape, devices: Sequence[Any]) -> jax.sharding.NamedSharding:
    left, sizes = len(devices), list[int]()
    axes: list[str | None] = [None] * len(shape)
    if shape and max(shape) >= jax.device_count():
        for dimension in np.argsort(shape)[::-1].tolist():
            shared = math.gcd(shape[dimension], left)
            if shape[dimension] >= left and shared > 1:
                axes[dimension] = _axis(len(sizes))
                sizes.append(shared)
                left //= shared
    else:
        axes = []
    if left > 1 or not sizes:
        sizes.append(left)
    names = tuple(map(_axis, range(len(sizes))))
    mesh = jax.sharding.Mesh(np.asarray(devices).reshape(sizes), names)
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))


def _axis(number: int) -> str:
    return chr(ord("a") + number)


__all__ = ["Index", "Shape", "construct_maximal_shardings", "to_shape_dtype_struct"]
