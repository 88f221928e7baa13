"""Matches the names of tensors in a file to the paths of a target: a dot in a name stands for a level.

The tensor ``layers.0.kernel`` fits the target's ``layers/0/kernel``, whether ``0`` is a position, an int or text, and
of course the key ``layers.0.kernel`` of a flat dictionary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from ckpt_core._load.checkpoint import ExtentItem, SavedItem
from ckpt_core._tree import Path
from ckpt_core._tree.match import MatchRules


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
