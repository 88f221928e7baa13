"""Changes the rules of a match by what the target's adapter knows about changed names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

from ckpt_core import _adapters
from ckpt_core._load.checkpoint import OrbaxItem, SavedItem
from ckpt_core._tree import Path, flatten, format_path, stored_paths
from ckpt_core._tree.leaves import LeafSpec
from ckpt_core._tree.match import MatchRules
from ckpt_core._tree.patterns import Select


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
