"""Sums over pieces are those over the whole."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ckpt_core._look.numbers import PairSums, Sums, changed_bits

FLOATS = hnp.arrays(np.float32, st.integers(0, 40), elements=st.floats(-1e6, 1e6, width=32))


def pieces_of(array: Any, cut: int) -> list[Any]:
    return [array[:cut], array[cut:]]


@given(
    FLOATS,
    st.integers(0, 40),
    st.lists(st.sampled_from([np.nan, np.inf, -np.inf, 0.0]), max_size=4),
)
def test_one_leaf(values: Any, cut: int, bad: list[float]) -> None:
    whole = np.concatenate([values, np.array(bad, np.float32)])
    sums = Sums()
    for piece in pieces_of(whole, cut):
        sums.add(piece)
    finite = whole[np.isfinite(whole)].astype(np.float64)
    assert sums.count == whole.size
    assert sums.nan_count == np.isnan(whole).sum()
    assert sums.inf_count == np.isinf(whole).sum()
    assert sums.zero_count == (whole == 0).sum()
    assert sums.finite_count == finite.size
    if finite.size:
        assert (sums.least, sums.most) == (finite.min(), finite.max())
        assert math.isclose(sums.norm, np.linalg.norm(finite), rel_tol=1e-9)
        assert np.isclose(sums.mean, finite.mean(), rtol=1e-9, atol=1e-6)
        assert np.isclose(sums.std, finite.std(), rtol=1e-3, atol=1e-2)


@given(FLOATS, st.integers(0, 40), st.integers(0, 39))
def test_two_leaves(values: Any, cut: int, where: int) -> None:
    other = values.copy()
    if other.size:
        other[where % other.size] += 1000
    sums = PairSums()
    for a, b in zip(pieces_of(values, cut), pieces_of(other, cut), strict=True):
        sums.add(a, b)
    apart = other.astype(np.float64) - values
    assert sums.changed_count == np.count_nonzero(apart)
    if values.size:
        assert sums.largest == np.abs(apart).max()
        assert math.isclose(sums.rms, math.sqrt((apart**2).mean()))
        norms = np.linalg.norm(values.astype(np.float64)), np.linalg.norm(other.astype(np.float64))
        if all(norms):
            product = np.dot(values.astype(np.float64), other.astype(np.float64))
            assert math.isclose(sums.cosine, product / math.prod(norms), rel_tol=1e-6, abs_tol=1e-6)
            assert math.isclose(sums.relative, np.linalg.norm(apart) / norms[0], rel_tol=1e-9)


@pytest.mark.parametrize(
    "dtype",
    [
        "bool",
        "int8",
        "uint64",
        "float16",
        "complex64",
        "complex128",
        "bfloat16",
        "float8_e4m3fn",
        "int4",
    ],
)
def test_every_dtype(dtype: str) -> None:
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    a = np.array([0, 1, 1, 0], np.int8).astype(kind)
    b = np.array([0, 1, 0, 0], np.int8).astype(kind)
    sums, alone = PairSums(), Sums()
    sums.add(a, b)
    alone.add(a)
    assert (sums.changed_count, sums.largest, changed_bits(a, b)) == (1, 1.0, 1)
    assert (alone.least, alone.most, alone.zero_count) == (0.0, 1.0, 2)


def test_bits_count_not_values() -> None:
    """-0.0 is another number than 0.0, and NaN is the same as itself."""
    a = np.array([0.0, np.nan, 1.0], np.float32)
    sums = PairSums()
    sums.add(a, np.array([-0.0, np.nan, 1.0], np.float32))
    assert (sums.changed_count, sums.largest, sums.nan_a, sums.nan_b) == (1, 0.0, 1, 1)
    other = PairSums()
    other.add(a, a.astype(np.float64))
    assert other.changed_count == 0
    nowhere = PairSums()
    nowhere.add(np.zeros(2), np.ones(2))
    assert nowhere.relative == math.inf
    assert math.isnan(nowhere.cosine)
