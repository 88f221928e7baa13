"""Checkpointables that are not pytrees: objects that write files, data pipelines."""

from __future__ import annotations

from typing import Any

import ckpt_core as ckpt
from ckpt_core import CheckpointInfo
from ckpt_orbax._refused import not_offered
from ckpt_orbax.v1._context import Context


def written_by(handler: Any, value: Any) -> Any:
    """Refused until a checkpoint can hold files."""
    kind = type(value) if handler is None else type(handler)
    raise not_offered(
        f"{kind.__name__}.save()",
        "a checkpoint holds pytrees and data pipelines",
        "save the state of the object as a pytree of arrays, numbers and text",
    )


def needed(name: str, target: Any) -> Any:
    """``target``, an object to set.

    Raises:
        ValueError: there is none.
    """
    if target is None:
        raise ValueError(
            f"{name}: To restore a `StatefulCheckpointable`, you must pass an instance of the object. "
            f"Pass {{{name!r}: the_object}}"
        )
    return target


def load_item(
    info: CheckpointInfo, name: str, target: Any, context: Context, options: ckpt.Options
) -> Any:
    """A checkpointable that is no pytree."""
    return ckpt.load(info.path, item=name, options=options)


def describe_item(info: CheckpointInfo, name: str, context: Context) -> Any:
    """None: only pytrees are described."""
    return None
