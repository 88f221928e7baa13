"""Names of step directories, and the steps in a directory."""

from __future__ import annotations

from typing import Any

from ckpt_orbax._paths import as_path, as_text
from ckpt_orbax.v0.utils import (
    TMP_DIR_SUFFIX,
    any_checkpoint_step,
    checkpoint_steps,
    checkpoint_steps_paths,
    get_save_directory,
    is_checkpoint_finalized,
    is_tmp_checkpoint,
    step_from_checkpoint_name,
    tmp_checkpoints,
)
from ckpt_orbax.v1.path.step import (
    NameFormat,
    Step,
    composite_name_format,
    is_standard_name_format,
    standard_name_format,
)

Metadata = Step
"""A step that a format of names has found: ``step`` and ``path``."""

is_path_finalized = is_checkpoint_finalized
is_path_temporary = is_tmp_checkpoint


def build_step_path(base_path: Any, name_format: Any, step: int) -> Any:
    """The path of a step."""
    return as_path(as_text(base_path)) / name_format.build_name(step)


def find_step_path(
    base_path: Any, name_format: Any, *, step: int, include_uncommitted: bool = False
) -> Any:
    """The path of a committed step; ValueError if there is none.

    Args:
        base_path: directory of the steps.
        name_format: how they are named.
        step: its number.
        include_uncommitted: of no effect: ckpt's unfinished steps cannot be read.
    """
    return name_format.find_step(base_path, step).path


def latest_step_metadata(root_path: Any, name_format: Any) -> Any:
    """The newest committed step, or None."""
    return max(name_format.find_all(root_path), default=None, key=lambda found: found.step)


def maybe_find_step_metadata(base_path: Any, name_format: Any, *, step: int) -> Any:
    """A committed step, or None."""
    try:
        return name_format.find_step(base_path, step)
    except ValueError:
        return None


def step_metadata_of_checkpoint_path(checkpoint_path: Any, name_format: Any) -> Any:
    """The committed step at a path; ValueError if there is none of this format."""
    path = as_path(as_text(checkpoint_path))
    found = {one.path.name: one for one in name_format.find_all(path.parent)}
    if path.name not in found:
        raise ValueError(f"{path}: no step; there are {', '.join(found) or 'none'} beside it")
    return found[path.name]


def step_prefix_with_underscore(step_prefix: str | None) -> str:
    """What stands before the number in the name of a step."""
    return "" if step_prefix is None else f"{step_prefix}_"


def single_host_load_and_broadcast_name_format(name_format: Any) -> Any:
    """The same format; ckpt lists a directory in one process anyhow."""
    return name_format


__all__ = [
    "TMP_DIR_SUFFIX",
    "Metadata",
    "NameFormat",
    "any_checkpoint_step",
    "build_step_path",
    "checkpoint_steps",
    "checkpoint_steps_paths",
    "composite_name_format",
    "find_step_path",
    "get_save_directory",
    "is_checkpoint_finalized",
    "is_path_finalized",
    "is_path_temporary",
    "is_standard_name_format",
    "is_tmp_checkpoint",
    "latest_step_metadata",
    "maybe_find_step_metadata",
    "single_host_load_and_broadcast_name_format",
    "standard_name_format",
    "step_from_checkpoint_name",
    "step_metadata_of_checkpoint_path",
    "step_prefix_with_underscore",
    "tmp_checkpoints",
]
