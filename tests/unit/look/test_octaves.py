"""Histograms by powers of two."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import ml_dtypes
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ckpt_core._look.numbers import Sums
from ckpt_core._look.octaves import Octaves
from ckpt_core.report._facts import _bars

FLOATS = st.floats(allow_nan=True, allow_infinity=True, allow_subnormal=True)


@given(st.lists(FLOATS, max_size=60), st.integers(0, 60))
def test_it_counts_what_counting_says(values: list[float], cut: int) -> None:
    octaves = Octaves()
    for piece in (values[:cut], values[cut:]):
        octaves.add(np.array(piece, np.float64))
    wanted: Counter[tuple[int, bool]] = Counter()
    for value in values:
        if value and math.isfinite(value):
            wanted[math.frexp(value)[1], value < 0] += 1
    found = octaves.bars()
    assert (
        Counter({(e, s): n for e, a, b in found for s, n in ((True, a), (False, b)) if n}) == wanted
    )
    assert (
        [bar[0] for bar in found] == list(range(found[0][0], found[-1][0] + 1)) if found else True
    )


def test_every_dtype_and_the_extremes() -> None:
    def bars(values: Any) -> Any:
        sums = Sums()
        sums.add(np.asarray(values))
        return sums.octaves.bars()

    assert bars(np.array([1, -1, 0, 3], np.int8)) == ((1, 1, 1), (2, 0, 1))
    assert bars(np.array([0.5], ml_dtypes.bfloat16)) == ((0, 0, 1),)
    assert bars(np.array([3 + 4j])) == ((3, 0, 1),)
    assert bars(np.array([5e-324, -np.finfo(np.float64).max]))[0] == (-1073, 0, 1)
    assert bars(np.array([-np.finfo(np.float64).max])) == ((1024, 1, 0),)
    assert bars(np.array([True, False])) == ((1, 0, 1),)
    assert bars(np.zeros(3)) == bars(np.zeros(0)) == bars(np.array([np.nan, np.inf])) == ()


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=200))
def test_bars_of_a_page_are_few_and_lose_none(counts: list[tuple[int, int]]) -> None:
    octaves = [(n - 5, a, b) for n, (a, b) in enumerate(counts)]
    first, width, *shown = _bars(octaves)
    assert first == -6 and len(shown) <= 48 and width * len(shown) // 2 >= len(octaves)
    assert sum(shown[::2]) == sum(a for a, _ in counts)
    assert sum(shown[1::2]) == sum(b for _, b in counts)
