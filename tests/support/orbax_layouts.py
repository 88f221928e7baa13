"""Checkpoints in every layout that Orbax writes, and what each must load as."""

import dataclasses
import functools
import json
import shutil
from collections import namedtuple
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint import v1 as ocp_v1

from tests.support.orbax import eight_mesh, put

Moments = namedtuple("Moments", "mu nu")


@dataclasses.dataclass
class Pair:
    """A pytree node with named fields, which Orbax stores as a dict."""

    left: object
    right: object


jax.tree_util.register_dataclass(Pair, data_fields=["left", "right"], meta_fields=[])


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


def save_v1_training(path, tree, step=5):
    with ocp_v1.training.Checkpointer(path) as checkpointer:
        checkpointer.save(step, tree, metrics={"loss": 0.25})
    return path / str(step)


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


def orbax_zarr2_sub(path, tree):
    """Cuts every matrix along its first axis; vectors and scalars stay whole."""

    def cut(leaf):
        axes = (0,) if getattr(leaf, "ndim", 0) else ()
        return ocp.SaveArgs(chunk_byte_size=16, shard_axes=axes)

    return save_pytree(path, tree, jax.tree.map(cut, tree))


def orbax_zarr3_sub(path, tree):
    def cut(_path, leaf):
        options = ocp_v1.options.ArrayOptions.Saving.StorageOptions
        return options(chunk_byte_size=16, shard_axes=(0,) if getattr(leaf, "ndim", 0) else None)

    return save_v1(path, tree, array__saving__scoped_storage_options_creator=cut)


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


@pytest.fixture(name="zoo", scope="module")
def make_zoo(tmp_path_factory):
    eight_mesh()
    return Zoo(tmp_path_factory.mktemp("orbax"))


def item_directory(path: Path) -> Path:
    """Where the tree's files are: the checkpoint itself when it is flat, else its item."""
    candidates = [path, path / "state", path / "default"]
    return next(candidate for candidate in candidates if (candidate / "_METADATA").exists())


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
