"""Hypothesis strategies for the contents of a checkpoint: leaves and pytrees.

::

    from hypothesis import given
    from ckpt_core.testing import assert_same, strategies

    @given(strategies.pytrees())
    def test_my_format(tree):
        assert_same(read(write(tree)), tree)

Arrays have random bits, which include every kind of NaN, infinities and negative zeros.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

Shape = tuple[int, ...]

JAX_DTYPES = (
    *("bool", "int4", "uint4", "int8", "int16", "int32", "uint8", "uint16", "uint32"),
    *("float16", "bfloat16", "float32", "complex64"),
    *("float4_e2m1fn", "float8_e4m3fn", "float8_e5m2"),
)
"""Dtypes of jax arrays without ``jax_enable_x64``."""

NUMPY_DTYPES = (*JAX_DTYPES, "int64", "uint64", "float64", "complex128")
"""Dtypes of numpy arrays."""

KEY_IMPLEMENTATIONS = ("threefry2x32", "rbg", "unsafe_rbg")
_SEEDS = st.integers(0, 2**32 - 1)


class Pair(NamedTuple):
    """The NamedTuple of ``pytrees``."""

    first: Any
    second: Any


@jax.tree_util.register_dataclass
@dataclass
class Record:
    """The registered dataclass of ``pytrees``."""

    left: Any
    right: Any


def dtypes(names: Sequence[str] = NUMPY_DTYPES) -> st.SearchStrategy[np.dtype[Any]]:
    """Dtypes of arrays, including those of ml_dtypes."""
    return st.sampled_from(names).map(lambda name: np.dtype(getattr(ml_dtypes, name, name)))


def shapes(max_dims: int = 3, max_side: int = 4) -> st.SearchStrategy[Shape]:
    """Shapes of arrays, including scalars and empty arrays."""
    return st.lists(st.integers(0, max_side), max_size=max_dims).map(tuple)


@st.composite
def numpy_arrays(draw: st.DrawFn, dtype: Any = None, shape: Any = None) -> np.ndarray[Any, Any]:
    """Numpy arrays of random bits, of a dtype and a shape or of strategies for them; by default ``dtypes()`` and ``shapes()``."""
    chosen = np.dtype(_drawn(draw, dtypes() if dtype is None else dtype))
    sides = tuple(_drawn(draw, shapes() if shape is None else shape))
    seed = draw(_SEEDS)  # hypothesis draws one number faster than many bytes
    size_bytes = math.prod(sides) * chosen.itemsize
    bits = np.frombuffer(np.random.default_rng(seed).bytes(size_bytes), np.uint8)
    if chosen.kind == "b" or "4" in chosen.name[-2:] or chosen.name.startswith("float4"):
        # These dtypes use fewer than 8 bits of a byte.
        bits = bits & (1 if chosen.kind == "b" else 7)
    return bits.copy().view(chosen).reshape(sides)


@st.composite
def jax_arrays(draw: st.DrawFn, dtype: Any = None, shape: Any = None) -> jax.Array:
    """Jax arrays of random bits, uncommitted; arguments as for ``numpy_arrays``."""
    return jnp.asarray(draw(numpy_arrays(dtypes(JAX_DTYPES) if dtype is None else dtype, shape)))


@st.composite
def keys(draw: st.DrawFn) -> jax.Array:
    """Typed PRNG keys of every implementation, single or in arrays."""
    seed, implementation = draw(_SEEDS), draw(st.sampled_from(KEY_IMPLEMENTATIONS))
    key, sides = jax.random.key(seed, impl=implementation), draw(shapes(2, 2))
    return jax.random.split(key, sides) if sides else key


def leaves() -> st.SearchStrategy[Any]:
    """Every kind of leaf: arrays, keys, numpy and Python numbers, text, bytes, generators."""
    return st.one_of(
        jax_arrays(),
        numpy_arrays(),
        keys(),
        numpy_arrays(shape=()).map(lambda array: array[()]),
        st.integers(),
        st.floats(),
        st.booleans(),
        st.complex_numbers(),
        st.text(max_size=8),
        st.binary(max_size=8),
        _SEEDS.map(np.random.default_rng),
    )


def dict_keys() -> st.SearchStrategy[list[Any]]:
    """Keys for one dict: all text or all ints, because jax cannot sort a mix.

    Without dots and slashes, which Orbax's format cannot always distinguish.
    """
    letters = st.characters(
        codec="utf-8", exclude_characters="./~", exclude_categories=["Cs", "Cc"]
    )
    text = st.text(letters, min_size=1, max_size=6).filter(lambda key: not key.isdigit())
    return st.one_of(
        st.lists(text, unique=True, max_size=4),
        st.lists(st.integers(0, 99), unique=True, max_size=4),
    )


def pytrees(
    leaves: st.SearchStrategy[Any] | None = None, max_leaves: int = 12
) -> st.SearchStrategy[Any]:
    """Trees of dicts, ordered dicts, lists, tuples, NamedTuples, dataclasses and None; ``leaves()`` are their leaves by default."""
    ends = st.one_of(st.none(), globals()["leaves"]() if leaves is None else leaves)

    def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        mappings = dict_keys().flatmap(
            lambda names: st.fixed_dictionaries(dict.fromkeys(names, inner))
        )
        return st.one_of(
            mappings,
            mappings.map(OrderedDict),
            st.lists(inner, max_size=4),
            st.lists(inner, max_size=4).map(tuple),
            st.builds(Pair, inner, inner),
            st.builds(Record, inner, inner),
        )

    return st.recursive(ends, containers, max_leaves=max_leaves)


def _drawn(draw: st.DrawFn, value: Any) -> Any:
    return draw(value) if isinstance(value, st.SearchStrategy) else value
