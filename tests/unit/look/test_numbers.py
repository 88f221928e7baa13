"""Sums over pieces are those over the whole."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ckpt_core._look.numbers import PairSums, Sums

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
