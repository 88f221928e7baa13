"""``construct_restore_args``: the arguments of a restore from a tree that looks like the result; and waiting for steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

import ckpt_core as ckpt
from ckpt_orbax import multihost
from ckpt_orbax._leaves import PLACEHOLDER as PLACEHOLDER, as_sharding, is_key
from ckpt_orbax._paths import as_text
from ckpt_orbax.metadata import ArrayMetadata, ScalarMetadata, StringMetadata, tree_in
from ckpt_orbax.path.step import checkpoint_steps
from ckpt_orbax.type_handlers import ArrayRestoreArgs, RestoreArgs


def construct_restore_args(
    target: Any,
    sharding_tree: Any = None,
    set_global_shape: bool = True,
    support_layout: bool = False,
    strict: bool = True,
) -> Any:
    """``RestoreArgs`` for each leaf of ``target``.

    Args:
        target: tree of arrays, numbers, texts, ``jax.ShapeDtypeStruct`` or metadata.
        sharding_tree: shardings for its leaves; by default those of ``target``.
        set_global_shape, strict: whether the arguments name the shape; see ``ArrayRestoreArgs``.
        support_layout: of no effect.

    Raises:
        ValueError: a leaf is none of these.

    Example:
        >>> import ckpt_orbax as ocp, numpy as np
        >>> ocp.checkpoint_utils.construct_restore_args({"w": np.zeros(2, np.float32), "n": 1})["n"]
        RestoreArgs(restore_type=<class 'int'>, dtype=None)
    """
    target = jax.tree.map(_key_data, tree_in(target))

    def arguments(value: Any, sharding: Any) -> RestoreArgs:
        found = _restore_args(value, sharding)
        if isinstance(found, ArrayRestoreArgs):
            found.strict = strict
            if set_global_shape and not is_key(value):
                found.shape = found.global_shape = tuple(value.shape)
        return found

    if sharding_tree is None:
        return jax.tree.map(lambda one: arguments(one, getattr(one, "sharding", None)), target)
    return jax.tree.map(arguments, target, tree_in(sharding_tree))


def _key_data(value: Any) -> Any:
    """What is stored of a key."""
    return jax.random.key_data(value) if isinstance(value, jax.Array) and is_key(value) else value


def _restore_args(value: Any, sharding: Any) -> RestoreArgs:
    if value is PLACEHOLDER:
        return RestoreArgs(restore_type=type(PLACEHOLDER))
    if isinstance(value, (str, StringMetadata)):
        return RestoreArgs(restore_type=str)
    if isinstance(value, ScalarMetadata):
        return RestoreArgs(restore_type=python_type(value.dtype), dtype=value.dtype)
    if isinstance(value, jax.Array):
        return ArrayRestoreArgs(sharding=sharding, dtype=value.dtype)
    if isinstance(value, (jax.ShapeDtypeStruct, ArrayMetadata)) and sharding is not None:
        return ArrayRestoreArgs(sharding=as_sharding(sharding), dtype=value.dtype)
    if isinstance(value, (jax.ShapeDtypeStruct, ArrayMetadata, np.ndarray)):
        return RestoreArgs(restore_type=np.ndarray, dtype=value.dtype)
    if isinstance(value, (int, float, np.number)):
        return RestoreArgs(restore_type=type(value))
    raise ValueError(
        f"Unsupported type: {type(value)}: give arrays, numbers, texts or jax.ShapeDtypeStruct"
    )


def python_type(dtype: Any) -> type:
    """The type of Python number for a dtype."""
    kind = np.dtype(dtype).kind
    return bool if kind == "b" else int if kind in "iu" else float


def checkpoints_iterator(
    checkpoint_dir: Any,
    *,
    min_interval_secs: int = 0,
    seconds_to_sleep: int = 1,
    timeout: int | None = None,
    timeout_fn: Callable[[], bool] | None = None,
    **_: Any,
) -> Iterator[int]:
    """The newest step of a directory, again and again, each once; ends after the timeout.

    As with ``ckpt_core.Checkpointer.wait_for_new_step``, retention does not delete a step until the next one is asked for.

    Args:
        checkpoint_dir: of the steps; it may come later.
        min_interval_secs: at least this long between two steps.
        seconds_to_sleep: of no effect: it looks about once a second.
        timeout: seconds to wait for each step; None for ever.
        timeout_fn: called after the timeout; False goes on waiting.
        **_: names of steps, which are found whatever they begin with, and snapshots, which ckpt has not.

    Example:
        >>> import ckpt_orbax as ocp, numpy as np, tempfile
        >>> directory = tempfile.mkdtemp()
        >>> ocp.PyTreeCheckpointer().save(directory + "/7", {"w": np.ones(2)})
        >>> list(ocp.checkpoint_utils.checkpoints_iterator(directory, timeout=0))
        [7]
    """
    with ckpt.Checkpointer(as_text(checkpoint_dir), read_only=True) as reader:
        seen, last, began = None, -1, time.monotonic()
        while True:
            left = None if timeout is None else max(0.0, began + timeout - time.monotonic())
            found = reader.wait_for_new_step(seen, left)
            if found is not None:
                seen, kept = found, max(checkpoint_steps(checkpoint_dir), default=-1)
                kept = int(multihost.broadcast_one_to_all(kept))
                if kept <= last:  # the new one is there only for resuming
                    continue
                last, began = kept, time.monotonic()
                yield kept
                time.sleep(max(0.0, began + min_interval_secs - time.monotonic()))
            elif timeout_fn is None or multihost.broadcast_one_to_all(timeout_fn()):
                return
            began = time.monotonic()
