"""What JSON holds as it is, JSON that every parser accepts, and the numbers in values of JSON. Pure."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from typing import Any

_MOST_DEPTH = 200


def refuse_keys(value: Any) -> None:
    """Raises TypeError for a key that is no text, which JSON would make text of; ValueError for a value nested too deep."""
    waiting = [(value, 0)]
    while waiting:
        one, depth = waiting.pop()
        if depth > _MOST_DEPTH:
            raise ValueError("it is nested too deep, or contains itself")
        if isinstance(one, dict):
            for key in one:
                if not isinstance(key, str):
                    raise TypeError(f"the key {key!r} is {type(key).__name__}, and JSON has text")
            waiting += [(part, depth + 1) for part in one.values()]
        elif isinstance(one, list | tuple):
            waiting += [(part, depth + 1) for part in one]


def frozen_metadata(metadata: Any) -> Any:
    """A copy of the metadata, as JSON returns it; TypeError if it is not JSON."""
    try:
        refuse_keys(metadata)
        return json.loads(json.dumps(metadata))
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"metadata must be plain JSON values: {error}") from None


def strict_json(value: Any) -> str:
    """The value as a line of ASCII JSON (RFC 8259); NaN, infinities and other types become texts."""
    try:
        return json.dumps(value, default=str, allow_nan=False)
    except ValueError:
        return json.dumps(_spelled(value), default=str, allow_nan=False)


def _spelled(value: Any) -> Any:
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {key: _spelled(item) for key, item in value.items()}
    return [_spelled(item) for item in value] if isinstance(value, (list, tuple)) else value


def numbers_in(value: Any) -> dict[str, float]:
    """The numbers in nested dicts, by names joined with ``/``; without those beyond all floats, with which none compares."""
    found: dict[str, float] = {}
    waiting: list[tuple[str, Any]] = [("", value)]
    while waiting:
        name, one = waiting.pop()
        if isinstance(one, dict):
            start = f"{name}/" if name else ""
            waiting += [(f"{start}{key}", part) for key, part in reversed(one.items())]
        elif name and (type(one) is float or (type(one) is int and abs(one) <= sys.float_info.max)):
            found[name] = one
    return found
