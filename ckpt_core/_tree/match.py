"""Matches saved leaves to a target's by path: renames, all mismatches at once. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ckpt_core._errors import CheckpointCorrupt, Mismatch
from ckpt_core._tree import Path, format_path
from ckpt_core._tree.leaves import PYTHON_NUMBERS, LeafSpec, family
from ckpt_core._tree.patterns import Predicate
from ckpt_core.arguments import nearest


@dataclass(frozen=True)
class MatchRules:
    """How strictly saved and wanted leaves must agree."""

    rename: Callable[[str], str] | None = None  # saved path -> wanted path, both as text
    cast: bool = False  # convert a saved dtype to the wanted one, instead of a mismatch
    missing: str = "error"  # wanted but not saved: ``error``, or ``keep`` the target's value
    unexpected: str = "error"  # saved but not wanted: ``error`` or ``ignore``
    static: str = (
        "error"  # other static values than the saved ones: ``error``, or ``target`` keeps its own
    )
    loose_keys: bool = False  # ``"0"`` and ``0`` are equal: Orbax's trees store no key types


@dataclass
class Match:
    """The result of ``match``."""

    # Per wanted leaf, the index of its saved leaf; None keeps the target's value.
    source: list[int | None] = field(default_factory=list[int | None])
    mismatches: list[Mismatch] = field(default_factory=list[Mismatch])
    # Paths, for the report; errors or not.
    missing: list[str] = field(default_factory=list[str])
    unexpected: list[str] = field(default_factory=list[str])
    cast: list[str] = field(default_factory=list[str])


def match(
    saved: Sequence[tuple[Path, LeafSpec]],
    wanted: Sequence[tuple[Path, LeafSpec | None]],
    rules: MatchRules,
    *,
    selected: Predicate | None = None,
    item: str | None = None,
) -> Match:
    """Pairs saved and wanted leaves by path; a wanted spec of None fits any. What is not ``selected`` keeps the target's value."""
    result = Match()
    # The text of a renamed path cannot distinguish the keys "0" and 0.
    loose = rules.loose_keys or rules.rename is not None
    saved_keys: list[Path] = [path for path, _ in saved]
    wanted_keys: list[Path] = [path for path, _ in wanted]
    if loose:
        saved_keys = [tuple(map(str, renamed_path(path, rules.rename))) for path in saved_keys]
        wanted_keys = [tuple(map(str, path)) for path in wanted_keys]
    by_key: dict[Path, int] = {}
    for position, (key, (path, _)) in enumerate(zip(saved_keys, saved, strict=True)):
        if by_key.setdefault(key, position) != position:
            if not loose:
                text = format_path(path)
                what = f"two leaves have the path {text!r}: the checkpoint is damaged"
                raise CheckpointCorrupt(what, leaf=text)
            both = f"{format_path(saved[by_key[key]][0])!r} and {format_path(path)!r}"
            same = format_path(renamed_path(path, rules.rename))
            raise ValueError(f"rename= gives {both} the same path {same!r}")
    used: set[int] = set()
    for key, (path, spec) in zip(wanted_keys, wanted, strict=True):
        position = by_key.get(key)
        known = spec if position is None else saved[position][1]
        if selected is not None and not selected(path, known or LeafSpec("unknown")):
            result.source.append(None)
            used.update(() if position is None else (position,))
            continue
        result.source.append(position)
        if position is None:
            result.missing.append(format_path(path))
            if rules.missing == "error":
                text = "something" if spec is None else str(spec)
                lacking = Mismatch(result.missing[-1], "missing", None, text, None, item)
                result.mismatches.append(lacking)
            continue
        used.add(position)
        was = saved[position][1]
        if spec is not None and spec != was:
            text, kinds = format_path(path), _differing(was, spec)
            if "dtype" in kinds and rules.cast and _is_castable(was, spec):
                kinds.remove("dtype")
                result.cast.append(text)
            for kind in kinds:
                result.mismatches.append(Mismatch(text, kind, str(was), str(spec), None, item))
    for position, (path, spec) in enumerate(saved):
        if position in used or (selected is not None and not selected(path, spec)):
            continue
        result.unexpected.append(format_path(path))
        if rules.unexpected == "error":
            beyond = Mismatch(result.unexpected[-1], "unexpected", str(spec), None, None, item)
            result.mismatches.append(beyond)
    if result.mismatches:
        result.mismatches = _with_nearest(result.mismatches)
    return result


def covers(places: Iterable[Path]) -> Callable[[Path], bool]:
    """The function that says whether a path is one of these places, or below one; keys count by their text."""
    texts = {tuple(map(str, path)) for path in places}
    lengths = {len(text) for text in texts}

    def covered(path: Path) -> bool:
        text = tuple(map(str, path))
        return any(text[:length] in texts for length in lengths)

    return covered


def renamed_path(path: Path, rename: Callable[[str], str] | None) -> Path:
    return path if rename is None else parse_path(rename(format_path(path)))


def parse_path(text: str) -> Path:
    """The entries of a path given as text, all of them str: ``a/0`` gives ``("a", "0")``."""
    if text in ("", "(root)"):
        return ()
    return tuple(part.replace("~1", "/").replace("~0", "~") for part in text.split("/"))


_NUMBERS = PYTHON_NUMBERS | {"jax", "numpy", "numpy_scalar"}
"""Kinds of leaves that fit each other; of any other kind, a leaf fits a target of its own kind alone."""


def _differing(saved: LeafSpec, wanted: LeafSpec) -> list[str]:
    """In what a saved leaf does not fit the wanted one: ``kind``, ``shape``, ``dtype``."""
    kinds, parts = {saved.kind, wanted.kind}, ["shape", "dtype"]
    if kinds <= {"int", "bigint"}:
        return []
    if not kinds <= _NUMBERS:
        if len(kinds) == 2:
            return ["kind"]
        parts = ["dtype", "shape"] if saved.kind == "key" else []
    elif not kinds.isdisjoint(PYTHON_NUMBERS) and family(saved.dtype) == family(wanted.dtype):
        parts = ["shape"]  # a Python number has no fixed width
    return [part for part in parts if getattr(saved, part) != getattr(wanted, part)]


def _is_castable(saved: LeafSpec, wanted: LeafSpec) -> bool:
    """Whether one dtype may be converted to the other: no key's, and no imaginary part is dropped."""
    drops_imaginary = family(saved.dtype) == "c" != family(wanted.dtype)
    return saved.kind != "key" and not drops_imaginary


def _with_nearest(mismatches: list[Mismatch]) -> list[Mismatch]:
    """Adds to each missing or unexpected leaf the most similar unmatched path of the other side: one that ends alike, or has
    the same shape and dtype."""
    missing = [entry for entry in mismatches if entry.kind == "missing"]
    unexpected = [entry for entry in mismatches if entry.kind == "unexpected"]
    if len(missing) + len(unexpected) > 200:
        return mismatches  # difflib takes quadratic time
    found: list[Mismatch] = []
    for entry in mismatches:
        if entry.kind in ("missing", "unexpected"):
            others = unexpected if entry.kind == "missing" else missing
            alike = [one.path for one in others if _may_be_meant(entry, one)]
            entry = replace(entry, nearest=nearest(entry.path, alike))
        found.append(entry)
    return found


def _may_be_meant(one: Mismatch, other: Mismatch) -> bool:
    if (one.saved or one.wanted) == (other.saved or other.wanted):
        return True
    return one.path.rpartition("/")[2] == other.path.rpartition("/")[2]


def positions_of(
    paths: Sequence[Path], specs: Sequence[LeafSpec], selected: Predicate | None
) -> Sequence[int]:
    """Indices of the selected leaves; of all if ``selected`` is None."""
    every = range(len(paths))
    return every if selected is None else [n for n in every if selected(paths[n], specs[n])]


class Idle(NamedTuple):
    """An entry of ``rename=`` that matches no saved path."""

    old: str
    new: str
    nearest: str | None  # the most similar saved path, or leading part of one
    done: bool  # ``new`` was saved: the rename is unnecessary


class Renames:
    """``rename=`` as a function of saved paths: it replaces the longest leading entries that match; ``sign`` is between them."""

    def __init__(self, rename: Mapping[str, str], sign: str = "/") -> None:
        self.entries = dict(rename)
        self._sign = sign
        self._table = sorted(rename.items(), key=lambda entry: -len(entry[0]))

    def __call__(self, path: str) -> str:
        for old, new in self._table:
            if path == old:
                return new
            if path.startswith(f"{old}{self._sign}"):
                return f"{new}{path[len(old) :]}".removeprefix(self._sign)
        return path

    def idle(self, paths: Iterable[str]) -> list[Idle]:
        """The entries of the mapping that match none of these saved paths."""
        begun: dict[str, None] = {}
        for path in paths:
            while path:
                begun[path] = None
                path = path.rpartition(self._sign)[0]
        candidates = list(begun)[:2000]  # difflib compares with each: bounds the time
        return [
            Idle(old, new, nearest(old.strip(self._sign), candidates), new in begun)
            for old, new in self._table
            if old not in begun
        ]
