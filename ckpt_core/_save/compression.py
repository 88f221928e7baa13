"""The compression codec of each leaf of a save."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ckpt_core._tree import Path, format_path
from ckpt_core._tree.patterns import idle_patterns, pattern_to_regex

Rules = Mapping[str, str | None]
"""For each pattern of paths, the codec of the leaves that it matches; None for no compression."""


def codecs_of(item: str, paths: Sequence[Path], rules: Rules) -> list[str | None]:
    """The codec of every leaf of an item, from the first pattern that matches; None if none does.

    A pattern is matched against the path inside the item, and against ``item/path``.
    """
    compiled = [(pattern_to_regex(pattern), codec) for pattern, codec in rules.items()]
    found: list[str | None] = []
    for path in paths:
        names = _names(item, path)
        fitting = (codec for rule, codec in compiled if any(map(rule.fullmatch, names)))
        found.append(next(fitting, None))
    return found


def refuse_idle(rules: Rules, items: Iterable[tuple[str, Sequence[Path]]]) -> None:
    """Raises ValueError if a pattern matches no leaf of any item: it is a mistake."""
    trees = list(items)
    for pattern in idle_patterns(list(rules), trees):
        names = [format_path(path) for _, paths in trees for path in paths]
        shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        raise ValueError(
            f"Options.compression: the pattern {pattern!r} matches no leaf; leaves are {shown}"
        )


def _names(item: str, path: Path) -> tuple[str, str]:
    inside = format_path(path)
    return inside, f"{item}/{inside}" if path else item
