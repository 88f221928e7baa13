"""Which leaves of a save are compressed, and how."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ckpt_core._tree import Path, format_path
from ckpt_core._tree.match import pattern_to_regex

Rules = Mapping[str, str | None]
"""Patterns of paths, and the codec of what they match."""


def codecs_of(item: str, paths: Sequence[Path], rules: Rules) -> list[str | None]:
    """The codec of every leaf of an item: of the first pattern that matches; None for none.

    A pattern is tried on the path inside the item and on ``item/path``.
    """
    compiled = [(pattern_to_regex(pattern), codec) for pattern, codec in rules.items()]
    found: list[str | None] = []
    for path in paths:
        names = _names(item, path)
        fitting = (codec for rule, codec in compiled if any(map(rule.fullmatch, names)))
        found.append(next(fitting, None))
    return found


def refuse_idle(rules: Rules, items: Iterable[tuple[str, Sequence[Path]]]) -> None:
    """Raises ValueError where a pattern matches no leaf of any item: it is a mistake."""
    names = [_names(item, path) for item, paths in items for path in paths]
    for pattern in rules:
        matches = pattern_to_regex(pattern).fullmatch
        if not any(matches(inside) or matches(full) for inside, full in names):
            shown = ", ".join(inside for inside, _ in names[:5])
            raise ValueError(
                f"Options.compression: the pattern {pattern!r} matches no leaf; leaves are {shown}"
                f"{', ...' if len(names) > 5 else ''}"
            )


def _names(item: str, path: Path) -> tuple[str, str]:
    inside = format_path(path)
    return inside, f"{item}/{inside}" if path else item
