"""Fast parser of ckpt.json in the exact form that ckpt writes: each distinct leaf is parsed once.

For any other form, even one additional blank, these functions raise, and the caller uses ``json``.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

Scan = Callable[[str, int], tuple[Any, int]]
"""(text, start) -> (the value that begins at start, the position after it)."""

_any: Scan = json.JSONDecoder().raw_decode
_AFTER_LEAVES = ',"shardings":'


def scan_record(text: str, make_leaf: Callable[[Any], Any]) -> Any:
    """The value of a record; every item's ``leaves`` is a tuple of results of ``make_leaf``.

    Raises:
        ValueError: the text is not in the form that ckpt writes.
        Exception: any error of ``make_leaf``.
    """
    leaves = functools.partial(_leaves, make=make_leaf)
    item = functools.partial(_object, scan_of=lambda name: leaves if name == "leaves" else _any)
    items = functools.partial(_object, scan_of=lambda _: item)
    value, end = _object(text, 0, lambda name: items if name == "items" else _any)
    if end != len(text):
        raise ValueError(f"more than an object: it ends at {end}")
    return value


def _object(text: str, start: int, scan_of: Callable[[str], Scan]) -> tuple[dict[str, Any], int]:
    """The object that begins at ``start``; ``scan_of`` gives the parser for each member's name."""
    found: dict[str, Any] = {}
    position, separator = start, "{"
    while text.startswith(separator + '"', position):
        name, position = _any(text, position + 1)
        if not text.startswith(":", position):
            raise ValueError(f"no value at {position}")
        found[name], position = scan_of(name)(text, position + 1)
        separator = ","
    if not found or not text.startswith("}", position):
        raise ValueError(f"no object at {start}")
    return found, position + 1


def _leaves(text: str, start: int, make: Callable[[Any], Any]) -> tuple[tuple[Any, ...], int]:
    """The results of ``make`` for a list of lists; called once for entries with equal text."""
    if text.startswith("[]" + _AFTER_LEAVES, start):
        return (), start + 2
    stop = text.find("]]" + _AFTER_LEAVES, start)
    if stop < 0 or not text.startswith('[["', start):
        raise ValueError(f"no leaves at {start}")
    texts = text[start + 3 : stop].split('],["')
    once = dict.fromkeys(texts)
    values = json.loads('[["' + '],["'.join(once) + "]]")
    made = dict(zip(once, map(make, values), strict=True))
    return tuple(map(made.__getitem__, texts)), stop + 2
