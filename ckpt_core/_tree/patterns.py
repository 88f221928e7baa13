"""Patterns of paths, as ``only=`` and ``Options.compression`` take them. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from ckpt_core._tree import Path, format_path
from ckpt_core._tree.leaves import LeafSpec
from ckpt_core.arguments import nearest

Predicate = Callable[[Path, LeafSpec], bool]


def pattern_to_regex(pattern: str) -> re.Pattern[str]:
    """A path pattern as a regex: ``*`` and ``?`` within an entry, ``**`` across entries."""
    wildcards = {"*": "[^/]*", "?": "[^/]"}
    many = r"(?:[^/]+(?:/[^/]+)*)?"
    parts = [
        many if part == "**" else "".join(wildcards.get(c) or re.escape(c) for c in part)
        for part in pattern.split("/")
    ]
    # "a/**" also matches "a", and "**/b" also matches "b".
    text = "/".join(parts).replace("/" + many, r"(?:/[^/]+)*")
    return re.compile(text.replace(many + "/", r"(?:[^/]+/)*"))


def selector(
    only: str | Iterable[str] | Callable[[str, LeafSpec], bool] | None, *, item: str
) -> Predicate | None:
    """The predicate for ``only=``, None for all leaves; a pattern matches the path inside the item, or ``item/path``."""
    if only is None:
        return None
    if callable(only):
        return lambda path, spec: only(format_path(path), spec)
    texts = [only] if isinstance(only, str) else list(only)
    if not all(isinstance(text, str) for text in texts):
        raise TypeError(f"only={only!r}: patterns are text, such as 'params/**'")
    exact = {text for text in texts if "*" not in text and "?" not in text}
    patterns = [pattern_to_regex(text) for text in texts if text not in exact]

    def selected(path: Path, spec: LeafSpec) -> bool:
        inside = format_path(path)
        full = f"{item}/{inside}" if path else item
        if inside in exact or full in exact:
            return True
        return any(one.fullmatch(inside) or one.fullmatch(full) for one in patterns)

    return selected


def read_again(only: Any) -> Any:
    """The argument ``only=`` as a value that can be read again: for each item, and after the call has returned."""
    once = isinstance(only, Iterator | list | set | frozenset)
    return list(only) if once and not callable(only) else only


def unmatched_patterns(only: Any, trees: Iterable[tuple[str, Iterable[Path]]]) -> list[str]:
    """The patterns in ``only=`` that match no leaf of any tree, given by item name and paths: each of them is a mistake."""
    texts = [only] if isinstance(only, str) else only
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        return []
    names: dict[str, None] = {}
    for item, paths in trees:
        for path in paths:
            inside = format_path(path)
            names[inside] = names[f"{item}/{inside}" if path else item] = None
    idle = [text for text in texts if text not in names]
    return [text for text in idle if not any(map(pattern_to_regex(text).fullmatch, names))]


_MOST_PATTERNS = 4


def patterns_of(chosen: Sequence[int], paths: Sequence[Path]) -> list[str]:
    """Patterns that match the ``chosen`` leaves alone, like ``rngs/**``; few if these stand together or have one name."""
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
    close = nearest(pattern, names[:2000])  # bounds the time
    return f"the nearest name is {close!r}" if close else ""
