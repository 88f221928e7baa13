"""The installed Orbax loads the trees that we wrote, by every route that it has.

One checkpoint of each shape is written once; each route of Orbax v0 and v1 then reads it.
"""

import json
import random

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint import v1 as ocp_v1

import ckpt_core as ckpt
from tests.support.orbax import eight_mesh
from tests.support.orbax_routes import (
    ROUTES,
    Moments,
    assert_same,
    check_route,
    named,
    sharded_tree,
    v0_composite_pytree,
    v0_composite_standard,
    v0_no_args,
    v0_pytree_checkpointer,
    v0_standard_checkpointer,
)
from tests.support.same_bits import bits


def plain_tree():
    return {
        "dense": {
            "w": jnp.arange(32.0).reshape(8, 4),
            "large": np.arange(2.0**17).reshape(512, 256),
        },
        "opt": [
            Moments(jnp.full(3, 2.0), {"c": np.arange(6.0).reshape(2, 3)}),
            None,
            (1, 2.5, True),
        ],
        "ints": {0: jnp.ones(1), 10: jnp.full(1, 10.0), 2: np.arange(2, dtype=np.int16)},
        "empty": {"dict": {}, "list": [], "tuple": (), "none": None},
        "key.with.dots": {"a b": jnp.full(2, 3.0)},
        "slash/ed": {"": np.full(2, 4.0, np.float32)},
        "": jnp.arange(3),
        "uni é中": np.array([True, False]),
        "rbg": jax.random.split(jax.random.key(2, impl="rbg"), 4),
        "unsafe": jax.random.key(2, impl="unsafe_rbg"),
        "zero_size": jnp.zeros((0, 3)),
        "zero_size_numpy": np.zeros((2, 0), np.int8),
        "zero_dim": jnp.float32(7.0),
        "zero_dim_numpy": np.array(-7, np.int32),
        "step": 7,
        "negative": -(2**62),
        "rate": 1.5,
        "nan": float("nan"),
        "flag": False,
    }


def text_tree():
    # Orbax fails over a text whose name has a "~" that is followed by neither 0 nor 1, whoever
    # wrote it: it takes the name for a JSON pointer.
    return {
        "note": "hello",
        "nested": {"text": 'wörld \n " ~ / \\ \x00', "void": ""},
        "s/lash": "slashed",
        "til~0de": {"a~1b": "tilde"},
        "list": ["zero", jnp.ones(2)],
        "a": np.arange(3),
    }


TREES = {"sharded": sharded_tree, "plain": plain_tree, "text": text_tree}


def v0_single_standard(root, step, _item, like):
    with ocp.CheckpointManager(root) as manager:
        return manager.restore(step, args=ocp.args.StandardRestore(like))


# StandardRestore knows no strings, whoever wrote them.
STRINGLESS = {v0_composite_standard, v0_single_standard, v0_standard_checkpointer}


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """A directory of steps by our Checkpointer: each tree as `state` and as `default`."""
    eight_mesh()
    root = tmp_path_factory.mktemp("ours")
    for item in ("state", "default"):
        for name, make in TREES.items():
            with ckpt.Checkpointer(root / item / name) as checkpointer:
                for step in (3, 4):
                    if item == "state":
                        checkpointer.save(step, make())
                    else:
                        checkpointer.save(step, default=make())
    return root


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("route", named(ROUTES))
def test_state(steps, route, tree):
    if tree == "text" and route in STRINGLESS:
        pytest.skip("StandardRestore takes no strings, whoever wrote them")
    check_route(route, steps / "state" / tree, 4, "state", TREES[tree]())


@pytest.mark.parametrize("tree", ["sharded", "plain"])
@pytest.mark.parametrize("route", named([v0_single_standard, *ROUTES]))
def test_default(steps, route, tree):
    """An item named `default` is a manager's single item."""
    if route in (v0_composite_standard, v0_composite_pytree):
        pytest.skip("Orbax reads `default` without Composite only")
    check_route(route, steps / "default" / tree, 4, "default", TREES[tree]())


@pytest.mark.parametrize("value", [jnp.arange(4.0), np.arange(3), 5, 2.5, True], ids=repr)
def test_bare_leaf(tmp_path, value):
    ckpt.save(tmp_path / "0", value)
    assert_same(v0_pytree_checkpointer(tmp_path, 0, "state", None), value, numpy_as_jax=True)
    assert_same(v0_no_args(tmp_path, 0, "state", None), value, numpy_as_jax=True)
    assert_same(ocp_v1.load(tmp_path / "0"), value)


# What Orbax reads as it is, and what it sees of the carrier of what its arrays cannot be.
CARRIED_AS_BYTES = ["uint2", "uint4", "float6_e2m3fn", "float6_e3m2fn", "float8_e4m3"]


NOT_OF_XLA = ["float6_e2m3fn", "float6_e3m2fn"]


NATIVE = [
    "bool", "int2", "int4", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32",
    "uint64", "float16", "bfloat16", "float32", "float64", "complex64", "complex128",
    "float8_e3m4", "float8_e4m3fn", "float8_e4m3b11fnuz", "float8_e4m3fnuz", "float8_e5m2",
    "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn",
]  # fmt: skip


def dtype_named(name):
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def some_of(name):
    """Twelve elements that every dtype holds, not all equal."""
    values = np.array([0, 1, 1, 0, 1, 0, 0, 1, 1, 1, 0, 1]).astype(dtype_named(name))
    return values.reshape(3, 4)


@pytest.fixture(scope="module")
def dtypes(tmp_path_factory):
    root = tmp_path_factory.mktemp("dtypes")
    tree = {name: some_of(name) for name in NATIVE + CARRIED_AS_BYTES}
    jax.config.update("jax_enable_x64", True)  # for Orbax's threads too
    try:
        of_jax = {n: jnp.asarray(array) for n, array in tree.items() if n not in NOT_OF_XLA}
        ckpt.save(root / "0", {"numpy": tree, "jax": of_jax})
        return {
            "v0": v0_no_args(root, 0, "state", None),
            "v1": ocp_v1.load(root / "0"),
            "single": v0_standard_checkpointer(root, 0, "state", None),
        }
    finally:
        jax.config.update("jax_enable_x64", False)


@pytest.mark.parametrize("route", ["v0", "v1", "single"])
@pytest.mark.parametrize("kind", ["numpy", "jax"])
def test_each_dtype(dtypes, route, kind):
    got = dtypes[route][kind]
    wrong = [name for name in NATIVE if bits(got[name]) != bits(some_of(name))]
    for name in set(CARRIED_AS_BYTES) - set(NOT_OF_XLA if kind == "jax" else ()):
        wrong += [name] if bits(got[name]) != bits(some_of(name).view(np.uint8)) else []
    assert not wrong


@pytest.fixture(scope="module")
def carriers(tmp_path_factory):
    root = tmp_path_factory.mktemp("carriers")
    generator = np.random.default_rng(5)
    tree = {
        "bytes": b"\x00\xffab",
        "no_bytes": b"",
        "complex": 1.5 - 2.5j,
        "numpy_scalar": np.float32(1.25),
        "numpy_bool": np.True_,
        "numpy_bfloat16": ml_dtypes.bfloat16(3.0),
        "big": 2**200 + 1,
        "minus_big": -(2**64),
        "generator": generator,
        "random_state": np.random.RandomState(6),
        "random": random.Random(7),
        "big_endian": np.arange(3, dtype=">i4"),
        "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    }
    ckpt.save(root / "0", tree)
    return {
        "v0": v0_no_args(root, 0, "state", None),
        "v1": ocp_v1.load(root / "0"),
        "pytree": v0_pytree_checkpointer(root, 0, "state", None),
    }


@pytest.mark.parametrize("route", ["v0", "v1", "pytree"])
def test_carriers(carriers, route):
    """What Orbax sees of the leaves that its format lacks."""
    got = carriers[route]
    assert bits(got["bytes"]) == bits(np.frombuffer(b"\x00\xffab", np.uint8))
    assert bits(got["no_bytes"]) == bits(np.zeros(0, np.uint8))
    assert bits(got["complex"]) == bits(np.array(1.5 - 2.5j))
    assert bits(got["numpy_scalar"]) == bits(np.array(1.25, np.float32))
    assert bits(got["numpy_bool"]) == bits(np.array(True))
    assert bits(got["numpy_bfloat16"]) == bits(np.array(3.0, ml_dtypes.bfloat16))
    assert int(got["big"], 0) == 2**200 + 1
    assert int(got["minus_big"], 0) == -(2**64)
    assert json.loads(got["generator"])["state"]["bit_generator"] == "PCG64"
    assert json.loads(got["random_state"])["bit_generator"] == "MT19937"
    assert len(json.loads(got["random"])[1]) == 625
    np.testing.assert_array_equal(got["big_endian"], np.arange(3))
    assert bits(got["fortran"]) == bits(np.arange(6.0).reshape(2, 3))
