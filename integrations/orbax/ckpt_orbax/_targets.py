"""Pytrees out of a checkpoint: without a target as Orbax returns them, or as a target asks, leaf by leaf."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

import ckpt_core as ckpt
from ckpt_core import ItemInfo, LeafInfo
from ckpt_orbax._errors import TreeMismatchError
from ckpt_orbax._leaves import PLACEHOLDER, ZEROS, is_abstract_leaf, saved_dtype
from ckpt_orbax._plain import Path, filled, leaves_of, orbax_form, path_text, plain


@dataclass(frozen=True)
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
    return Wanted(_on_devices(leaf, saved) if hasattr(leaf, "sharding") else _on_host(leaf, saved))


def _scalar(path: str, kind: type, saved: LeafInfo | None) -> Wanted:
    """A Python number, or one of numpy; also from an array of one element."""
    if saved is None:
        return Wanted(0, kind)  # which the load will name as missing
    if saved.kind in ZEROS:
        return Wanted(ZEROS[saved.kind], kind)
    if saved.kind == "bigint":  # of more than 64 bits
        return Wanted(2**64, kind)
    if not saved.dtype or int(np.prod(saved.shape)) != 1:
        raise ValueError(
            f"{path}: saved {saved.dtype or saved.kind}{list(saved.shape)}, wanted a scalar, {kind.__name__}"
        )
    return Wanted(
        _empty(saved.shape, saved.dtype), lambda value: kind(np.asarray(value).reshape(()).item())
    )


def _on_devices(leaf: Any, saved: LeafInfo | None) -> Any:
    """A ``jax.ShapeDtypeStruct`` of the leaf; a description may leave shape and dtype open."""
    sharding = getattr(leaf.sharding, "sharding", leaf.sharding)  # a Format has one inside
    return array(saved, leaf.shape, leaf.dtype, sharding)


def array(saved: LeafInfo | None, shape: Any, dtype: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    """An array of jax; of the saved shape and dtype where they are None."""
    if saved is not None:
        shape = saved.shape if shape is None else shape
        dtype = saved_dtype(saved) if dtype is None else dtype
    return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=sharding)


def _on_host(leaf: Any, saved: LeafInfo | None) -> Any:
    """A numpy array of the leaf's shape, which takes no memory; one without elements stands for any shape."""
    shape, dtype = leaf.shape, leaf.dtype
    if saved is not None and not (dtype or saved.dtype):
        # what numpy has no dtype for comes back as it was saved
        return 2**64 if saved.kind == "bigint" else ""
    if saved is not None:
        shape = saved.shape if shape is None or 0 in shape else shape
        dtype = saved.dtype if dtype is None else dtype
    return _empty(tuple(shape), dtype)


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
    ``keep`` says so of them, and ``partial`` leaves out what the target does not name. If the two differ,
    TreeMismatchError has ``leaving_out`` and ``keeping`` as advice for leaves of one side alone.
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
        unexpected = "ignore" if partial else "error"
        loaded = ckpt.load(
            path, like, item=item.name, cast=True, unexpected=unexpected, options=options
        )
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
