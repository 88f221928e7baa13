"""Items out of a checkpoint, as their arguments and their handlers ask for them."""

from __future__ import annotations

import dataclasses
import json
import os
from typing import Any

import ckpt_core as ckpt
from ckpt_core import CheckpointInfo
from ckpt_orbax import _tree_targets, _trees, checkpoint_args, handlers
from ckpt_orbax import args as args_lib
from ckpt_orbax._describe import is_metrics
from ckpt_orbax._errors import TreeMismatchError
from ckpt_orbax._handler_files import is_of_its_framework, saved_by, with_directory
from ckpt_orbax._items import ARRAY, ItemHandlers
from ckpt_orbax._paths import as_path, kind_at
from ckpt_orbax._plain import filled, leaves_of
from ckpt_orbax.checkpoint_args import as_call
from ckpt_orbax.type_handlers import wants_broadcast


def restored_items(
    info: CheckpointInfo, args: Any, items: ItemHandlers, options: ckpt.Options
) -> args_lib.Composite:
    """Several items of a checkpoint: those of ``args``, or all."""
    if not args:
        found = {
            name: restored_item(info, name, None, items.known(name), options)
            for name, item in info.items.items()
            if not is_metrics(item)
        }
        return args_lib.Composite(**found)
    missing = [name for name in args if name not in info.items]
    if missing:
        raise KeyError(
            f'Item "{missing[0]}" was not found in the checkpoint. Available items: '
            f"{', '.join(info.items) or 'none'}"
        )
    return args_lib.Composite(
        **{
            name: restored_item(info, name, one, items.of_args(name, one), options)
            for name, one in args.items()
        }
    )


def restored_item(
    info: CheckpointInfo, name: str, args: Any, handler: Any, options: ckpt.Options
) -> Any:
    """One item of a checkpoint, as ``args`` ask for it; by whoever saved it if ``handler`` is None."""
    item = info.items[name]
    value = getattr(args, "item", None)
    if item.form == "process":
        own = (
            handler is not None
            and handlers.overrides(handler)
            and not is_of_its_framework(handler, value)
        )
        if own and info.format_version is None:  # of Orbax: it wrote these
            return restored_by(handler, as_path(info.path) / name, args)
        return _set_live(info, name, value, options)
    if handler is None and args is None:
        handler = _who_saved(info, name)
    if handler is not None and handlers.overrides(handler):
        return _by_handler(info, name, args, handler, options)
    if item.form == "tree" and not isinstance(args, args_lib.JsonRestore):
        return _tree(info, name, args, handler, options)
    if item.form == "files":
        raise ValueError(
            f"{info.path}: item {name!r} was saved by a handler that is not known here: register it with "
            "ocp.args.register_with_handler; ckpt_core.load gives the files themselves"
        )
    return ckpt.load(info.path, item=name, options=options)


def _tree(info: CheckpointInfo, name: str, args: Any, handler: Any, options: ckpt.Options) -> Any:
    item = info.items[name]
    single = isinstance(args, args_lib.ArrayRestore) or isinstance(
        handler, handlers.ArrayCheckpointHandler
    )
    if single:
        wanted = getattr(args, "restore_args", None)
        args = args_lib.PyTreeRestore(restore_args=None if wanted is None else {ARRAY: wanted})
    if wants_broadcast(getattr(args, "restore_args", None)):
        options = dataclasses.replace(options, broadcast=True)
    own: dict[Any, Any] = {}
    if isinstance(args, args_lib.PyTreeRestore):
        target, partial = _tree_targets.pytree_target(args, item), _tree_targets.is_partial(args)
        own = _tree_targets.own_values(args, item)
        keeping = "ocp.args.PyTreeRestore(partial_restore=True)"
        leaving_out = (
            "ocp.PLACEHOLDER in their place, or ocp.args.PyTreeRestore(partial_restore=True)"
        )
    else:
        args = args or args_lib.StandardRestore()
        target, partial = _tree_targets.standard_target(args, item), False
        keeping = leaving_out = (
            "ocp.PyTreeCheckpointer().restore(path, item=target, partial_restore=True), with the path of "
            "the item"
        )
    try:
        loaded = _trees.load_tree(
            info.path,
            item,
            target,
            options,
            partial=partial,
            leaving_out=leaving_out,
            keeping=keeping,
        )
    except TreeMismatchError as error:
        _tree_targets.refuse_other_shapes(args, error.__cause__)
        raise
    if own:
        loaded = filled(args.item, {**leaves_of(loaded), **own})
    return loaded[ARRAY] if single and isinstance(loaded, dict) and ARRAY in loaded else loaded


def _set_live(info: CheckpointInfo, name: str, target: Any, options: ckpt.Options) -> Any:
    if target is None:
        raise ValueError(
            f"{info.path}: item {name!r} is the state of each process: give the object as item="
        )
    ckpt.restore(info.path, items={name: target}, options=options)
    return target


def _who_saved(info: CheckpointInfo, name: str) -> Any:
    """A new handler of the registered class that saved an item of files; None for other forms."""
    if info.items[name].form != "files":
        return None
    files = ckpt.load(info.path, item=name)
    cls = checkpoint_args.handler_of_type_name(saved_by(info, name, files))
    return None if cls is None else cls()


def _by_handler(
    info: CheckpointInfo, name: str, args: Any, handler: Any, options: ckpt.Options
) -> Any:
    if info.items[name].form != "files":
        raise ValueError(
            f"{info.path}: item {name!r} is a {info.items[name].form} of ckpt's own, and "
            f"{type(handler).__name__} reads files"
        )
    if args is None and checkpoint_args.has_registered_args(handler):
        args = checkpoint_args.get_registered_args_cls(handler)[1]()
    files = ckpt.load(info.path, item=name, options=options)
    return with_directory(files, lambda directory: restored_by(handler, directory, args))


def restored_by(handler: Any, directory: Any, args: Any) -> Any:
    """What a handler of the user reads in a directory."""
    if args is None:
        return handler.restore(directory)
    given, named = as_call(args)
    return handler.restore(directory, *given, **named)


def flat_value(path: str, handler: Any, args: Any, why: ckpt.CheckpointNotFound) -> Any:
    """What a handler reads in a directory that Orbax wrote for it alone; else raises ``why``, the engine's error."""
    if kind_at(path) != "directory":
        raise FileNotFoundError(f"Checkpoint at {path} not found.")
    if isinstance(handler, handlers.JsonCheckpointHandler):
        written = os.path.join(path, "metadata")
        if kind_at(written) != "file":
            raise why
        with open(written, "rb") as file:
            return json.load(file)
    if not handlers.overrides(handler):  # ckpt itself reads such items
        raise why
    return restored_by(handler, as_path(path), args)
