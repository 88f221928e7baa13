"""Arrays in settings, as text: dtype, shape, and a digest of their bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

WHOLE_BYTES = 64 << 20
"""Larger arrays are digested by blocks spread over them, because they may be mapped files."""

BLOCKS = 64
BLOCK_BYTES = 1 << 20


def as_array(value: Any) -> np.ndarray | None:
    """The value as a host array; None if it is not an array, or not readable on the host."""
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, np.void):
        return np.asarray(value)
    if isinstance(value, jax.Array):
        if value.is_deleted() or not value.is_fully_addressable:
            return None
        if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
            value = jax.random.key_data(value)
        return np.asarray(jax.device_get(value))
    if type(value).__module__.partition(".")[0] in ("torch", "tensorflow"):
        return _tensor(value)
    return None


def array_text(array: np.ndarray, text_of: Callable[[Any], str]) -> str:
    """An array as text; ``text_of`` describes its elements if they are objects."""
    if array.dtype.hasobject or array.dtype.kind == "T":
        return f"ndarray[{array.dtype}{array.shape}, {text_of(array.tolist())}]"
    if array.dtype.names is not None:  # the padding between fields must not count
        return f"ndarray[{text_of({name: array[name] for name in array.dtype.names})}]"
    return f"ndarray[{array.dtype}{array.shape}, digest {_digest(array)}]"


def _tensor(value: Any) -> np.ndarray | None:
    try:
        found = np.asarray(value)
    except (RuntimeError, TypeError, ValueError):  # on a device, or no numpy dtype
        return None
    return found if found.dtype.kind != "O" else None


def _digest(array: np.ndarray) -> str:
    if array.nbytes <= WHOLE_BYTES:
        return hashlib.sha256(array.tobytes()).hexdigest()[:16]
    items = max(1, BLOCK_BYTES // array.itemsize)
    found = hashlib.sha256()
    for start in np.linspace(0, array.size - items, BLOCKS).astype(np.int64):
        found.update(array.flat[start : start + items].tobytes())
    return found.hexdigest()[:16]
