"""The plan of one item: what is read of it, and what becomes of that: new containers, or the state of live objects, which
``InPlace`` sets; and what becomes of these if the restore fails.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ckpt_core._errors import SET, CheckpointError, drop_locals, mark_of_target
from ckpt_core._lazy import jax
from ckpt_core._load.constants import nodes_in
from ckpt_core._load.targets import is_resharded
from ckpt_core._options import MIB
from ckpt_core._read import Want
from ckpt_core._results import RestoreReport
from ckpt_core._saved import OrbaxItem, SavedItem
from ckpt_core._tree import Key, Node, Path, format_path, static_function
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
    wraps_function = any(static_function(one.static) for _, one in nodes_in(node))
    if len(left) == len(node.children) and not wraps_function:
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


_BATCH_BYTES = 128 * MIB


@dataclass(eq=False)
class InPlace:
    """Sets the live objects of one restore: those of NNX, Keras and torchax while arrays are being read, the others at the end. An
    array that is set frees the one that it replaces: memory holds one state, and of the other at most ``limit_bytes`` and
    128 MiB. The price: if the restore fails midway, the object holds parts of two states; ``give_up`` then deletes its new
    arrays, so that jax refuses to train on the mix. Objects that were set as a whole stay, and the error names them.
    """

    limit_bytes: int
    # arrays that were read but not set: by name of the item its plan, and by position the arrays
    _waiting: dict[str, tuple[ItemPlan, dict[int, Any]]] = field(
        default_factory=dict[str, tuple[ItemPlan, dict[int, Any]]]
    )
    _waiting_bytes: int = 0
    _new: list[Any] = field(default_factory=list[Any])  # set in parts: deleted if the restore fails
    _begun: dict[str, ItemPlan] = field(default_factory=dict[str, ItemPlan])  # set in part, by name
    _setting: bool = False  # an object is being set
    _set: list[ItemPlan] = field(default_factory=list[ItemPlan])  # set as a whole

    def begin(self, plans: Sequence[ItemPlan]) -> None:
        """Sets the data pipelines, before arrays are read."""
        for plan in plans:
            if plan.is_pipeline:
                self._set.append(plan)
                self._setting = True
                plan.make = constant(plan.make([]))
                self._setting = False

    def take(self, plan: ItemPlan, result: int, value: Any, size_bytes: int) -> None:
        """Takes the array that was read for position ``result``; sets all waiting arrays once they reach the limit."""
        if plan.set_parts is None or not isinstance(value, jax.Array):
            return
        if plan.item.name not in self._waiting:
            self._waiting[plan.item.name] = plan, {}
        self._waiting[plan.item.name][1][result] = value
        self._waiting_bytes += size_bytes
        if self._waiting_bytes >= min(self.limit_bytes, _BATCH_BYTES):
            for one, values in self._waiting.values():
                self._set_waiting(one, values)
            self._waiting, self._waiting_bytes = {}, 0

    def _set_waiting(self, plan: ItemPlan, values: Mapping[int, Any]) -> None:
        """Sets arrays of one object, by position; an object that can set none now is set as a whole at the end."""
        assert plan.set_parts is not None
        name, first = plan.item.name, plan.item.name not in self._begun
        self._new += values.values()
        self._begun[name] = plan
        self._setting = True
        held = plan.set_parts({plan.paths[result]: value for result, value in values.items()})
        self._setting = False
        self._new += held
        if held:
            for result in values:
                plan.kept[result] = None  # else the plan would keep the old arrays in memory
        elif first:
            del self._begun[name]

    def finish(self, plans: Sequence[ItemPlan], leaves: Sequence[list[Any]]) -> list[Any]:
        """The value of each item, after the last step of a restore: sets all live objects that are not set yet."""
        values: list[Any] = []
        for plan, read in zip(plans, leaves, strict=True):
            if plan.live and not plan.is_pipeline and plan.item.name not in self._begun:
                self._set.append(plan)
            self._setting = True
            values.append(plan.make(read))
            self._setting = False
        return values

    def give_up(self, error: BaseException) -> None:
        """After a failure, makes objects that hold parts of two states unusable; notes on the error say what became of each."""
        if self._setting:
            mark_of_target(error)
        try:
            self._delete_new(error)
        except Exception as failure:
            error.add_note(f"ckpt: cleaning up after the failed restore failed, too: {failure}")
        if self._set:
            names = ", ".join(plan.name for plan in self._set)
            error.add_note(
                f"ckpt: {names} {'was' if len(self._set) == 1 else 'were'} {SET}, or while it did: restore again, "
                "or create it again"
            )
        if self._begun:
            drop_locals(error)  # a caller that keeps the error must not keep the old arrays alive
        # the error's traceback keeps this object alive, so it must release the old arrays
        self._begun, self._new, self._set, self._waiting = {}, [], [], {}

    def _delete_new(self, error: BaseException) -> None:
        """Deletes the new arrays of objects set in parts, so that jax refuses to use them."""
        if not self._begun:
            return
        for array in self._new:
            array.delete()
        names: list[str] = []
        for plan in self._begun.values():
            old = {id(leaf) for leaf in plan.kept if leaf is not None}
            try:
                for array in _arrays(plan):  # the adapter may have set copies of the new arrays
                    if id(array) not in old:
                        array.delete()
                if any(array.is_deleted() for array in _arrays(plan)):
                    names.append(plan.name)
            except CheckpointError:  # the adapter refuses to read deleted arrays
                names.append(plan.name)
        if names:
            error.add_note(
                f"ckpt: {', '.join(names)} held parts of two states when the restore failed, so "
                "its new arrays were deleted and it cannot be used. Restore another step "
                "into it, or create it again. Options(atomic_restore=True) changes nothing before all is "
                "read and verified, for twice the memory"
            )


def _arrays(plan: ItemPlan) -> list[Any]:
    """The jax arrays that the item's objects hold at present."""
    return [leaf for leaf in plan.leaves_now() if isinstance(leaf, jax.Array)]
