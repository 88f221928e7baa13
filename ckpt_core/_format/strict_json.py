"""JSON that every parser takes: numbers that JSON has no notion of become text."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def strict_json(value: Any) -> str:
    """The value as JSON of RFC 8259, in ASCII, on one line.

    ``NaN``, ``Infinity`` and ``-Infinity`` stand as these strings, as in the JSON of protocol
    buffers: ``null`` would say that nothing was measured. What JSON has no type for is its ``str``.
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
