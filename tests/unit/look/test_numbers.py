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

from ckpt_core._look import numbers
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
        assert np.isclose(sums.std, finite.std(), rtol=1e-9, atol=1e-9 * np.abs(finite).max())


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


@pytest.mark.parametrize("shift", [0.0, 1e4, 1e8, -1e12])
@pytest.mark.parametrize("scale", [1.0, 1e-290, 1e180, 1e290])
def test_a_mean_far_from_zero_and_numbers_whose_squares_are_beyond_floats(
    shift: float, scale: float
) -> None:
    plain = np.random.default_rng(0).normal(size=1000) + shift
    values = plain * scale
    sums, apart = Sums(), PairSums()
    for piece in np.array_split(values, 3):
        sums.add(piece)
        apart.add(piece, piece * 2)
    assert math.isclose(sums.mean.real, plain.mean() * scale, rel_tol=1e-9, abs_tol=1e-9 * scale)
    assert math.isclose(sums.std, plain.std() * scale, rel_tol=1e-3 if shift == -1e12 else 1e-6)
    assert math.isclose(sums.norm, np.linalg.norm(plain) * scale, rel_tol=1e-9)
    assert math.isclose(apart.rms, np.sqrt((plain**2).mean()) * scale, rel_tol=1e-9)
    assert math.isclose(apart.relative, 1, rel_tol=1e-9)
    assert math.isclose(apart.cosine, 1, rel_tol=1e-9)


def test_the_greatest_numbers_of_all() -> None:
    huge = np.array([1e308, 1e308, -1e308])
    sums, apart = Sums(), PairSums()
    sums.add(huge)
    assert math.isclose(sums.mean.real, 1e308 / 3)
    apart.add(huge, -huge)
    assert (apart.largest, apart.rms, apart.relative) == (math.inf, math.inf, math.inf)
    assert math.isclose(apart.cosine, -1)
    large = Sums()
    large.add(np.full(4, 1.7e308))
    assert large.norm == math.inf
    complexes = Sums()
    complexes.add(np.array([1e200 + 1e200j, complex(math.nan, math.inf), complex(1, math.inf)]))
    assert (complexes.count, complexes.finite_count) == (3, 1)
    assert (complexes.nan_count, complexes.inf_count) == (1, 1)
    assert math.isclose(complexes.norm, math.sqrt(2) * 1e200)


def test_whole_numbers_of_64_bits_that_are_one_float(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numbers, "_BLOCK", 2)
    for dtype, extremes in ((np.int64, (-(2**63), 2**63 - 1)), (np.uint64, (0, 2**64 - 1))):
        a = np.array([extremes[1], extremes[0], extremes[1], 5], dtype)
        b = np.array([extremes[1] - 1, extremes[0] + 3, extremes[1], 4], dtype)
        sums = PairSums()
        sums.add(a, b)
        assert (sums.changed_count, sums.largest) == (3, 3.0)
        assert math.isclose(sums.rms, math.sqrt((1 + 9 + 1) / 4))
