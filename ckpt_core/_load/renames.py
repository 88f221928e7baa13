"""From the paths of saved leaves to those that are wanted: by the user, by adapters, by Orbax and by names in files."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

from ckpt_core import _adapters
from ckpt_core._errors import Mismatch, StructureMismatch
from ckpt_core._load.checkpoint import Checkpoint, ExtentItem, OrbaxItem, SavedItem
from ckpt_core._load.functions import nodes_in
from ckpt_core._load.outcomes import ItemPlan, live_of
from ckpt_core._tree import Path, flatten, format_path, stored_paths
from ckpt_core._tree.leaves import LeafSpec
from ckpt_core._tree.match import Idle, MatchRules, Renames
from ckpt_core._tree.patterns import Select


def idle_renames(
    checkpoint: Checkpoint, rules: MatchRules, plans: Sequence[ItemPlan]
) -> list[Idle]:
    """The entries of a ``rename=`` dict that match no path in any item of the checkpoint."""
    if not isinstance(rules.rename, Renames):
        return []
    items = checkpoint.items.values()
    found = (
        format_path(path)
        for item in items
        for path in (*item.paths, *(path for path, _ in nodes_in(item.root)))
    )
    idle = rules.rename.idle(itertools.chain(found, *map(spellings, items)))
    return [entry for entry in idle if not any(_fits_by_adapter(entry, plan) for plan in plans)]


def _fits_by_adapter(entry: Idle, plan: ItemPlan) -> bool:
    """Whether the target, or its adapter, understands an entry that is no prefix of a saved path.

    Adapters such as the one for Keras have names in the middle of paths.
    """
    live = live_of(plan.outcome)
    if any(entry.old in getattr(obj, "reads_renames", ()) for obj, _ in live):
        return True
    adapter = adapter_of_renames(live)
    if adapter is None:
        return False
    return bool(adapter.renamed({entry.old: entry.new}, list(map(format_path, plan.item.paths))))


def refuse_idle(opened: Checkpoint, idle: list[Idle]) -> None:
    """Raises StructureMismatch that lists the entries which match no saved path.

    An entry whose new name was saved is accepted: a program that loads checkpoints from before and
    after a renaming passes the same ``rename=`` for both.
    """
    wrong = [
        Mismatch(entry.old, "rename", None, entry.new, entry.nearest)
        for entry in idle
        if not entry.done
    ]
    if wrong:
        advice = "An entry of rename= must be a saved path, or the beginning of one up to a slash."
        raise StructureMismatch(wrong, where=opened.path, advice=advice)


def advice_on(idle: list[Idle]) -> str:
    """The sentence about such entries in an error that lists other differences."""
    told = ", ".join(
        f"{entry.old!r}" + (f" (nearest name: {entry.nearest})" if entry.nearest else "")
        for entry in idle
    )
    return f"No saved path begins with these entries of rename=: {told}."


def align(
    item: SavedItem, like: Any, rules: MatchRules, selected: Select | None
) -> tuple[MatchRules, Select | None]:
    """The rules and the selection, changed by ``align`` of the target's adapter, if it has one."""
    adapter: Any = _adapters.adapter_for(like)
    if not isinstance(adapter, _adapters.verbs.Aligns):
        return rules, selected
    renamed = rules.rename or (lambda path: path)
    saved = {renamed(format_path(path)): spec for path, spec in item.leaves}
    names: Mapping[str, str]
    left_alone: Set[str]
    names, left_alone = adapter.align(like, saved, ordered=not isinstance(item, OrbaxItem))
    if names:
        rules = replace(rules, rename=_composed(renamed, names))
    return rules, _excluding(selected, left_alone) if left_alone else selected


def adapter_of_renames(live: Sequence[tuple[Any, bool]]) -> Any:
    """The adapter of these live objects, if they share one that has ``renamed``; else None."""
    adapters: dict[int, Any] = {}
    for obj, _ in live:
        adapter: Any = _adapters.adapter_for(obj)
        adapters[id(adapter)] = adapter
    adapter = next(iter(adapters.values()), None)
    one = len(adapters) == 1 and isinstance(adapter, _adapters.verbs.Renames)
    return adapter if one else None


def renamed_by_adapter(
    item: SavedItem, live: Sequence[tuple[Any, bool]], rules: MatchRules, renames: Mapping[str, str]
) -> MatchRules:
    """The rules, with the ``rename=`` dict interpreted by the adapter of the live objects."""
    adapter = adapter_of_renames(live)
    if adapter is None:
        return rules
    names = adapter.renamed(renames, list(map(format_path, item.paths)))
    return replace(rules, rename=lambda path: names.get(path, path))


def under_orbax_names(item: SavedItem, like: Any, rules: MatchRules) -> MatchRules:
    """The rules for a pytree that Orbax wrote: all its keys are text, and some paths are longer.

    Orbax names the array of an NNX Variable ``kernel/value`` where the target's path is ``kernel``.
    """
    rules = replace(rules, loose_keys=True)
    flat = flatten(like, expand=_adapters.expander(stored=True))
    stored = stored_paths(flat.root, flat.paths)
    if stored is flat.paths:
        return rules
    renamed = rules.rename or (lambda path: path)
    there = {renamed(format_path(path)) for path in item.paths}
    wanted = list(map(format_path, flat.paths))
    known = set(wanted)
    names = {
        old: new
        for old, new in zip(map(format_path, stored), wanted, strict=True)
        if old in there and old not in known and new not in there
    }
    return replace(rules, rename=_composed(renamed, names)) if names else rules


def _composed(first: Callable[[str], str], names: Mapping[str, str]) -> Callable[[str], str]:
    """A function that renames a path by ``first``, and the result by ``names``."""

    def rename(path: str) -> str:
        path = first(path)
        return names.get(path, path)

    return rename


def _excluding(selected: Select | None, left_alone: Set[str]) -> Select:
    """The selection without the paths in ``left_alone``."""

    def select(path: Path, spec: LeafSpec) -> bool:
        if format_path(path) in left_alone:
            return False
        return selected is None or selected(path, spec)

    return select


def under_wanted_paths(
    item: ExtentItem,
    wanted: Sequence[Path],
    rules: MatchRules,
    renames: Mapping[str, str] | None,
) -> tuple[ExtentItem, MatchRules]:
    """The item with the wanted paths in place of the names that fit them; and the rules, less ``rename``.

    A tensor that fits no wanted path gets its name, cut at its dots: patterns of ``only=`` then see it as they
    see a path.

    Args:
        item: the saved item.
        wanted: paths of the target.
        rules: rules of the match; their ``rename`` is applied here.
        renames: the dict passed as ``rename=``, if it is one.
    """
    exact = {path[0]: path for path in wanted if len(path) == 1}
    levels: dict[str, Path | None] = {}
    for path in wanted:
        text = ".".join(map(str, path)).replace("/", ".")
        levels[text] = None if text in levels else path  # two paths of one text: only exact names
    paths: list[Path] = []
    for name in renamed_names(item, rules.rename, renames):
        text = name.replace("/", ".")
        found = exact.get(name) or levels.get(text)
        paths.append(tuple(text.split(".")) if found is None else found)
    return replace(item, paths=paths), replace(rules, rename=None)


def renamed_names(
    item: ExtentItem,
    rename: Callable[[str], str] | None,
    renames: Mapping[str, str] | None,
) -> list[str]:
    """The name of each tensor, renamed: by a function of the name, or by a dict of leading parts of names.

    In the dict, parts are separated by dots, or by slashes as in paths.
    """
    names = [str(path[0]) for path in item.paths]
    if rename is None:
        return names
    if renames is None:
        return [rename(name) for name in names]
    table = sorted(
        ((old.replace("/", "."), new) for old, new in renames.items()),
        key=lambda entry: -len(entry[0]),
    )
    return [_renamed(name, table) for name in names]


def _renamed(name: str, table: Sequence[tuple[str, str]]) -> str:
    for old, new in table:
        if name == old:
            return new
        if name.startswith(f"{old}."):
            return f"{new}{name[len(old) :]}".removeprefix(".")
    return name


def spellings(item: SavedItem) -> Iterator[str]:
    """For an item of a file, the beginnings of its names, as an entry of ``rename=`` may spell them."""
    if not isinstance(item, ExtentItem):
        return
    for path in item.paths:
        parts = str(path[0]).split(".")
        yield "/".join(parts)
        for length in range(1, len(parts)):
            yield ".".join(parts[:length])
