"""Single checkpoints: ``save``, ``load``, ``metadata`` and their forms; and each checkpointable as an item of one."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any, TypedDict, TypeVar, Unpack, cast

import jax

import ckpt_core as ckpt
from ckpt_core import CheckpointInfo, ItemInfo
from ckpt_core.arguments import an
from ckpt_orbax import _checkpointables as handlers, _errors as errors, _targets
from ckpt_orbax._handler_files import NOTE, frameworks_of, run, saved_by, with_directory, written
from ckpt_orbax._leaves import is_empty, is_leaf
from ckpt_orbax._paths import as_path, as_text
from ckpt_orbax.future import AsyncResponse, in_thread
from ckpt_orbax.metadata import (
    CheckpointMetadata,
    custom_metadata_of,
    is_metrics,
    times_of,
    tree_of,
)
from ckpt_orbax.v1._context import Context, engine_options, get_context, refuse_unsupported, stored

STATE = "state"
"""Name of a pytree that was saved without one."""
AUTO = "AUTO"
"""Name that stands for the only or most likely pytree."""
_FIRST = (STATE, "pytree", "default")
_RESERVED = frozenset({AUTO, "metrics", "_CHECKPOINT_DELETION"})
_STATEFUL = (
    "orbax.checkpoint.experimental.v1._src.handlers.stateful_checkpointable_handler."
    "StatefulCheckpointableHandler"
)
"""The type name under which Orbax records what saved itself."""
_Call = TypeVar("_Call", bound=Callable[..., Any])


def deprecated(call: _Call) -> _Call:
    """A function under a name of earlier releases of Orbax's second API, which warns."""

    @functools.wraps(call)
    def warned(*arguments: Any, **named: Any) -> Any:
        warnings.warn(f"Use `{call.__name__}` instead.", DeprecationWarning, stacklevel=2)
        return call(*arguments, **named)

    return cast(_Call, warned)


def check_checkpointables(given: Any, what: str) -> dict[str, Any]:
    """``given``, if it is a dict of checkpointables by names that are allowed."""
    if not isinstance(given, dict):
        raise ValueError(f"{what} must be a dict of names to objects, got {an(given)}")
    for name in cast(dict[str, Any], given):
        _check_name(name)
    return cast(dict[str, Any], given)


def _check_name(name: str) -> None:
    if not name:
        raise ValueError("a checkpointable's name must not be empty")
    if name in _RESERVED:
        raise ValueError(f"Provided reserved checkpointable key: {name!r}; choose another name")


class Saving(TypedDict, total=False):
    """Further arguments of ``save`` and its forms."""

    overwrite: bool
    custom_metadata: Any


def save(
    path: Any,
    state: Any,
    *,
    checkpointable_name: str = STATE,
    overwrite: bool = False,
    custom_metadata: Any = None,
) -> None:
    """Writes a pytree at ``path``; when it returns, a power cut cannot lose it.

    Args:
        path: directory, or URL in a bucket; it must not exist.
        state: pytree of arrays, numbers and text.
        checkpointable_name: name of the pytree in the checkpoint.
        overwrite: replace what is there, in one step: a crash leaves the old or the new one.
        custom_metadata: a JSON value of your own.

    Raises:
        DestinationExistsError: there is something at ``path``.
        ValueError: the tree is empty, or has a leaf that Orbax does not save.

    Example:
        >>> from ckpt_orbax import v1 as ocp
        >>> import numpy as np, tempfile
        >>> path = tempfile.mkdtemp() + "/checkpoint"
        >>> ocp.save(path, {"w": np.ones(2)})
        >>> ocp.load(path)["w"].tolist()
        [1.0, 1.0]
    """
    more: Saving = {"overwrite": overwrite, "custom_metadata": custom_metadata}
    save_async(path, state, checkpointable_name=checkpointable_name, **more).result()


def save_async(
    path: Any, state: Any, *, checkpointable_name: str = STATE, **more: Unpack[Saving]
) -> AsyncResponse[None]:
    """As ``save``, in the background; blocks only until the arrays are copied."""
    check_state(state)
    return save_checkpointables_async(path, {checkpointable_name: state}, **more)


def save_checkpointables(
    path: Any, checkpointables: dict[str, Any], **more: Unpack[Saving]
) -> None:
    """As ``save``, for several named objects: pytrees, data pipelines, objects with a handler."""
    save_checkpointables_async(path, checkpointables, **more).result()


def save_checkpointables_async(
    path: Any,
    checkpointables: dict[str, Any],
    *,
    overwrite: bool = False,
    custom_metadata: Any = None,
) -> AsyncResponse[None]:
    """As ``save_checkpointables``, in the background."""
    context = context_of_save(checkpointables)
    items, options = items_of(checkpointables, context), engine_options(context)
    try:
        pending = ckpt.save_async(
            as_text(path),
            items=items,
            overwrite=overwrite,
            metadata=custom_metadata,
            options=options,
        )
    except ckpt.CheckpointExists as error:
        raise errors.DestinationExistsError(str(error)) from error
    return AsyncResponse(pending.result, context.asynchronous.post_finalization_callback)


def context_of_save(checkpointables: Any, default: Context | None = None) -> Context:
    """The Context of a save of named objects; raises ValueError if there are none, or a name is not allowed."""
    context = get_context(default)
    if not checkpointables:
        raise ValueError(f"checkpointables must name what is to be saved, got {checkpointables!r}")
    check_checkpointables(checkpointables, "checkpointables")
    refuse_unsupported(context)
    return context


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
    options = engine_options(context)
    abstract_state = _tree_in(abstract_state)
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
    options = engine_options(context)
    abstract_checkpointables = _tree_in(abstract_checkpointables)
    info = inspected(as_text(path))
    if abstract_checkpointables is None:
        abstract_checkpointables = dict.fromkeys(info.items)
    targets = check_checkpointables(abstract_checkpointables, "abstract_checkpointables")
    if missing := sorted(targets.keys() - info.items.keys()):
        raise errors.MissingCheckpointablesError(
            f"Requested checkpointables: {', '.join(missing)}: not in {info.path}, which has "
            f"{', '.join(sorted(info.items)) or 'none'}"
        )
    loaded: dict[str, Any] = {}
    live: dict[str, Any] = {}
    for name, target in targets.items():
        if info.items[name].form == "tree":
            loaded[name] = _load_tree(info, name, target, context, options)
        elif info.items[name].form == "process":
            live[name] = _needed(name, target)
        else:
            loaded[name] = _load_item(info, name, target, context, options)
    if live:  # last, when nothing can fail any more but these
        ckpt.restore(info.path, items=live, options=options)
    return {name: live.get(name, loaded.get(name)) for name in targets}


def _load_tree(
    info: CheckpointInfo, name: str, target: Any, context: Context, options: ckpt.Options
) -> Any:
    return _targets.load_tree(
        info.path,
        info.items[name],
        target,
        options,
        partial=context.pytree.loading.partial_load,
        leaving_out="ocp.PLACEHOLDER in their place, or context.pytree.loading.partial_load = True",
    )


def _tree_in(target: Any) -> Any:
    """The tree inside of a ``CheckpointMetadata``, else ``target`` itself."""
    is_metadata = hasattr(target, "metadata") and hasattr(target, "custom_metadata")
    return target.metadata if is_metadata else target


def load_async(
    path: Any, abstract_state: Any = None, *, checkpointable_name: str | None = STATE
) -> AsyncResponse[Any]:
    """As ``load``, in the background; unlike Orbax's, for every layout."""
    work = functools.partial(load, path, abstract_state, checkpointable_name=checkpointable_name)
    return AsyncResponse(in_thread(work, "ckpt-load").result)


def load_checkpointables_async(
    path: Any, abstract_checkpointables: Any = None
) -> AsyncResponse[dict[str, Any]]:
    """As ``load_checkpointables``, in the background; objects are set by ``result()``'s time."""
    work = functools.partial(load_checkpointables, path, abstract_checkpointables)
    return AsyncResponse(in_thread(work, "ckpt-load").result)


def metadata(path: Any, checkpointable_name: str | None = AUTO) -> CheckpointMetadata[Any]:
    """The tree of a checkpoint with shape, dtype and sharding at each leaf; a target for ``load``.

    Raises:
        InvalidLayoutError: there is no checkpoint, or no such pytree.

    Example:
        >>> from ckpt_orbax import v1 as ocp
        >>> import numpy as np, tempfile
        >>> path = tempfile.mkdtemp() + "/checkpoint"
        >>> ocp.save(path, {"w": np.ones(2)}, custom_metadata={"lr": 0.1})
        >>> found = ocp.metadata(path)
        >>> found.metadata["w"].shape, found.custom_metadata
        ((2,), {'lr': 0.1})
    """
    return _metadata(path, lambda info, _: tree_of(pytree_item(info, checkpointable_name)))


def checkpointables_metadata(path: Any) -> CheckpointMetadata[dict[str, Any]]:
    """As ``metadata``, for each checkpointable; None for those without a description."""

    def describe(info: CheckpointInfo, context: Context) -> dict[str, Any]:
        return {name: _describe_item(info, name, context) for name in info.items}

    return _metadata(path, describe)


def inspected(path: str) -> CheckpointInfo:
    """``ckpt_core.inspect``, without the item that holds the metrics."""
    try:
        info = ckpt.inspect(path)
    except ckpt.CheckpointNotFound as error:
        raise errors.NoCheckpointError(str(error)) from error
    items = {name: item for name, item in info.items.items() if not is_metrics(item)}
    return dataclasses.replace(info, items=items)


def pytree_item(info: CheckpointInfo, name: str | None) -> ItemInfo:
    """The pytree of this name; the only or most likely one for ``AUTO`` or None."""
    if name not in (None, AUTO):
        _check_name(name)
    trees = {one: item for one, item in info.items.items() if item.form == "tree"}
    if name is None or name == AUTO:
        name = next((one for one in (*_FIRST, *sorted(trees)) if one in trees), None)
    if name is not None and name in trees:
        return trees[name]
    held = ", ".join(f"{item.name} ({item.form})" for item in info.items.values()) or "nothing"
    wanted = "no pytree" if name is None else f"no pytree {name!r}"
    raise errors.InvalidLayoutError(f"{info.path}: {wanted} in this checkpoint: it has {held}")


def _metadata(
    path: Any, describe: Callable[[CheckpointInfo, Context], Any]
) -> CheckpointMetadata[Any]:
    context = get_context()
    refuse_unsupported(context)
    info = inspected(as_text(path))
    return CheckpointMetadata(
        as_path(path, context.file.path_class),
        metadata=describe(info, context),
        **times_of(info),
        custom_metadata=custom_metadata_of(info),
    )


def items_of(checkpointables: dict[str, Any], context: Context) -> dict[str, Any]:
    """What ckpt saves for each checkpointable."""
    return {name: _item(name, value, context) for name, value in checkpointables.items()}


def _item(name: str, value: Any, context: Context) -> Any:
    if isinstance(value, (ckpt.Files, ckpt.Json, ckpt.SavedFiles)):
        return value
    handler = handlers.handler_for_save(context.checkpointables.registry, name, value)
    if frameworks_of(type(value)) and isinstance(value, handlers.StatefulCheckpointable):
        return value  # a data pipeline: the engine knows what it has to keep
    if isinstance(handler, handlers.PyTreeHandler):
        if is_empty(value):
            raise ValueError(f"{name}: Found empty item: there is nothing to save")
        return stored(value, context)
    if isinstance(handler, handlers.JsonHandler):
        return ckpt.Json(value)
    return _written_by(handler, value)


def check_state(state: Any) -> None:
    """Raises ValueError if the tree has a leaf that Orbax does not save."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        if not is_leaf(leaf):
            place = jax.tree_util.keystr(path) or "the state"
            raise ValueError(
                f"{place}: Unsupported leaf type for saving: `{type(leaf)}`. Supported are jax and numpy "
                "arrays, numbers and text; ckpt_core.save takes more"
            )


class Directory:
    """An existing directory, as a handler's ``save`` gets it."""

    def __init__(self, path: Any) -> None:
        self.path = path

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.name

    def __truediv__(self, other: Any) -> Directory:
        return Directory(self.path / other)

    async def await_creation(self) -> Any:
        """The directory, which exists."""
        self.path.mkdir(parents=True, exist_ok=True)
        return self.path


def _written_by(handler: Any, value: Any) -> ckpt.Files:
    """The files that a handler writes."""

    async def save(directory: Any) -> None:
        background = await handler.save(Directory(as_path(directory)), value)
        if background is not None:
            await background

    files = written(type(handler), functools.partial(run, save))
    if isinstance(handler, handlers.StatefulCheckpointableHandler):
        files.orbax_handler = _STATEFUL
    return files


def _needed(name: str, target: Any) -> Any:
    """``target``, an object to set; raises ValueError if there is none."""
    if target is None:
        raise ValueError(
            f"{name}: To restore a `StatefulCheckpointable`, you must pass an instance of the object. "
            f"Pass {{{name!r}: the_object}}"
        )
    return target


def _load_item(
    info: CheckpointInfo, name: str, target: Any, context: Context, options: ckpt.Options
) -> Any:
    """A checkpointable that is no pytree."""
    loaded = ckpt.load(info.path, item=name, options=options)
    if info.items[name].form != "files":
        return loaded
    if target is None and info.format_version is not None and NOTE not in loaded.names():
        return loaded  # saved as ckpt.Files, not by a handler
    wrote = saved_by(info, name, loaded)
    handler = _handler(name, target, context, wrote)
    if handler is None:
        of = f" of {wrote}" if wrote else ""
        into = "" if target is None else f" into a {type(target).__name__}"
        raise errors.NoEntryError(
            f"{name}: no handler is registered that loads these {len(loaded)} files{of}{into}: register one with "
            "ocp.handlers.register_handler; ckpt_core.load gives the files themselves"
        )
    if isinstance(handler, handlers.StatefulCheckpointableHandler):
        _needed(name, target)

    async def load(directory: Any) -> Any:
        return await (await handler.load(directory, target))

    return with_directory(loaded, functools.partial(run, load))


def _handler(name: str, target: Any, context: Context, wrote: str | None) -> Any:
    """The handler that loads an item of files into a target, given who wrote it; None without one."""
    if isinstance(target, handlers.StatefulCheckpointable):
        return handlers.StatefulCheckpointableHandler()
    handler = handlers.handler_for_load(context.checkpointables.registry, name, target, wrote)
    return None if isinstance(handler, handlers.FORMS) else handler


def _describe_item(info: CheckpointInfo, name: str, context: Context) -> Any:
    """The tree of an item with a description at each leaf, or what its handler says of it; None without one."""
    if info.items[name].form == "tree":
        return tree_of(info.items[name])
    if info.items[name].form != "files":
        return None
    files = ckpt.load(info.path, item=name)
    handler = _handler(name, None, context, saved_by(info, name, files))
    if handler is None:
        return None
    return with_directory(files, functools.partial(run, handler.metadata))


save_pytree, save_pytree_async = deprecated(save), deprecated(save_async)
load_pytree, load_pytree_async = deprecated(load), deprecated(load_async)
pytree_metadata = deprecated(metadata)
