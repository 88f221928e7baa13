"""From the paths of saved leaves to those that are wanted: by the user, by adapters, by Orbax and by names in files."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

from ckpt_core import _adapters
from ckpt_core._errors import Mismatch, StructureMismatch
from ckpt_core._format.rules import Rule, pattern_of
from ckpt_core._lazy import jax
from ckpt_core._load.constants import NO_FUNCTION, nodes_in
from ckpt_core._load.plans import ItemPlan
from ckpt_core._load.request import Request
from ckpt_core._load.targets import TargetTree
from ckpt_core._saved import Checkpoint, DerivedItem, ExtentItem, OrbaxItem, SavedItem
from ckpt_core._tree import Path, flatten, format_path, stored_paths
from ckpt_core._tree.match import Idle, MatchRules, Renames
from ckpt_core.arguments import nearest


def under_wanted_paths(
    item: SavedItem, wanted: TargetTree, request: Request
) -> tuple[SavedItem, MatchRules, Set[str]]:
    """The item, the rules by which its paths become those of a target, and wanted paths that stay. The caller renames them, as the
    target's adapter reads it; then Orbax's names and those that the adapter knows to have changed count.
    """
    rules, left_alone = request.matching, frozenset[str]()
    stored = item.base if isinstance(item, DerivedItem) else item
    if isinstance(stored, ExtentItem) and request.rules is None:
        names = renamed_names(item, rules.rename)
        paths = paths_of_names(names, wanted.flat.paths)
        item, rules = replace(item, paths=paths), replace(rules, rename=None)
    elif isinstance(rules.rename, Renames) and (known := _adapter_of_renames(wanted.live)):
        renamed: Mapping[str, str] = known.renamed(rules.rename.entries, renamed_names(item, None))
        rules = replace(rules, rename=lambda path: renamed.get(path, path))
    if isinstance(stored, OrbaxItem):
        rules = replace(rules, loose_keys=True)
        rules = _then(rules, _names_of_orbax(item, wanted.like, rules.rename))
    if align := getattr(_adapters.adapter_for(wanted.like), "align", None):
        now = rules.rename or (lambda path: path)
        saved = {
            now(format_path(path)): spec for path, spec in zip(item.paths, item.specs, strict=True)
        }
        moved, left_alone = align(wanted.like, saved, ordered=not isinstance(stored, OrbaxItem))
        rules = _then(rules, moved)
    return item, rules, left_alone


def _then(rules: MatchRules, names: Mapping[str, str]) -> MatchRules:
    """The rules with ``names`` applied to what their ``rename`` gives."""
    if not names:
        return rules
    first = rules.rename

    def rename(path: str) -> str:
        path = path if first is None else first(path)
        return names.get(path, path)

    return replace(rules, rename=rename)


def _names_of_orbax(
    item: SavedItem, like: Any, rename: Callable[[str], str] | None
) -> Mapping[str, str]:
    """Paths of a pytree of Orbax's, and the shorter wanted ones: for an NNX Variable ``kernel`` it writes ``kernel/value``."""
    flat = flatten(like, expand=_adapters.expander(stored=True))
    stored = stored_paths(flat.root, flat.paths)
    if stored is flat.paths:
        return {}
    there = set(renamed_names(item, rename))
    wanted = list(map(format_path, flat.paths))
    known = set(wanted)
    return {
        old: new
        for old, new in zip(map(format_path, stored), wanted, strict=True)
        if old in there and old not in known and new not in there
    }


def paths_of_names(names: Sequence[str], wanted: Sequence[Path]) -> list[Path]:
    """The wanted path that fits each name of a tensor: ``layers.0.kernel`` fits ``layers/0/kernel``, whether ``0`` is an int or
    text, and the key of a flat dictionary. Any other name is cut at its dots: patterns of ``only=`` see it as a path.
    """
    exact = {path[0]: path for path in wanted if len(path) == 1}
    levels: dict[str, Path | None] = {}
    for path in wanted:
        text = ".".join(map(str, path)).replace("/", ".")
        levels[text] = None if text in levels else path  # two paths of one text: only exact names
    paths: list[Path] = []
    for name in names:
        text = name.replace("/", ".")
        found = exact.get(name) or levels.get(text)
        paths.append(tuple(text.split(".")) if found is None else found)
    return paths


def _idle_renames(
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
    idle = rules.rename.idle(itertools.chain(found, *map(_spellings, items)))
    for plan in plans:  # a target, or its adapter, may understand more: that for Keras has names in the middle of paths
        known = {name for obj, _ in plan.live for name in getattr(obj, "reads_renames", ())}
        idle = [entry for entry in idle if entry.old not in known]
        if idle and (adapter := _adapter_of_renames(plan.live)) is not None:
            paths = list(map(format_path, plan.item.paths))
            idle = [entry for entry in idle if not adapter.renamed({entry.old: entry.new}, paths)]
    return idle


def refuse_mismatches(checkpoint: Checkpoint, plans: Sequence[ItemPlan], request: Request) -> None:
    """Raises StructureMismatch with all differences and the arguments that would allow them; or with idle entries of ``rename=``
    and ``rules=``. An entry with a new name that was saved is fine: it serves checkpoints from before and after a renaming.
    """
    rules = request.matching
    mismatches = [entry for plan in plans if plan.match for entry in plan.match.mismatches]
    mismatches += _idle_rules(checkpoint, plans, request.rules or ())
    idle = _idle_renames(checkpoint, rules, plans)
    if mismatches:
        renames = {} if request.rules else _proposed(mismatches, plans, rules)
        advice = _advice_for(mismatches, request, idle, renames)
        raise StructureMismatch(mismatches, where=checkpoint.path, advice=advice)
    wrong = [
        Mismatch(one.old, "rename", None, one.new, one.nearest) for one in idle if not one.done
    ]
    if wrong:
        advice = "An entry of rename= must be a saved path, or the beginning of one up to a slash."
        raise StructureMismatch(wrong, where=checkpoint.path, advice=advice)


def _idle_rules(
    checkpoint: Checkpoint, plans: Sequence[ItemPlan], rules: Sequence[Rule]
) -> Iterator[Mismatch]:
    """The rules that fit no path of a checkpoint. A list of rules for files may have some for tensors that a model lacks."""
    items = [plan.item for plan in plans if isinstance(plan.item, DerivedItem)]
    used = {rule for item in items for rule in item.rules}
    names = [format_path(path) for item in checkpoint.items.values() for path in item.paths]
    for rule in rules:
        if rule in used or any(isinstance(item.base, ExtentItem) for item in items):
            continue
        patterns = [pattern_of(name, "./") for name in (*rule.sources, *rule.results)]
        if not any(pattern.fullmatch(name) for pattern in patterns for name in names):
            saved, wanted = (" and ".join(texts) for texts in (rule.sources, rule.results))
            yield Mismatch(saved, "rule", None, wanted, nearest(saved, names[:2000]))


_MOST_PROPOSED = 6


def _proposed(
    mismatches: Sequence[Mismatch], plans: Sequence[ItemPlan], rules: MatchRules
) -> dict[str, str]:
    """Entries of ``rename=`` for a few leaves with another name in the target and the same spec; they move no other leaf."""
    if rules.rename or any(_adapter_of_renames(plan.live) is not None for plan in plans):
        return {}
    wanted = {(one.item, one.path): one for one in mismatches if one.kind == "missing"}
    moves: dict[tuple[str | None, str], str] = {}
    for one in mismatches:
        other = wanted.get((one.item, one.nearest or "")) if one.kind == "unexpected" else None
        if other is None or other.nearest != one.path:
            continue
        if one.saved == (other.wanted or "").partition(" (")[0]:
            moves[one.item, one.path] = other.path
    saved = [
        (plan.item.name or None, format_path(path)) for plan in plans for path in plan.item.paths
    ]
    by_beginnings = dict(_without_common_end(old, new) for (_, old), new in moves.items())
    for entries in (by_beginnings, {old: new for (_, old), new in moves.items()}):
        now, few = Renames(entries), len(entries) <= _MOST_PROPOSED
        if few and all(now(path) == moves.get((item, path), path) for item, path in saved):
            return entries
    return {}


def _without_common_end(old: str, new: str) -> tuple[str, str]:
    """Two paths without the last entries that they share, of which each keeps one."""
    olds, news = old.split("/"), new.split("/")
    while len(olds) > 1 and len(news) > 1 and olds[-1] == news[-1]:
        del olds[-1], news[-1]
    return "/".join(olds), "/".join(news)


def _adapter_of_renames(live: Sequence[tuple[Any, bool]]) -> Any:
    """The adapter of these live objects, if they share one that has ``renamed``; else None."""
    adapters = {id(one): one for one in (_adapters.adapter_for(obj) for obj, _ in live)}
    adapter = next(iter(adapters.values())) if len(adapters) == 1 else None
    return adapter if hasattr(adapter, "renamed") else None


def renamed_names(item: SavedItem, rename: Callable[[str], str] | None) -> list[str]:
    """The path of each leaf, renamed; of a file, the name of each tensor: a dict of ``rename=`` may have slashes for its dots."""
    if not isinstance(item.base if isinstance(item, DerivedItem) else item, ExtentItem):
        names = map(format_path, item.paths)
        return list(names if rename is None else map(rename, names))
    names = [str(path[0]) for path in item.paths]
    if isinstance(rename, Renames):
        dotted = {old.replace("/", "."): new for old, new in rename.entries.items()}
        rename = Renames(dotted, ".")
    return names if rename is None else list(map(rename, names))


def _spellings(item: SavedItem) -> Iterator[str]:
    """For an item of a file, the beginnings of its names, as an entry of ``rename=`` may spell them."""
    if not isinstance(item, ExtentItem):
        return
    for path in item.paths:
        parts = str(path[0]).split(".")
        yield "/".join(parts)
        for length in range(1, len(parts)):
            yield ".".join(parts[:length])


_WITHOUT_VALUE = ("(abstract)", "a restore that failed)", "as saved")
"""Endings of ``Mismatch.wanted`` for a leaf of which the target holds no value to keep."""


def _advice_for(
    mismatches: list[Mismatch], request: Request, idle: list[Idle], renames: dict[str, str]
) -> str:
    """The arguments that would allow the differences, but for those already passed; ``renames`` may be what is meant."""
    rules = request.matching
    kinds = {entry.kind for entry in mismatches}
    hints: list[str] = []
    missing = [str(entry.wanted) for entry in mismatches if entry.kind == "missing"]
    without_value = sum(text.endswith(_WITHOUT_VALUE) for text in missing)
    if without_value < len(missing) and rules.missing == "error":
        hints.append('missing="keep" keeps what the target holds')
    if "unexpected" in kinds:
        hints.append('unexpected="ignore" leaves saved leaves out')
    of_numbers = [one for one in mismatches if one.kind == "dtype" and not _is_key(one.saved)]
    if not rules.cast and of_numbers:  # a random key is converted into no other
        hints.append("cast=True converts dtypes")
    if "function" in kinds:
        hints.append('unexpected="ignore" keeps the functions of the target')
    if "static" in kinds:
        hints.append('static="target" keeps the values of the target')
    of_functions = [one for one in mismatches if one.kind == "function"]
    gone = any(one.wanted == NO_FUNCTION for one in of_functions)
    moved = gone and any(one.saved == NO_FUNCTION for one in of_functions)
    both_sides = {"missing", "unexpected"} <= kinds or moved
    if both_sides and (rules.rename is None or idle) and not request.rules:
        such_as = f", such as rename={renames}" if renames else ""
        hints.append("rename= maps saved paths to wanted ones" + such_as)
    lines = [f"Where this is intended: {'; '.join(hints)}."] if hints else []
    if "shape" in kinds:
        lines.append(
            "rules= stacks, splits, joins and transposes, select= of load takes a part: for any other shape change the target, "
            "or load what fits with only= and convert the rest."
        )
    if idle:
        listed = ", ".join(
            f"{entry.old!r}" + (f" (nearest name: {entry.nearest})" if entry.nearest else "")
            for entry in idle
        )
        lines.append(f"No saved path begins with these entries of rename=: {listed}.")
    lines += dict.fromkeys(text for one in mismatches if (text := _on_key(one)))
    if any("64[" in str(one.saved) and "64[" not in str(one.wanted) for one in of_numbers):
        flags: Any = jax.config  # its attributes have no types
        if not flags.jax_enable_x64:
            lines.append(
                'Where 64 bits are wanted: jax.config.update("jax_enable_x64", True) before the target is made, or numpy '
                "arrays in the target."
            )
    if without_value or ("missing" in kinds and rules.missing != "error"):
        lines.append(
            "The target holds no value there that could be kept: pass a target with values instead of an "
            "abstract one, or select with only= the leaves that were saved."
        )
    return " ".join(lines)


def _is_key(spec: str | None) -> bool:
    return str(spec).startswith("key<")


def _on_key(mismatch: Mismatch) -> str:
    """How a target gets the random key that was saved; empty for any other mismatch."""
    saved, wanted = str(mismatch.saved), str(mismatch.wanted)
    impl = (wanted if _is_key(wanted) else saved).partition("<")[2].partition(">")[0]
    if mismatch.kind == "dtype" and _is_key(saved):
        impl = saved.partition("<")[2].partition(">")[0]
        return f"A key stays of its implementation: in the target write jax.random.key(0, impl={impl!r})."
    if mismatch.kind == "kind" and _is_key(saved) and wanted.startswith("uint32"):
        return f"A typed key was saved: in the target write jax.random.wrap_key_data(key, impl={impl!r})."
    if mismatch.kind == "kind" and _is_key(wanted) and saved.startswith("uint32"):
        return (
            "A raw key was saved: in the target write jax.random.key_data(key), and of what comes back make "
            f"jax.random.wrap_key_data(key, impl={impl!r})."
        )
    return ""
