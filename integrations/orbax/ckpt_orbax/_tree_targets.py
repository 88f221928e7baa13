"""Restore arguments of pytrees as targets that ckpt loads into, leaf by leaf."""

from __future__ import annotations

from typing import Any, cast

import jax
import numpy as np

from ckpt_core import ItemInfo, LeafInfo
from ckpt_orbax._errors import TreeMismatchError
from ckpt_orbax._leaves import (
    PLACEHOLDER,
    AbstractArray,
    as_sharding,
    is_abstract_leaf,
    is_leaf,
    saved_dtype,
)
from ckpt_orbax._plain import filled, leaves_of, orbax_form, path_text, plain
from ckpt_orbax._refused import not_offered
from ckpt_orbax.args import PyTreeRestore, StandardRestore
from ckpt_orbax.checkpoint_utils import python_type
from ckpt_orbax.metadata import (
    ArrayMetadata,
    ScalarMetadata,
    ShardingMetadata,
    StringMetadata,
    TreeMetadata,
)
from ckpt_orbax.type_handlers import ArrayRestoreArgs, RestoreArgs, sharding_of

_TYPES: dict[str, type] = {"int": int, "float": float, "bool": bool, "str": str}
"""Kinds of saved leaves that are values of Python."""


def standard_target(args: StandardRestore, item: ItemInfo) -> Any:
    """The target of a ``StandardRestore``; None for the tree as it was saved."""
    tree = _tree(args.item)
    if tree is None:
        return None
    saved = _saved_leaves(item)

    def wanted(path: Any, leaf: Any) -> Any:
        if leaf is PLACEHOLDER or not _is_target(leaf):
            raise ValueError(f"Unsupported type: {type(leaf)} for key: {path_text(path)}")
        return _like(leaf, saved.get(path), args.fallback_sharding)

    return filled(tree, {path: wanted(path, leaf) for path, leaf in leaves_of(tree).items()})


def _is_target(leaf: Any) -> bool:
    return isinstance(leaf, (ArrayMetadata, StringMetadata)) or is_abstract_leaf(leaf)


def _like(leaf: Any, saved: LeafInfo | None, fallback: Any) -> Any:
    """A leaf that is wanted as ``leaf`` looks: its type, dtype, shape and sharding."""
    if isinstance(leaf, StringMetadata):
        return str
    if isinstance(leaf, ScalarMetadata):
        return python_type(leaf.dtype)
    if not isinstance(leaf, (ArrayMetadata, jax.ShapeDtypeStruct)):
        return leaf
    sharding = None if leaf.sharding is None else as_sharding(leaf.sharding)
    if sharding is None and saved is not None and saved.kind not in ("jax", "key"):
        return AbstractArray(leaf.shape, leaf.dtype)
    return jax.ShapeDtypeStruct(
        leaf.shape, leaf.dtype, sharding=sharding or _saved_sharding(saved, fallback)
    )


def pytree_target(args: PyTreeRestore, item: ItemInfo) -> Any:
    """The target of a ``PyTreeRestore``; None for the tree as it was saved."""
    _refuse_transforms(args)
    given = leaves_of(_tree(args.restore_args))
    tree = _tree(args.item)
    if tree is None and not given:
        return None
    saved, own = _saved_leaves(item), own_values(args, item)
    if tree is None:
        tree = orbax_form(item.tree)
        if unknown := [path_text(path) for path in given if path not in saved]:
            raise ValueError(
                f"restore_args name leaves that were not saved: {', '.join(unknown[:10])}"
            )
    return filled(
        tree,
        {
            path: None
            if path in own
            else leaf
            if leaf is PLACEHOLDER
            else _as_asked(given.get(path) or RestoreArgs(), saved.get(path), leaf)
            for path, leaf in leaves_of(tree).items()
        },
    )


def _refuse_transforms(args: PyTreeRestore) -> None:
    if args.transforms or args.legacy_transform_fn is not None:
        what = "transforms" if args.transforms else "legacy_transform_fn"
        raise not_offered(
            f"PyTreeRestore({what}=)",
            "functions and patterns would change the tree between the file and its checks",
            "ckpt_core.load(path, like, rename=...) for other names, missing= and unexpected= for other "
            "leaves; or restore the saved tree, and change that",
        )
    if args.transforms is not None and not args.transforms_default_to_original:
        raise not_offered(
            "PyTreeRestore(transforms_default_to_original=False)",
            "nothing would be restored but what a transform names",
            "partial_restore=True",
        )
    if args.transforms is not None and args.item is None:
        raise ValueError("transforms={} needs item=: the tree of what is wanted")


def is_partial(args: PyTreeRestore) -> bool:
    """Whether saved leaves that the target does not name are left out."""
    return args.partial_restore or args.transforms is not None


def own_values(args: PyTreeRestore, item: ItemInfo) -> dict[Any, Any]:
    """What the target keeps, by path, because the checkpoint lacks it."""
    wanted = _tree(args.item)
    if args.partial_restore and wanted is not None:
        compared = _Compared()
        compared.compare(plain(wanted), orbax_form(item.tree), ())
        compared.refuse(item.name)
        return compared.lacking
    if args.transforms is None:
        return {}
    saved = _saved_leaves(item)
    leaves = leaves_of(wanted).items()
    return {path: leaf for path, leaf in leaves if path not in saved and is_leaf(leaf)}


class _Compared:
    """A target beside the saved tree: dicts may name less and more, lists are of one length."""

    def __init__(self) -> None:
        self.lacking: dict[Any, Any] = {}
        self._problems: list[str] = []

    def compare(self, wanted: Any, saved: Any, path: tuple[Any, ...]) -> None:
        """Collects the leaves of ``wanted`` that ``saved`` lacks, and where the two do not fit."""
        if wanted is None or wanted is PLACEHOLDER:
            return
        if isinstance(wanted, tuple):
            wanted = list(cast(tuple[Any, ...], wanted))
        kinds = [_container(wanted), _container(saved)]
        if kinds[0] != kinds[1] and saved is not None:
            self._problems.append(f"{path_text(path)}: saved {kinds[1]}, wanted {kinds[0]}")
        elif isinstance(wanted, list):
            self._compare_lists(cast(list[Any], wanted), saved or [], path)
        elif isinstance(wanted, dict):
            named: dict[Any, Any] = saved or {}
            for key, child in cast(dict[Any, Any], wanted).items():
                if key in named:
                    self.compare(child, named[key], (*path, key))
                else:
                    found = leaves_of(child).items()
                    self.lacking |= {(*path, key, *below): leaf for below, leaf in found}
        elif saved is None:
            self.lacking[path] = wanted

    def _compare_lists(self, wanted: list[Any], saved: list[Any], path: tuple[Any, ...]) -> None:
        if len(wanted) != len(saved):
            self._problems.append(
                f"{path_text(path)}: saved a list of {len(saved)}, wanted one of {len(wanted)}"
            )
        for position, (one, other) in enumerate(zip(wanted, saved, strict=False)):
            self.compare(one, other, (*path, position))

    def refuse(self, name: str) -> None:
        """Raises TreeMismatchError if the two do not fit somewhere."""
        if self._problems:
            lines = "\n".join(self._problems)
            raise TreeMismatchError(
                f"User-provided restore item and on-disk value differ ({name}): {lines}\n"
                "With partial_restore=True what is not wanted of a dict is left out, and of a list: put "
                "ocp.PLACEHOLDER in its place"
            )


def _container(node: Any) -> str:
    return "a dict" if isinstance(node, dict) else "a list" if isinstance(node, list) else "a leaf"


def _as_asked(args: RestoreArgs, saved: LeafInfo | None, leaf: Any) -> Any:
    """A leaf that is wanted as its arguments say; ``leaf`` is what the target has there."""
    if saved is None:  # the load names it as missing
        return AbstractArray(leaf.shape, leaf.dtype) if _is_array(leaf) else 0
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


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and isinstance(getattr(leaf, "dtype", None), np.dtype)


def _as_saved(saved: LeafInfo, dtype: Any) -> Any:
    if saved.kind in _TYPES:
        number = _TYPES[saved.kind]
        return number if dtype is None or number is str else python_type(dtype)
    if saved.kind == "jax":
        return _on_devices(saved, None, dtype, None)
    return AbstractArray(None, dtype)


def _on_devices(saved: LeafInfo, shape: Any, dtype: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    """An array as asked for, and as it was saved where that is open."""
    return jax.ShapeDtypeStruct(
        saved.shape if shape is None else shape,
        saved_dtype(saved) if dtype is None else dtype,
        sharding=_saved_sharding(saved, None) if sharding is None else sharding,
    )


def _saved_sharding(saved: LeafInfo | None, fallback: Any) -> Any:
    """The saved sharding on the devices of this process, else ``fallback``."""
    if saved is None or not saved.sharding:
        return fallback
    try:
        return ShardingMetadata(saved.sharding).to_jax_sharding()
    except ValueError:
        return fallback


def _tree(given: Any) -> Any:
    return given.tree if isinstance(given, TreeMetadata) else given


def _saved_leaves(item: ItemInfo) -> dict[Any, LeafInfo]:
    return leaves_of(orbax_form(item.tree))


def refuse_other_shapes(args: Any, error: Any) -> None:
    """Raises NotOffered if shapes differ, and the arguments want arrays padded or cut."""
    leaves = leaves_of(_tree(getattr(args, "restore_args", None)))
    lenient = not getattr(args, "strict", True) or any(
        isinstance(leaf, ArrayRestoreArgs) and not leaf.strict for leaf in leaves.values()
    )
    if lenient and any(mismatch.kind == "shape" for mismatch in error.mismatches):
        raise not_offered(
            "strict=False for a leaf of another shape",
            f"an array would be cut or filled silently: {error}",
            "restore the saved shape, and slice or jnp.pad it",
        ) from error
