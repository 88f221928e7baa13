"""Copies of the live objects in the target of a load, which changes nothing that it is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ckpt_core import _adapters
from ckpt_core._errors import UnsupportedLeaf
from ckpt_core._tree import Path, flatten, format_path, unflatten
from ckpt_core.arguments import with_article


def copier(like: Any, item: str = "") -> Callable[[Any], Any]:
    """The function from a live object in ``like`` to its copy. Its first call copies all, together: if originals share arrays or
    submodules, their copies do, too. It raises UnsupportedLeaf if one cannot be copied; ``item`` is for the message.
    """
    made: dict[int, Any] = {}

    def copy(obj: Any) -> Any:
        if not made:
            of_adapter: dict[int, dict[int, tuple[Path, Any]]] = {}
            for path, one in _adapters.live_objects(like):
                found = of_adapter.setdefault(id(_adapters.adapter_for(one)), {})
                found.setdefault(id(one), (path, one))
            for found in of_adapter.values():
                copies = _adapters.copies_of([one for _, one in found.values()])
                for (path, one), copied in zip(found.values(), copies, strict=True):
                    if copied is None:
                        raise _not_copied(path, one, item)
                    made[id(one)] = copied
        return made[id(obj)]

    return copy


def _not_copied(path: Path, obj: Any, item: str) -> UnsupportedLeaf:
    where, name = format_path(path), type(obj).__name__
    item = item if item.isidentifier() else "state"
    return UnsupportedLeaf(
        f"{where}: load changes nothing that it is given, and {with_article(name)} cannot be copied. To set it in place, "
        f"use restore(path, {item}=...); to get only the saved values, leave it out of like",
        leaf=where,
        type_name=name,
    )


def detached(like: Any) -> Any:
    """``like`` with a copy of each live object, so that the caller may change the originals."""
    copy = copier(like)

    def expand(obj: Any, _: Path) -> Any:
        return None if _adapters.adapter_for(obj) is None else ((), lambda _: copy(obj))

    flat = flatten(like, expand=expand, keep=True)
    return unflatten(flat.root, flat.leaves)
