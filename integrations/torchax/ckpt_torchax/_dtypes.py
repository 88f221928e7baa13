"""Dtypes by name, of numpy and of ml_dtypes; without torch."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np


def dtype_named(name: str) -> np.dtype[Any]:
    """The numpy dtype of a name such as ``bfloat16``."""
    return np.dtype(getattr(ml_dtypes, name, name))


WIDENED: dict[Any, Any] = {
    **{dtype_named(name): np.int8 for name in ("int2", "int4")},
    **{dtype_named(name): np.uint8 for name in ("uint2", "uint4")},
}
"""Integers for which neither torch nor safetensors has a dtype, and what holds their values."""
