"""What an array is, to the bit."""

from typing import Any

import jax
import numpy as np


def is_key(value: Any) -> bool:
    """Whether it is an array of typed random keys."""
    return isinstance(value, jax.Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)


def bits(value: Any) -> Any:
    """Equal for two arrays exactly when dtype, byte order, shape and every bit are."""
    if is_key(value):
        return str(jax.random.key_impl(value)), value.shape, bits(jax.random.key_data(value))
    array = np.asarray(value)
    return array.dtype.str, str(array.dtype), array.shape, array.tobytes()
