"""Every layout, item and step that Orbax writes loads here; what something damaged is an error of ours, never zeros.

Orbax itself is the judge of what a tree without a target must be: each case compares `ckpt.load`
with what Orbax's own reader gives, and then with what was saved.
"""

import dataclasses
import os
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from orbax.checkpoint import v1 as ocp_v1

import ckpt_core as ckpt
from tests.contract.orbax_compat.test_orbax_reads import grain_iterators
from tests.support import orbax_layouts as layouts
from tests.support.damage import flip
from tests.support.orbax import put
from tests.support.orbax_layouts import make_zoo  # noqa: F401 (fixture)
from tests.support.same_bits import bits
from tests.support.trees import abstract, assert_same


def orbax_rich(path, tree):
    options = ocp_v1.options.PyTreeOptions().saving.pytree_metadata_options
    return layouts.save_v1(
        path,
        tree,
        pytree__saving__pytree_metadata_options=dataclasses.replace(
            options, support_rich_types=True
        ),
    )


@pytest.mark.parametrize("layout", layouts.LAYOUTS)
def test_each_layout(zoo, layout):
    """As Orbax's own reader gives it; and text keys fit the ints, fields and tuples of a target."""
    path, tree = zoo[layout], layouts.tree_of(layout)
    got = ckpt.load(path)
    assert_same(got, ocp.PyTreeCheckpointer().restore(layouts.item_directory(path)), sharding=True)
    assert_same(got, layouts.expectation_of(layout), sharding=True)
    assert_same(ckpt.load(path, abstract(tree)), tree, sharding=True)


@pytest.mark.parametrize("layout", ["v1", "v0_standard", "v0_pytree_files"])
def test_one_sharding_for_all(zoo, layout):
    mesh = Mesh(np.array(jax.devices()[:4]), ("z",))
    replicated = NamedSharding(mesh, P())
    got = ckpt.load(zoo[layout], sharding=replicated)
    assert_same(got, layouts.expectation_of(layout))
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
    tree = {
        "tuple": (1, jnp.ones(2)),
        "moments": layouts.Moments(jnp.zeros(2), {"c": np.ones(1)}),
        "e": (),
    }
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
    names = ["v1", "v1_zarr2", "v1_files", "v0_standard", "v0_pytree_files", "v0_sub_chunks"]
    answers = run_python(ONE_DEVICE, *(str(zoo[name]) for name in names), XLA_FLAGS="")
    want = layouts.with_keys(layouts.expected_tree())
    count = sum(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(want))
    for name in names:
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
        path = layouts.save_v1(tmp_path / "x64", tree)
        assert_same(ckpt.load(path), tree)
    try:
        got = ckpt.load(path)
    except ckpt.CheckpointError:
        return
    assert bits(got["d"]) == bits(tree["d"])
    assert bits(got["i"]) == bits(tree["i"])


@pytest.fixture(scope="module")
def composite(tmp_path_factory):
    """A v0 manager's step with one item of each of Orbax's handlers, and metrics."""
    root = tmp_path_factory.mktemp("composite") / "root"
    args = ocp.args
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"], best_mode="min")
    with ocp.CheckpointManager(root, options=options, metadata={"run": "a"}) as manager:
        for step, loss in ((2, 0.5), (4, 0.125), (6, 0.25)):
            manager.save(
                step,
                metrics={"loss": loss},
                custom_metadata={"epoch": step},
                args=args.Composite(
                    state=args.StandardSave({"a": put(jnp.arange(8.0) + step, "x")}),
                    text=args.PyTreeSave({"s": "hi", "n": np.arange(3)}),
                    meta=args.JsonSave({"list": [1, 2.5, {"none": None}], "é": "ü"}),
                    array=args.ArraySave(jnp.arange(5.0)),
                    numpy_array=args.ArraySave(np.arange(5)),
                    key=args.JaxRandomKeySave(jax.random.key(3)),
                    raw_key=args.JaxRandomKeySave(jax.random.PRNGKey(4)),
                    legacy=args.NumpyRandomKeySave(np.random.RandomState(5).get_state()),
                    modern=args.NumpyRandomKeySave(
                        np.random.RandomState(6).get_state(legacy=False)
                    ),
                ),
            )
    return root


def test_composite_loads_each_item(composite):
    got = ckpt.load(composite / "4")
    assert set(got) == {
        "state", "text", "meta", "array", "numpy_array", "key", "raw_key", "legacy", "modern",
    }  # fmt: skip
    assert_same(got["state"], {"a": put(jnp.arange(8.0) + 4, "x")}, sharding=True)
    assert_same(got["text"], {"s": "hi", "n": np.arange(3)})
    assert got["meta"] == {"list": [1, 2.5, {"none": None}], "é": "ü"}
    assert bits(got["array"]) == bits(jnp.arange(5.0))
    assert bits(got["numpy_array"]) == bits(np.arange(5))
    assert bits(got["key"]) == bits(jax.random.key(3))
    assert bits(got["raw_key"]) == bits(jax.random.PRNGKey(4))
    for name, seed in (("legacy", 5), ("modern", 6)):
        state = np.random.RandomState()
        state.set_state(got[name])
        assert state.randint(10**6) == np.random.RandomState(seed).randint(10**6)


def test_root_of_steps_is_no_checkpoint(composite):
    with pytest.raises(ckpt.CheckpointNotFound) as caught:
        ckpt.load(composite)
    assert all(step in str(caught.value) for step in ("2", "4", "6"))


def test_checkpointer_reads_a_v0_directory(composite):
    with ckpt.Checkpointer(composite, read_only=True) as checkpointer:
        assert list(checkpointer.all_steps()) == [2, 4, 6]
        assert checkpointer.latest_step() == 6
        assert checkpointer.metrics(4) == {"loss": 0.125}
        assert checkpointer.metadata(4)["epoch"] == 4
        restored = checkpointer.restore_latest(state={"a": put(jnp.zeros(8), "x")})
        assert restored.step == 6
        assert_same(restored["state"], {"a": put(jnp.arange(8.0) + 6, "x")}, sharding=True)
        assert_same(checkpointer.load(2)["text"], {"s": "hi", "n": np.arange(3)})
    with ckpt.Checkpointer(
        composite, read_only=True, best_metric="loss", best_mode="min"
    ) as checkpointer:
        assert checkpointer.best_step() == 4


def test_orbax_temporary_directories_are_no_steps(zoo, tmp_path):
    root = tmp_path / "root"
    shutil.copytree(zoo["v0_manager"], root / "3")
    shutil.copytree(zoo["v0_manager"], root / "4.orbax-checkpoint-tmp")
    with ckpt.Checkpointer(root, read_only=True) as checkpointer:
        assert list(checkpointer.all_steps()) == [3]
    assert (root / "4.orbax-checkpoint-tmp").exists(), "a reader deletes nothing"


def test_restore_latest_falls_back_from_damage_of_orbax(zoo, tmp_path):
    root = tmp_path / "root"
    for step in ("3", "4"):
        shutil.copytree(zoo["v0_manager"], root / step)
    layouts.drop_data_files(root / "4" / "default")
    tree = layouts.tree_of("v0_manager")
    with ckpt.Checkpointer(root) as checkpointer:
        with pytest.warns(RuntimeWarning, match="step 4"):
            restored = checkpointer.restore_latest(default=abstract(tree))
        assert restored.step == 3
        assert_same(restored["default"], tree, sharding=True)


def test_v1_checkpointables(tmp_path):
    items = {"state": {"a": put(jnp.arange(8.0), "x")}, "extra": {"x": np.arange(3), "s": "t"}}
    registry = ocp_v1.handlers.local_registry()
    registry.add(ocp_v1.handlers.JsonHandler, checkpointable_name="config")
    context = layouts.v1_context(checkpointables__registry=registry)
    with context:
        ocp_v1.save_checkpointables(tmp_path / "c", items | {"config": {"k": [1, None]}})
    got = ckpt.load(tmp_path / "c")
    assert got.pop("config") == {"k": [1, None]}
    assert_same(got, items, sharding=True)


@pytest.mark.parametrize("writer", ["v0", "v1"])
def test_grain_items_of_orbax(tmp_path, writer):
    grain = pytest.importorskip("grain")
    pytest.importorskip("ckpt_grain")
    iterator, loader = grain_iterators(grain)
    for _ in range(3):
        next(iterator), next(loader)
    state = {"a": jnp.ones(2)}
    if writer == "v0":
        with ocp.CheckpointManager(tmp_path) as manager:
            args = ocp.args.Composite(
                state=ocp.args.StandardSave(state),
                data=grain.checkpoint.CheckpointSave(iterator),
                loader=grain.checkpoint.CheckpointSave(loader),
            )
            manager.save(0, args=args)
        path = tmp_path / "0"
    else:
        path = tmp_path / "v1"
        ocp_v1.save_checkpointables(path, {"state": state, "data": iterator, "loader": loader})
    want = [next(iterator).tolist() for _ in range(3)], [int(next(loader)) for _ in range(3)]
    other, other_loader = grain_iterators(grain)
    restored = ckpt.restore(path, state=state, data=other, loader=other_loader)
    assert_same(restored["state"], state)
    assert (
        [next(other).tolist() for _ in range(3)],
        [int(next(other_loader)) for _ in range(3)],
    ) == want
    # Whoever wants only the arrays needs no iterator.
    assert_same(ckpt.load(path, item="state"), state)


def cut_data_files(item: Path):
    for path in layouts.data_files(item):
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size // 2)


def flip_root_node(item: Path):
    """A bit inside the tree of keys at the top, which has checksums of its own."""
    (path,) = (item / "d").iterdir()
    flip(path)


DAMAGE = {
    "metadata_missing": lambda item: (item / "_METADATA").unlink(),
    "metadata_empty": lambda item: (item / "_METADATA").write_text(""),
    "metadata_garbage": lambda item: (item / "_METADATA").write_bytes(b"\xff\xfe{" * 100),
    "metadata_cut": lambda item: os.truncate(item / "_METADATA", 900),
    "metadata_is_a_list": lambda item: (item / "_METADATA").write_text("[1, 2]"),
    "metadata_without_tree": lambda item: (item / "_METADATA").write_text('{"use_zarr3": true}'),
    "metadata_bad_entry": lambda item: layouts.rewrite_json(
        item / "_METADATA",
        lambda meta: meta["tree_metadata"].update({"('x',)": {"key_metadata": 3}}),
    ),
    "metadata_deep": lambda item: (item / "_METADATA").write_text("[" * 100_000 + "]" * 100_000),
    "strings_missing": lambda item: (item / "_strings.json").unlink(),
    "strings_garbage": lambda item: (item / "_strings.json").write_text("{"),
    "strings_lack_one": lambda item: layouts.rewrite_json(
        item / "_strings.json", lambda strings: {k: v for k, v in strings.items() if k != "note"}
    ),
    "string_is_no_text": lambda item: layouts.rewrite_json(
        item / "_strings.json", lambda strings: strings | {"note": 5}
    ),
    "manifest_missing": lambda item: (item / "manifest.ocdbt").unlink(),
    "manifest_garbage": lambda item: (item / "manifest.ocdbt").write_bytes(b"garbage" * 30),
    "manifest_empty": lambda item: (item / "manifest.ocdbt").write_bytes(b""),
    "data_missing": layouts.drop_data_files,
    "data_cut": cut_data_files,
    "index_flipped": flip_root_node,
    "array_metadata_garbage": lambda item: (item / "array_metadatas" / "process_0").write_text("{"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_an_error_of_ours(zoo, tmp_path, damage):
    path = zoo.copy("v1", tmp_path)
    DAMAGE[damage](layouts.item_directory(path))
    arguments = (abstract(layouts.tree_of("v1")),) if list(DAMAGE).index(damage) % 2 else ()
    with pytest.raises(ckpt.CheckpointError) as caught:
        ckpt.load(path, *arguments)
    if damage != "metadata_missing":
        assert isinstance(caught.value, ckpt.CheckpointCorrupt), caught.value
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("content", ["", "{", "[]"])
def test_unreadable_sharding_file(zoo, tmp_path, content):
    """Shardings are advice: damage there is an error or the default device, never wrong data."""
    path = zoo.copy("v1", tmp_path)
    (path / "state" / "_sharding").write_text(content)
    try:
        got = ckpt.load(path)
    except ckpt.CheckpointError:
        pass
    else:
        assert_same(got, layouts.expectation_of("v1"))


def test_without_sharding_file(zoo, tmp_path):
    path = zoo.copy("v1", tmp_path)
    (path / "state" / "_sharding").unlink()
    got = ckpt.load(path)
    assert_same(got, layouts.expectation_of("v1"))
    assert got["params"]["w"].devices() == {jax.devices()[0]}


def test_without_optional_files(zoo, tmp_path):
    """All that a reader needs is `_METADATA` and the data, as in Orbax's oldest directories."""
    path = zoo.copy("v0_manager", tmp_path)
    for name in ("_CHECKPOINT_METADATA", "commit_success.txt", "default/commit_success.txt"):
        (path / name).unlink()
    assert_same(ckpt.load(path), layouts.expectation_of("v0_manager"), sharding=True)


@pytest.mark.parametrize("layout", ["v1_files", "v0_pytree_files"])
def test_missing_chunk_is_no_zero(zoo, tmp_path, layout):
    path = zoo.copy(layout, tmp_path)
    array = layouts.item_directory(path) / "params.w"
    chunk = next(
        p for p in array.rglob("*") if p.is_file() and not p.name.startswith((".z", "zarr"))
    )
    chunk.unlink()
    with pytest.raises(ckpt.CheckpointCorrupt, match="params/w"):
        ckpt.load(path)
    # The rest is still there.
    assert_same(
        ckpt.load(path, only=lambda path, _: path != "params/w")["opt"],
        layouts.expectation_of(layout)["opt"],
    )


def test_a_directory_of_something_else(tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file.txt").write_text("x")
    with pytest.raises(ckpt.CheckpointNotFound):
        ckpt.load(tmp_path / "other")
