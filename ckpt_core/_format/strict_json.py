"""JSON that every parser accepts: NaN and infinities become strings."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def strict_json(value: Any) -> str:
    """The value as one line of ASCII JSON (RFC 8259).

    NaN and infinities become the strings ``NaN``, ``Infinity`` and ``-Infinity``, as in the JSON
    form of protocol buffers; ``null`` would mean a missing value. Values of other types become
    their ``str``.
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
