"""The public strategies give everything that they promise, and all of it goes through a checkpoint."""

from collections import OrderedDict
from typing import Any

import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from hypothesis import Phase, find, given, settings

import ckpt_core as ckpt
from ckpt_core.testing import assert_same, strategies

QUICK = ckpt.Options(durable=False)


def check(directory: Any, tree: Any) -> None:
    path = directory / "c"
    ckpt.save(path, tree, options=QUICK)
    assert_same(ckpt.load(path), tree)
    assert_same(ckpt.load(path, tree), tree)


@given(strategies.pytrees())
@settings(max_examples=40)
def test_any_tree_comes_back(tmp_path_factory, tree):
    check(tmp_path_factory.mktemp("tree"), tree)


def check_sharding(directory: Any, array: jax.Array, data: st.DataObject) -> None:
    path = directory / "c"
    ckpt.save(path, {"a": array}, options=QUICK)
    same = ckpt.load(path)["a"]
    assert_same(same, array)
    assert same.sharding.is_equivalent_to(array.sharding, array.ndim)
    other = data.draw(strategies.shardings(array.shape))
    moved = ckpt.load(path, {"a": jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=other)})
    assert_same(moved["a"], array)
    assert moved["a"].sharding == other


@given(strategies.sharded_arrays(), st.data())
@settings(max_examples=30)
def test_any_sharding_to_any_other(tmp_path_factory, array, data):
    check_sharding(tmp_path_factory.mktemp("array"), array, data)


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
        (
            strategies.shardings((8, 8)),
            lambda s: s.num_devices == 8 and tuple(s.spec) == ("y", "x"),
        ),
        (strategies.shardings((8, 8)), lambda s: s.num_devices > 1 and ("x", "y") in tuple(s.spec)),
        (strategies.shardings((3,)), lambda s: s.num_devices == 8 and s.is_fully_replicated),
        (strategies.sharded_arrays(), lambda a: len(a.sharding.device_set) == 1 and a.committed),
    ],
)
def test_what_they_give(strategy, wanted):
    search = settings(max_examples=3000, database=None, phases=[Phase.generate])
    assert wanted(find(strategy, wanted, settings=search))
