"""Trees as the restore arguments of the first API ask for them, leaf by leaf."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

import ckpt_core as ckpt
from ckpt_core import ItemInfo, LeafInfo
from ckpt_orbax._errors import TreeMismatchError
from ckpt_orbax._leaves import (
    PLACEHOLDER,
    ZEROS,
    AbstractArray,
    as_sharding,
    is_abstract_leaf,
    is_leaf,
)
from ckpt_orbax._plain import Path, leaves_of, orbax_form, path_text, plain
from ckpt_orbax._refused import not_offered
from ckpt_orbax._targets import Wanted, array, load_tree, saved_leaves, wanted
from ckpt_orbax.args import PyTreeRestore, StandardRestore
from ckpt_orbax.checkpoint_utils import python_type
from ckpt_orbax.metadata import (
    ArrayMetadata,
    ScalarMetadata,
    ShardingMetadata,
    StringMetadata,
    tree_in,
)
from ckpt_orbax.type_handlers import ArrayRestoreArgs, RestoreArgs, sharding_of, wants_broadcast

_PARTIAL = "ocp.args.PyTreeRestore(partial_restore=True)"


def restored_tree(path: str, item: ItemInfo, args: Any, options: ckpt.Options) -> Any:
    """A tree of a checkpoint as a ``PyTreeRestore`` or ``StandardRestore`` asks for it; as it was saved for None."""
    restore: Any = _pytree if isinstance(args, PyTreeRestore) else _standard
    args = args or StandardRestore()
    try:
        return restore(path, item, args, options)
    except TreeMismatchError as error:
        _refuse_other_shapes(args, error.__cause__)
        raise


def _refuse_other_shapes(args: Any, error: Any) -> None:
    """Raises NotOffered if shapes differ, and the arguments want arrays padded or cut."""
    leaves = leaves_of(tree_in(getattr(args, "restore_args", None)))
    lenient = not getattr(args, "strict", True) or any(
        isinstance(leaf, ArrayRestoreArgs) and not leaf.strict for leaf in leaves.values()
    )
    if lenient and any(one.kind == "shape" for one in getattr(error, "mismatches", ())):
        raise not_offered(
            "strict=False for a leaf of another shape",
            f"an array would be cut or filled silently: {error}",
            "restore the saved shape, and slice or jnp.pad it",
        ) from error


# ----------------------------------------------------------------------------- as the target looks


def _standard(path: str, item: ItemInfo, args: StandardRestore, options: ckpt.Options) -> Any:
    def ask(at: str, leaf: Any, saved: LeafInfo | None) -> Wanted:
        described = isinstance(leaf, (ArrayMetadata, StringMetadata))
        if leaf is PLACEHOLDER or not (described or is_abstract_leaf(leaf)):
            raise ValueError(f"Unsupported type: {type(leaf)} for key: {at}")
        return wanted(at, _like(leaf, saved, args.fallback_sharding), saved)

    instead = "ocp.PyTreeCheckpointer().restore(path, item=target, partial_restore=True), with the path of the item"
    target = tree_in(args.item)
    return load_tree(path, item, target, options, ask=ask, leaving_out=instead, keeping=instead)


def _like(leaf: Any, saved: LeafInfo | None, fallback: Any) -> Any:
    """A leaf that is wanted as ``leaf`` looks: its type, dtype, shape and sharding."""
    if isinstance(leaf, StringMetadata):
        return str
    if isinstance(leaf, ScalarMetadata):
        return python_type(leaf.dtype)
    if not isinstance(leaf, (ArrayMetadata, jax.ShapeDtypeStruct)):
        return leaf
    sharding = as_sharding(leaf.sharding)
    if sharding is None and saved is not None and saved.kind not in ("jax", "key"):
        return AbstractArray(leaf.shape, leaf.dtype)
    return _on_devices(saved, leaf.shape, leaf.dtype, sharding, fallback)


# --------------------------------------------------------------------------- as the arguments say


def _pytree(path: str, item: ItemInfo, args: PyTreeRestore, options: ckpt.Options) -> Any:
    _refuse_transforms(args)
    given = {path_text(at): one for at, one in leaves_of(tree_in(args.restore_args)).items()}
    target = tree_in(args.item)
    if target is None and given:
        target = orbax_form(item.tree)
        if unknown := given.keys() - saved_leaves(item):
            named = ", ".join(sorted(unknown)[:10])
            raise ValueError(f"restore_args name leaves that were not saved: {named}")
    if args.partial_restore and (problems := [*_unlike(plain(target), orbax_form(item.tree))]):
        lines = "\n".join(problems)
        raise TreeMismatchError(
            f"User-provided restore item and on-disk value differ ({item.name}): {lines}\n"
            "With partial_restore=True what is not wanted of a dict is left out, and of a list: put "
            "ocp.PLACEHOLDER in its place"
        )
    if wants_broadcast(args.restore_args):
        options = dataclasses.replace(options, broadcast=True)

    def keep(leaf: Any) -> bool:
        return args.partial_restore or (args.transforms is not None and is_leaf(leaf))

    def ask(at: str, leaf: Any, saved: LeafInfo | None) -> Wanted:
        if leaf is not PLACEHOLDER:
            leaf = _as_asked(given.get(at) or RestoreArgs(), saved, leaf)
        return wanted(at, leaf, saved)

    return load_tree(
        path,
        item,
        target,
        options,
        ask=ask,
        keep=keep,
        partial=args.partial_restore or args.transforms is not None,
        leaving_out=f"ocp.PLACEHOLDER in their place, or {_PARTIAL}",
        keeping=_PARTIAL,
    )


def _refuse_transforms(args: PyTreeRestore) -> None:
    none = args.transforms is not None and not args.transforms_default_to_original
    given = {"transforms": args.transforms, "legacy_transform_fn": args.legacy_transform_fn}
    given["transforms_default_to_original"] = none
    for name in filter(given.get, given):
        raise not_offered(
            f"PyTreeRestore({name}=)",
            "functions and patterns would change the tree between the file and its checks",
            "ckpt_core.load(path, like, rename=...) for other names, partial_restore=True for other leaves; or restore "
            "the saved tree, and change that",
        )
    if args.transforms is not None and args.item is None:
        raise ValueError("transforms={} needs item=: the tree of what is wanted")


def _as_asked(args: RestoreArgs, saved: LeafInfo | None, leaf: Any) -> Any:
    """A leaf that is wanted as its arguments say; ``leaf`` is what the target has there."""
    if saved is None:  # the load names it as missing
        is_array = hasattr(leaf, "shape") and isinstance(getattr(leaf, "dtype", None), np.dtype)
        return AbstractArray(leaf.shape, leaf.dtype) if is_array else 0
    kind, dtype = args.restore_type, args.dtype
    if kind is type(PLACEHOLDER):
        return PLACEHOLDER
    sharding = sharding_of(args)
    if saved.kind == "key":  # arguments made from a target speak of the numbers inside of it
        return _on_devices(saved, None, None, sharding)
    if kind is None and sharding is None:
        return _as_saved(saved, dtype)
    if kind is np.ndarray:
        return AbstractArray(None, dtype)
    if isinstance(kind, type) and issubclass(kind, (int, float, str, np.generic)):
        return kind
    if kind is not None and not issubclass(kind, jax.Array):
        raise ValueError(
            f"{saved.path}: Unsupported restore_type {kind!r}: give jax.Array, np.ndarray or a type of "
            "number or text"
        )
    return _on_devices(saved, getattr(args, "global_shape", None), dtype, sharding)


def _as_saved(saved: LeafInfo, dtype: Any) -> Any:
    if saved.kind == "str":
        return str
    if saved.kind in ZEROS:
        return type(ZEROS[saved.kind]) if dtype is None else python_type(dtype)
    if saved.kind == "jax":
        return _on_devices(saved, None, dtype, None)
    return AbstractArray(None, dtype)


def _on_devices(
    saved: LeafInfo | None, shape: Any, dtype: Any, sharding: Any, fallback: Any = None
) -> jax.ShapeDtypeStruct:
    """An array as asked for, and as it was saved where that is open; ``fallback`` if the saved devices are not here."""
    if sharding is None:
        sharding = fallback
        if saved is not None and saved.sharding:
            with contextlib.suppress(ValueError):
                sharding = ShardingMetadata(saved.sharding).to_jax_sharding()
    return array(saved, shape, dtype, sharding)


def _unlike(target: Any, saved: Any, path: Path = ()) -> Iterator[str]:
    """Where a target does not fit the saved tree: dicts may name less and more, lists are of one length."""
    if target is None or target is PLACEHOLDER:
        return
    kind, other_kind = _container(target), _container(saved)
    if kind != other_kind and saved is not None:
        yield f"{path_text(path)}: saved {other_kind}, wanted {kind}"
    elif kind == "a dict":
        for key, child in target.items():
            if saved is not None and key in saved:
                yield from _unlike(child, saved[key], (*path, key))
    elif kind == "a list":
        others = saved or []
        if len(target) != len(others):
            yield f"{path_text(path)}: saved a list of {len(others)}, wanted one of {len(target)}"
        for position, (one, other) in enumerate(zip(target, others, strict=False)):
            yield from _unlike(one, other, (*path, position))


def _container(node: Any) -> str:
    if isinstance(node, dict):
        return "a dict"
    return "a list" if isinstance(node, (list, tuple)) else "a leaf"
