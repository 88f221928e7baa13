"""Live objects in targets: found, copied where nothing may change, noted where they are set."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ckpt_core import _adapters
from ckpt_core._errors import UnsupportedLeaf
from ckpt_core._lazy import jax
from ckpt_core._tree import Path, flatten, format_path, unflatten

_CHANGEABLE = (np.random.Generator, np.random.RandomState, random.Random)


def live_objects(tree: Any) -> Iterator[tuple[Path, Any]]:
    """Every live object in a tree that an adapter takes, with where it stands; none is asked anything."""
    marked: dict[int, Any] = {}

    def mark(obj: Any) -> Any:
        if _adapters.adapter_for(obj) is None:
            return None
        mark = jax.ShapeDtypeStruct((), np.bool_)  # a leaf, each one an object of its own
        marked[id(mark)] = (mark, obj)
        return mark, list

    flat = flatten(tree, expand=mark)
    for path, leaf in zip(flat.paths, flat.leaves, strict=True):
        if id(leaf) in marked:
            yield path, marked[id(leaf)][1]


class Copies:
    """Gives for each live object of a ``like`` the copy that a load sets in its place.

    The copies share among themselves what the originals share. They are made when the first is
    asked for, so that a tree without live objects costs nothing.

    Args:
        like: the target of a load.
        item: that it is the target of, for messages.
    """

    def __init__(self, like: Any, item: str = "") -> None:
        self._like = like
        self._item = item
        self._made: dict[int, Any] = {}

    def __call__(self, obj: Any) -> Any:
        """The copy of one of the objects.

        Raises:
            UnsupportedLeaf: one of them cannot be copied.
        """
        if not self._made:
            self._make_all()
        return self._made[id(obj)]

    def _make_all(self) -> None:
        of_adapter: dict[int, list[tuple[Path, Any]]] = {}
        for path, obj in live_objects(self._like):
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
        item = self._item if self._item.isidentifier() else "state"
        return UnsupportedLeaf(
            f"{where}: load changes nothing that it is given, and a {name} cannot be copied. To set it, use "
            f"restore(path, {item}=...); for the values that were saved, leave it out of like",
            leaf=where,
            type_name=name,
        )


def detached(like: Any) -> Any:
    """``like`` with copies in the place of its live objects, which may change from now on.

    Raises:
        UnsupportedLeaf: an object that cannot be copied.
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


def refuse_twice(targets: Mapping[str, Any], lives: Sequence[Sequence[tuple[Any, bool]]]) -> None:
    """Refuses targets of which one live object is several: the last one would win in silence.

    Args:
        targets: by item.
        lives: of each, the live objects in it, with whether a tree may hold each twice.

    Raises:
        UnsupportedLeaf: with both names.
    """
    first_of: dict[int, str] = {}
    for name, live in zip(targets, lives, strict=True):
        for obj, may_repeat in live:
            first = first_of.setdefault(id(obj), name)
            again = sum(obj is other for other, _ in live) > 1
            if first != name or (again and not may_repeat):
                raise _one_object_twice(targets, obj)


def _one_object_twice(targets: Mapping[str, Any], obj: Any) -> UnsupportedLeaf:
    places = [
        "/".join([name, *([format_path(path)] if path else [])])
        for name, target in targets.items()
        for path, found in live_objects(target)
        if found is obj
    ]
    name = type(obj).__name__
    return UnsupportedLeaf(
        f"{' and '.join(places)} are one and the same live {name}: it cannot hold what was saved under each. "
        "Restore it under one of the names; what is saved under another is loaded with load(path, item=...)",
        leaf=places[-1] if places else None,
        type_name=name,
    )


def held(like: Any, limit_bytes: int) -> Callable[[], object] | None:
    """What sets the live objects of a tree back to what they hold now; None where that cannot be.

    Args:
        like: the tree.
        limit_bytes: of what has to be copied, as it may be written to: more is not held.
    """
    try:
        flat = flatten(like, expand=_adapters.expander(), keep=True)
    except Exception:
        return None  # an object that cannot tell yet what it holds can be set all the same
    return setting_back(functools.partial(unflatten, flat.root), flat.leaves, limit_bytes)


def setting_back(
    set_all: Callable[[list[Any]], object], leaves: Sequence[Any], limit_bytes: int
) -> Callable[[], object] | None:
    """Calls ``set_all`` with the leaves as they are now: those that may be written to are copied."""
    arrays = [leaf for leaf in leaves if isinstance(leaf, np.ndarray)]
    if sum(array.nbytes for array in arrays) > limit_bytes:
        return None
    return functools.partial(set_all, [_own(leaf) for leaf in leaves])


def _own(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray):
        return np.array(leaf)
    return copy.deepcopy(leaf) if isinstance(leaf, _CHANGEABLE) else leaf
