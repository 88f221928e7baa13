"""Saved leaves against wanted ones: patterns, renames, and every mismatch at once. Pure."""

from __future__ import annotations

import ast
import contextlib
import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

from ckpt_core._errors import Mismatch
from ckpt_core._tree import Path, format_path
from ckpt_core._tree.leaves import LeafSpec

Select = Callable[[Path, LeafSpec], bool]


@dataclass(frozen=True)
class MatchRules:
    """How strictly the two sides must agree.

    Attributes:
        rename: saved path -> wanted path, as text.
        cast: whether a dtype may be converted to the wanted one.
        missing: ``error``, or ``keep`` what the target holds.
        unexpected: ``error``, or ``ignore`` what was saved.
        loose_keys: text keys fit ints (Orbax's own trees keep no key types).
    """

    rename: Callable[[str], str] | None = None
    cast: bool = False
    missing: str = "error"
    unexpected: str = "error"
    loose_keys: bool = False


@dataclass
class Match:
    """Which saved leaf goes where.

    Attributes:
        source: for every wanted leaf the position of the saved one, or None to keep it.
        mismatches: everything that does not fit.
        missing, unexpected, cast: paths, for the report.
    """

    source: list[int | None] = field(default_factory=list[int | None])
    mismatches: list[Mismatch] = field(default_factory=list[Mismatch])
    missing: list[str] = field(default_factory=list[str])
    unexpected: list[str] = field(default_factory=list[str])
    cast: list[str] = field(default_factory=list[str])


def match(
    saved: Sequence[tuple[Path, LeafSpec]],
    wanted: Sequence[tuple[Path, LeafSpec | None]],
    rules: MatchRules,
    *,
    selected: Select | None = None,
    item: str | None = None,
) -> Match:
    """Pairs saved and wanted leaves by path.

    Args:
        saved: what the checkpoint holds.
        wanted: what the target asks for; a None spec takes whatever was saved.
        rules: how strictly.
        selected: leaves outside this selection are kept and neither missing nor unexpected.
        item: for the messages.
    """
    result = Match()
    # a renamed path was typed by a person, who cannot type the difference between "0" and 0
    loose = rules.loose_keys or rules.rename is not None
    by_key: dict[object, int] = {}
    for position, (path, _) in enumerate(saved):
        key = _identity(renamed_path(path, rules.rename), loose)
        if by_key.setdefault(key, position) != position:
            both = f"{format_path(saved[by_key[key]][0])!r} and {format_path(path)!r}"
            raise ValueError(
                f"rename= gives {both} the same path {format_path(renamed_path(path, rules.rename))!r}"
            )
    used: set[int] = set()
    for path, spec in wanted:
        position = by_key.get(_identity(path, loose))
        if selected is not None and not _is_selected(selected, path, spec, saved, position):
            result.source.append(None)
            used.update(() if position is None else (position,))
            continue
        result.source.append(position)
        if position is None:
            result.missing.append(format_path(path))
            if rules.missing == "error":
                text = "something" if spec is None else str(spec)
                result.mismatches.append(
                    Mismatch(format_path(path), "missing", None, text, None, item)
                )
            continue
        used.add(position)
        if spec is not None:
            _compare(format_path(path), saved[position][1], spec, rules, result, item)
    for position, (path, spec) in enumerate(saved):
        if position in used or (selected is not None and not selected(path, spec)):
            continue
        result.unexpected.append(format_path(path))
        if rules.unexpected == "error":
            result.mismatches.append(
                Mismatch(format_path(path), "unexpected", str(spec), None, None, item)
            )
    result.mismatches = _with_nearest(result.mismatches)
    return result


def _is_selected(
    selected: Select,
    path: Path,
    spec: LeafSpec | None,
    saved: Sequence[tuple[Path, LeafSpec]],
    position: int | None,
) -> bool:
    known = spec if position is None else saved[position][1]
    return selected(path, known if known is not None else LeafSpec("unknown"))


def _identity(path: Path, loose: bool) -> object:
    return tuple(map(str, path)) if loose else path


def renamed_path(path: Path, rename: Callable[[str], str] | None) -> Path:
    return path if rename is None else parse_path(rename(format_path(path)))


def parse_path(text: str) -> Path:
    """The entries of a path that a person typed; all of them text."""
    if text in ("", "(root)"):
        return ()
    return tuple(part.replace("~1", "/").replace("~0", "~") for part in text.split("/"))


_PYTHON_NUMBERS = {"int": "iu", "float": "f", "bool": "b", "complex": "c"}


def _compare(
    path: str, saved: LeafSpec, wanted: LeafSpec, rules: MatchRules, result: Match, item: str | None
) -> None:
    """Adds the mismatches of one pair."""

    def differs(kind: str) -> None:
        result.mismatches.append(Mismatch(path, kind, str(saved), str(wanted), None, item))

    if {saved.kind, wanted.kind} <= {"int", "bigint"}:
        return
    saved_group, wanted_group = _group(saved), _group(wanted)
    if saved_group != wanted_group:
        differs("kind")
        return
    if saved_group != "number":
        if saved_group == "key" and saved.dtype != wanted.dtype:
            differs("dtype")
        if saved_group == "key" and saved.shape != wanted.shape:
            differs("shape")
        return
    if saved.shape != wanted.shape:
        differs("shape")
    if saved.dtype == wanted.dtype:
        return
    loose = _PYTHON_NUMBERS.get(saved.kind) or _PYTHON_NUMBERS.get(wanted.kind)
    if loose and _dtype_group(saved.dtype) == _dtype_group(wanted.dtype):
        return  # a Python number has no width of its own; a value that does not fit is an error
    drops_imaginary = _dtype_group(saved.dtype) == "c" != _dtype_group(wanted.dtype)
    if rules.cast and not drops_imaginary:
        result.cast.append(path)
    else:
        differs("dtype")


def _group(spec: LeafSpec) -> str:
    """Leaves of different groups never stand for one another."""
    numbers = ("jax", "numpy", "numpy_scalar", "float", "bool", "complex", "int")
    return "number" if spec.kind in numbers else spec.kind


def _dtype_group(name: str) -> str:
    if name.startswith(("uint", "int")):
        return "i"
    if name.startswith(("float", "bfloat")):
        return "f"
    return name[:1]


def _with_nearest(mismatches: list[Mismatch]) -> list[Mismatch]:
    """Adds to missing and unexpected leaves the most similar name that is free on the other side."""
    missing = [entry.path for entry in mismatches if entry.kind == "missing"]
    unexpected = [entry.path for entry in mismatches if entry.kind == "unexpected"]
    if len(missing) + len(unexpected) > 200:
        return mismatches  # difflib is quadratic, and nobody reads two hundred hints
    saved_names, wanted_names = unexpected, missing
    found: list[Mismatch] = []
    for entry in mismatches:
        if entry.kind in ("missing", "unexpected"):
            names = saved_names if entry.kind == "missing" else wanted_names
            nearest = _closest(entry.path, names)
            entry = Mismatch(entry.path, entry.kind, entry.saved, entry.wanted, nearest, entry.item)
        found.append(entry)
    return found


def pattern_to_regex(pattern: str) -> re.Pattern[str]:
    """A path pattern as a regular expression: ``*`` within an entry, ``**`` across entries."""
    parts: list[str] = []
    for part in pattern.split("/"):
        if part == "**":
            parts.append(r"(?:[^/]+(?:/[^/]+)*)?")
        else:
            parts.append(
                "".join("[^/]*" if c == "*" else "[^/]" if c == "?" else re.escape(c) for c in part)
            )
    text = "/".join(parts)
    # "a/**" holds a itself, "**/b" holds b itself
    many = re.escape("") + r"(?:[^/]+(?:/[^/]+)*)?"
    text = text.replace("/" + many, r"(?:/[^/]+)*")
    text = text.replace(many + "/", r"(?:[^/]+/)*")
    return re.compile(text)


class Named:
    """The selection of leaves by their names.

    Args:
        names: paths as people write them.
        item: that the leaves are in.
    """

    def __init__(self, names: frozenset[str], item: str) -> None:
        self._names = names
        self._bare = "(root)" in names or item in names
        last_two = [name.split("/")[-2:] for name in names]
        self._ends = {entry for parts in last_two for entry in _entries(parts[-1])}
        self._tails = {tail for parts in last_two for tail in product(*map(_entries, parts))}

    def __call__(self, path: Path, spec: LeafSpec) -> bool:
        if not path:
            return self._bare
        return bool(self.among((path,)))

    def among(self, paths: Sequence[Path]) -> list[int]:
        """The positions of those that are selected."""
        ends, tails, names = self._ends, self._tails, self._names
        # nearly all differ in the last entry, or in the last two: quicker to see than a whole path
        return [
            position
            for position, path in enumerate(paths)
            if (
                path[-1] in ends and path[-2:] in tails and format_path(path) in names
                if path
                else self._bare
            )
        ]


def _entries(part: str) -> list[Any]:
    """What an entry of a path may be that is written so."""
    text = part.replace("~1", "/").replace("~0", "~")
    if text.startswith("(") and text.endswith(")"):
        with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            return [text, ast.literal_eval(text)]
    return [text, int(part)] if _INTEGER.fullmatch(part) else [text]


_INTEGER = re.compile(r"-?[0-9]{1,4000}")


def positions_of(
    paths: Sequence[Path], specs: Sequence[LeafSpec], selected: Select | None
) -> Sequence[int]:
    """Which leaves are selected."""
    if selected is None:
        return range(len(paths))
    if isinstance(selected, Named):
        return selected.among(paths)
    return [
        position
        for position, (path, spec) in enumerate(zip(paths, specs, strict=True))
        if selected(path, spec)
    ]


def selector(
    only: str | Iterable[str] | Callable[[str, LeafSpec], bool] | None, *, item: str
) -> Select | None:
    """The selection that ``only=`` asks for, over paths inside ``item``.

    A pattern is tried on the path inside the item and on ``item/path``.
    """
    if only is None:
        return None
    if callable(only):
        return lambda path, spec: only(format_path(path), spec)
    texts = [only] if isinstance(only, str) else list(only)
    if not any(character in text for text in texts for character in "*?"):
        return Named(frozenset({*texts, *(text.removeprefix(f"{item}/") for text in texts)}), item)
    patterns = [pattern_to_regex(text) for text in texts]

    def selected(path: Path, spec: LeafSpec) -> bool:
        inside = format_path(path)
        full = f"{item}/{inside}" if path else item
        return any(p.fullmatch(inside) or p.fullmatch(full) for p in patterns)

    return selected


def renamer(rename: Mapping[str, str] | Callable[[str], str] | None) -> Callable[[str], str] | None:
    """The function from saved to wanted paths that ``rename=`` asks for.

    A mapping replaces whole leading entries: ``{"encoder": "backbone"}`` turns ``encoder/w`` into
    ``backbone/w``; the longest match counts.
    """
    return Renames(rename) if isinstance(rename, Mapping) else rename


class Idle(NamedTuple):
    """An entry of ``rename=`` that nothing which was saved begins with.

    Attributes:
        old, new: what it maps.
        nearest: what was saved that is most like ``old``, or None.
        done: whether something was saved as ``new``, so that there is nothing to do.
    """

    old: str
    new: str
    nearest: str | None
    done: bool


class Renames:
    """The function that a mapping of saved to wanted paths stands for."""

    def __init__(self, rename: Mapping[str, str]) -> None:
        self._table = sorted(rename.items(), key=lambda entry: -len(entry[0]))

    def __call__(self, path: str) -> str:
        for old, new in self._table:
            if path == old:
                return new
            if path.startswith(old + "/"):
                return f"{new}{path[len(old) :]}".removeprefix("/")
        return path

    def idle(self, paths: Iterable[str]) -> list[Idle]:
        """The entries with which none of these paths begins."""
        begun: dict[str, None] = {}
        for path in paths:
            begun |= dict.fromkeys(_beginnings(path))
        candidates = list(begun)[:2000]  # difflib takes its time for each
        return [
            Idle(old, new, _closest(old.strip("/"), candidates), new in begun)
            for old, new in self._table
            if old not in begun
        ]


def _beginnings(path: str) -> Iterator[str]:
    """A path and all that it lies in."""
    while path:
        yield path
        path = path.rpartition("/")[0]


def _closest(name: str, names: list[str]) -> str | None:
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return close[0] if close else None
