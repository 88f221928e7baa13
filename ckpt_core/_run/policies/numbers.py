"""The numbers that policies and the Checkpointer's short arguments take, checked where they are written."""

from __future__ import annotations

import datetime
import math
import operator
from collections.abc import Iterable

from ckpt_core.arguments import an


def whole_number(name: str, value: object, least: int = 1, why: str = "") -> int:
    """``value`` as an int of at least ``least``; else a TypeError or ValueError with ``name``, and ``why`` if it is too small."""
    try:
        number = operator.index(value)  # pyright: ignore[reportArgumentType]
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise _no_number(name, "a whole number", value, _meant(value, least, whole=True)) from None
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {number}{why}")
    return number


def seconds(name: str, value: object) -> float:
    """``value`` as a number of seconds, which may be infinite; TypeError or ValueError with ``name`` if it is none, or negative."""
    if isinstance(value, (bool, str, bytes)) or not hasattr(value, "__float__"):
        raise _no_number(name, "a number of seconds", value, _meant(value, 0, whole=False))
    number = float(value)  # pyright: ignore[reportArgumentType]
    if not number >= 0:
        raise ValueError(f"{name} must not be negative, got {number:g}")
    return number


def numbers_of_steps(name: str, values: Iterable[object]) -> frozenset[int]:
    """The numbers of steps in ``values``; a TypeError or ValueError with ``name`` if they are none."""
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        meant = _meant(values, 0, whole=True)
        raise _no_number(name, "a list of numbers", values, f"[{meant}]" if meant else "")
    return frozenset(whole_number(f"each of {name}", value, least=0) for value in values)


def _no_number(name: str, wanted: str, value: object, meant: str) -> TypeError:
    instead = f": write {meant}" if meant else ""
    return TypeError(f"{name} must be {wanted}, got {value!r}, {an(value)}{instead}")


def _meant(value: object, least: int, *, whole: bool) -> str:
    """The number that a text, a float such as 3.0 or a ``timedelta`` stands for, as programs have it; or nothing."""
    if isinstance(value, datetime.timedelta):
        value = value.total_seconds()
    try:
        number = float(value) if isinstance(value, (str, float, int)) else math.nan
    except (ValueError, OverflowError):
        return ""
    if isinstance(value, bool) or not least <= number < math.inf:
        return ""
    if number.is_integer():
        return str(int(number))
    return "" if whole else repr(number)
