"""Patterns of paths, as ``only=`` and ``Options.compression`` take them. Pure."""

from __future__ import annotations

import ast
import contextlib
import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from typing import Any

from ckpt_core._tree import Path, format_path
from ckpt_core._tree.leaves import LeafSpec

Select = Callable[[Path, LeafSpec], bool]


def pattern_to_regex(pattern: str) -> re.Pattern[str]:
    """A path pattern as a regex: ``*`` and ``?`` within an entry, ``**`` across entries."""
    parts: list[str] = []
    for part in pattern.split("/"):
        if part == "**":
            parts.append(r"(?:[^/]+(?:/[^/]+)*)?")
        else:
            parts.append(
                "".join("[^/]*" if c == "*" else "[^/]" if c == "?" else re.escape(c) for c in part)
            )
    text = "/".join(parts)
    # "a/**" also matches "a", and "**/b" also matches "b".
    many = re.escape("") + r"(?:[^/]+(?:/[^/]+)*)?"
    text = text.replace("/" + many, r"(?:/[^/]+)*")
    text = text.replace(many + "/", r"(?:[^/]+/)*")
    return re.compile(text)


class Named:
    """Selects leaves of ``item`` by exact paths as text; called with a path and a spec."""

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
        """Indices of the selected paths."""
        ends, tails, names = self._ends, self._tails, self._names
        # Compare the last one and two entries first: cheaper than formatting every path.
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
    """The path entries that have this text: ``"3"`` may be the key ``"3"`` or the key ``3``."""
    text = part.replace("~1", "/").replace("~0", "~")
    if text.startswith("(") and text.endswith(")"):
        with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            return [text, ast.literal_eval(text)]
    return [text, int(part)] if _INTEGER.fullmatch(part) else [text]


_INTEGER = re.compile(r"-?[0-9]{1,4000}")


def selector(
    only: str | Iterable[str] | Callable[[str, LeafSpec], bool] | None, *, item: str
) -> Select | None:
    """The predicate for the argument ``only=``; None selects all leaves. A pattern matches if it matches the path inside the
    item, or ``item/path``.
    """
    if only is None:
        return None
    if callable(only):
        return lambda path, spec: only(format_path(path), spec)
    texts = [only] if isinstance(only, str) else list(only)
    if not all(isinstance(text, str) for text in texts):
        raise TypeError(f"only={only!r}: patterns are text, such as 'params/**'")
    if not any(character in text for text in texts for character in "*?"):
        return Named(frozenset({*texts, *(text.removeprefix(f"{item}/") for text in texts)}), item)
    patterns = [pattern_to_regex(text) for text in texts]

    def selected(path: Path, spec: LeafSpec) -> bool:
        inside = format_path(path)
        full = f"{item}/{inside}" if path else item
        return any(p.fullmatch(inside) or p.fullmatch(full) for p in patterns)

    return selected


def read_again(only: Any) -> Any:
    """The argument ``only=`` as a value of its own that can be read more than once: it is read for every item, and by a
    background load after the call has returned.
    """
    once = isinstance(only, Iterator | list | set | frozenset)
    return list(only) if once and not callable(only) else only


def idle_patterns(only: Any, trees: Iterable[tuple[str, Iterable[Path]]]) -> list[str]:
    """The patterns in ``only=`` that match no leaf of any tree, given by item name and paths: each of them is a mistake."""
    texts = [only] if isinstance(only, str) else only
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        return []
    names: dict[str, None] = {}
    for item, paths in trees:
        for path in paths:
            inside = format_path(path)
            names[inside] = names[f"{item}/{inside}" if path else item] = None
    return [text for text in texts if text not in names and not _matches_any(text, names)]


def _matches_any(pattern: str, names: Iterable[str]) -> bool:
    return any(c in pattern for c in "*?") and any(map(pattern_to_regex(pattern).fullmatch, names))


_MOST_PATTERNS = 4


def patterns_of(chosen: Sequence[int], paths: Sequence[Path]) -> list[str]:
    """Patterns that match the ``chosen`` leaves and no others, like ``rngs/**``; few if the leaves stand together or have one
    name.
    """
    wanted = {*chosen}
    others = [path for n, path in enumerate(paths) if n not in wanted]
    heads = {path[:size] for path in others for size in range(1, len(path) + 1)}
    below: dict[str, None] = {}
    for n in chosen:
        path = paths[n]
        size = next((k for k in range(1, len(path)) if path[:k] not in heads), len(path))
        below[format_path(path[:size]) + ("/**" if size < len(path) else "")] = None
    if len(below) <= _MOST_PATTERNS:
        return [*below]
    tails = {path[-size:] for path in others for size in range(1, len(path) + 1)}
    ends: dict[str, None] = {}
    for n in chosen:
        path = paths[n]
        size = next((k for k in range(1, len(path) + 1) if path[-k:] not in tails), 0)
        # size 0: another path ends as the whole of this one, which only its full name tells apart
        names = [format_path((entry,)) for entry in path[-size:]]
        ends["/".join(["**", *names] if size else names)] = None
    return [*min(below, ends, key=len)]


def advice_on_pattern(pattern: str, names: Sequence[str]) -> str:
    """What to write instead of a pattern that matches none of these names; empty if nothing is like it."""
    branch = pattern.rstrip("/")
    if any(name.startswith(f"{branch}/") for name in names):
        return f"{branch!r} is no leaf: {branch + '/**'!r} takes all leaves below it"
    close = difflib.get_close_matches(pattern, names[:2000], n=1)  # bounds the time
    return f"the nearest name is {close[0]!r}" if close else ""
