"""What JSON holds as it is, and JSON that every parser accepts."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

_MOST_DEPTH = 200


def refuse_keys(value: Any) -> None:
    """Raises TypeError for a key that is no text: JSON would make text of it, and two keys could become one. Raises
    ValueError for a value that is nested too deep.
    """
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


def strict_json(value: Any) -> str:
    """The value as one line of ASCII JSON (RFC 8259). NaN and infinities become the strings ``NaN``, ``Infinity`` and
    ``-Infinity``, as in the JSON form of protocol buffers; ``null`` would mean a missing value. Values of other types
    become their ``str``.
    """
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
