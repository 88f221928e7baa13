"""Names of checkpointables."""

from __future__ import annotations

from typing import Any, cast

STATE = "state"
AUTO = "AUTO"
_RESERVED = frozenset({AUTO, "metrics", "_CHECKPOINT_DELETION"})


def check_name(name: str | None) -> None:
    """Raises ValueError if no pytree can have this name."""
    if name is not None and name != AUTO:
        _check(name)


def check_checkpointables(given: Any, what: str) -> dict[str, Any]:
    """``given``, if it is a dict of checkpointables by names that are allowed."""
    if not isinstance(given, dict):
        raise ValueError(f"{what} must be a dict of names to objects, got a {type(given).__name__}")
    for name in cast(dict[str, Any], given):
        _check(name)
    return cast(dict[str, Any], given)


def _check(name: str) -> None:
    if not name:
        raise ValueError("a checkpointable's name must not be empty")
    if name in _RESERVED:
        raise ValueError(f"Provided reserved checkpointable key: {name!r}; choose another name")
