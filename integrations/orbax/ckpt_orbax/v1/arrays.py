"""Arrays and their descriptions."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from ckpt_orbax._leaves import AbstractArray, as_sharding

Shape = tuple[int, ...]
DType = Any
Scalar = int | float | np.number | bytes | bool
AbstractScalar = Scalar
AbstractShardedArray = jax.ShapeDtypeStruct
ArrayLike = AbstractArray | AbstractShardedArray


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


__all__ = [
    "AbstractArray",
    "AbstractScalar",
    "AbstractShardedArray",
    "ArrayLike",
    "DType",
    "Scalar",
    "Shape",
    "to_shape_dtype_struct",
]
