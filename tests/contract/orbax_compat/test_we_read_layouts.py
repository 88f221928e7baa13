"""Every layout that Orbax writes loads here: with no argument, with a target, and on one device.

Orbax itself is the judge of what a tree without a target must be: each case compares `ckpt.load`
with what Orbax's own reader gives, and then with what was saved.
"""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from orbax.checkpoint import v1 as ocp_v1

import ckpt_core as ckpt
from tests.support.orbax_layouts import (  # noqa: F401 (fixture)
    LAYOUTS,
    Moments,
    abstract,
    assert_same,
    expectation_of,
    expected_tree,
    item_directory,
    make_zoo,
    save_pytree,
    save_standard,
    save_v1,
    sharded_tree,
    tree_of,
    with_keys,
)
from tests.support.same_bits import bits


def orbax_rich(path, tree):
    options = ocp_v1.options.PyTreeOptions().saving.pytree_metadata_options
    return save_v1(
        path,
        tree,
        pytree__saving__pytree_metadata_options=dataclasses.replace(
            options, support_rich_types=True
        ),
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout(zoo, layout):
    """As Orbax's own reader gives it; and text keys fit the ints, fields and tuples of a target."""
    path, tree = zoo[layout], tree_of(layout)
    got = ckpt.load(path)
    assert_same(got, ocp.PyTreeCheckpointer().restore(item_directory(path)), sharding=True)
    assert_same(got, expectation_of(layout), sharding=True)
    assert_same(ckpt.load(path, abstract(tree)), tree, sharding=True)


@pytest.mark.parametrize("layout", ["v1", "v0_standard", "v0_pytree_files"])
def test_one_sharding_for_all(zoo, layout):
    mesh = Mesh(np.array(jax.devices()[:4]), ("z",))
    replicated = NamedSharding(mesh, P())
    got = ckpt.load(zoo[layout], sharding=replicated)
    assert_same(got, expectation_of(layout))
    arrays = [leaf for leaf in jax.tree.leaves(got) if isinstance(leaf, jax.Array)]
    assert arrays
    assert all(leaf.sharding.is_equivalent_to(replicated, leaf.ndim) for leaf in arrays)


@pytest.mark.parametrize("layout", ["v1", "v1_files_zarr2", "v0_standard"])
def test_as_numpy(zoo, layout):
    got = ckpt.load(zoo[layout], as_numpy=True, only=lambda path, _: "key" not in path)
    leaves = jax.tree.leaves(got)
    assert not any(isinstance(leaf, jax.Array) for leaf in leaves)
    np.testing.assert_array_equal(got["params"]["w"], np.arange(32.0).reshape(8, 4))
    assert got["params"]["half"].dtype == ml_dtypes.bfloat16


def test_rich_types_keep_tuples(tmp_path):
    """Where Orbax was asked to record tuples and NamedTuples, they come back."""
    tree = {"tuple": (1, jnp.ones(2)), "moments": Moments(jnp.zeros(2), {"c": np.ones(1)}), "e": ()}
    got = ckpt.load(orbax_rich(tmp_path / "rich", tree))
    assert isinstance(got["tuple"], tuple)
    assert isinstance(got["e"], tuple)
    assert got["moments"]._fields == ("mu", "nu")
    assert_same(got["moments"].nu, tree["moments"].nu)
    assert_same(ckpt.load(tmp_path / "rich", tree), tree)


ONE_DEVICE = """
import json, sys
import jax, numpy as np
import ckpt_core as ckpt
assert len(jax.devices()) == 1
answers = {}
for path in sys.argv[1:]:
    tree = ckpt.load(path)
    arrays = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    answers[path] = {
        "w": np.asarray(tree["params"]["w"]).tolist(),
        "half": np.asarray(tree["params"]["half"], np.float32).tolist(),
        "keys": np.asarray(jax.random.key_data(tree["sharded_keys"])).tolist(),
        "arrays": len(arrays),
        "here": all(leaf.devices() == {jax.devices()[0]} for leaf in arrays),
    }
print(json.dumps(answers))
"""


def test_saved_on_eight_devices_loads_on_one(zoo, run_python):
    layouts = ["v1", "v1_zarr2", "v1_files", "v0_standard", "v0_pytree_files", "v0_sub_chunks"]
    answers = run_python(ONE_DEVICE, *(str(zoo[name]) for name in layouts), XLA_FLAGS="")
    want = with_keys(expected_tree())
    count = sum(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(want))
    for name in layouts:
        answer = answers[str(zoo[name])]
        assert answer["w"] == np.asarray(want["params"]["w"]).tolist(), name
        assert answer["half"] == np.asarray(want["params"]["half"], np.float32).tolist(), name
        assert answer["keys"] == np.asarray(jax.random.key_data(want["sharded_keys"])).tolist()
        assert answer["arrays"] == count, name
        assert answer["here"], name


def test_wide_jax_arrays_are_not_narrowed(tmp_path):
    """float64 that jax saved is float64 again, or an error, whatever x64 says at the load."""
    with jax.enable_x64(True):
        tree = {"d": jnp.array([1e300, 1 / 3]), "i": jnp.array([2**62 + 1])}
        path = save_v1(tmp_path / "x64", tree)
        assert_same(ckpt.load(path), tree)
    try:
        got = ckpt.load(path)
    except ckpt.CheckpointError:
        return
    assert bits(got["d"]) == bits(tree["d"])
    assert bits(got["i"]) == bits(tree["i"])
