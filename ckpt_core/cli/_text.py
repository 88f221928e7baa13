"""Output of the commands: sizes and times for people, JSON for programs."""

from __future__ import annotations

import sys
import time
from typing import Any

from rich.console import Console

from ckpt_core._format.strict_json import strict_json


def console() -> Console:
    """A console on stdout; wide if there is no terminal, so that nothing is truncated."""
    return Console(width=None if sys.stdout.isatty() else 160, highlight=False)


def print_json(value: Any) -> None:
    """Prints one line of strict JSON, in which NaN and infinities are strings."""
    print(strict_json(value))


def size(count: float) -> str:
    """Bytes as text in a suitable unit: 12 B, 3.4 KiB, 5.6 GiB."""
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if count < 1024:
            break
        count, unit = count / 1024, larger
    return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"


def when(unix_secs: float | None) -> str:
    """Local time to the second; empty if it is unknown."""
    if unix_secs is None:
        return ""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_secs))
    except (ValueError, OverflowError, OSError):  # a foreign checkpoint may hold any number
        return "at no possible time"


def counted(count: int, one: str, many: str) -> str:
    """``1 leaf``, ``2 leaves``."""
    return f"{count} {one if count == 1 else many}"


def metric(value: Any) -> str:
    """A metric with few digits; other libraries may store any type."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return f"{value:g}" if number else str(value)
