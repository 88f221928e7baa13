"""Converts arrays to other dtypes, and tells which values that would make others of. Pure."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, Any]


def casts_at_once(one: np.dtype[Any], other: np.dtype[Any]) -> bool:
    """Whether numpy casts between two dtypes; between some floats of 8 bits only by way of another, which is exact."""
    return np.can_cast(one, other, "unsafe")


def converted(
    array: Array, dtype: np.dtype[Any], *, rounds: bool = True, overflows: bool = True
) -> tuple[Array, Array]:
    """The array in another dtype, and those of its values that are lost. Between floats numbers round, and beyond the largest
    they become infinite, as in ``astype``; a fraction is cut off on the way to an integer. Lost are integers that the wanted
    dtype does not hold, and NaN and what is too large where integers are wanted. With ``rounds=False`` a float that changes its
    value is lost, too; with ``overflows=False`` a finite one that becomes infinite. A complex array needs a complex dtype.
    """
    if array.dtype == dtype:
        return array, array.reshape(-1)[:0]
    from_, to = family(array.dtype.name), family(dtype.name)
    exact = array
    if from_ == "i" and array.dtype.kind not in "iu":  # of 2 or 4 bits
        exact = array.astype(np.int8)
    elif not casts_at_once(array.dtype, dtype):
        exact = array.astype(np.float32)
    with np.errstate(all="ignore"):
        if from_ == "f" and to == "i" and dtype.kind not in "iu":
            # in steps that every dtype of ml_dtypes has
            made = exact.astype(np.float32).astype(np.int32).astype(dtype)
        else:
            made = exact.astype(dtype)
        lost: Any = False
        if from_ == "i" and to in "ib":
            least, most = (0, 1) if to == "b" else _bounds(dtype)
            lost = (exact < least) | (exact > most) if _reaches(exact, least, most) else False
        elif from_ == "i":
            lost = _rounded(exact, made, dtype)
        elif from_ == "f" and to == "i":
            least, most = _bounds(dtype)
            whole = np.trunc(exact.astype(np.float64))
            # both limits are exact in a float64
            lost = ~((whole >= float(least)) & (whole < float(most + 1)))
        elif to in "fc":
            if not rounds:
                lost = (made.astype(array.dtype) != array) & ~np.isnan(array)
            elif not overflows:
                lost = np.isfinite(array) & ~np.isfinite(made)
    return made, array[lost] if np.any(lost) else array.reshape(-1)[:0]


def family(name: str) -> str:
    """``b``, ``i``, ``f`` or ``c``, by the name of a dtype: numpy does not know all of them."""
    if name.startswith(("int", "uint")):
        return "i"
    return "f" if name.startswith("bfloat") else name[:1]


def _bounds(dtype: np.dtype[Any]) -> tuple[int, int]:
    limits = ml_dtypes.iinfo(dtype)
    return int(limits.min), int(limits.max)


def _reaches(array: Array, least: int, most: int) -> bool:
    """Whether an integer is beyond these limits; finds out without a mask as large as the array."""
    return bool(array.size) and (int(array.min()) < least or int(array.max()) > most)


def _rounded(integers: Array, made: Array, dtype: np.dtype[Any]) -> Any:
    """Which integers have another value as floats of a dtype."""
    part = made.real if family(dtype.name) == "c" else made
    digits = int(ml_dtypes.finfo(part.dtype).nmant) + 1
    if not _reaches(integers, -(2**digits), 2**digits) and part.dtype.itemsize > 1:
        return False
    # A float of p digits is an odd number of at most p digits, times a power of 2. Comparing as floats alone
    # would compare two rounded numbers.
    size = np.where(integers < 0, -integers.astype(np.uint64), integers.astype(np.uint64))
    odd = size // np.maximum(size & (~size + np.uint64(1)), np.uint64(1))
    return (odd >= 2**digits) | (part.astype(np.float64) != integers.astype(np.float64))
