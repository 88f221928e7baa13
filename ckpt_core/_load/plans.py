"""The plan of one item: what is read of it, and what becomes of that: new containers, or the state of live objects."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ckpt_core._load.constants import wraps_any
from ckpt_core._load.targets import is_resharded
from ckpt_core._read import Want
from ckpt_core._results import RestoreReport
from ckpt_core._saved import OrbaxItem, SavedItem
from ckpt_core._tree import Key, Node, Path, format_path
from ckpt_core._tree.match import Match

Make = Callable[[list[Any]], Any]
"""A function from the leaves of the result, in order, to the value of the item."""


@dataclass
class ItemPlan:
    """One item, ready to be read. ``positions``, ``kept`` and ``wants`` go by positions in the list that the load fills."""

    item: SavedItem  # with the spec of every leaf
    make: Make  # builds the item's value from the result, and sets the objects of ``live``
    positions: Sequence[int | None] = ()  # in the item; None: not read, the target's is kept
    kept: list[Any] = field(default_factory=list[Any])  # of the target, also those that are read
    wants: dict[int, Want] = field(default_factory=dict[int, Want])  # the arrays that are read
    match: Match | None = None  # for the report; None without a target
    paths: Sequence[Path] = ()  # of the target's leaves, for patterns; empty without a target
    live: Sequence[tuple[Any, bool]] = ()  # objects in the target, as in ``TargetTree``
    is_pipeline: bool = False  # set first and without leaves, so that it prefetches
    # Of one object that can be set in parts: sets values by path, and returns the arrays that it then holds.
    set_parts: Callable[[Mapping[Path, Any]], list[Any]] | None = None
    leaves_now: Callable[[], Sequence[Any]] = list  # of such an object

    @property
    def name(self) -> str:
        """Name of the item, for messages."""
        return self.item.name or "the target"

    @property
    def stored_bytes(self) -> int:
        """Of the arrays that are read."""
        return sum(self.item.specs[want.leaf].stored_bytes for want in self.wants.values())

    def then(self, convert: Callable[[Any], Any]) -> ItemPlan:
        """The plan of the same item, of which the value is converted."""
        make = self.make
        return replace(self, make=lambda leaves: convert(make(leaves)))


def constant(value: Any) -> Make:
    """Makes a value that is known before any array is read."""
    return lambda _: value


def renamed_dicts(paths: Sequence[str], leaves: list[Any]) -> dict[str, Any]:
    """Nested dicts by the new paths, for ``rename=`` without ``like``: the saved containers do not fit renamed paths."""
    root: dict[str, Any] = {}
    for path, leaf in zip(paths, leaves, strict=True):
        node: Any = root
        *parents, last = path.split("/")
        for part in parents:
            node = node.setdefault(part, {}) if isinstance(node, dict) else None
        if not isinstance(node, dict) or last in node:
            raise ValueError(
                f"rename= gives two leaves the path {path!r}, or puts one leaf inside another"
            )
        node[last] = leaf
    return root


def pruned(node: Node, keep: set[int], counter: Iterator[int] | None = None) -> Node | None:
    """The structure with only the leaves at positions in ``keep``; None if none is left. ``counter`` gives the next position."""
    counter = counter or itertools.count()
    if node.kind == "leaf":
        return node if next(counter) in keep else None
    if node.kind == "expanded":
        return pruned(node.children[0], keep, counter)
    if not node.children:
        return node if node.kind == "none" else None
    left: list[tuple[Key, Node]] = []
    for key, child in zip(node.keys, node.children, strict=True):
        kept = pruned(child, keep, counter)
        if kept is not None:
            left.append((key, kept))
    if len(left) == len(node.children) and not wraps_any(node):
        return replace(node, children=tuple(child for _, child in left), make=None)
    if not any(child.kind != "none" for _, child in left):
        return None
    # a sequence with gaps becomes a dict, in which the old positions are the keys
    kind = node.kind if node.kind in ("dict", "ordered") else "dict"
    return Node(kind, tuple(key for key, _ in left), tuple(child for _, child in left))


def report_of(plans: Sequence[ItemPlan]) -> RestoreReport:
    """The report, from the executed plans; each path begins with the name of its item."""
    found = {name: list[str]() for name in ("loaded", "missing", "unexpected", "cast", "resharded")}
    for plan in plans:
        prefix, match = f"{plan.item.name}/" if plan.item.name else "", plan.match or Match()
        read = (at for at in plan.positions if at is not None)
        found["loaded"] += [prefix + format_path(plan.item.paths[at]) for at in read]
        found["resharded"] += [prefix + path for path in _resharded(plan)]
        for name in ("missing", "unexpected", "cast"):
            found[name] += [prefix + path for path in getattr(match, name)]
    return RestoreReport(**{name: tuple(paths) for name, paths in found.items()})


def _resharded(plan: ItemPlan) -> Iterator[str]:
    """Paths of the leaves whose sharding differs from the one that they were saved with."""
    item = plan.item
    # by id of saved and of target sharding: many leaves share both, so they are compared once
    moved: dict[tuple[int, int], bool] = {}
    for want in plan.wants.values():
        described, saved = item.shardings[want.leaf], item.specs[want.leaf]
        on_devices = {(want.spec or saved).kind, saved.kind} <= {"jax", "key"}
        if not on_devices or (not described and isinstance(getattr(item, "base", item), OrbaxItem)):
            continue  # Orbax may have recorded no sharding
        pair = (id(described), id(want.sharding))
        if pair not in moved:
            moved[pair] = is_resharded(described, want.sharding)
        if moved[pair]:
            yield format_path(item.paths[want.leaf])
