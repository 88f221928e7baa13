"""Round trips of every kind of leaf: dtypes, keys, numpy, Python's own; the rest is refused."""

import copy
import decimal
import functools
import math
import random
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ckpt_core as ckpt
from tests.support.same_bits import bits
from tests.support.trees import (
    Moments,
    X,
    assert_same,
    every_bit_pattern,
    round_trip,
    with_shardings,
    without_shardings,
)

# ------------------------------------------------------------------------------------------- dtypes


ML_DTYPES = [
    "int2", "uint2", "int4", "uint4", "bfloat16", "float4_e2m1fn", "float6_e2m3fn",
    "float6_e3m2fn", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn",
    "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
]  # fmt: skip


NOT_OF_XLA = ["float6_e2m3fn", "float6_e3m2fn"]  # jax names them, its compiler lacks them


# Numpy has these from ml_dtypes, jax cannot hold them: they may be refused, by name.
NOT_OF_JAX = ["int1", "uint1", "complex32", "bcomplex32"]


NUMPY_DTYPES = [
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "float32", "float64", "complex64", "complex128",
]  # fmt: skip


EVERY_DTYPE = [*ML_DTYPES, *NUMPY_DTYPES]


def test_the_list_of_dtypes_is_whole():
    """A dtype that a new jax or ml_dtypes brings must not be forgotten here."""
    known = {
        name
        for name, value in vars(ml_dtypes).items()
        if isinstance(value, type) and issubclass(value, np.generic)
    }
    assert known - set(NOT_OF_JAX) == set(ML_DTYPES)
    assert {str(np.dtype(code)) for code in "?bhilBHILefdFD"} - set(NUMPY_DTYPES) == set()


def to_jax(array):
    """The array in jax with the same bits; None where jax lacks the dtype."""
    return None if str(array.dtype) in NOT_OF_XLA else jnp.asarray(array)


@pytest.mark.parametrize("shape", [(16, 16), (), (0, 3), (1, 257)], ids=str)
def test_every_dtype(tmp_path, shape):
    with jax.enable_x64(True):
        arrays = {name: np.array(every_bit_pattern(name, shape)) for name in EVERY_DTYPE}
        in_jax = {name: to_jax(array) for name, array in arrays.items()}
        in_jax = {name: array for name, array in in_jax.items() if array is not None}
        tree = {"numpy": arrays, "jax": in_jax}
        assert_same(round_trip(tmp_path, tree), tree)
        assert_same(ckpt.load(tmp_path / "c", tree), tree)
        assert_same(ckpt.load(tmp_path / "c", without_shardings(tree)), tree)


def test_every_dtype_large_and_sharded(tmp_path, mesh):
    """Above the size where another way of writing begins."""
    with jax.enable_x64(True):
        arrays = {name: np.array(every_bit_pattern(name, (1024, 512))) for name in EVERY_DTYPE}
        sharding = NamedSharding(mesh, P("data", "model"))
        of_jax = {name: array for name, array in arrays.items() if name not in NOT_OF_XLA}
        tree = {"numpy": arrays, "jax": jax.device_put(of_jax, sharding)}
        assert_same(round_trip(tmp_path, tree), tree, sharding=True)


@pytest.mark.parametrize("name", NOT_OF_JAX)
def test_dtypes_that_jax_lacks(tmp_path, name):
    if not hasattr(ml_dtypes, name):
        pytest.skip("ml_dtypes has no such dtype")
    tree = {"a": np.array([0, 1, 0], getattr(ml_dtypes, name))}
    try:
        got = round_trip(tmp_path, tree)
    except ckpt.UnsupportedLeaf as error:
        assert name in str(error)  # noqa: PT017 - either outcome is right
    else:
        assert_same(got, tree)


def test_wide_dtypes_are_not_narrowed(tmp_path):
    """Saved with x64 and loaded without: the same values, or an error; never float32 in silence."""
    with jax.enable_x64(True):
        tree = {"d": jnp.array([1e300, 1 / 3]), "i": jnp.array([2**62 + 1]), "n": np.float64(1e300)}
        ckpt.save(tmp_path / "c", tree)
    try:
        got = ckpt.load(tmp_path / "c")
    except ckpt.CheckpointError as error:
        assert "x64" in str(error)  # noqa: PT017 - either outcome is right
    else:
        assert_same(got, tree)
    got = ckpt.load(tmp_path / "c", as_numpy=True)
    assert bits(got["d"]) == bits(tree["d"])


# ---------------------------------------------------------------------------------------- PRNG keys


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_keys(tmp_path, mesh, impl):
    key = jax.random.key(7, impl=impl)
    tree = {
        "one": key,
        "batch": jax.random.split(key, 6).reshape(2, 3),
        "none": jax.random.split(key, 4)[:0],
        "sharded": jax.device_put(jax.random.split(key, 8), NamedSharding(mesh, P("data"))),
        "raw": jax.random.key_data(key),
    }
    got = round_trip(tmp_path, tree)
    assert_same(got, tree, sharding=True)
    assert bits(jax.random.normal(got["one"], 3)) == bits(jax.random.normal(key, 3))
    assert_same(ckpt.load(tmp_path / "c", with_shardings(tree)), tree, sharding=True)
    moved = jax.device_put(tree["sharded"], NamedSharding(mesh, P("model")))
    got = ckpt.load(tmp_path / "c", with_shardings(tree | {"sharded": moved}))
    assert_same(got, tree | {"sharded": moved}, sharding=True)


def test_keys_of_another_implementation_are_refused(tmp_path):
    ckpt.save(tmp_path / "c", {"k": jax.random.key(0, impl="rbg")})
    with pytest.raises(ckpt.StructureMismatch, match="k"):
        ckpt.load(tmp_path / "c", {"k": jax.random.key(0)})
    with pytest.raises(ckpt.StructureMismatch, match="k"):
        ckpt.load(tmp_path / "c", {"k": jax.random.key_data(jax.random.key(0, impl="rbg"))})


# --------------------------------------------------------------------------------- numpy and Python


def test_numpy(tmp_path):
    base = np.arange(24.0).reshape(4, 6)
    read_only = base.copy()
    read_only.flags.writeable = False
    tree = {
        "scalar": np.float32(1.5),
        "scalar_bool": np.True_,
        "scalar_bfloat16": ml_dtypes.bfloat16(3),
        "scalar_complex": np.complex64(1 - 2j),
        "scalar_wide": np.uint64(2**64 - 1),
        "zero_dim": np.array(1.5),
        "strided": base[::2, ::3],
        "reversed": base[::-1],
        "fortran": np.asfortranarray(base),
        "transposed": base.T,
        "broadcast": np.broadcast_to(np.float32(2), (3, 5)),
        "read_only": read_only,
        "many_dims": np.arange(2**12).reshape((2,) * 12),
    }
    assert_same(round_trip(tmp_path, tree), tree)
    assert_same(ckpt.load(tmp_path / "c", tree), tree)


def test_big_endian_values(tmp_path):
    tree = {"a": np.arange(6, dtype=">i4").reshape(2, 3), "b": np.array([1.5], ">f8")}
    got = round_trip(tmp_path, tree)
    for name, array in tree.items():
        np.testing.assert_array_equal(got[name], array)
        assert got[name].dtype == array.dtype


def test_memory_map_is_an_array(tmp_path):
    mapped = np.memmap(tmp_path / "file", np.float32, "w+", shape=(4, 4))
    mapped[:] = 3
    np.testing.assert_array_equal(round_trip(tmp_path, {"m": mapped})["m"], np.full((4, 4), 3))


def test_what_was_loaded_is_the_callers(tmp_path):
    """Loaded numpy arrays can be written, and writing them changes no file."""
    ckpt.save(tmp_path / "c", {"a": np.zeros(3), "b": np.zeros(10**6)})
    got = ckpt.load(tmp_path / "c")
    got["a"][0] = 5
    got["b"][0] = 5
    assert ckpt.verify(tmp_path / "c").ok
    assert ckpt.load(tmp_path / "c")["b"][0] == 0


@pytest.mark.parametrize("kind", ["PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"])
def test_numpy_generators(tmp_path, kind):
    generator = np.random.Generator(getattr(np.random, kind)(3))
    generator.standard_normal(5)
    generator.integers(10, dtype=np.int32)  # leaves half of a word behind
    want = copy.deepcopy(generator)
    got = round_trip(tmp_path, {"g": generator})["g"]
    assert_same(got, want)
    assert got.standard_normal(7).tolist() == want.standard_normal(7).tolist()
    got = ckpt.load(tmp_path / "c", {"g": np.random.Generator(getattr(np.random, kind)(0))})["g"]
    assert got.integers(10**6) == copy.deepcopy(generator).integers(10**6)


def test_other_random_states(tmp_path):
    state, python = np.random.RandomState(5), random.Random(6)
    state.normal(), python.gauss(0, 1)  # both keep a second normal number back
    got = round_trip(tmp_path, {"numpy": state, "python": python})
    assert got["numpy"].normal() == state.normal()
    assert got["python"].gauss(0, 1) == python.gauss(0, 1)
    assert got["python"].random() == python.random()


def test_python_numbers(tmp_path):
    tree = {
        "ints": [0, 1, -1, 2**31, 2**53 + 1, 2**63 - 1, -(2**63), 2**63, 2**64, -(2**63) - 1],
        "huge": [10**400, -(10**400), 3**20_000],
        "floats": [0.0, -0.0, 5e-324, 1.7976931348623157e308, math.inf, -math.inf, math.nan],
        "bools": [True, False],
        "complex": [1 - 2j, complex(math.nan, math.inf), complex(-0.0, 0.0)],
    }
    assert_same(round_trip(tmp_path, tree), tree)
    assert_same(ckpt.load(tmp_path / "c", tree), tree)


def test_text_and_bytes(tmp_path):
    tree = {
        "text": [
            "",
            "a",
            "é中\U0001f600",
            "line\nline\r\n",
            "\x00\x1f",
            '"\\/~',
            "\ud800",
            "x" * 10**5,
        ],
        "bytes": [b"", b"\x00", bytes(range(256)), b"y" * 10**6],
    }
    assert_same(round_trip(tmp_path, tree), tree)
    assert_same(ckpt.load(tmp_path / "c", tree), tree)


# -------------------------------------------------------------------------------------- unsupported


def deleted_array():
    array = jnp.ones(3) + 1
    array.delete()
    return array


UNSUPPORTED = {
    "float0": lambda: np.zeros(3, jax.dtypes.float0),
    "object array": lambda: np.array([1, "a", None], object),
    "string array": lambda: np.array(["a", "b"]),
    "datetime array": lambda: np.array(["2020-01-01"], "datetime64[D]"),
    "timedelta": lambda: np.timedelta64(3, "s"),
    "structured array": lambda: np.zeros(2, [("x", "f4"), ("y", "i4")]),
    "void": lambda: np.void(b"abc"),
    "long double": lambda: np.zeros(2, np.longdouble),
    "masked array": lambda: np.ma.masked_array([1.0, 2.0], [True, False]),
    "abstract array": lambda: jax.ShapeDtypeStruct((2,), jnp.float32),
    "deleted array": deleted_array,
    "set": lambda: {1, 2},
    "frozenset": lambda: frozenset({1}),
    "function": lambda: len,
    "lambda": lambda: lambda x: x,
    "partial": lambda: functools.partial(len, [1]).func,
    "class": lambda: Moments,
    "module": lambda: types,
    "object": lambda: object(),
    "iterator": lambda: iter([1, 2]),
    "bytearray": lambda: bytearray(b"x"),
    "range": lambda: range(3),
    "decimal": lambda: decimal.Decimal(1),
    "path": lambda: Path("x"),
    "ellipsis": lambda: ...,
    "str subclass": lambda: type("Name", (str,), {})("x"),
    "int subclass": lambda: type("Count", (int,), {})(3),
    "random subclass": lambda: random.SystemRandom(),
    "bit generator": lambda: np.random.PCG64(3),
    "dict with a bool key": lambda: {True: 1},
    "dict with a tuple of floats as key": lambda: {(1, 2.0): 1},
    "dict with a tuple of bools as key": lambda: {(1, (True,)): 1},
    "dict with None as key": lambda: {None: 1},
    "dict with a float key": lambda: {1.5: 1},
    "dict with a bytes key": lambda: {b"x": 1},
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_leaves(tmp_path, name):
    value = UNSUPPORTED[name]()
    with pytest.raises(ckpt.UnsupportedLeaf) as caught:
        ckpt.save(tmp_path / "c", {"good": np.ones(2), "inner": [1, {"x/y": value}]})
    assert isinstance(caught.value, TypeError)
    assert "inner/1/x~1y" in str(caught.value)
    assert caught.value.leaf.startswith("inner/1/x~1y")
    if name.startswith("dict with"):
        assert caught.value.type_name in str(caught.value)
    else:
        assert type(value).__name__ in caught.value.type_name
        assert type(value).__name__ in str(caught.value)
    assert not any(tmp_path.iterdir()), "nothing is left behind"


def test_unsupported_leaf_of_an_item_names_the_item(tmp_path):
    with pytest.raises(ckpt.UnsupportedLeaf) as caught:
        ckpt.save(tmp_path / "c", model={"w": X}, opt={"s": {1}})
    assert "opt" in str(caught.value)


def test_tracers_are_refused(tmp_path):
    def step(x):
        ckpt.save(tmp_path / "c", {"x": x})
        return x

    with pytest.raises(ckpt.UnsupportedLeaf, match="x"):
        jax.jit(step)(jnp.ones(2))
    with pytest.raises(ckpt.UnsupportedLeaf, match="x"):
        jax.grad(lambda x: step(x).sum())(jnp.ones(2))
    assert not any(tmp_path.iterdir())
