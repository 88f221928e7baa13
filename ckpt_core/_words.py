"""Sizes, times, numbers and lists as text for people. Pure."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

_DIGITS = re.compile(r"(\d+)")


def size(count: float) -> str:
    """Bytes as text in a suitable unit: 12 B, 3.4 KiB, 5.6 GiB."""
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if count < 1024:
            break
        count, unit = count / 1024, larger
    return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"


def time_of(unix_secs: float | None) -> str:
    """Local time to the second; empty for None."""
    try:
        local = time.localtime(unix_secs)
        return "" if unix_secs is None else time.strftime("%Y-%m-%d %H:%M:%S", local)
    except (ValueError, OverflowError, OSError):  # a foreign checkpoint may hold any number
        return "at an unknown time"


def counted(count: int, one: str, many: str = "") -> str:
    """``1 leaf``, ``2 leaves``; without ``many``, several have an s."""
    return f"{count} {one if count == 1 else many or f'{one}s'}"


def number(value: Any) -> str:
    """A metric with few digits; other libraries may store any type."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return f"{value:g}" if is_number else str(value)


def pairs(named: Mapping[str, Any]) -> str:
    """``loss 0.5, accuracy 0.9``: names and values."""
    return ", ".join(f"{name} {number(value)}" for name, value in named.items())


def some(names: Sequence[str], between: str = ", ") -> str:
    """The first five, and how many more there are."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return between.join(names[:5]) + more


def in_order(name: str) -> list[tuple[int, int, str]]:
    """Key by which ``layer_2`` stands before ``layer_10``."""
    parts = _DIGITS.split(name)
    return [(1, int(part[:4000]), "") if n % 2 else (0, 0, part) for n, part in enumerate(parts)]
