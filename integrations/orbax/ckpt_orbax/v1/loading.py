"""``load`` and its forms."""

from __future__ import annotations

import warnings
from typing import Any

import ckpt_core as ckpt
from ckpt_core import CheckpointInfo
from ckpt_orbax import _trees
from ckpt_orbax._leaves import PLACEHOLDER as PLACEHOLDER
from ckpt_orbax._leaves import is_abstract_leaf
from ckpt_orbax._paths import as_text
from ckpt_orbax._response import AsyncResponse, Waiting, in_thread
from ckpt_orbax.v1 import _engine, _files
from ckpt_orbax.v1._context import Context, get_context
from ckpt_orbax.v1._describe import inspected, pytree_item
from ckpt_orbax.v1._names import AUTO, STATE, check_checkpointables, check_name
from ckpt_orbax.v1.errors import MissingCheckpointablesError


def load(path: Any, abstract_state: Any = None, *, checkpointable_name: str | None = AUTO) -> Any:
    """The pytree of a checkpoint, as a new tree; every byte is verified.

    Args:
        path: a checkpoint of ckpt or of Orbax, of its first or second API.
        abstract_state: tree of ``jax.ShapeDtypeStruct``, arrays, or types of numbers: arrays come in
            their dtype and sharding. ``ocp.PLACEHOLDER`` leaves a leaf out. None: as it was saved.
        checkpointable_name: which pytree; by default the only or first one.

    Raises:
        InvalidLayoutError: there is no checkpoint, or no such pytree.
        TreeMismatchError: the trees differ; the message has every difference.

    Example:
        >>> from ckpt_orbax import v1 as ocp
        >>> import jax, jax.numpy as jnp, tempfile
        >>> path = tempfile.mkdtemp() + "/checkpoint"
        >>> ocp.save(path, {"w": jnp.ones(2), "step": 7})
        >>> ocp.load(path, {"w": jax.ShapeDtypeStruct((2,), jnp.bfloat16), "step": ocp.PLACEHOLDER})
        {'step': Ellipsis, 'w': Array([1, 1], dtype=bfloat16)}
    """
    context = get_context()
    options = _engine.engine_options(context)
    abstract_state = _described(abstract_state)
    check_name(checkpointable_name)
    check_abstract(abstract_state)
    info = inspected(as_text(path))
    name = pytree_item(info, checkpointable_name).name
    return _load_tree(info, name, abstract_state, context, options)


def load_checkpointables(path: Any, abstract_checkpointables: Any = None) -> dict[str, Any]:
    """Several checkpointables by name: those of ``abstract_checkpointables``, or all.

    Args:
        path: see ``load``.
        abstract_checkpointables: for each name a target, an object to set, or None for what was saved.

    Raises:
        MissingCheckpointablesError: the checkpoint lacks some of them.
        NoCheckpointError: there is no checkpoint.
    """
    context = get_context()
    options = _engine.engine_options(context)
    abstract_checkpointables = _described(abstract_checkpointables)
    info = inspected(as_text(path))
    if abstract_checkpointables is None:
        abstract_checkpointables = dict.fromkeys(info.items)
    targets = check_checkpointables(abstract_checkpointables, "abstract_checkpointables")
    if missing := sorted(targets.keys() - info.items.keys()):
        raise MissingCheckpointablesError(
            f"Requested checkpointables: {', '.join(missing)}: not in {info.path}, which has "
            f"{', '.join(sorted(info.items)) or 'none'}"
        )
    loaded: dict[str, Any] = {}
    live: dict[str, Any] = {}
    for name, target in targets.items():
        if info.items[name].form == "tree":
            loaded[name] = _load_tree(info, name, target, context, options)
        elif info.items[name].form == "process":
            live[name] = _files.needed(name, target)
        else:
            loaded[name] = _files.load_item(info, name, target, context, options)
    if live:  # last, when nothing can fail any more but these
        ckpt.restore(info.path, items=live, options=options)
    return {name: live.get(name, loaded.get(name)) for name in targets}


def _load_tree(
    info: CheckpointInfo, name: str, target: Any, context: Context, options: ckpt.Options
) -> Any:
    return _trees.load_tree(
        info.path,
        info.items[name],
        target,
        options,
        partial=context.pytree.loading.partial_load,
        leaving_out="ocp.PLACEHOLDER in their place, or context.pytree.loading.partial_load = True",
    )


def _described(target: Any) -> Any:
    """The tree inside of a ``CheckpointMetadata``, else ``target`` itself."""
    is_metadata = hasattr(target, "metadata") and hasattr(target, "custom_metadata")
    return target.metadata if is_metadata else target


def check_abstract(tree: Any) -> None:
    """Raises TypeError if a leaf cannot be part of a target."""
    import jax

    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if not is_abstract_leaf(leaf):
            raise TypeError(
                f"{jax.tree_util.keystr(path)}: Unsupported abstract leaf type for loading: `{type(leaf)}`: give a "
                "jax.ShapeDtypeStruct, an array, a number, a text, or a type of number"
            )


def load_async(
    path: Any, abstract_state: Any = None, *, checkpointable_name: str | None = STATE
) -> AsyncResponse[Any]:
    """As ``load``, in the background; unlike Orbax's, for every layout."""

    def work() -> Any:
        return load(path, abstract_state, checkpointable_name=checkpointable_name)

    return Waiting(in_thread(work, "ckpt-load").result)


def load_checkpointables_async(
    path: Any, abstract_checkpointables: Any = None
) -> AsyncResponse[dict[str, Any]]:
    """As ``load_checkpointables``, in the background; objects are set by ``result()``'s time."""

    def work() -> dict[str, Any]:
        return load_checkpointables(path, abstract_checkpointables)

    return Waiting(in_thread(work, "ckpt-load").result)


def load_pytree(*arguments: Any, **named: Any) -> Any:
    """Deprecated name of ``load``."""
    warnings.warn("Use `load` instead.", DeprecationWarning, stacklevel=2)
    return load(*arguments, **named)


def load_pytree_async(*arguments: Any, **named: Any) -> AsyncResponse[Any]:
    """Deprecated name of ``load_async``."""
    warnings.warn("Use `load_async` instead.", DeprecationWarning, stacklevel=2)
    return load_async(*arguments, **named)
