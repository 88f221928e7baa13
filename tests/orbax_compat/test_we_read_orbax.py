"""Every layout that Orbax writes loads here: with no argument, with a target, and on one device.

Orbax itself is the judge of what a tree without a target must be: each case compares `ckpt.load`
with what Orbax's own reader gives, and then with what was saved. Layouts that no released Orbax
writes any more, or only for large arrays, are written by hand with TensorStore and JSON.
"""

import base64
import dataclasses
import functools
import itertools
import json
import os
import shutil
from collections import namedtuple
from pathlib import Path

import absl.logging
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import v1 as ocp_v1

import ckpt_core as ckpt

# Orbax's own reader warns about every load that is given no sharding; ours is not concerned.
pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")

Moments = namedtuple("Moments", "mu nu")
STANDARD = "orbax.checkpoint._src.handlers.standard_checkpoint_handler.StandardCheckpointHandler"


@dataclasses.dataclass
class Pair:
    """A pytree node with named fields, which Orbax stores as a dict."""

    left: object
    right: object


jax.tree_util.register_dataclass(Pair, data_fields=["left", "right"], meta_fields=[])


@pytest.fixture(autouse=True, scope="module")
def _quiet_orbax():
    """Keeps Orbax's warnings about missing shardings out of the log."""
    before = absl.logging.get_verbosity()
    absl.logging.set_verbosity(absl.logging.FATAL)
    yield
    absl.logging.set_verbosity(before)


def eight_mesh():
    if len(jax.devices()) < 8:
        pytest.skip("needs 8 devices")
    return Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("x", "y"))


def move(value, sharding):
    """The array on that sharding; through the host, where nothing has to be compiled."""
    return jax.device_put(value if is_key(value) else np.asarray(value), sharding)


def put(value, *spec):
    return move(value, NamedSharding(eight_mesh(), P(*spec)))


# ------------------------------------------------------------------------------------ what is saved


def sharded_tree():
    """Every kind of leaf, container, key and sharding that all of Orbax's writers take."""
    return {
        "params": {
            "w": put(jnp.arange(32.0).reshape(8, 4), "x", "y"),
            "rows": put(jnp.arange(32, dtype=jnp.int32).reshape(8, 4), ("x", "y")),
            "half": put(jnp.arange(64, dtype=jnp.bfloat16).reshape(8, 8), None, "y"),
            "all": put(jnp.arange(16.0).reshape(16)),
        },
        "opt": [
            Moments(jnp.full(3, 2.0), {"c": np.arange(6.0).reshape(2, 3)}),
            None,
            (1, 2.5, True),
        ],
        "ints": {0: jnp.ones(1), 10: jnp.full(1, 10.0), 2: np.arange(2, dtype=np.int16)},
        "empty": {
            "dict": {},
            "list": [],
            "tuple": (),
            "none": None,
            "state": namedtuple("E", "")(),
        },
        "key.with.dots": {"a b": jnp.full(2, 3.0)},
        "slash/ed": np.full(2, 4.0, np.float32),
        "uni é中": np.array([True, False]),
        "pair": Pair(jnp.int32(5), 6),
        "complex": jnp.array([1 + 2j, 3 - 4j], jnp.complex64),
        "int4": jnp.arange(-4, 4, dtype=jnp.int4),
        "fp8": jnp.arange(4, dtype=jnp.float8_e4m3fn),
        "u8": jnp.arange(4, dtype=jnp.uint8),
        "zero_dim": jnp.float32(7.0),
        "step": 7,
        "negative": -(2**62),
        "rate": 1.5,
    }


def expected_tree():
    """What Orbax gives for `sharded_tree` without a target: dicts and lists."""
    tree = sharded_tree()
    moments, none, numbers = tree["opt"]
    return tree | {
        "opt": [{"mu": moments.mu, "nu": moments.nu}, none, list(numbers)],
        "ints": {str(key): value for key, value in tree["ints"].items()},
        "empty": tree["empty"] | {"state": None},
        "pair": {"left": tree["pair"].left, "right": tree["pair"].right},
    }


def with_strings(tree):
    return tree | {"note": "hello", "nested": {"text": "wörld \n ~ /", "void": ""}}


def with_keys(tree):
    return tree | {
        "key": jax.random.key(1),
        "keys": jax.random.split(jax.random.key(2, impl="rbg"), 4),
        "sharded_keys": put(jax.random.split(jax.random.key(3), 8), "x"),
    }


# ---------------------------------------------------------------------------------------- comparing


def is_key(value):
    return isinstance(value, jax.Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)


def bits(value):
    if is_key(value):
        return str(jax.random.key_impl(value)), bits(jax.random.key_data(value))
    array = np.asarray(value)
    return array.dtype.str, str(array.dtype), array.shape, array.tobytes()


def assert_same(got, want, path="", *, sharding=False):
    """Container types, leaf types, dtypes and every bit are equal; shardings too where asked."""
    assert isinstance(got, jax.Array) == isinstance(want, jax.Array), (path, type(got), type(want))
    if not isinstance(want, jax.Array):
        assert type(got) is type(want), (path, type(got), type(want))
    if isinstance(want, dict):
        assert set(got) == set(want), path
        for key in want:
            assert_same(got[key], want[key], f"{path}/{key}", sharding=sharding)
    elif isinstance(want, list | tuple):
        assert len(got) == len(want), path
        for index, (one, other) in enumerate(zip(got, want, strict=True)):
            assert_same(one, other, f"{path}/{index}", sharding=sharding)
    elif isinstance(want, Pair):
        assert_same([got.left, got.right], [want.left, want.right], path, sharding=sharding)
    elif isinstance(want, jax.Array | np.ndarray | np.generic):
        assert bits(got) == bits(want), path
        if sharding and isinstance(want, jax.Array):
            same = got.sharding.is_equivalent_to(want.sharding, want.ndim)
            assert same, (path, got.sharding, want.sharding)
    else:
        assert got == want or (got != got and want != want), (path, got, want)


def abstract(tree, *, sharding=True):
    """The tree with every jax array as a ShapeDtypeStruct."""

    def one(leaf):
        if not isinstance(leaf, jax.Array):
            return leaf
        return jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=leaf.sharding if sharding else None
        )

    return jax.tree.map(one, tree)


# ---------------------------------------------------------------------------------- Orbax's writers


def v1_context(**settings):
    context = ocp_v1.Context()
    for path, value in settings.items():
        *parents, name = path.split("__")
        setattr(functools.reduce(getattr, parents, context), name, value)
    return context


def save_v1(path, tree, **settings):
    with v1_context(**settings):
        ocp_v1.save(path, tree)
    return path


def save_v1_training(path, tree):
    checkpointer = ocp_v1.training.Checkpointer(path)
    checkpointer.save(5, tree, metrics={"loss": 0.25})
    checkpointer.close()
    return path / "5"


def save_standard(path, tree):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)
    return path


def save_pytree(path, tree, save_args=None, **settings):
    with ocp.PyTreeCheckpointer(**settings) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(tree, save_args=save_args))
    return path


def save_manager(path, tree):
    with ocp.CheckpointManager(path) as manager:
        manager.save(3, args=ocp.args.StandardSave(tree))
    return path / "3"


def save_manager_pytree(path, tree):
    with ocp.CheckpointManager(path) as manager:
        manager.save(3, args=ocp.args.Composite(state=ocp.args.PyTreeSave(tree)))
    return path / "3"


def sub_chunks_of(tree):
    """Cuts every matrix along its first axis; vectors and scalars stay whole."""
    return jax.tree.map(
        lambda leaf: ocp.SaveArgs(
            chunk_byte_size=16, shard_axes=(0,) if getattr(leaf, "ndim", 0) else ()
        ),
        tree,
    )


def scoped_sub_chunks(_path, leaf):
    options = ocp_v1.options.ArrayOptions.Saving.StorageOptions
    return options(chunk_byte_size=16, shard_axes=(0,) if getattr(leaf, "ndim", 0) else None)


def orbax_zarr2_sub(path, tree):
    return save_pytree(path, tree, sub_chunks_of(tree))


def orbax_zarr3_sub(path, tree):
    return save_v1(path, tree, array__saving__scoped_storage_options_creator=scoped_sub_chunks)


def orbax_rich(path, tree):
    options = ocp_v1.options.PyTreeOptions().saving.pytree_metadata_options
    return save_v1(
        path,
        tree,
        pytree__saving__pytree_metadata_options=dataclasses.replace(
            options, support_rich_types=True
        ),
    )


LAYOUTS = {
    "v1": save_v1,
    "v1_zarr2": functools.partial(save_v1, array__saving__use_zarr3=False),
    "v1_raw": functools.partial(save_v1, array__saving__use_compression=False),
    "v1_raw_zarr2": functools.partial(
        save_v1, array__saving__use_compression=False, array__saving__use_zarr3=False
    ),
    "v1_files": functools.partial(save_v1, array__saving__use_ocdbt=False),
    "v1_files_zarr2": functools.partial(
        save_v1, array__saving__use_ocdbt=False, array__saving__use_zarr3=False
    ),
    "v1_files_raw": functools.partial(
        save_v1, array__saving__use_ocdbt=False, array__saving__use_compression=False
    ),
    "v1_small_files": functools.partial(save_v1, array__saving__ocdbt_target_data_file_size=256),
    "v1_sub_chunks": orbax_zarr3_sub,
    "v1_no_replica_parallel": functools.partial(save_v1, array__saving__use_replica_parallel=False),
    "v1_replica_folders": functools.partial(
        save_v1,
        array__saving__use_replica_parallel=True,
        array__saving__enable_replica_parallel_separate_folder=True,
    ),
    "v1_training": save_v1_training,
    "v0_standard": save_standard,
    "v0_pytree": save_pytree,
    "v0_pytree_zarr3": functools.partial(save_pytree, use_zarr3=True),
    "v0_pytree_files": functools.partial(save_pytree, use_ocdbt=False),
    "v0_pytree_files_zarr3": functools.partial(save_pytree, use_ocdbt=False, use_zarr3=True),
    "v0_pytree_raw": functools.partial(save_pytree, use_compression=False),
    "v0_sub_chunks": orbax_zarr2_sub,
    "v0_manager": save_manager,
    "v0_manager_composite": save_manager_pytree,
}
# StandardSave takes no strings; every other writer does.
STRINGLESS = {"v0_standard", "v0_manager"}
# The quick run reads what differs in kind; the rest of the grid is for `slow`.
QUICK = {
    "v1", "v1_zarr2", "v1_raw", "v1_files", "v1_sub_chunks", "v1_training",
    "v0_standard", "v0_pytree", "v0_pytree_files", "v0_sub_chunks", "v0_manager",
    "v0_manager_composite",
}  # fmt: skip
EVERY_LAYOUT = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in LAYOUTS
]


def tree_of(layout):
    tree = with_keys(sharded_tree())
    return tree if layout in STRINGLESS else with_strings(tree)


def expectation_of(layout):
    tree = with_keys(expected_tree())
    return tree if layout in STRINGLESS else with_strings(tree)


class Zoo:
    """Checkpoints by Orbax, each written when a test first asks for it."""

    def __init__(self, directory: Path):
        self.directory = directory
        self._paths: dict[str, Path] = {}

    def __getitem__(self, layout: str) -> Path:
        if layout not in self._paths:
            self._paths[layout] = LAYOUTS[layout](self.directory / layout, tree_of(layout))
        return self._paths[layout]

    def copy(self, layout: str, to: Path) -> Path:
        """A copy to damage; the original is shared."""
        return Path(shutil.copytree(self[layout], to / layout))


@pytest.fixture(scope="module")
def zoo(tmp_path_factory):
    eight_mesh()
    return Zoo(tmp_path_factory.mktemp("orbax"))


def item_directory(path: Path) -> Path:
    """Where the tree's files are: the checkpoint itself when it is flat, else its item."""
    candidates = [path, path / "state", path / "default"]
    return next(candidate for candidate in candidates if (candidate / "_METADATA").exists())


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


# ------------------------------------------------------------------------------------ several items


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


def test_composite_one_item(composite):
    assert_same(ckpt.load(composite / "2", item="text"), {"s": "hi", "n": np.arange(3)})
    assert ckpt.load(composite / "2", item="meta")["é"] == "ü"


def test_composite_with_targets(composite):
    like = {"a": put(jnp.zeros(8), "y")}
    restored = ckpt.restore(composite / "6", state=like, text={"s": "", "n": np.zeros(3, int)})
    assert_same(restored["state"], {"a": put(jnp.arange(8.0) + 6, "y")}, sharding=True)
    assert_same(restored["text"], {"s": "hi", "n": np.arange(3)})
    assert_same(ckpt.load(composite / "6", like, item="state"), restored["state"])


def test_unknown_item_names_those_that_exist(composite):
    with pytest.raises(ckpt.CheckpointError, match="state") as caught:
        ckpt.load(composite / "2", item="stat")
    assert "stat" in str(caught.value)


def test_item_directory_loads_by_itself(composite):
    assert_same(ckpt.load(composite / "2" / "text"), {"s": "hi", "n": np.arange(3)})


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


def test_checkpointer_reads_single_item_managers(zoo):
    for layout, step in (("v0_manager", 3), ("v1_training", 5), ("v0_manager_composite", 3)):
        with ckpt.Checkpointer(zoo[layout].parent, read_only=True) as checkpointer:
            assert list(checkpointer.all_steps()) == [step]
            assert_same(checkpointer.load(step), expectation_of(layout), sharding=True)
            tree = tree_of(layout)
            assert_same(checkpointer.load(step, abstract(tree)), tree, sharding=True)


def test_metrics_of_v1_training(zoo):
    assert ckpt.inspect(zoo["v1_training"]).metrics == {"loss": 0.25}
    with ckpt.Checkpointer(zoo["v1_training"].parent, read_only=True) as checkpointer:
        assert checkpointer.metrics(5) == {"loss": 0.25}


@pytest.mark.parametrize(
    ("prefix", "length", "name"),
    [("ckpt", None, "ckpt_7"), (None, 4, "0007"), ("x_y", 3, "x_y_007")],
)
def test_step_names(tmp_path, prefix, length, name):
    options = ocp.CheckpointManagerOptions(step_prefix=prefix, step_format_fixed_length=length)
    with ocp.CheckpointManager(tmp_path, options=options) as manager:
        manager.save(7, args=ocp.args.StandardSave({"a": jnp.ones(2)}))
    assert (tmp_path / name).is_dir()
    with ckpt.Checkpointer(
        tmp_path, step_prefix=prefix, step_format_fixed_length=length, read_only=True
    ) as checkpointer:
        assert list(checkpointer.all_steps()) == [7]
        assert_same(checkpointer.load(7), {"a": jnp.ones(2)})


def test_orbax_temporary_directories_are_no_steps(zoo, tmp_path):
    root = tmp_path / "root"
    shutil.copytree(zoo["v0_manager"], root / "3")
    shutil.copytree(zoo["v0_manager"], root / "4.orbax-checkpoint-tmp")
    with ckpt.Checkpointer(root, read_only=True) as checkpointer:
        assert list(checkpointer.all_steps()) == [3]
    assert (root / "4.orbax-checkpoint-tmp").exists(), "a reader deletes nothing"


def test_we_continue_a_directory_of_orbax(zoo, tmp_path):
    """Saving, keeping and deleting among steps that Orbax wrote."""
    root = tmp_path / "root"
    shutil.copytree(zoo["v0_manager"], root / "3")
    shutil.copytree(zoo["v0_manager"], root / "4")
    tree = {"a": jnp.arange(3.0)}
    with ckpt.Checkpointer(root, max_to_keep=2) as checkpointer:
        assert checkpointer.latest_step() == 4
        checkpointer.save(5, default=tree)
        checkpointer.wait_until_finished()
        assert list(checkpointer.all_steps()) == [4, 5]
    with ocp.CheckpointManager(root) as manager:
        assert sorted(manager.all_steps()) == [4, 5]
        restored = manager.restore(5)
    np.testing.assert_array_equal(restored["a"], tree["a"])


def test_restore_latest_falls_back_from_damage_of_orbax(zoo, tmp_path):
    root = tmp_path / "root"
    for step in ("3", "4"):
        shutil.copytree(zoo["v0_manager"], root / step)
    drop_data_files(root / "4" / "default")
    tree = tree_of("v0_manager")
    with ckpt.Checkpointer(root) as checkpointer:
        with pytest.warns(RuntimeWarning, match="step 4"):
            restored = checkpointer.restore_latest(default=abstract(tree))
        assert restored.step == 3
        assert_same(restored["default"], tree, sharding=True)


def test_v1_checkpointables(tmp_path):
    items = {"state": {"a": put(jnp.arange(8.0), "x")}, "extra": {"x": np.arange(3), "s": "t"}}
    registry = ocp_v1.handlers.local_registry()
    registry.add(ocp_v1.handlers.JsonHandler, checkpointable_name="config")
    context = v1_context(checkpointables__registry=registry)
    with context:
        ocp_v1.save_checkpointables(tmp_path / "c", items | {"config": {"k": [1, None]}})
    got = ckpt.load(tmp_path / "c")
    assert got.pop("config") == {"k": [1, None]}
    assert_same(got, items, sharding=True)


def test_v1_custom_metadata(tmp_path):
    ocp_v1.save(tmp_path / "c", {"a": np.ones(1)}, custom_metadata={"lr": 0.5})
    assert ckpt.inspect(tmp_path / "c").metadata["lr"] == 0.5
    assert ckpt.restore(tmp_path / "c", state={"a": np.zeros(1)}).metadata["lr"] == 0.5


# -------------------------------------------------------------------------------------------- Grain


def grain_iterators(grain):
    dataset = grain.MapDataset.range(100).shuffle(seed=1).batch(4).to_iter_dataset()
    loader = grain.DataLoader(
        data_source=range(50),
        sampler=grain.samplers.IndexSampler(num_records=50, shuffle=True, seed=0),
    )
    return iter(dataset), iter(loader)


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


# ------------------------------------------------------------------------------------------- damage


def rewrite_json(path: Path, change):
    content = json.loads(path.read_text())
    content = change(content) or content
    path.write_text(json.dumps(content))


def data_files(item: Path):
    """Data files of the databases of an item, the largest first."""
    files = [path for path in item.rglob("d/*") if path.is_file()]
    return sorted(files, key=lambda path: path.stat().st_size, reverse=True)


def drop_data_files(item: Path):
    for path in data_files(item):
        path.unlink()


def cut_data_files(item: Path):
    for path in data_files(item):
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size // 2)


def flip_root_node(item: Path):
    """A bit inside the tree of keys at the top, which has checksums of its own."""
    (path,) = (item / "d").iterdir()
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


DAMAGE = {
    "metadata_missing": lambda item: (item / "_METADATA").unlink(),
    "metadata_empty": lambda item: (item / "_METADATA").write_text(""),
    "metadata_garbage": lambda item: (item / "_METADATA").write_bytes(b"\xff\xfe{" * 100),
    "metadata_cut": lambda item: os.truncate(item / "_METADATA", 900),
    "metadata_is_a_list": lambda item: (item / "_METADATA").write_text("[1, 2]"),
    "metadata_without_tree": lambda item: (item / "_METADATA").write_text('{"use_zarr3": true}'),
    "metadata_bad_entry": lambda item: rewrite_json(
        item / "_METADATA",
        lambda meta: meta["tree_metadata"].update({"('x',)": {"key_metadata": 3}}),
    ),
    "metadata_deep": lambda item: (item / "_METADATA").write_text("[" * 100_000 + "]" * 100_000),
    "strings_missing": lambda item: (item / "_strings.json").unlink(),
    "strings_garbage": lambda item: (item / "_strings.json").write_text("{"),
    "strings_lack_one": lambda item: rewrite_json(
        item / "_strings.json", lambda strings: {k: v for k, v in strings.items() if k != "note"}
    ),
    "string_is_no_text": lambda item: rewrite_json(
        item / "_strings.json", lambda strings: strings | {"note": 5}
    ),
    "manifest_missing": lambda item: (item / "manifest.ocdbt").unlink(),
    "manifest_garbage": lambda item: (item / "manifest.ocdbt").write_bytes(b"garbage" * 30),
    "manifest_empty": lambda item: (item / "manifest.ocdbt").write_bytes(b""),
    "data_missing": drop_data_files,
    "data_cut": cut_data_files,
    "index_flipped": flip_root_node,
    "array_metadata_garbage": lambda item: (item / "array_metadatas" / "process_0").write_text("{"),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("with_like", [False, True], ids=["no_like", "like"])
def test_damage_is_an_error_of_ours(zoo, tmp_path, damage, with_like):
    path = zoo.copy("v1", tmp_path)
    DAMAGE[damage](item_directory(path))
    arguments = (abstract(tree_of("v1")),) if with_like else ()
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
        assert_same(got, expectation_of("v1"))


def test_without_sharding_file(zoo, tmp_path):
    path = zoo.copy("v1", tmp_path)
    (path / "state" / "_sharding").unlink()
    got = ckpt.load(path)
    assert_same(got, expectation_of("v1"))
    assert got["params"]["w"].devices() == {jax.devices()[0]}


def test_without_one_sharding(zoo, tmp_path):
    """Orbax itself fails here; the leaf simply goes to the default device."""
    path = zoo.copy("v1", tmp_path)
    name = base64.urlsafe_b64encode(b"params.w").decode()
    rewrite_json(path / "state" / "_sharding", lambda all_: all_.pop(name) and None)
    got = ckpt.load(path)
    assert_same(got, expectation_of("v1"))
    assert got["params"]["w"].devices() == {jax.devices()[0]}


def test_without_optional_files(zoo, tmp_path):
    """All that a reader needs is `_METADATA` and the data, as in Orbax's oldest directories."""
    path = zoo.copy("v0_manager", tmp_path)
    for name in ("_CHECKPOINT_METADATA", "commit_success.txt", "default/commit_success.txt"):
        (path / name).unlink()
    assert_same(ckpt.load(path), expectation_of("v0_manager"), sharding=True)


def test_empty_checkpoint_metadata(zoo, tmp_path):
    path = zoo.copy("v1", tmp_path)
    (path / "_CHECKPOINT_METADATA").write_text("{}")
    assert_same(ckpt.load(path), expectation_of("v1"), sharding=True)


@pytest.mark.parametrize("layout", ["v1_files", "v0_pytree_files"])
def test_missing_chunk_is_no_zero(zoo, tmp_path, layout):
    path = zoo.copy(layout, tmp_path)
    array = item_directory(path) / "params.w"
    chunk = next(
        p for p in array.rglob("*") if p.is_file() and not p.name.startswith((".z", "zarr"))
    )
    chunk.unlink()
    with pytest.raises(ckpt.CheckpointCorrupt) as caught:
        ckpt.load(path)
    assert "params/w" in str(caught.value)
    # The rest is still there.
    assert_same(
        ckpt.load(path, only=lambda path, _: path != "params/w")["opt"],
        expectation_of(layout)["opt"],
    )


@pytest.mark.parametrize("layout", ["v1_files", "v0_pytree_files"])
def test_missing_array_is_no_zero(zoo, tmp_path, layout):
    path = zoo.copy(layout, tmp_path)
    shutil.rmtree(item_directory(path) / "params.w")
    with pytest.raises(ckpt.CheckpointCorrupt, match="params/w"):
        ckpt.load(path)


@pytest.mark.parametrize("layout", ["v1_files", "v0_pytree_files"])
def test_cut_chunk(zoo, tmp_path, layout):
    path = zoo.copy(layout, tmp_path)
    array = item_directory(path) / "params.w"
    for chunk in array.rglob("*"):
        if chunk.is_file() and not chunk.name.startswith((".z", "zarr")):
            os.truncate(chunk, chunk.stat().st_size - 3)
    with pytest.raises(ckpt.CheckpointCorrupt, match="params/w"):
        ckpt.load(path)


def test_a_directory_of_something_else(tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file.txt").write_text("x")
    with pytest.raises(ckpt.CheckpointNotFound):
        ckpt.load(tmp_path / "other")


# ------------------------------------------------------------------------------------------ by hand


def by_hand_spec(item: Path, name: str, array, *, zarr, ocdbt, chunks, **variant):
    """A TensorStore spec for one array, in any of the shapes that the format allows."""
    if ocdbt:
        kvstore = {
            "driver": "ocdbt",
            "base": {"driver": "file", "path": f"{item}/"},
            "path": name + "/" if name else "",
            "config": variant.get("config", {}),
        }
        if "target_data_file_size" in variant:
            kvstore["target_data_file_size"] = variant["target_data_file_size"]
    else:
        kvstore = {"driver": "file", "path": f"{item}/{name}/" if name else f"{item}/"}
    spec = {
        "driver": "zarr3" if zarr == 3 else "zarr",
        "kvstore": kvstore,
        "dtype": array.dtype.name,
        "store_data_equal_to_fill_value": True,
    }
    if zarr == 2:
        metadata = {"shape": array.shape, "chunks": chunks, "compressor": variant.get("compressor")}
        if "order" in variant and array.ndim > 1:
            metadata["order"] = variant["order"]
        if "separator" in variant:
            metadata["dimension_separator"] = variant["separator"]
        return spec | {"metadata": metadata}
    codecs = variant.get("codecs", [{"name": "bytes", "configuration": {"endian": "little"}}])
    metadata = {
        "shape": array.shape,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunks}},
        "codecs": codecs,
    }
    if "separator" in variant:
        metadata["chunk_key_encoding"] = {
            "name": "default",
            "configuration": {"separator": variant["separator"]},
        }
    return spec | {"metadata": metadata}


def write_by_hand(item: Path, leaves, *, zarr=3, ocdbt=True, chunk=None, keep=None, **variant):
    """Writes one item without Orbax; `leaves` is [(key path, value)], ints are sequence positions.

    `keep(name, index)` says which chunks to leave out of the database, to make holes.
    """
    item.mkdir(parents=True)
    context = ts.Context()
    tree, strings = {}, {}
    for path, value in leaves:
        name = ".".join(str(key) for key in path)
        kind = "string" if isinstance(value, str) else "np.ndarray"
        kind = "scalar" if isinstance(value, int | float) else kind
        kind = "jax.Array" if isinstance(value, jax.Array) else kind
        tree[str(tuple(str(key) for key in path))] = {
            "key_metadata": [
                {"key": str(key), "key_type": 1 if isinstance(key, int) else 2} for key in path
            ],
            "value_metadata": {"value_type": kind, "skip_deserialize": False},
        }
        if kind == "string":
            *parents, last = name.split("/")
            node = strings
            for parent in parents:
                node = node.setdefault(parent, {})
            node[last] = value
            continue
        array = np.asarray(value)
        chunks = [max(1, min(size, chunk or size)) for size in array.shape]
        spec = by_hand_spec(item, name, array, zarr=zarr, ocdbt=ocdbt, chunks=chunks, **variant)
        store = ts.open(spec, create=True, open=True, context=context).result()
        if keep is None:
            store.write(array).result()
            continue
        for index in itertools.product(
            *(range(0, size, step) for size, step in zip(array.shape, chunks, strict=True))
        ):
            region = tuple(
                slice(start, min(start + step, size))
                for start, step, size in zip(index, chunks, array.shape, strict=True)
            )
            if keep(name, index):
                store[region].write(array[region]).result()
    if strings:
        (item / "_strings.json").write_text(json.dumps(strings))
    metadata = {"tree_metadata": tree, "use_zarr3": zarr == 3} | variant.get("metadata_extra", {})
    (item / "_METADATA").write_text(json.dumps(metadata))
    return item


def by_hand_leaves():
    random = np.random.default_rng(0)
    return [
        (("params", "w"), jnp.asarray(random.standard_normal((8, 6)), jnp.float32)),
        (("params", "big"), random.standard_normal((100, 33)).astype(np.float32)),
        (("params", "bf16"), random.standard_normal((5, 3)).astype(ml_dtypes.bfloat16)),
        (("opt", 0, "mu"), np.ones((3,), np.float32)),
        (("opt", 1), np.arange(-4, 4, dtype=np.int8)),
        (("opt", 2), np.array(2.5, np.float32)),
        (("key.with.dots", "and/slash"), np.arange(6, dtype=np.int32).reshape(2, 3)),
        (("bools",), np.array([True, False, True])),
        (("complex",), np.array([1 + 2j], np.complex128)),
        (("step",), 7),
        (("rate",), 1.5),
        (("note",), "hello"),
        (("s/1",), "slashed"),
    ]


def by_hand_tree():
    leaves = dict(by_hand_leaves())
    return {
        "params": {name: leaves["params", name] for name in ("w", "big", "bf16")},
        "opt": [{"mu": leaves["opt", 0, "mu"]}, leaves["opt", 1], leaves["opt", 2]],
        "key.with.dots": {"and/slash": leaves["key.with.dots", "and/slash"]},
        **{name: leaves[(name,)] for name in ("bools", "complex", "step", "rate", "note", "s/1")},
    }


LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}
BIG = {"name": "bytes", "configuration": {"endian": "big"}}
CRC = {"name": "crc32c"}


def zstd(level):
    return {"name": "zstd", "configuration": {"level": level}}


BY_HAND = {
    "raw": {},
    "numbered_manifest": {"config": {"manifest_kind": "numbered"}},
    "all_inline": {"config": {"max_inline_value_bytes": 1 << 20}},
    "none_inline": {"config": {"max_inline_value_bytes": 0}},
    "deep_tree": {"config": {"max_decoded_node_bytes": 500}},
    "plain_nodes": {"config": {"compression": None}},
    "many_files": {"target_data_file_size": 300},
    "uneven_chunks": {"chunk": 4},
    "zstd": {"codecs": [LITTLE, zstd(3)]},
    "gzip": {"codecs": [LITTLE, {"name": "gzip", "configuration": {"level": 5}}]},
    "crc": {"codecs": [LITTLE, CRC]},
    "big_endian": {"codecs": [BIG]},
    "v2_raw": {"zarr": 2},
    "v2_zstd": {"zarr": 2, "compressor": {"id": "zstd", "level": 1}},
    "v2_blosc": {
        "zarr": 2,
        "compressor": {"id": "blosc", "cname": "lz4", "clevel": 5, "shuffle": 1},
    },
    "v2_column_major": {"zarr": 2, "order": "F", "chunk": 4},
    "v2_uneven_chunks": {"zarr": 2, "chunk": 4},
    "files_v2": {"zarr": 2, "ocdbt": False},
    "files_v2_slashes": {"zarr": 2, "ocdbt": False, "separator": "/", "chunk": 4},
    "files_v3": {"ocdbt": False},
    "files_v3_zstd": {"ocdbt": False, "codecs": [LITTLE, zstd(1)], "chunk": 4},
    "files_v3_dots": {"ocdbt": False, "separator": ".", "chunk": 4},
}


@pytest.mark.parametrize("variant", BY_HAND)
def test_hand_written(tmp_path, variant):
    item = write_by_hand(tmp_path / "flat", by_hand_leaves(), **BY_HAND[variant])
    assert_same(ckpt.load(item), by_hand_tree())
    step = tmp_path / "step"
    step.mkdir()
    item.rename(step / "default")
    assert_same(ckpt.load(step), by_hand_tree())


@pytest.mark.parametrize("inner", ["raw", "zstd", "crc"])
@pytest.mark.parametrize("where", ["start", "end"])
def test_hand_written_sharding_indexed(tmp_path, inner, where):
    """Chunks inside chunks, the inner ones smaller than the outer."""
    codecs = {"raw": [LITTLE], "zstd": [LITTLE, zstd(1)], "crc": [LITTLE, CRC]}[inner]
    sharding = {
        "name": "sharding_indexed",
        "configuration": {
            "chunk_shape": [2, 3],
            "codecs": codecs,
            "index_codecs": [LITTLE, CRC],
            "index_location": where,
        },
    }
    value = np.random.default_rng(0).standard_normal((8, 12)).astype(np.float32)
    item = write_by_hand(tmp_path / "item", [(("w",), value)], chunk=6, codecs=[sharding])
    assert_same(ckpt.load(item), {"w": value})


@pytest.mark.parametrize("zarr", [2, 3])
@pytest.mark.parametrize("inline", [0, 1 << 20])
def test_merged_databases_of_several_processes(tmp_path, zarr, inline):
    """Each process has a database of its own; the one at the top refers into them."""
    value = np.random.default_rng(0).standard_normal((8, 6)).astype(np.float32)
    item = write_by_hand(tmp_path / "item", [(("w",), value), (("s",), 3)], zarr=zarr, ocdbt=False)
    shutil.rmtree(item / "w")
    shutil.rmtree(item / "s")
    context = ts.Context()
    config = {"max_inline_value_bytes": inline}
    for process in range(4):
        part = item / f"ocdbt.process_{process}"
        for name, array, chunks in (("w", value, [2, 6]), ("s", np.array(3), [])):
            if name == "s" and process:
                continue
            spec = by_hand_spec(
                part, name, array, zarr=zarr, ocdbt=True, chunks=chunks, config=config
            )
            store = ts.open(spec, create=True, open=True, context=context).result()
            rows = slice(2 * process, 2 * process + 2)
            (store if name == "s" else store[rows]).write(
                array if name == "s" else array[rows]
            ).result()

    def database(path):
        spec = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{path}/"}, "config": config}
        return ts.KvStore.open(spec, context=context).result()

    transaction = ts.Transaction(atomic=True)
    parent = database(item).with_transaction(transaction)
    for process in range(4):
        database(item / f"ocdbt.process_{process}").experimental_copy_range_to(parent).result()
    transaction.commit_async().result()
    assert_same(ckpt.load(item), {"w": value, "s": 3})
    if inline == 0:
        shutil.rmtree(item / "ocdbt.process_2")
        with pytest.raises(ckpt.CheckpointCorrupt, match="w"):
            ckpt.load(item)


def test_partial_saves(tmp_path):
    """A checkpoint that Orbax wrote in several sessions and then finalized."""
    parts = {"a": jnp.arange(4.0)}, {"b": {"c": np.arange(3)}}
    for part in parts:
        ocp_v1.partial.save(tmp_path / "c", part)
    with pytest.raises(ckpt.CheckpointNotFound):
        ckpt.load(tmp_path / "c")
    ocp_v1.partial.finalize(tmp_path / "c")
    assert_same(ckpt.load(tmp_path / "c"), parts[0] | parts[1])


@pytest.mark.parametrize("zarr", [2, 3])
@pytest.mark.parametrize("ocdbt", [True, False], ids=["ocdbt", "files"])
def test_holes_are_no_zeros(tmp_path, zarr, ocdbt):
    """Orbax v0 reads a missing chunk as zeros unless a field says otherwise; we never do."""
    item = write_by_hand(
        tmp_path / "item",
        [(("a",), np.ones((8, 8), np.float32)), (("b",), np.ones(3))],
        zarr=zarr,
        ocdbt=ocdbt,
        chunk=4,
        keep=lambda name, index: (name, index) != ("a", (4, 0)),
    )
    with pytest.raises(ckpt.CheckpointCorrupt, match="a"):
        ckpt.load(item)
    assert_same(ckpt.load(item, only="b"), {"b": np.ones(3)})


def test_use_zarr3_absent_means_zarr2(tmp_path):
    item = write_by_hand(tmp_path / "item", by_hand_leaves(), zarr=2)
    rewrite_json(item / "_METADATA", lambda meta: meta.pop("use_zarr3") and None)
    assert_same(ckpt.load(item), by_hand_tree())


def test_damaged_crc_codec_is_corrupt(tmp_path):
    """Where the writer did use checksums, damage shows although the directory is not ours."""
    value = np.arange(4096, dtype=np.float32)
    item = write_by_hand(tmp_path / "item", [(("w",), value)], codecs=[LITTLE, CRC])
    path = data_files(item)[0]
    content = bytearray(path.read_bytes())
    position = content.find(value[1000:1010].tobytes())
    assert position >= 0
    content[position] ^= 1
    path.write_bytes(content)
    with pytest.raises(ckpt.CheckpointCorrupt, match="w"):
        ckpt.load(item)


HOSTILE = """
import json, sys
import ckpt_core as ckpt
answers = []
for path in sys.argv[1:]:
    try:
        ckpt.load(path)
    except ckpt.CheckpointError as error:
        answers.append("refused")
    else:
        answers.append("loaded")
print(json.dumps(answers))
"""


def hostile_directories(tmp_path):
    """Directories that make TensorStore end the process when they reach it unchecked."""
    leaves = [(("w",), np.ones((4, 4), np.float32))]
    huge = write_by_hand(tmp_path / "huge_v3", leaves, ocdbt=False)
    rewrite_json(huge / "w" / "zarr.json", lambda zarr: zarr | {"shape": [2**60, 2**60]})
    chunks = write_by_hand(tmp_path / "huge_chunks", leaves, ocdbt=False, zarr=2)
    rewrite_json(
        chunks / "w" / ".zarray",
        lambda zarr: zarr | {"shape": [2**40, 2**20], "chunks": [2**40, 2**20]},
    )
    deep = write_by_hand(tmp_path / "deep", leaves, ocdbt=False)
    (deep / "w" / "zarr.json").write_text('{"a":' * 200_000 + "1" + "}" * 200_000)
    outside = write_by_hand(tmp_path / "outside", leaves, ocdbt=False)
    rewrite_json(
        outside / "_METADATA",
        lambda meta: {
            **meta,
            "tree_metadata": {
                "('../huge_v3/w',)": {
                    "key_metadata": [{"key": "../huge_v3/w", "key_type": 2}],
                    "value_metadata": {"value_type": "np.ndarray", "skip_deserialize": False},
                }
            },
        },
    )
    return [huge, chunks, deep, outside]


def test_hostile_directories_do_not_end_the_process(tmp_path, run_python):
    paths = hostile_directories(tmp_path)
    answers = run_python(HOSTILE, *map(str, paths), XLA_FLAGS="")
    assert dict(zip(paths, answers, strict=True)) == dict.fromkeys(paths, "refused")


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
