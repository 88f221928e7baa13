"""Trees of every kind of leaf, and what it means that two are the same."""

import dataclasses
import math
import random
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import ckpt_core as ckpt
from tests.support.same_bits import bits

QUICK = ckpt.Options(durable=False)


class Moments(NamedTuple):
    mu: Any
    nu: Any


@dataclasses.dataclass
class Plain:
    """A dataclass that jax knows nothing of."""

    left: Any
    right: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Registered:
    data: Any
    more: Any
    static: str = dataclasses.field(default="s", metadata={"static": True})


@jax.tree_util.register_pytree_node_class
class Keyless:
    """A registered node whose children have positions only."""

    def __init__(self, one, two):
        self.one, self.two = one, two

    def tree_flatten(self):
        return (self.one, self.two), "aux"

    @classmethod
    def tree_unflatten(cls, _aux, children):
        return cls(*children)


@jax.tree_util.register_pytree_with_keys_class
class Keyed:
    """A registered node whose children have names."""

    def __init__(self, one, two):
        self.one, self.two = one, two

    def tree_flatten_with_keys(self):
        key = jax.tree_util.GetAttrKey
        return ((key("one"), self.one), (key("two"), self.two)), None

    @classmethod
    def tree_unflatten(cls, _aux, children):
        return cls(*children)


def assert_same(got, want, path="", *, sharding=False, numpy_as_jax=False):
    """Types of containers and leaves, and every bit; shardings too where asked.

    `numpy_as_jax` allows a numpy array where a jax array was saved: Orbax v0 gives that without a target.
    """
    how = {"sharding": sharding, "numpy_as_jax": numpy_as_jax}
    if isinstance(want, jax.Array):
        assert numpy_as_jax or isinstance(got, jax.Array), (path, type(got))
        assert bits(got) == bits(want), path
        if sharding:
            same = got.sharding.is_equivalent_to(want.sharding, want.ndim)
            assert same, (path, got.sharding, want.sharding)
        return
    if isinstance(want, np.ndarray | np.generic):
        assert numpy_as_jax or type(got) is type(want), (path, type(got), type(want))
        assert bits(got) == bits(want), path
        return
    assert type(got) is type(want), (path, type(got), type(want))
    if isinstance(want, dict):
        assert {*got} == {*want}, path
        for key in want:
            assert_same(got[key], want[key], f"{path}/{key}", **how)
    elif isinstance(want, list | tuple):
        assert len(got) == len(want), path
        for index, pair in enumerate(zip(got, want, strict=True)):
            assert_same(*pair, f"{path}/{index}", **how)
    elif isinstance(want, Keyless | Keyed) or dataclasses.is_dataclass(want):
        assert_same(vars(got), vars(want), path, **how)
    elif isinstance(want, np.random.Generator):
        np.testing.assert_equal(got.bit_generator.state, want.bit_generator.state)
    elif isinstance(want, np.random.RandomState):
        np.testing.assert_equal(got.get_state(legacy=False), want.get_state(legacy=False))
    elif isinstance(want, random.Random):
        assert got.getstate() == want.getstate(), path
    elif isinstance(want, float | complex):
        assert bits(np.array(got)) == bits(np.array(want)), path
    else:
        assert got == want, path


def abstract(tree, *, sharding=True):
    """The tree with every jax array as a ShapeDtypeStruct."""

    def one(leaf):
        if not isinstance(leaf, jax.Array):
            return leaf
        where = leaf.sharding if sharding else None
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

    return jax.tree.map(one, tree)


def round_trip(tmp_path, tree, **load):
    ckpt.save(tmp_path / "c", tree, options=QUICK)
    report = ckpt.verify(tmp_path / "c")
    assert report.ok, report.problems
    return ckpt.load(tmp_path / "c", **load)


def every_bit_pattern(name, shape=(16, 16)):
    """All bit patterns of a narrow dtype, NaNs and subnormals included; random bits of a wide."""
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    count = math.prod(shape)
    if name == "bool":
        return (np.arange(count) % 3 == 0).reshape(shape)
    widths = {"int2": 4, "uint2": 4, "int4": 16, "uint4": 16, "float4_e2m1fn": 16}
    widths |= {"float6_e2m3fn": 64, "float6_e3m2fn": 64}
    if dtype.itemsize == 1:
        patterns = (np.arange(count) % widths.get(name, 256)).astype(np.uint8)
        if name in ("int2", "int4"):  # stored sign-extended
            return patterns.astype(np.int8).astype(dtype).reshape(shape)
        return patterns.view(dtype).reshape(shape)
    random_bytes = np.random.default_rng(0).bytes(count * dtype.itemsize)
    return np.frombuffer(random_bytes, dtype).reshape(shape)


X, Y = np.ones(2), np.zeros(2)


def meshes():
    devices = np.array(jax.devices())
    return {
        "4x2": Mesh(devices.reshape(4, 2), ("x", "y")),
        "2x4": Mesh(devices.reshape(2, 4), ("x", "y")),
        "reversed": Mesh(devices[::-1].reshape(4, 2), ("x", "y")),
        "3x2": Mesh(devices[:6].reshape(3, 2), ("x", "y")),
        "last2": Mesh(devices[6:].reshape(2, 1), ("x", "y")),
        "1": Mesh(devices[5:6].reshape(1, 1), ("x", "y")),
    }


SPECS = {
    "both": P("x", "y"),
    "swapped": P("y", "x"),
    "first": P("x"),
    "second": P(None, "y"),
    "merged": P(("x", "y")),
    "replicated": P(),
}


def sharded(array, mesh, spec):
    return jax.device_put(array, NamedSharding(meshes()[mesh], SPECS[spec]))


def numbers(shape):
    return np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
