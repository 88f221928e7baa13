"""Every layout that Orbax writes loads here: with no argument, with a target, and on one device.

Orbax itself is the judge of what a tree without a target must be: each case compares `ckpt.load`
with what Orbax's own reader gives, and then with what was saved.
"""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import v1 as ocp_v1

import ckpt_core as ckpt
from tests.support.orbax import make_quiet_orbax, move, put  # noqa: F401 (fixture)
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
from tests.support.same_bits import bits, is_key

# Orbax's own reader warns about every load that is given no sharding; ours is not concerned.
pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")


# ---------------------------------------------------------------------------------- Orbax's writers


def orbax_rich(path, tree):
    options = ocp_v1.options.PyTreeOptions().saving.pytree_metadata_options
    return save_v1(
        path,
        tree,
        pytree__saving__pytree_metadata_options=dataclasses.replace(
            options, support_rich_types=True
        ),
    )


# The quick run reads what differs in kind; the rest of the grid is for `slow`.
QUICK = {
    "v1", "v1_zarr2", "v1_raw", "v1_files", "v1_sub_chunks", "v1_training",
    "v0_standard", "v0_pytree", "v0_pytree_files", "v0_sub_chunks", "v0_manager",
    "v0_manager_composite",
}  # fmt: skip


EVERY_LAYOUT = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in LAYOUTS
]


def orbax_own(path: Path):
    """What Orbax's own reader gives for the same directory, without a target."""
    item = item_directory(path)
    return ocp.PyTreeCheckpointer().restore(item)


# -------------------------------------------------------------------------------------- the layouts


@pytest.mark.parametrize("layout", EVERY_LAYOUT)
def test_no_argument(zoo, layout):
    got = ckpt.load(zoo[layout])
    assert_same(got, orbax_own(zoo[layout]), sharding=True)


@pytest.mark.parametrize("layout", EVERY_LAYOUT)
def test_no_argument_gives_what_was_saved(zoo, layout):
    assert_same(ckpt.load(zoo[layout]), expectation_of(layout), sharding=True)


@pytest.mark.parametrize("layout", EVERY_LAYOUT)
def test_like_with_the_saved_containers(zoo, layout):
    """Text keys of Orbax's trees fit the ints, fields and tuples of a target."""
    tree = tree_of(layout)
    assert_same(ckpt.load(zoo[layout], abstract(tree)), tree, sharding=True)


@pytest.mark.parametrize("layout", ["v1", "v0_standard", "v1_files", "v1_sub_chunks"])
def test_like_on_another_mesh(zoo, layout):
    mesh = Mesh(np.array(jax.devices()[:2]), ("z",))
    tree = tree_of(layout)

    def moved(leaf):
        if not isinstance(leaf, jax.Array):
            return leaf
        spec = P("z") if leaf.ndim and leaf.shape[0] % 2 == 0 else P()
        return move(leaf, NamedSharding(mesh, spec))

    want = jax.tree.map(moved, tree)
    assert_same(ckpt.load(zoo[layout], abstract(want)), want, sharding=True)


@pytest.mark.parametrize("layout", ["v1", "v0_pytree"])
def test_like_may_be_concrete(zoo, layout):
    tree = tree_of(layout)
    blank = jax.tree.map(
        lambda leaf: (
            move(np.zeros_like(leaf), leaf.sharding)
            if isinstance(leaf, jax.Array) and not is_key(leaf)
            else np.zeros_like(leaf)
            if isinstance(leaf, np.ndarray)
            else leaf
        ),
        tree,
    )
    assert_same(ckpt.load(zoo[layout], blank), tree, sharding=True)


@pytest.mark.parametrize("layout", ["v1", "v0_standard"])
def test_like_without_shardings(zoo, layout):
    tree = tree_of(layout)
    assert_same(ckpt.load(zoo[layout], abstract(tree, sharding=False)), tree)


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


def test_only_some_leaves(zoo):
    got = ckpt.load(zoo["v1"], only="params/**")
    assert list(got) == ["params"]
    assert_same(got["params"], sharded_tree()["params"], sharding=True)


def test_rich_types_keep_tuples(tmp_path):
    """Where Orbax was asked to record tuples and NamedTuples, they come back."""
    tree = {"tuple": (1, jnp.ones(2)), "moments": Moments(jnp.zeros(2), {"c": np.ones(1)}), "e": ()}
    got = ckpt.load(orbax_rich(tmp_path / "rich", tree))
    assert isinstance(got["tuple"], tuple)
    assert isinstance(got["e"], tuple)
    assert got["moments"]._fields == ("mu", "nu")
    assert_same(got["moments"].nu, tree["moments"].nu)
    assert_same(ckpt.load(tmp_path / "rich", tree), tree)


@pytest.mark.parametrize("value", [jnp.arange(4.0), np.arange(3), 5, 2.5], ids=str)
def test_bare_leaf(tmp_path, value):
    """A tree may be one leaf, whose array has no name."""
    assert_same(ckpt.load(save_pytree(tmp_path / "v0", [value])), [value])
    with ocp.CheckpointManager(tmp_path / "root") as manager:
        manager.save(0, args=ocp.args.PyTreeSave(value))
    assert_same(ckpt.load(tmp_path / "root" / "0"), value)


def test_inspect_names_leaves_without_reading(zoo):
    info = ckpt.inspect(zoo["v1"])
    assert info.format_version is None
    assert list(info.items) == ["state"]
    leaves = {leaf.path: leaf for leaf in info.items["state"].leaves}
    assert leaves["params/w"].shape == (8, 4)
    assert np.dtype(leaves["params/w"].dtype) == np.float32
    assert "slash~1ed" in leaves
    assert "key.with.dots/a b" in leaves


# --------------------------------------------------------------------------------------- one device


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
    layouts = [name for name in LAYOUTS if name in QUICK]
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


# --------------------------------------------------------------------------------------- strictness


def test_mismatches_are_all_named(zoo):
    tree = tree_of("v1")
    wrong = abstract(tree)
    wrong["params"] = dict(wrong["params"])
    wrong["params"]["w"] = jax.ShapeDtypeStruct((8, 5), jnp.float32)
    wrong["params"]["rows"] = jax.ShapeDtypeStruct((8, 4), jnp.float32)
    wrong["params"]["halff"] = wrong["params"].pop("half")
    with pytest.raises(ckpt.StructureMismatch) as caught:
        ckpt.load(zoo["v1"], wrong)
    found = {(mismatch.path, mismatch.kind) for mismatch in caught.value.mismatches}
    assert found == {
        ("params/w", "shape"),
        ("params/rows", "dtype"),
        ("params/halff", "missing"),
        ("params/half", "unexpected"),
    }
    nearest = {mismatch.path: mismatch.nearest for mismatch in caught.value.mismatches}
    assert nearest["params/halff"] == "params/half"


@pytest.mark.parametrize("layout", ["v1", "v0_pytree_files"])
def test_cast(zoo, layout):
    like = abstract(tree_of(layout))
    like["params"]["w"] = jax.ShapeDtypeStruct((8, 4), jnp.bfloat16)
    with pytest.raises(ckpt.StructureMismatch, match="params/w"):
        ckpt.load(zoo[layout], like)
    got = ckpt.load(zoo[layout], like, cast=True)
    assert got["params"]["w"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(
        np.asarray(got["params"]["w"], np.float32), tree_of("v1")["params"]["w"]
    )


# ---------------------------------------------------------------------------------------------- x64


LARGE = {
    "v1": save_v1,
    "v1_raw": functools.partial(save_v1, array__saving__use_compression=False),
    "v1_small_files": functools.partial(save_v1, array__saving__ocdbt_target_data_file_size=2**20),
    "v0_standard": save_standard,
    "v0_files": functools.partial(save_pytree, use_ocdbt=False),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LARGE)
def test_large_arrays(tmp_path, layout):
    """Arrays of many chunks and files, whole, resharded and to numpy."""
    values = np.random.default_rng(0).standard_normal((2048, 1024)).astype(np.float32)
    tree = {
        "a": put(values, "x", "y"),
        "b": put(values),
        "c": jnp.asarray(values),
        "n": values,
        "half": put(values.astype(ml_dtypes.bfloat16), ("y", "x")),
    }
    path = LARGE[layout](tmp_path / "c", tree)
    assert_same(ckpt.load(path), tree, sharding=True)
    other = NamedSharding(Mesh(np.array(jax.devices()[:6]).reshape(2, 3), ("p", "q")), P("p"))
    want = jax.tree.map(lambda x: move(x, other) if isinstance(x, jax.Array) else x, tree)
    assert_same(ckpt.load(path, abstract(want)), want, sharding=True)
    got = ckpt.load(path, as_numpy=True)
    assert all(np.array_equal(got[name], tree[name]) for name in tree)


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


@pytest.mark.parametrize("dtype", ["float16", "float8_e5m2", "uint16", "uint32", "int8"])
def test_more_dtypes_of_orbax(tmp_path, dtype):
    values = jnp.arange(6, dtype=dtype).reshape(2, 3)
    for name, save in (("v1", save_v1), ("v0", save_standard)):
        assert_same(ckpt.load(save(tmp_path / name, {"a": values})), {"a": values})


def test_saved_with_another_dtype(tmp_path):
    """SaveArgs(dtype) casts on the way in; what stands on disk is what loads."""
    tree = {"a": jnp.arange(4.0)}
    path = save_pytree(tmp_path / "c", tree, {"a": ocp.SaveArgs(dtype=np.dtype(jnp.bfloat16))})
    assert_same(ckpt.load(path), {"a": jnp.arange(4, dtype=jnp.bfloat16)})


def test_single_device_sharding_of_another_device(tmp_path):
    device = jax.devices()[3]
    tree = {"a": jax.device_put(jnp.ones(4), SingleDeviceSharding(device))}
    got = ckpt.load(save_v1(tmp_path / "c", tree))
    assert got["a"].devices() == {device}
