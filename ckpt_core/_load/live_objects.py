"""Live objects in targets: finds them, copies them for a load, and sets them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckpt_core import _adapters
from ckpt_core._errors import UnsupportedLeaf
from ckpt_core._load.plans import LiveTarget, Make
from ckpt_core._tree import Node, Path, flatten, format_path, unflatten
from ckpt_core.arguments import with_article


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
        expand=lambda obj, _: (
            None if _adapters.adapter_for(obj) is None else ((), lambda _: copies(obj))
        ),
        keep=True,
    )
    return unflatten(flat.root, flat.leaves)


def live_tree(
    like: Any,
    objects: Sequence[tuple[Any, bool]],
    set_parts: Callable[[Mapping[Path, Any]], list[Any]] | None,
) -> LiveTarget:
    """A target that contains live objects, or is one; ``unflatten`` sets them."""

    def leaves() -> Sequence[Any]:
        return flatten(like, expand=_adapters.expander()).leaves

    return LiveTarget(objects, False, set_parts, leaves)


def live_object(adapter: Any, obj: Any, root: Node) -> tuple[Make, LiveTarget]:
    """The function that sets a user's object with ``set_state``, which accepts any saved structure. ``root`` is that, with the
    present container classes where both are equal.
    """

    def make(leaves: list[Any]) -> Any:
        adapter.set_state(obj, unflatten(root, leaves))
        return obj

    return make, LiveTarget([(obj, False)])


def pipeline(adapter: Any, obj: Any, state: Any) -> tuple[Make, LiveTarget]:
    """A data pipeline, set before arrays are read, so that it prefetches meanwhile."""

    def make(_: list[Any]) -> Any:
        adapter.set_state(obj, state)
        return obj

    return make, LiveTarget([(obj, False)], early=True)
