"""Small functions about directories of steps, processes and trees."""

from __future__ import annotations

import re
from typing import Any

import ckpt_core as ckpt
from ckpt_orbax._paths import as_path, as_text
from ckpt_orbax.multihost import (
    broadcast_one_to_all,
    fully_replicated_host_local_array_to_global_array,
    is_pathways_backend,
    is_primary_host,
    reached_preemption,
    sync_global_processes,
)
from ckpt_orbax.v0.tree import from_flat_dict, serialize_tree, to_flat_dict
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
    if not directory.exists():
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
    try:
        return bool(ckpt.inspect(as_text(path)).items)
    except (ckpt.CheckpointError, OSError, ValueError):
        return False


def is_tmp_checkpoint(path: Any) -> bool:
    """Whether the name of a path says that Orbax has not finished it."""
    return TMP_DIR_SUFFIX in as_path(as_text(path)).name


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


__all__ = [
    "TMP_DIR_SUFFIX",
    "any_checkpoint_step",
    "broadcast_one_to_all",
    "checkpoint_steps",
    "checkpoint_steps_paths",
    "from_flat_dict",
    "fully_replicated_host_local_array_to_global_array",
    "get_save_directory",
    "is_checkpoint_finalized",
    "is_pathways_backend",
    "is_primary_host",
    "is_tmp_checkpoint",
    "reached_preemption",
    "serialize_tree",
    "step_from_checkpoint_name",
    "sync_global_processes",
    "to_flat_dict",
    "to_shape_dtype_struct",
]
