"""The numbers in metrics that hold more than numbers. Pure."""

from __future__ import annotations

from typing import Any


def numbers_in(value: Any) -> dict[str, float]:
    """All numbers in nested dicts, by names joined with ``/``. Anything else is left out, also whole numbers beyond
    the greatest float: they could not be compared with others.
    """
    found: dict[str, float] = {}
    waiting: list[tuple[str, Any]] = [("", value)]
    while waiting:
        name, one = waiting.pop()
        if isinstance(one, dict):
            start = f"{name}/" if name else ""
            waiting += [(f"{start}{key}", part) for key, part in reversed(one.items())]
        elif name and type(one) in (int, float) and _is_a_float(one):
            found[name] = one
    return found


def _is_a_float(number: float) -> bool:
    try:
        float(number)
    except OverflowError:
        return False
    return True
