"""The numbers in metrics that hold more than numbers. Pure."""

from __future__ import annotations

from typing import Any


def numbers_in(value: Any) -> dict[str, float]:
    """All numbers in nested dicts, by names joined with ``/``; anything else is left out.

    Whole numbers beyond the greatest float too: they could not be compared with others.

    Example:
        >>> from ckpt_core._format.metrics import numbers_in
        >>> numbers_in({"loss": 0.5, "eval": {"bleu": 31, "by": "hand"}, "curve": [1, 2]})
        {'loss': 0.5, 'eval/bleu': 31}
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
