"""The public strategies give everything that they promise, and all of it goes through a checkpoint."""

import math
from collections import OrderedDict

import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from hypothesis import Phase, find, given, settings
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

import ckpt_core as ckpt
from ckpt_core.testing import assert_same, strategies

QUICK = ckpt.Options(durable=False)


@given(strategies.pytrees())
@settings(max_examples=40)
def test_any_tree_comes_back(tmp_path_factory, tree):
    path = tmp_path_factory.mktemp("tree") / "c"
    ckpt.save(path, tree, options=QUICK)
    assert_same(ckpt.load(path), tree)
    assert_same(ckpt.load(path, tree), tree)


@st.composite
def shardings(draw: st.DrawFn, shape: tuple[int, ...]) -> Sharding:
    """Shardings that fit this shape: on one device, replicated, sharded, or mixed."""
    devices = jax.devices()
    if draw(st.booleans()) and draw(st.booleans()):
        return SingleDeviceSharding(draw(st.sampled_from(devices)))
    sizes = [(a, b) for a in (1, 2, 4, 8) for b in (1, 2, 4, 8) if a * b <= len(devices)]
    first, second = draw(st.sampled_from(sizes))
    chosen = np.array(draw(st.permutations(devices))[: first * second])
    mesh = Mesh(chosen.reshape(first, second), ("x", "y"))
    axes_of: list[list[str]] = [[] for _ in shape]  # of each dimension
    for axis, size in mesh.shape.items():
        parts = [size * math.prod(mesh.shape[other] for other in axes) for axes in axes_of]
        fitting = [at for at, side in enumerate(shape) if side % parts[at] == 0]
        at = draw(st.sampled_from([None, *fitting]))
        if at is not None:
            axes_of[at].append(axis)
    spec = [axes[0] if len(axes) == 1 else tuple(axes) or None for axes in axes_of]
    return NamedSharding(mesh, PartitionSpec(*spec))


@st.composite
def sharded_arrays(draw: st.DrawFn) -> jax.Array:
    """Arrays with a sharding; the number of devices divides many of their dimensions."""
    sides = st.lists(st.sampled_from([1, 2, 4, 6, 8]), max_size=3).map(tuple)
    array = draw(strategies.jax_arrays(shape=sides))
    return jax.device_put(array, draw(shardings(array.shape)))


@given(sharded_arrays(), st.data())
@settings(max_examples=30)
def test_any_sharding_to_any_other(tmp_path_factory, array, data):
    path = tmp_path_factory.mktemp("array") / "c"
    ckpt.save(path, {"a": array}, options=QUICK)
    same = ckpt.load(path)["a"]
    assert_same(same, array)
    assert same.sharding.is_equivalent_to(array.sharding, array.ndim)
    other = data.draw(shardings(array.shape))
    moved = ckpt.load(path, {"a": jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=other)})
    assert_same(moved["a"], array)
    assert moved["a"].sharding == other


@pytest.mark.parametrize(
    ("strategy", "wanted"),
    [
        (strategies.shapes(), lambda shape: 0 in shape and len(shape) == 3),
        (strategies.dtypes(), lambda dtype: dtype.name == "float8_e5m2"),
        (strategies.numpy_arrays("float32"), lambda a: np.isnan(a).any()),
        (strategies.jax_arrays("int4"), lambda a: a.size > 0),
        (strategies.keys(), lambda key: key.shape == (2,) and "rbg" in str(key.dtype)),
        (
            strategies.pytrees(st.just(1)),
            lambda tree: isinstance(tree, OrderedDict) and len(tree) == 2,
        ),
        (strategies.pytrees(st.just(1)), lambda tree: isinstance(tree, strategies.Record)),
        (strategies.pytrees(st.just(1)), lambda tree: isinstance(tree, dict) and 0 in tree),
    ],
)
def test_what_they_give(strategy, wanted):
    search = settings(max_examples=3000, database=None, phases=[Phase.generate])
    assert wanted(find(strategy, wanted, settings=search))
