"""Arrays and their descriptions."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from ckpt_orbax._leaves import AbstractArray

Shape = tuple[int, ...]
DType = Any
Scalar = int | float | np.number | bytes | bool
AbstractScalar = Scalar
AbstractShardedArray = jax.ShapeDtypeStruct
ArrayLike = AbstractArray | AbstractShardedArray


def to_shape_dtype_struct(x: Any, dtype: Any = None) -> jax.ShapeDtypeStruct:
    """Shape, dtype and sharding of an array, as a target of ``load``."""
    return jax.ShapeDtypeStruct(
        np.shape(x), dtype or np.result_type(x), sharding=getattr(x, "sharding", None)
    )


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
