"""How much detail a description of a pipeline has, and what `_values` and `_earlier` share."""

from __future__ import annotations

import re
from typing import Any

WHOLE, FIRM = "whole, by value", "firm, by value"
"""All settings; only those that use cannot change."""

EARLIER_WHOLE, EARLIER_FIRM, OLD = "whole", "firm", "old"
"""The two kinds as earlier versions wrote them; and the only kind of the versions before."""

MAX_TEXT = 400
"""The most characters of one setting; a longer one is cut, with a digest added."""

MAX_ITEMS = 10_000
"""The most entries of a list or dictionary that are described one by one."""

ADDRESS = re.compile(r" at 0x[0-9a-f]+")
"""Memory addresses, which differ between processes."""

QUOTED = re.compile(r"'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\"")
"""Text in quotes, as ``repr`` writes it."""


def is_of_grain(value: Any) -> bool:
    """Whether an object is of one of Grain's own classes."""
    return type(value).__module__.partition(".")[0] == "grain"
