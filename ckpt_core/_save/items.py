"""Which items a save call asks for, and whether their names will do."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Any

from ckpt_core._format import orbax
from ckpt_core._format.record import (
    RECORD_FILE,
)

_RESERVED_ITEMS = frozenset({"metrics", "metadata"})
_ARGUMENTS = ("overwrite", "metadata", "options", "items", "metrics", "force")


class Nothing:
    """Stands for a state that was not passed, as None is a state."""


NOTHING = Nothing()


def collect_items(
    state: Any, items: Mapping[str, Any] | None, named: Mapping[str, Any]
) -> dict[str, Any]:
    """The items by name that a call's arguments ask for.

    Raises:
        TypeError: a state together with items, none of both, or a name that looks like a
            misspelt argument.
    """
    twice = sorted(set(items or {}) & set(named))
    if twice:
        raise TypeError(f"items {', '.join(twice)} were passed twice: by name and in items=")
    chosen = {**(items or {}), **named}
    if not isinstance(state, Nothing):
        if chosen:
            raise TypeError(
                f"pass one state, or named items ({', '.join(chosen)}), not both: "
                "give the state a name too"
            )
        return {"state": state}
    if not chosen:
        raise TypeError("nothing to save: pass a state, or named items such as model=model")
    for name in named:
        close = difflib.get_close_matches(name, _ARGUMENTS, n=1, cutoff=0.8)
        if close:
            raise TypeError(
                f"{name!r} looks like the argument {close[0]!r}: to save an item of this name, "
                f"pass items={{{name!r}: ...}}"
            )
    for name in chosen:
        _check_item_name(name)
    return chosen


def _check_item_name(name: Any) -> None:
    if not isinstance(name, str):
        raise TypeError(f"item names must be text, got {name!r}")
    bad = (
        not name
        or "/" in name
        or ".orbax-checkpoint-tmp" in name
        or "\0" in name
        or name.startswith((".", "_"))
        or len(name) > 200
    )
    if bad or name in _RESERVED_ITEMS or name in (RECORD_FILE, orbax.COMMIT_FILE):
        raise ValueError(
            f"{name!r} cannot be the name of an item: use letters, digits, '-', '_' and '.', not "
            f"beginning with '.' or '_', and none of {', '.join(sorted(_RESERVED_ITEMS))}"
        )


def check_metadata(metadata: Any) -> None:
    """Refuses metadata that JSON cannot hold."""
    try:
        json.dumps(metadata)
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"metadata must be plain JSON values: {error}") from error
