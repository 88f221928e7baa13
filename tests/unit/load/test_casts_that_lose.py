"""``cast=True`` never makes another number of one that does not fit, and a Python float is rounded on request only."""

import math
import re
from fractions import Fraction
from itertools import product

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import ckpt_core as ckpt
from ckpt_core._tree.leaves import converted

SMALL = {"int2": (-2, 1), "uint2": (0, 3), "int4": (-8, 7), "uint4": (0, 15)}
INTEGERS = [*SMALL, "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
FLOATS = [
    *("float16", "float32", "float64", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
    *("float4_e2m1fn", "float6_e2m3fn", "float8_e8m0fnu", "float8_e4m3b11fnuz"),
]


def dtype_of(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def bounds(name: str) -> tuple[int, int]:
    limits = ml_dtypes.iinfo(dtype_of(name))
    return int(limits.min), int(limits.max)


@pytest.mark.parametrize("stored", INTEGERS)
def test_every_integer_keeps_its_value_or_is_told(stored):
    least, most = bounds(stored)
    near = {sign * 2**k + d for k, d, sign in product(range(65), (-1, 0, 1), (-1, 1))}
    numbers = sorted(n for n in near | {least, most, 0} if least <= n <= most)
    array = np.array(numbers, np.uint64 if least == 0 else np.int64).astype(dtype_of(stored))
    for wanted in [*INTEGERS, *FLOATS, "complex64", "complex128", "bool"]:
        if wanted == stored:
            continue
        made, lost = converted(array, dtype_of(wanted))
        refused = set(map(int, lost))
        for number, value in zip(numbers, made, strict=True):
            real = float(value.real)
            same = math.isfinite(real) and Fraction(real) == number
            if wanted in INTEGERS:
                low, high = bounds(wanted)
                same = low <= number <= high
                assert not same or int(value) == number
            assert same == (number not in refused), (stored, wanted, number, value)


@pytest.mark.parametrize("stored", FLOATS)
def test_every_float_becomes_its_whole_part_or_is_told(stored):
    edges = [float(sign * 2**k + d) for k, d, sign in product(range(66), (-1, 0, 1), (-1, 1))]
    rest = [0.0, -0.0, 0.5, -0.5, 7.9, -8.9, -9.1, 1e30, math.inf, -math.inf, math.nan]
    with np.errstate(all="ignore"):
        array = np.array([*edges, *rest]).astype(dtype_of(stored))
    for wanted in INTEGERS:
        low, high = bounds(wanted)
        made, lost = converted(array, dtype_of(wanted))
        fits = [math.isfinite(x) and low <= math.trunc(x) <= high for x in map(float, array)]
        assert lost.size == fits.count(False), wanted
        for number, value, fit in zip(array, made, fits, strict=True):
            assert not fit or int(value) == math.trunc(float(number)), (wanted, number)


@pytest.mark.parametrize(
    ("saved", "wanted", "number"),
    [
        ([1, 8, -9, 3], "int4", 8),
        ([0, 1, 2], "int2", 2),
        ([-1, 16], "uint4", -1),
        ([3, 4], "uint2", 4),
        ([1.0, math.nan], "int32", "nan"),
        ([1.0, 3e9], "int32", r"3e\+09|3000000000"),
        ([2**24 + 1], "float32", 2**24 + 1),
        ([0, 2], "bool", 2),
    ],
)
@pytest.mark.parametrize("kind", ["numpy", "jax"])
def test_a_load_refuses_with_path_and_count(tmp_path, saved, wanted, number, kind):
    narrow = np.asarray(saved, np.float32 if isinstance(saved[0], float) else np.int32)
    ckpt.save(tmp_path / "a", {"deep": {"w": narrow if kind == "numpy" else jnp.asarray(narrow)}})
    like = np.zeros(len(saved), dtype_of(wanted))
    like = {"deep": {"w": like if kind == "numpy" else jnp.asarray(like)}}
    with pytest.raises(ckpt.StructureMismatch, match="deep/w: dtype differs") as told:
        ckpt.load(tmp_path / "a", like, cast=True)
    assert re.search(f" do not fit, such as {number}", str(told.value.mismatches[0].saved))


def test_out_of_small_integers(tmp_path):
    for name, (low, high) in SMALL.items():
        array = jnp.asarray(np.array([low, high, 0, 1]).astype(dtype_of(name)))
        ckpt.save(tmp_path / name, array)
        loaded = ckpt.load(tmp_path / name, jnp.zeros(4, jnp.int32), cast=True)
        assert loaded.tolist() == [low, high, 0, 1]
        loaded = ckpt.load(tmp_path / name, jnp.zeros(4, jnp.float32), cast=True)
        assert loaded.tolist() == [low, high, 0, 1]
        if low < 0:
            with pytest.raises(ckpt.StructureMismatch, match="1 do not fit"):
                ckpt.load(tmp_path / name, jnp.zeros(4, jnp.uint8), cast=True)


@pytest.mark.parametrize("number", [1700000000.123, 0.1, 1e300, -1e39, 1e-320])
@pytest.mark.parametrize("make", [jnp.float32, np.float32, lambda _: np.zeros((), np.float32)])
def test_a_python_float_is_not_rounded_unasked(tmp_path, number, make):
    ckpt.save(tmp_path / "a", {"t": number})
    like = {"t": make(0)}
    with pytest.raises(
        ckpt.StructureMismatch, match=r"^1 mismatch.*\n.*t: dtype.*\n.*does not fit.*cast=True"
    ):
        ckpt.load(tmp_path / "a", like)
    if abs(number) > 1e38:
        with pytest.raises(ckpt.StructureMismatch, match="does not fit"):
            ckpt.load(tmp_path / "a", like, cast=True)
    else:
        assert float(ckpt.load(tmp_path / "a", like, cast=True)["t"]) == np.float32(number)


def test_a_python_float_that_fits_needs_no_cast(tmp_path):
    numbers = {
        "a": 0.5,
        "b": 3.0,
        "c": math.inf,
        "d": math.nan,
        "e": -0.0,
        "f": 2.0**100,
        "g": 1 + 2j,
    }
    ckpt.save(tmp_path / "a", numbers)
    like = {name: jnp.float32(0) for name in numbers} | {"g": jnp.complex64(0)}
    loaded = ckpt.load(tmp_path / "a", like)
    assert repr({name: array.item() for name, array in loaded.items()}) == repr(numbers)


def test_a_weakly_typed_target_is_what_jit_makes_of_a_python_float(tmp_path):
    ckpt.save(tmp_path / "a", {"lr": 0.1})
    weak = jnp.asarray(0.5)
    assert weak.weak_type
    assert ckpt.load(tmp_path / "a", {"lr": weak})["lr"] == jnp.float32(0.1)
    assert ckpt.load(tmp_path / "a", {"lr": 0.5})["lr"] == 0.1
    ckpt.save(tmp_path / "b", {"lr": 1e300})
    with pytest.raises(ckpt.StructureMismatch, match="does not fit"):
        ckpt.load(tmp_path / "b", {"lr": weak})


def test_floats_round_as_in_astype(tmp_path):
    array = np.array([0.1, 1e300, -math.inf, math.nan])
    ckpt.save(tmp_path / "a", array)
    loaded = ckpt.load(tmp_path / "a", np.zeros(4, np.float32), cast=True)
    assert repr(loaded.tolist()) == repr([float(np.float32(0.1)), math.inf, -math.inf, math.nan])
