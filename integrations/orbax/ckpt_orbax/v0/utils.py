"""Small functions about directories of steps, processes and trees."""

from __future__ import annotations

import re
from typing import Any

import jax
import numpy as np

from ckpt_orbax._paths import as_path, as_text, exists
from ckpt_orbax.multihost import (
    broadcast_one_to_all,
    fully_replicated_host_local_array_to_global_array,
    is_pathways_backend,
    is_primary_host,
    reached_preemption,
    sync_global_processes,
)
from ckpt_orbax.v0.tree import (
    deserialize_tree,
    from_flat_dict,
    get_key_name,
    is_empty_node,
    serialize_tree,
    to_flat_dict,
)
from ckpt_orbax.v0.tree import str_keypath as tuple_path_from_keypath
from ckpt_orbax.v1._describe import is_orbax_checkpoint
from ckpt_orbax.v1.arrays import to_shape_dtype_struct
from ckpt_orbax.v1.path.step import standard_name_format

TMP_DIR_SUFFIX = ".orbax-checkpoint-tmp"
"""In the names of directories that Orbax has not finished."""

_STEP_NAME = re.compile(r"(?:.*_)?(\d+)")


def checkpoint_steps(checkpoint_dir: Any) -> list[int]:
    """The numbers of the steps in a directory, whatever their names begin with.

    Example:
        >>> import ckpt_orbax as ocp, numpy as np, tempfile
        >>> directory = tempfile.mkdtemp()
        >>> ocp.PyTreeCheckpointer().save(directory + "/step_7", {"w": np.ones(2)})
        >>> ocp.utils.checkpoint_steps(directory)
        [7]
    """
    return [step_from_checkpoint_name(path.name) for path in checkpoint_steps_paths(checkpoint_dir)]


def checkpoint_steps_paths(checkpoint_dir: Any) -> list[Any]:
    """The paths of the steps in a directory."""
    directory = as_path(as_text(checkpoint_dir))
    if not exists(directory):
        return []
    return [
        path
        for path in directory.iterdir()
        if _STEP_NAME.fullmatch(path.name) and is_checkpoint_finalized(path)
    ]


def any_checkpoint_step(checkpoint_dir: Any) -> int | None:
    """The number of a step in a directory, or None."""
    return next(iter(checkpoint_steps(checkpoint_dir)), None)


def step_from_checkpoint_name(name: str) -> int:
    """The number in the name of a step.

    Raises:
        ValueError: it is not the name of a step.
    """
    found = _STEP_NAME.fullmatch(name)
    if found is None:
        raise ValueError(f"{name!r} is not the name of a step, such as 7 or step_7")
    return int(found[1])


def is_checkpoint_finalized(path: Any) -> bool:
    """Whether there is a complete checkpoint at a path."""
    return is_orbax_checkpoint(path)


def is_tmp_checkpoint(path: Any) -> bool:
    """Whether the name of a path says that Orbax has not finished it."""
    return TMP_DIR_SUFFIX in as_path(as_text(path)).name


def tmp_checkpoints(checkpoint_dir: Any) -> list[str]:
    """The names in a directory that say that Orbax has not finished them."""
    directory = as_path(as_text(checkpoint_dir))
    if not exists(directory):
        return []
    return [path.name for path in directory.iterdir() if is_tmp_checkpoint(path)]


def is_gcs_path(path: Any) -> bool:
    """Whether a path is in a bucket of Google."""
    return as_text(path).startswith("gs://")


def is_scalar(x: Any) -> bool:
    """Whether something is a number of Python or numpy."""
    return isinstance(x, (int, float, np.number))


def is_dict_key(key: Any) -> bool:
    """Whether a key of a path of jax is a name."""
    return isinstance(key, (jax.tree_util.DictKey, jax.tree_util.GetAttrKey))


def is_sequence_key(key: Any) -> bool:
    """Whether a key of a path of jax is a position."""
    return isinstance(key, (jax.tree_util.FlattenedIndexKey, jax.tree_util.SequenceKey))


def is_empty_or_leaf(x: Any) -> bool:
    """Whether something is a leaf, None or a container without children."""
    return jax.tree_util.all_leaves([x]) or is_empty_node(x)


def sync_global_devices(name: str) -> None:
    """Blocks until all processes have come to the call of this name."""
    sync_global_processes(name)


def get_save_directory(
    step: int,
    directory: Any,
    name: str | None = None,
    step_prefix: str | None = None,
    override_directory: Any = None,
    step_format_fixed_length: int | None = None,
    step_name_format: Any = None,
) -> Any:
    """The path of a step, or of one of its items.

    Args:
        step: its number.
        directory: of the run.
        name: of the item.
        step_prefix, step_format_fixed_length, step_name_format: how steps are named.
        override_directory: the path of the step, instead of all these.
    """
    names = step_name_format or standard_name_format(
        step_prefix=step_prefix, step_format_fixed_length=step_format_fixed_length
    )
    if override_directory is None:
        found = as_path(as_text(directory)) / names.build_name(step)
    else:
        found = as_path(as_text(override_directory))
    return found if name is None else found / name


_PLACEHOLDER, _AGGREGATED = "PLACEHOLDER://", "AGGREGATED://"


def leaf_placeholder(name: str) -> str:
    """The text by which Orbax, before it had files of metadata, marked a leaf that is stored under ``name``."""
    return _PLACEHOLDER + name


def leaf_is_placeholder(leaf: Any) -> bool:
    """Whether a leaf is such a text, or that of a leaf in a file of several."""
    return isinstance(leaf, str) and leaf.startswith((_PLACEHOLDER, _AGGREGATED))


def name_from_leaf_placeholder(placeholder: str) -> str:
    """The name in such a text.

    Raises:
        ValueError: it is none.
    """
    if not leaf_is_placeholder(placeholder):
        raise ValueError(f"{placeholder!r} does not begin with {_PLACEHOLDER!r} or {_AGGREGATED!r}")
    return placeholder.partition("://")[2]


__all__ = [
    "TMP_DIR_SUFFIX",
    "any_checkpoint_step",
    "broadcast_one_to_all",
    "checkpoint_steps",
    "checkpoint_steps_paths",
    "deserialize_tree",
    "from_flat_dict",
    "fully_replicated_host_local_array_to_global_array",
    "get_key_name",
    "get_save_directory",
    "is_checkpoint_finalized",
    "is_dict_key",
    "is_empty_node",
    "is_empty_or_leaf",
    "is_gcs_path",
    "is_pathways_backend",
    "is_primary_host",
    "is_scalar",
    "is_sequence_key",
    "is_tmp_checkpoint",
    "leaf_is_placeholder",
    "leaf_placeholder",
    "name_from_leaf_placeholder",
    "reached_preemption",
    "serialize_tree",
    "step_from_checkpoint_name",
    "sync_global_devices",
    "sync_global_processes",
    "tmp_checkpoints",
    "to_flat_dict",
    "to_shape_dtype_struct",
    "tuple_path_from_keypath",
]
