"""Pytrees out of a checkpoint: as Orbax returns them without a target, as a target asks, or as the first API's arguments do."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

import ckpt_core as ckpt
from ckpt_core import ItemInfo, LeafInfo
from ckpt_orbax import metadata, type_handlers
from ckpt_orbax._errors import TreeMismatchError
from ckpt_orbax._leaves import (
    PLACEHOLDER,
    ZEROS,
    AbstractArray,
    Path,
    as_sharding,
    filled,
    is_abstract_leaf,
    is_leaf,
    leaves_of,
    orbax_form,
    path_text,
    plain,
    saved_dtype,
)
from ckpt_orbax._refused import not_offered
from ckpt_orbax.args import PyTreeRestore, StandardRestore
from ckpt_orbax.checkpoint_utils import python_type
from ckpt_orbax.metadata import ArrayMetadata, ScalarMetadata, StringMetadata, tree_in

_PARTIAL = "ocp.args.PyTreeRestore(partial_restore=True)"


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What one leaf of a target asks for: ``like`` is ckpt's target, ``finish`` turns what comes into what Orbax returns."""

    like: Any
    finish: Callable[[Any], Any] = lambda value: value


def wanted(path: str, leaf: Any, saved: LeafInfo | None) -> Wanted:
    """What a leaf of a target asks for, given what was saved at its place."""
    if leaf is PLACEHOLDER:
        return Wanted(leaf)
    if not is_abstract_leaf(leaf):
        raise TypeError(
            f"{path}: Unsupported abstract leaf type for loading: `{type(leaf)}`: give a jax.ShapeDtypeStruct, an array, "
            "a number, a text, or a type of number"
        )
    kind: Any = leaf if isinstance(leaf, type) else type(leaf)
    if issubclass(kind, str):
        number = ZEROS.get(saved.kind) if saved is not None and isinstance(leaf, type) else None
        return Wanted("") if number is None else Wanted(number, str)
    if isinstance(leaf, type) or issubclass(kind, (int, float, np.generic)):
        return _scalar(path, kind, saved)
    return Wanted(_array(leaf, saved))


def _scalar(path: str, kind: type, saved: LeafInfo | None) -> Wanted:
    """A Python number, or one of numpy; also from an array of one element."""
    numbers = {**ZEROS, "bigint": 2**64}  # the last for all of more than 64 bits
    if saved is None or saved.kind in numbers:  # the load will name what is missing
        return Wanted(numbers["int" if saved is None else saved.kind], kind)
    if not saved.dtype or int(np.prod(saved.shape)) != 1:
        raise ValueError(
            f"{path}: saved {saved.dtype or saved.kind}{list(saved.shape)}, wanted a scalar, {kind.__name__}"
        )
    return Wanted(
        _empty(saved.shape, saved.dtype), lambda value: kind(np.asarray(value).reshape(()).item())
    )


def _array(leaf: Any, saved: LeafInfo | None) -> Any:
    """A ``jax.ShapeDtypeStruct`` of the leaf, which may leave shape and dtype open; for the host an array without memory."""
    shape, dtype, on_host = leaf.shape, leaf.dtype, not hasattr(leaf, "sharding")
    if saved is not None:
        if on_host and not (dtype or saved.dtype):
            # what numpy has no dtype for comes back as it was saved
            return 2**64 if saved.kind == "bigint" else ""
        shape = saved.shape if shape is None or (on_host and 0 in shape) else shape
        dtype = saved_dtype(saved) if dtype is None else dtype
    if on_host:
        return _empty(tuple(shape), dtype)
    sharding = getattr(leaf.sharding, "sharding", leaf.sharding)  # a Format has one inside
    return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=sharding)


def _empty(shape: tuple[int, ...], dtype: Any) -> Any:
    return np.broadcast_to(np.zeros((), dtype), shape)


def saved_leaves(item: ItemInfo) -> dict[str, LeafInfo]:
    """The leaves of an item by the text of their paths."""
    return {leaf.path: leaf for leaf in item.leaves}


def load_tree(
    path: str,
    item: ItemInfo,
    target: Any,
    options: ckpt.Options,
    *,
    ask: Callable[[str, Any, LeafInfo | None], Wanted] = wanted,
    keep: Callable[[Any], bool] = lambda _: False,
    partial: bool = False,
    leaving_out: str,
    keeping: str = "",
) -> Any:
    """One item of a checkpoint as a new tree, as ``ask`` says of each leaf of a target. Leaves that were not saved stay if
    ``keep`` wants them, and ``partial`` leaves out what the target does not name. ``leaving_out`` and ``keeping`` are advice.
    """
    if target is None:
        return orbax_form(ckpt.load(path, item=item.name, options=options))
    saved, own = saved_leaves(item), dict[Path, Any]()
    asked: dict[Path, Wanted] = {}
    misplaced: list[ckpt.Mismatch] = []

    def like_of(at: Path, leaf: Any) -> Any:
        text = path_text(at)
        if text not in saved and keep(leaf):
            own[at] = leaf
            return None
        asked[at] = one = ask(text, leaf, saved.get(text))
        if one.like is PLACEHOLDER and text not in saved:
            why = "... for a leaf, and no leaf has this path"
            misplaced.append(ckpt.Mismatch(text, "missing", None, why))
        return one.like

    try:
        like = plain(target, like_of)
        if misplaced:
            raise ckpt.StructureMismatch(misplaced)
        rest = "ignore" if partial else "error"
        loaded = ckpt.load(path, like, item=item.name, cast=True, unexpected=rest, options=options)
    except ckpt.StructureMismatch as error:
        raise TreeMismatchError(
            f"User-provided restore item and on-disk value differ ({item.name or path}): "
            + _differences(error, leaving_out, keeping)
        ) from error
    values = leaves_of(loaded)
    return filled(target, {at: one.finish(values[at]) for at, one in asked.items()} | own)


def _differences(error: ckpt.StructureMismatch, leaving_out: str, keeping: str) -> str:
    """A message with Orbax's own arguments as advice instead of those of ``ckpt_core.load``."""
    kinds = {one.kind for one in error.mismatches}
    lines = [str(one) for one in error.mismatches] or [str(error)]
    if "unexpected" in kinds or not kinds:
        lines.append(f"To leave saved leaves out: {leaving_out}")
    if "missing" in kinds:
        lines.append("What was not saved cannot be restored: leave it out of what is asked for")
        if keeping:
            lines.append(f"To keep the target's values there: {keeping}")
    return "\n".join(lines)


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
        isinstance(leaf, type_handlers.ArrayRestoreArgs) and not leaf.strict
        for leaf in leaves.values()
    )
    if lenient and any(one.kind == "shape" for one in getattr(error, "mismatches", ())):
        raise not_offered(
            "strict=False for a leaf of another shape",
            f"an array would be cut or filled silently: {error}",
            "restore the saved shape, and slice or jnp.pad it",
        ) from error


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
    return _placed(saved, leaf.shape, leaf.dtype, sharding, fallback)


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
    if any(isinstance(one, type_handlers.SingleReplicaArrayRestoreArgs) for one in given.values()):
        options = dataclasses.replace(options, broadcast=True)

    def keep(leaf: Any) -> bool:
        return args.partial_restore or (args.transforms is not None and is_leaf(leaf))

    def ask(at: str, leaf: Any, saved: LeafInfo | None) -> Wanted:
        if leaf is not PLACEHOLDER:
            leaf = _as_asked(given.get(at) or type_handlers.RestoreArgs(), saved, leaf)
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


def _as_asked(args: type_handlers.RestoreArgs, saved: LeafInfo | None, leaf: Any) -> Any:
    """A leaf that is wanted as its arguments say; ``leaf`` is what the target has there."""
    if saved is None:  # the load names it as missing
        is_array = hasattr(leaf, "shape") and isinstance(getattr(leaf, "dtype", None), np.dtype)
        return AbstractArray(leaf.shape, leaf.dtype) if is_array else 0
    kind, dtype = args.restore_type, args.dtype
    if kind is type(PLACEHOLDER):
        return PLACEHOLDER
    sharding = type_handlers.sharding_of(args)
    if saved.kind == "key":  # arguments made from a target speak of the numbers inside of it
        return _placed(saved, None, None, sharding)
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
    return _placed(saved, getattr(args, "global_shape", None), dtype, sharding)


def _as_saved(saved: LeafInfo, dtype: Any) -> Any:
    if saved.kind == "str":
        return str
    if saved.kind in ZEROS:
        return type(ZEROS[saved.kind]) if dtype is None else python_type(dtype)
    if saved.kind == "jax":
        return _placed(saved, None, dtype, None)
    return AbstractArray(None, dtype)


def _placed(
    saved: LeafInfo | None, shape: Any, dtype: Any, sharding: Any, fallback: Any = None
) -> ArrayMetadata:
    """An array as asked for, on the saved devices where that is open; on ``fallback`` if these are not here."""
    if sharding is None:
        sharding = fallback
        if saved is not None and saved.sharding:
            with contextlib.suppress(ValueError):
                sharding = metadata.ShardingMetadata(saved.sharding).to_jax_sharding()
    return ArrayMetadata("", None, shape, sharding, dtype)


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
