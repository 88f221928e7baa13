"""Whether JSON holds a value as it is: it makes text of every key, and so one of two."""

from __future__ import annotations

from typing import Any

_MOST_DEPTH = 200


def refuse_keys(value: Any) -> None:
    """Raises TypeError for a key that is no text, of which JSON would make text: two keys could become one.

    Raises:
        ValueError: it is nested too deep.
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
