"""Live objects in targets: finds them, copies them for a load, sets them, and notes their state for an undo."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ckpt_core import _adapters
from ckpt_core._errors import UnsupportedLeaf
from ckpt_core._load.plans import LiveTarget, Make, Undo
from ckpt_core._tree import FlatTree, Node, Path, flatten, format_path, importable_type, unflatten
from ckpt_core.arguments import with_article

_CHANGEABLE = (np.random.Generator, np.random.RandomState, random.Random)


@dataclass
class Copies:
    """Maps each live object of ``like``, the target of a load, to the copy that is set instead. If originals share arrays or
    submodules, their copies do, too. The first call makes all copies, so that a target without live objects costs nothing.
    """

    like: Any
    item: str = ""  # for messages
    _made: dict[int, Any] = field(default_factory=dict[int, Any])

    def __call__(self, obj: Any) -> Any:
        """The copy of a live object in ``like``; raises UnsupportedLeaf if any object there cannot be copied."""
        if not self._made:
            self._make_all()
        return self._made[id(obj)]

    def _make_all(self) -> None:
        of_adapter: dict[int, list[tuple[Path, Any]]] = {}
        for path, obj in _adapters.live_objects(self.like):
            found = of_adapter.setdefault(id(_adapters.adapter_for(obj)), [])
            if all(obj is not other for _, other in found):
                found.append((path, obj))
        made: dict[int, Any] = {}
        for found in of_adapter.values():
            originals = [obj for _, obj in found]
            copies = _adapters.copies_of(originals)
            for (path, obj), copied in zip(found, copies, strict=True):
                if copied is None:
                    raise self._refusal(path, obj)
                made[id(obj)] = copied
        self._made = made

    def _refusal(self, path: Path, obj: Any) -> UnsupportedLeaf:
        where, name = format_path(path), type(obj).__name__
        item = self.item if self.item.isidentifier() else "state"
        return UnsupportedLeaf(
            f"{where}: load changes nothing that it is given, and {with_article(name)} cannot be copied. To set it in place, "
            f"use restore(path, {item}=...); to get only the saved values, leave it out of like",
            leaf=where,
            type_name=name,
        )


def detached(like: Any) -> Any:
    """``like`` with a copy of each live object, so that the caller may change the originals; raises UnsupportedLeaf if one
    cannot be copied.
    """
    copies = Copies(like)
    flat = flatten(
        like,
        expand=lambda obj: (
            None if _adapters.adapter_for(obj) is None else ((), lambda _: copies(obj))
        ),
        keep=True,
    )
    return unflatten(flat.root, flat.leaves)


def live_tree(
    like: Any,
    flat: FlatTree,
    objects: Sequence[tuple[Any, bool]],
    limit_bytes: int,
    set_parts: Callable[[Mapping[Path, Any]], list[Any]] | None,
) -> LiveTarget:
    """A target that contains live objects, or is one; ``unflatten`` sets them. A restore drops the leaves that it has replaced
    from ``flat.leaves``, to free their memory. If undoing it needs copies of more than ``limit_bytes``, it is not undone.
    """

    def undo() -> Undo | None:
        if all(_adapters.is_held_by_reference(obj) for obj, _ in objects):
            return functools.partial(unflatten, flat.root, list(flat.leaves))
        try:
            now = flatten(like, expand=_adapters.expander(), keep=True)
        except Exception:
            return None  # an object without a state yet can still be restored, only not set back
        return _setting_back(functools.partial(unflatten, now.root), now.leaves, limit_bytes)

    def leaves() -> Sequence[Any]:
        return flatten(like, expand=_adapters.expander()).leaves

    return LiveTarget(objects, undo, False, set_parts, leaves)


def live_object(
    adapter: Any, obj: Any, now: FlatTree, root: Node, limit_bytes: int
) -> tuple[Make, LiveTarget]:
    """The functions that set a user's object with ``set_state``, which accepts any saved structure. ``now`` is its state before
    the restore. ``root`` is the saved structure, with the present container classes where both are equal.
    """

    def make(leaves: list[Any]) -> Any:
        adapter.set_state(obj, unflatten(root, leaves, resolve=importable_type))
        return obj

    def set_before(leaves: list[Any]) -> None:
        adapter.set_state(obj, unflatten(now.root, leaves))

    undo = functools.partial(_setting_back, set_before, now.leaves, limit_bytes)
    return make, LiveTarget([(obj, False)], undo)


def pipeline(adapter: Any, obj: Any, state: Any) -> tuple[Make, LiveTarget]:
    """A data pipeline, set before arrays are read, so that it prefetches meanwhile."""

    def make(_: list[Any]) -> Any:
        adapter.set_state(obj, state)
        return obj

    def undo() -> Undo:
        has_position = isinstance(adapter, _adapters.verbs.HasPosition)
        before = adapter.get_position(obj) if has_position else adapter.get_state(obj)
        return functools.partial(adapter.set_state, obj, before)

    return make, LiveTarget([(obj, False)], undo, early=True)


def _setting_back(
    set_all: Callable[[list[Any]], object], leaves: Sequence[Any], limit_bytes: int
) -> Undo | None:
    """A function that calls ``set_all`` with the present leaves; None if it must copy more than ``limit_bytes``. Numpy arrays
    and random generators are copied now, as they can be written to; jax arrays are not.
    """
    arrays = [leaf for leaf in leaves if isinstance(leaf, np.ndarray)]
    if sum(array.nbytes for array in arrays) > limit_bytes:
        return None
    return functools.partial(set_all, [_copy_if_writable(leaf) for leaf in leaves])


def _copy_if_writable(leaf: Any) -> Any:
    """A copy of a numpy array or random generator; any other leaf itself."""
    if isinstance(leaf, np.ndarray):
        return np.array(leaf)
    return copy.deepcopy(leaf) if isinstance(leaf, _CHANGEABLE) else leaf
