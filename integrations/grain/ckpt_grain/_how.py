"""In how much detail a pipeline is told, and what both ways to tell settings share."""

from __future__ import annotations

import re
from typing import Any

WHOLE, FIRM = "whole, by value", "firm, by value"
"""All settings; those that no use changes."""

EARLIER_WHOLE, EARLIER_FIRM, OLD = "whole", "firm", "old"
"""The same as earlier versions told them; and as they were told before there were these two."""

MAX_TEXT = 400
"""Characters of one setting; of a longer one, the beginning and a digest."""

MAX_ITEMS = 10_000
"""Entries of a list or dictionary that are told."""

ADDRESS = re.compile(r" at 0x[0-9a-f]+")
"""What makes a text differ in each process."""

QUOTED = re.compile(r"'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\"")
"""Text in quotes, as ``repr`` writes it."""


def is_of_grain(value: Any) -> bool:
    """Whether an object is of one of Grain's own classes."""
    return type(value).__module__.partition(".")[0] == "grain"
