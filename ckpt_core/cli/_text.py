"""How the commands write: sizes and times for people, JSON for programs."""

from __future__ import annotations

import sys
import time
from typing import Any

from rich.console import Console

from ckpt_core._format.strict_json import strict_json


def console() -> Console:
    """Stdout; wide where no terminal says how wide it is, so that nothing is cut off."""
    return Console(width=None if sys.stdout.isatty() else 160, highlight=False)


def print_json(value: Any) -> None:
    """One line that every JSON parser takes; NaN and infinities are strings in it."""
    print(strict_json(value))


def size(count: float) -> str:
    """Bytes in the unit that suits them: 12 B, 3.4 KiB, 5.6 GiB."""
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if count < 1024:
            break
        count, unit = count / 1024, larger
    return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"


def when(unix_secs: float | None) -> str:
    """Local time to the second; nothing where it is not known."""
    if unix_secs is None:
        return ""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_secs))
    except (ValueError, OverflowError, OSError):  # a checkpoint may say anything
        return "at no possible time"


def counted(count: int, one: str, many: str) -> str:
    """``1 leaf``, ``2 leaves``."""
    return f"{count} {one if count == 1 else many}"


def metric(value: Any) -> str:
    """A metric in few digits; of other libraries it may be anything."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return f"{value:g}" if number else str(value)
